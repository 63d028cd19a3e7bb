"""`Head`: one LM head, its losses, its steps, its weights."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import uuid
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from headwater import _arrays, _requests
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Backend, Expected, Progress, StepKey
from headwater._errors import HeadwaterError, invalid_argument
from headwater._futures import as_future
from headwater._requests import ComputeRequest, CrossEntropyOptions, JsdOptions, TeacherRows
from headwater._types import (
    ApplyResult,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    LossResult,
    SaveResult,
    SealResult,
    StepStatus,
    check_integer,
    check_number,
)

if TYPE_CHECKING:
    from headwater._client import Client


class Head:
    """A head at one epoch. Made by `Client.create_head` or `Client.head`. Thread-safe, except that `step` is one number for all.

    Every method `x(...)` has `x_future(...)`, which returns at once a future good for `.result()` and `await`. Futures run side by
    side and in any order: wait for the micro-batches of a step before closing it.

    A head that was restored, re-created or taken over by another process answers `EpochFencedError` from then on; this object never
    follows on its own. What this object does itself (set_weight, load, restore) it knows.

    Attributes:
        step: the step that calls work on unless they say otherwise. `apply_optimizer_step` and `discard_gradient` move it on. Of
            several trainers one closes the step; the others add 1 themselves, after a barrier with that one.
    """

    def __init__(self, client: Client, info: HeadInfo):
        self._client = client
        self._backend = client._backend
        self._executors = client._executors
        self._name = info.name
        self._spec = info.spec
        self._epoch = info.epoch
        self.step = info.open_step
        self._abandoned = _AbandonedContributions(self)
        # Where headwater.torch keeps the ids that its loss functions have drawn.
        self._micro_batch_source: Any = None

    def __repr__(self) -> str:
        kind = "trainable" if self._spec.trainable else "frozen"
        return f"<headwater.Head {self._name} [{self._spec.vocab_size}, {self._spec.hidden_size}] {self._spec.data_type} {kind}>"

    @property
    def name(self) -> str:
        """`tenants/{tenant}/heads/{head}`."""
        return self._name

    @property
    def spec(self) -> HeadSpec:
        """What the head is; fixed for its life."""
        return self._spec

    @property
    def epoch(self) -> bytes:
        """The 16 bytes that this object's calls carry."""
        return self._epoch

    def _timeout(self, timeout_s: float | None) -> float:
        return self._client._timeout(timeout_s)

    def _key(self, step: int | None) -> StepKey:
        number = self.step if step is None else step
        if number is None:
            raise invalid_argument("INVALID_COMBINATION", f"{self._name} is frozen: it has no steps", field="step")
        return StepKey(self._name, self._epoch, check_integer(number, "step"))

    def _adopt(self, info: HeadInfo) -> HeadInfo:
        """Takes over the epoch and step of an answer to a call that this object made."""
        self._epoch = info.epoch
        self.step = info.open_step
        return info

    # ---- losses -----------------------------------------------------------------------------------------------------

    def cross_entropy(
        self,
        hidden: Any,
        targets: Any,
        *,
        step: int | None = None,
        micro_batch: int | None = None,
        loss_scale: float = 1.0,
        token_weights: Any = None,
        ignore_index: int = _requests.DEFAULT_IGNORE_INDEX,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        class_weights: Any = None,
        commit: str = "eager",
        outputs: Sequence[str] = (),
        backward: bool = True,
        return_grad_hidden: bool | None = None,
        grad_hidden_scale: float = 1.0,
        grad_hidden_dtype: Any = None,
        on_mismatch: str = "conflict",
        non_finite: str = "report",
        expected_weight_version: int | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """Computes one micro-batch's cross entropy and gradients, and adds its `grad_weight` to the step.

        Same numbers as, but without building the (num_tokens, vocab_size) logits:
            logits = transform(hidden.float() @ weight.float().T + bias)
            per_token = F.cross_entropy(logits, targets, weight=class_weights, label_smoothing=label_smoothing,
                                        ignore_index=ignore_index, reduction="none") + z_loss * logits.logsumexp(-1) ** 2
            (loss_scale * (token_weights * per_token).sum()).backward()

        Args:
            hidden: (num_tokens, hidden_size), float32, float16 or bfloat16; need not be the head's dtype. Not modified.
            targets: (num_tokens,) integers, each in [0, valid_vocab_size) or `ignore_index`; aligned with the rows.
            step: None: `self.step`. Ignored by frozen heads and with backward=False.
            micro_batch: id in the step, unique among all trainers: k * world_size + rank. Required where something is added.
            loss_scale: multiplies both gradients, not the reported sums. 1 / (number of tokens of the step) makes a mean.
            token_weights: (num_tokens,) finite, any sign. None: 1.
            label_smoothing: in [0, 1), spread evenly over the valid vocabulary.
            z_loss: >= 0, coefficient of lse^2 (nats^2).
            class_weights: (valid_vocab_size,) or (vocab_size,), >= 0. They scale a row's loss; see `target_weight_sum` for means.
            commit: "eager" adds at once; "explicit" waits for `commit` or `discard`, and takes a staging slot.
            outputs: among "token_loss", "lse", "target_log_probability", "entropy", "argmax".
            backward: False computes losses and outputs only, in any state, and adds nothing.
            return_grad_hidden: None: as `backward` says. False if the hidden states are not trained.
            grad_hidden_scale: multiplies `grad_hidden` alone; world_size under data parallelism that averages.
            grad_hidden_dtype: None: that of `hidden`.
            on_mismatch: a repeat of `micro_batch` with other content is a "conflict", or "first_wins" computes and adds nothing.
            non_finite: "report" counts NaN and infinities; "refuse" fails and adds nothing.
            expected_weight_version: fail unless the weights are of this version.
        Returns:
            LossResult; `grad_hidden` is in the kind and dtype of `hidden`.
        Raises:
            InvalidArgumentError: shape, dtype or range; checked before anything is sent.
            StepMismatchError, EpochFencedError, MicroBatchConflictError, StagingFullError: nothing was added.
        """
        ignore_index = check_integer(ignore_index, "ignore_index", low=-(2**31), high=2**31 - 1)
        rows = _requests.check_rows(hidden, "hidden", self._spec.hidden_size)
        request = self._request(
            rows,
            targets=_requests.check_targets(targets, rows.shape[0], ignore_index, self._spec.valid_size),
            loss=_requests.check_cross_entropy(self._spec, label_smoothing, z_loss, class_weights),
            teacher=None,
            ignore_index=ignore_index,
            step=step,
            micro_batch=micro_batch,
            loss_scale=loss_scale,
            token_weights=token_weights,
            commit=commit,
            outputs=outputs,
            backward=backward,
            return_grad_hidden=return_grad_hidden,
            grad_hidden_scale=grad_hidden_scale,
            grad_hidden_dtype=grad_hidden_dtype,
            on_mismatch=on_mismatch,
            non_finite=non_finite,
            expected_weight_version=expected_weight_version,
        )
        return self._compute(request, self._timeout(timeout_s))

    def jsd(
        self,
        student_hidden: Any,
        teacher: Head,
        teacher_hidden: Any,
        *,
        targets: Any = None,
        beta: float = 0.5,
        student_temperature: float = 1.0,
        teacher_temperature: float = 1.0,
        hard_loss_weight: float = 0.0,
        step: int | None = None,
        micro_batch: int | None = None,
        loss_scale: float = 1.0,
        token_weights: Any = None,
        ignore_index: int = _requests.DEFAULT_IGNORE_INDEX,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        class_weights: Any = None,
        truncate_to_common: bool = False,
        commit: str = "eager",
        outputs: Sequence[str] = (),
        backward: bool = True,
        return_grad_hidden: bool | None = None,
        grad_hidden_scale: float = 1.0,
        grad_hidden_dtype: Any = None,
        on_mismatch: str = "conflict",
        non_finite: str = "report",
        expected_weight_version: int | None = None,
        timeout_s: float | None = None,
    ) -> LossResult:
        """Computes the generalized Jensen-Shannon divergence to a teacher over the full vocabulary, and its gradients.

        With P the teacher's and Q the student's distribution, and M = beta P + (1 - beta) Q:
            jsd = beta * KL(P || M) + (1 - beta) * KL(Q || M)          # beta = 0: KL(P || Q); beta = 1: KL(Q || P)
            per_token = (1 - hard_loss_weight) * jsd + hard_loss_weight * cross_entropy
            (loss_scale * (token_weights * per_token).sum()).backward()

        Args:
            student_hidden: (num_tokens, hidden_size), as `hidden` of `cross_entropy`.
            teacher: the head that the teacher's hidden states go through; usually a frozen one. It gets no gradient.
            teacher_hidden: (num_tokens, hidden_size of the teacher's head).
            targets: (num_tokens,); needed with hard_loss_weight > 0, otherwise only `ignore_index` in it matters.
            beta: in [0, 1].
            student_temperature, teacher_temperature: > 0; divide the logits. There is no factor of temperature squared.
            hard_loss_weight: in [0, 1], share of the cross entropy, which never sees a temperature.
            label_smoothing, z_loss, class_weights: options of the cross entropy; only with hard_loss_weight > 0.
            truncate_to_common: vocabularies of different sizes are compared over the columns that both have; otherwise refused.
        Other arguments, return value and errors are those of `cross_entropy`.
        """
        if not isinstance(teacher, Head):
            raise invalid_argument(
                "INVALID_FIELD", f"teacher must be a headwater.Head, got {type(teacher).__name__}", field="teacher"
            )
        if teacher._backend is not self._backend:
            raise invalid_argument("INVALID_COMBINATION", "teacher and student must be heads of one client", field="teacher")
        ignore_index = check_integer(ignore_index, "ignore_index", low=-(2**31), high=2**31 - 1)
        rows = _requests.check_rows(student_hidden, "student_hidden", self._spec.hidden_size)
        teacher_rows = _requests.check_rows(teacher_hidden, "teacher_hidden", teacher._spec.hidden_size)
        if teacher_rows.shape[0] != rows.shape[0]:
            raise invalid_argument(
                "SHAPE_MISMATCH",
                f"teacher_hidden has {teacher_rows.shape[0]} rows, student_hidden has {rows.shape[0]}",
                field="teacher_hidden",
                expected=rows.shape[0],
                actual=teacher_rows.shape[0],
            )
        hard_loss_weight = check_number(hard_loss_weight, "hard_loss_weight", low=0, high=1)
        hard_loss = _requests.check_cross_entropy(self._spec, label_smoothing, z_loss, class_weights)
        if hard_loss_weight == 0 and (label_smoothing or z_loss or class_weights is not None):
            raise invalid_argument(
                "INVALID_COMBINATION",
                "label_smoothing, z_loss and class_weights belong to the hard loss: set hard_loss_weight > 0",
                field="hard_loss_weight",
            )
        if hard_loss_weight > 0 and targets is None:
            raise invalid_argument("MISSING_FIELD", "hard_loss_weight > 0 needs targets", field="targets")
        truncate_to_common = _requests.check_bool(truncate_to_common, "truncate_to_common")
        if not truncate_to_common and self._spec.valid_size != teacher._spec.valid_size:
            raise invalid_argument(
                "VOCAB_SIZE_MISMATCH",
                f"the student's head has {self._spec.valid_size} valid columns, the teacher's {teacher._spec.valid_size}; "
                "pass truncate_to_common=True to compare what both have",
                field="teacher",
                expected=self._spec.valid_size,
                actual=teacher._spec.valid_size,
            )
        checked_targets = None
        if targets is not None:
            checked_targets = _requests.check_targets(targets, rows.shape[0], ignore_index, self._spec.valid_size)
        request = self._request(
            rows,
            targets=checked_targets,
            loss=JsdOptions(
                beta=check_number(beta, "beta", low=0, high=1),
                student_temperature=check_number(student_temperature, "student_temperature", low=0, low_open=True),
                teacher_temperature=check_number(teacher_temperature, "teacher_temperature", low=0, low_open=True),
                hard_loss_weight=hard_loss_weight,
                hard_loss=hard_loss,
                truncate_to_common=truncate_to_common,
            ),
            teacher=TeacherRows(teacher._name, teacher._epoch, teacher_rows),
            ignore_index=ignore_index,
            step=step,
            micro_batch=micro_batch,
            loss_scale=loss_scale,
            token_weights=token_weights,
            commit=commit,
            outputs=outputs,
            backward=backward,
            return_grad_hidden=return_grad_hidden,
            grad_hidden_scale=grad_hidden_scale,
            grad_hidden_dtype=grad_hidden_dtype,
            on_mismatch=on_mismatch,
            non_finite=non_finite,
            expected_weight_version=expected_weight_version,
        )
        return self._compute(request, self._timeout(timeout_s))

    def _request(
        self,
        rows: HostArray,
        *,
        targets: np.ndarray | None,
        loss: CrossEntropyOptions | JsdOptions,
        teacher: TeacherRows | None,
        ignore_index: int,
        step: int | None,
        micro_batch: int | None,
        loss_scale: float,
        token_weights: Any,
        commit: str,
        outputs: Sequence[str],
        backward: bool,
        return_grad_hidden: bool | None,
        grad_hidden_scale: float,
        grad_hidden_dtype: Any,
        on_mismatch: str,
        non_finite: str,
        expected_weight_version: int | None,
    ) -> ComputeRequest:
        backward = _requests.check_bool(backward, "backward")
        wants_grad = backward if return_grad_hidden is None else _requests.check_bool(return_grad_hidden, "return_grad_hidden")
        if wants_grad and not backward:
            raise invalid_argument("INVALID_COMBINATION", "backward=False computes no grad_hidden", field="return_grad_hidden")
        step_number, micro_batch = _requests.check_micro_batch_key(
            self._spec.trainable, backward, self.step if step is None else step, micro_batch
        )
        explicit = _requests.check_choice(commit, "commit", ("eager", "explicit")) == "explicit"
        if explicit and micro_batch is None:
            raise invalid_argument("INVALID_COMBINATION", 'commit="explicit" needs something to commit', field="commit")
        if expected_weight_version is not None:
            expected_weight_version = check_integer(expected_weight_version, "expected_weight_version")
        if token_weights is not None:
            token_weights = _arrays.float_vector(token_weights, "token_weights", (rows.shape[0],))
        return ComputeRequest(
            head=self._name,
            epoch=self._epoch,
            step=step_number,
            micro_batch=micro_batch,
            backward=backward,
            explicit=explicit,
            first_wins=_requests.check_choice(on_mismatch, "on_mismatch", ("conflict", "first_wins")) == "first_wins",
            refuse_non_finite=_requests.check_choice(non_finite, "non_finite", ("report", "refuse")) == "refuse",
            hidden=rows,
            targets=targets,
            ignore_index=ignore_index,
            token_weights=token_weights,
            loss_scale=check_number(loss_scale, "loss_scale"),
            loss=loss,
            teacher=teacher,
            outputs=_requests.check_outputs(outputs),
            return_grad_hidden=wants_grad,
            grad_hidden_data_type=(
                rows.data_type if grad_hidden_dtype is None else _arrays.data_type_name(grad_hidden_dtype, "grad_hidden_dtype")
            ),
            grad_hidden_scale=check_number(grad_hidden_scale, "grad_hidden_scale"),
            expected_weight_version=expected_weight_version,
        )

    def _compute(self, request: ComputeRequest, timeout_s: float) -> LossResult:
        self._abandoned.settle()
        compaction = _requests.compact(request)
        return _requests.finish(compaction, request, self._backend.compute(compaction.request, timeout_s))

    def commit(self, *, micro_batch: int, factor: float = 1.0, step: int | None = None, timeout_s: float | None = None) -> bool:
        """Adds an explicit micro-batch, times `factor`, to its step. The same factor again is answered alike.

        Returns:
            True if an equal call had committed it before.
        Raises:
            NotFoundError: the step knows no such micro-batch.
            MicroBatchConflictError: it was committed with another factor.
            AbortedError: `MICRO_BATCH_DISCARDED`: it was discarded.
        """
        factor = check_number(factor, "factor")
        micro_batch = check_integer(micro_batch, "micro_batch")
        return self._backend.commit(self._key(step), micro_batch, factor, self._timeout(timeout_s))

    def discard(self, *, micro_batch: int, step: int | None = None, timeout_s: float | None = None) -> bool:
        """Drops an uncommitted micro-batch; its id cannot be used again in this step. Idempotent.

        Returns:
            True if a contribution was dropped.
        Raises:
            MicroBatchConflictError: it was committed, and stays.
        """
        micro_batch = check_integer(micro_batch, "micro_batch")
        return self._backend.discard(self._key(step), micro_batch, self._timeout(timeout_s))

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step_state(self, *, timeout_s: float | None = None) -> StepStatus:
        """The open and the last closed step, with every micro-batch: how a client that lost an answer finds out."""
        self._abandoned.settle()
        return self._backend.step_state(self._name, self._epoch, self._timeout(timeout_s))

    def seal(self, *, expected_micro_batches: Expected, step: int | None = None, timeout_s: float | None = None) -> SealResult:
        """Refuses further micro-batches for the step and returns its totals. Idempotent.

        Args:
            expected_micro_batches: exactly these ids, or n for 0 ... n-1. A discarded one counts as missing.
        Raises:
            FailedPreconditionError: `MICRO_BATCH_MISSING`, `MICRO_BATCH_UNCOMMITTED` or `MICRO_BATCH_UNEXPECTED`; nothing changed.
        """
        expected = _check_expected(expected_micro_batches)
        self._abandoned.settle()
        return self._backend.seal(self._key(step), expected, self._timeout(timeout_s))

    def apply_optimizer_step(
        self,
        *,
        learning_rate: float,
        step: int | None = None,
        expected_micro_batches: Expected | None = None,
        gradient_factor: float = 1.0,
        max_grad_norm: float | None = None,
        other_grad_norm_squared: float = 0.0,
        weight_decay: float | None = None,
        beta1: float | None = None,
        beta2: float | None = None,
        epsilon: float | None = None,
        momentum: float | None = None,
        timeout_s: float | None = None,
    ) -> ApplyResult:
        """Updates the weights from the step's gradient and opens the next step; seals an open one first.

        Idempotent: the same arguments for the last closed step are answered alike. Only one of several trainers calls it.

        Args:
            expected_micro_batches: as in `seal`; needed unless the step is sealed.
            gradient_factor: multiplies the gradient once, before norm and clipping; 1 / (loss scale) with a GradScaler.
            max_grad_norm: > 0; clips by the global norm, as torch.nn.utils.clip_grad_norm_ does. None: no clipping.
            other_grad_norm_squared: >= 0; squared norm of the trainer's own gradients, which the global norm includes.
            weight_decay, beta1, beta2, epsilon, momentum: override the head's optimizer for this step.
        Returns:
            ApplyResult; multiply the trainer's own gradients by its `clip_factor`.
        Raises:
            FailedPreconditionError: `NON_FINITE_GRADIENT`: nothing changed; call `discard_gradient`. Also what `seal` raises.
            StepConflictError: the step was closed otherwise.
        """
        optional = {
            "weight_decay": (weight_decay, {"low": 0}),
            "beta1": (beta1, {"low": 0, "high": 1, "high_open": True}),
            "beta2": (beta2, {"low": 0, "high": 1, "high_open": True}),
            "epsilon": (epsilon, {"low": 0}),
            "momentum": (momentum, {"low": 0, "high": 1, "high_open": True}),
            "max_grad_norm": (max_grad_norm, {"low": 0, "low_open": True}),
        }
        arguments = ApplyArguments(
            learning_rate=check_number(learning_rate, "learning_rate", low=0),
            gradient_factor=check_number(gradient_factor, "gradient_factor"),
            other_grad_norm_squared=check_number(other_grad_norm_squared, "other_grad_norm_squared", low=0),
            **{
                name: None if value is None else check_number(value, name, **limits)  # type: ignore[arg-type]
                for name, (value, limits) in optional.items()
            },
        )
        expected = None if expected_micro_batches is None else _check_expected(expected_micro_batches)
        self._abandoned.settle()
        result = self._backend.apply(self._key(step), expected, arguments, self._timeout(timeout_s))
        self.step = result.open_step
        return result

    def discard_gradient(self, *, step: int | None = None, timeout_s: float | None = None) -> DiscardGradientResult:
        """Closes the step with the weights unchanged, and opens the next one. Idempotent."""
        self._abandoned.settle()
        result = self._backend.discard_gradient(self._key(step), self._timeout(timeout_s))
        self.step = result.open_step
        return result

    @overload
    def gradient(
        self, *, bias: Literal[False] = ..., gradient_factor: float = ..., step: int | None = ..., timeout_s: float | None = ...
    ) -> np.ndarray: ...
    @overload
    def gradient(
        self, *, bias: Literal[True], gradient_factor: float = ..., step: int | None = ..., timeout_s: float | None = ...
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def gradient(
        self, *, bias: bool = False, gradient_factor: float = 1.0, step: int | None = None, timeout_s: float | None = None
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Downloads what the open or sealed step has accumulated, times `gradient_factor`.

        Returns:
            float32 (vocab_size, hidden_size); with bias=True a pair of that and float32 (vocab_size,).
        """
        if bias and not self._spec.has_bias:
            raise invalid_argument("INVALID_COMBINATION", f"{self._name} has no bias", field="bias")
        key, factor, timeout_s = self._key(step), check_number(gradient_factor, "gradient_factor"), self._timeout(timeout_s)
        weight = self._backend.gradient(key, "weight", factor, timeout_s)
        return (weight, self._backend.gradient(key, "bias", factor, timeout_s)) if bias else weight

    def gradient_norm(self, *, gradient_factor: float = 1.0, step: int | None = None, timeout_s: float | None = None) -> float:
        """L2 norm of what the open or sealed step has accumulated (weight and bias together), times |gradient_factor|."""
        factor = check_number(gradient_factor, "gradient_factor")
        return math.sqrt(self._backend.gradient_norm_squared(self._key(step), factor, self._timeout(timeout_s)))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def weight(self, *, dtype: Any = None, timeout_s: float | None = None) -> Any:
        """Downloads the weight, (vocab_size, hidden_size).

        Args:
            dtype: None: the storage type (bfloat16 as ml_dtypes' if that is imported, else `headwater.BFloat16`). "float32": the
                master weights where the head has them.
        """
        return self._download("weight", dtype, timeout_s)

    def bias(self, *, dtype: Any = None, timeout_s: float | None = None) -> Any:
        """Downloads the bias, (vocab_size,), as `weight` does."""
        if not self._spec.has_bias:
            raise invalid_argument("INVALID_COMBINATION", f"{self._name} has no bias", field="bias")
        return self._download("bias", dtype, timeout_s)

    def _download(self, tensor: str, dtype: Any, timeout_s: float | None) -> Any:
        wanted = None if dtype is None else _arrays.data_type_name(dtype)
        if wanted not in (None, _arrays.FLOAT32, self._spec.data_type):
            raise invalid_argument(
                "DATA_TYPE_MISMATCH", f"dtype must be float32 or {self._spec.data_type}, got {wanted}", field="dtype"
            )
        data, data_type = self._backend.download(self._name, tensor, wanted, self._timeout(timeout_s))
        return _arrays.to_numpy(HostArray(data, data_type, _arrays.to_numpy))

    def set_weight(
        self,
        weight: Any,
        bias: Any = None,
        *,
        upload_id: str | None = None,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> HeadInfo:
        """Replaces weight and, if given, bias. The head gets a new epoch, and what the open step has accumulated is dropped.

        An upload that was cut goes on where it stopped if it is called again with the same `upload_id` and the same arrays. Nothing
        is visible before a tensor's last byte.

        Args:
            weight: (vocab_size, hidden_size) in the head's dtype or float32, or None to leave it; uint16 are bits of bfloat16.
            bias: (vocab_size,), or None to leave it.
            upload_id: at most 59 characters, chosen by the caller. None: a random one.
            on_progress: called with bytes sent and total bytes; an exception that it raises ends the upload.
        """
        upload_id = uuid.uuid4().hex if upload_id is None else upload_id
        if not isinstance(upload_id, str) or not 1 <= len(upload_id.encode()) <= 59:
            raise invalid_argument("INVALID_FIELD", "upload_id must have 1 to 59 bytes", field="upload_id", actual=upload_id)
        shapes = {"weight": (self._spec.vocab_size, self._spec.hidden_size), "bias": (self._spec.vocab_size,)}
        arrays = {}
        for tensor, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            if tensor == "bias" and not self._spec.has_bias:
                raise invalid_argument("INVALID_COMBINATION", f"{self._name} has no bias", field="bias")
            array = _arrays.from_any(value, tensor, bits_of=self._spec.data_type)
            _arrays.check_shape(array.shape, shapes[tensor], tensor)
            if array.data_type not in (self._spec.data_type, _arrays.FLOAT32):
                raise invalid_argument(
                    "DATA_TYPE_MISMATCH", f"{tensor} must be {self._spec.data_type} or float32, got {array.data_type}", field=tensor
                )
            arrays[tensor] = array
        if not arrays:
            raise invalid_argument("MISSING_FIELD", "weight or bias is required", field="weight")
        for tensor, array in arrays.items():
            info = self._upload(tensor, array, f"{upload_id}-{tensor[0]}", on_progress, self._timeout(timeout_s))
        return info

    def _upload(self, tensor: str, array: HostArray, upload_id: str, on_progress: Progress | None, timeout_s: float) -> HeadInfo:
        return self._adopt(self._backend.upload(self._name, self._epoch, tensor, array, upload_id, on_progress, timeout_s))

    def load(self, path: str, *, weight_tensor: str = "", bias_tensor: str = "", timeout_s: float | None = None) -> HeadInfo:
        """Reads weights from a safetensors file or a Hugging Face model folder under the server's load root. A new epoch follows.

        Args:
            path: relative to the load root.
            weight_tensor: empty: `lm_head.weight`, else the tied embedding, else a tensor named `weight`.
            bias_tensor: empty: `lm_head.bias`, else `bias`.
        """
        return self._adopt(self._backend.load(self._name, self._epoch, path, weight_tensor, bias_tensor, self._timeout(timeout_s)))

    # ---- checkpoints and life ---------------------------------------------------------------------------------------

    def save(self, checkpoint: str, *, overwrite: bool = False, timeout_s: float | None = None) -> SaveResult:
        """Writes weights, optimizer state and step, as they were when the open step began. Complete or not there at all."""
        checkpoint = _requests.check_checkpoint_name(checkpoint)
        return self._backend.save(self._name, self._epoch, checkpoint, overwrite, self._timeout(timeout_s))

    def restore(self, checkpoint: str, *, timeout_s: float | None = None) -> HeadInfo:
        """Sets the head to a checkpoint: a new epoch, the checkpoint's step, nothing accumulated."""
        checkpoint = _requests.check_checkpoint_name(checkpoint)
        return self._adopt(self._backend.restore(self._name, self._epoch, checkpoint, self._timeout(timeout_s)))

    def info(self, *, timeout_s: float | None = None) -> HeadInfo:
        """The head as the server has it now. Does not change what this object believes: compare `epoch`."""
        return self._backend.get_head(self._name, self._timeout(timeout_s))

    def delete(self, *, force: bool = False, timeout_s: float | None = None) -> None:
        """Frees the head; checkpoints stay.

        Raises:
            FailedPreconditionError: `HEAD_IN_USE`: the open step is not empty, and `force` is not set.
        """
        self._abandoned.settle()
        self._backend.delete_head(self._name, self._epoch, force, self._timeout(timeout_s))

    cross_entropy_future = as_future(cross_entropy, threads="loss")
    jsd_future = as_future(jsd, threads="loss")
    commit_future = as_future(commit)
    discard_future = as_future(discard)
    step_state_future = as_future(step_state)
    seal_future = as_future(seal)
    apply_optimizer_step_future = as_future(apply_optimizer_step)
    discard_gradient_future = as_future(discard_gradient)
    gradient_future = as_future(gradient)
    gradient_norm_future = as_future(gradient_norm)
    weight_future = as_future(weight)
    bias_future = as_future(bias)
    set_weight_future = as_future(set_weight)
    load_future = as_future(load)
    save_future = as_future(save)
    restore_future = as_future(restore)
    info_future = as_future(info)
    delete_future = as_future(delete)


def _check_expected(expected: Any) -> Expected:
    if hasattr(expected, "__index__"):
        return check_integer(expected, "expected_micro_batches")
    ids = [check_integer(value, "expected_micro_batches") for value in expected]
    if len(set(ids)) != len(ids):
        raise invalid_argument("INVALID_FIELD", "expected_micro_batches has an id twice", field="expected_micro_batches")
    return ids


class _AbandonedContributions:
    """Explicit micro-batches that nobody can commit any more, and the thread that discards them.

    `add` may run inside a finalizer, in any thread at any point: it only puts into a SimpleQueue, which is reentrant, and makes no
    call. The thread is started by the first explicit contribution that could be abandoned.
    """

    def __init__(self, head: Head):
        self._backend = head._backend
        self._timeout_s = head._client.timeout_s
        self._queue: queue.SimpleQueue[tuple[StepKey, int] | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Ends the thread with the head; the thread knows only the queue and the backend.
        weakref.finalize(head, self._queue.put, None).atexit = False

    def watch(self) -> None:
        """Makes sure that the thread runs."""
        with self._lock:
            if self._thread is None:
                arguments = (self._queue, self._backend, self._timeout_s)
                self._thread = threading.Thread(target=_discard_abandoned, args=arguments, name="headwater-discard", daemon=True)
                self._thread.start()

    def add(self, key: StepKey, micro_batch: int) -> None:
        """Hands a contribution over; returns at once."""
        self._queue.put((key, micro_batch))

    def settle(self) -> None:
        """Waits until everything that was handed over is discarded: for calls whose outcome depends on it."""
        if self._thread is not None:
            settled = threading.Event()
            self._queue.put(settled)
            settled.wait(self._timeout_s)


def _discard_abandoned(
    abandoned: queue.SimpleQueue[tuple[StepKey, int] | threading.Event | None], backend: Backend, timeout_s: float
) -> None:
    while (item := abandoned.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        # Where this fails, the step is closed or the head is gone, and the contribution with it.
        with contextlib.suppress(HeadwaterError):
            backend.discard(item[0], item[1], timeout_s)
