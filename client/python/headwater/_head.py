"""`Head`: one LM head, its losses, its steps, its weights."""

from __future__ import annotations

import math
import uuid
from typing import Any, Literal, overload

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import HeadwaterError, checkpoints_in, invalid_argument, make_error, refused, wrong_shape, wrong_type
from headwater._futures import as_future
from headwater._loss import _requests
from headwater._loss._losses import HeadLosses
from headwater._loss._requests import Expected, Progress, StepKey
from headwater._messages import checkpoint_info, expected_message, head_info, head_step, read, step_of, step_result
from headwater._model_files._export import export
from headwater._remote import RemoteBackend
from headwater._types import (
    OPTIMIZER_SETTINGS,
    ApplyResult,
    CheckpointInfo,
    DiscardGradientResult,
    HeadInfo,
    SaveResult,
    SealResult,
    StepStatus,
    check_factor,
    check_integer,
    check_max_grad_norm,
    check_not_negative,
    check_number,
)

# Tries to upload all tensors of a head to one and the same server.
_REPLACE_TRIES = 3


class Head(HeadLosses):
    """A head at one epoch. Made by `Client.create_head` or `Client.head`. Thread-safe, except that `step` is one number for all.

    Every method `x(...)` has `x_future(...)`, which returns at once a future good for `.result()` and `await`. Futures run side by
    side and in any order: wait for the micro-batches of a step before closing it.

    A head that was restored, re-created or taken over by another process answers `EpochFencedError` from then on; this object never
    follows on its own. It does follow its own changes (take, set_weight, load, restore), and with `connect(replay=True)` a
    restarted server.

    A call for the step after the open one waits until that is open, at most as long as its `timeout_s`.

    Attributes:
        step: the step that calls work on unless they say otherwise. `apply_optimizer_step`, `discard_gradient` and `replace_weight`
            move it on. One of several trainers closes the step; the others add 1 themselves, and wait for it if they are early.
    """

    _WHY_NOT_PICKLED = "a headwater.Head belongs to its client and cannot be pickled: send its name, and ask client.head(name)"

    def __init__(self, backend: RemoteBackend, info: HeadInfo, *, created: bool = False):
        super().__init__(backend, info.name, info.spec, info.epoch, info.open_step)
        self._created = created
        self._last_seal: tuple[StepKey, int] | None = None  # the last sealed step, and the number of its micro-batches
        # The ids that headwater.torch's loss functions have drawn, and the submissions of headwater.jax's programs.
        self._micro_batch_source: Any = None
        self._submissions: Any = None

    def __repr__(self) -> str:
        kind = "trainable" if self._spec.trainable else "frozen"
        return f"<headwater.Head {self._name} [{self._spec.vocab_size}, {self._spec.hidden_size}] {self._spec.data_type} {kind}>"

    @property
    def created(self) -> bool:
        """Whether the call that made this object created the head; False if it was there before (`if_exists="attach"`)."""
        return self._created

    def _key(self, step: int | None) -> StepKey:
        number = self.step if step is None else step
        if number is None:
            raise refused(f"{self._name} is frozen: it has no steps", "step")
        return StepKey(self._name, self.epoch, check_integer(number, "step"))

    def _at_epoch(self) -> dict[str, Any]:
        """The fields of a request that name the head as this object knows it."""
        return {"name": self._name, "epoch": self.epoch}

    def _check_step(self, expected: int | None, timeout_s: float) -> None:
        """Raises StepMismatchError unless the head stands at this step; None: at any."""
        if expected is None:
            return
        expected = check_integer(expected, "expected_step")
        key = self._key(None)
        if key.step == expected:
            self._confirm()
            return
        metadata = {"head": self._name, "openStep": str(key.step), "step": str(expected)}
        try:
            # No step that the server would wait for: it refuses the call, and names the head's checkpoints.
            self._call("GetGradientNorm", timeout_s, head=head_step(StepKey(key.head, key.epoch, key.step + 2)))
        except HeadwaterError as error:
            metadata["checkpoints"] = error.metadata.get("checkpoints", "")
        known = checkpoints_in(metadata)
        there = next((name for name, step in known.items() if step == expected), None)
        if there is not None:
            advice = f'Head.restore("{there}") goes there'
        elif known:
            advice = f"Head.restore goes to one of its checkpoints ({metadata['checkpoints']})"
        else:
            advice = "it has no checkpoint that is known here"
        raise make_error(
            "FAILED_PRECONDITION",
            "STEP_MISMATCH",
            f"{self._name} stands at step {key.step}, expected_step is {expected}; {advice}, or bring the trainer to "
            f"step {key.step}",
            metadata,
        )

    def _confirm(self) -> None:
        """Drops the warning about the head's weights: the caller has said where the run continues."""
        self._backend.unconfirmed.pop(self._name, None)

    def _adopt(self, info: HeadInfo) -> HeadInfo:
        """Takes over the epoch and step of an answer to a call that this object made."""
        self._known_epoch = info.epoch
        self.step = info.open_step
        return info

    # ---- contributions ----------------------------------------------------------------------------------------------

    def commit(
        self,
        *,
        micro_batch: int,
        factor: float = 1.0,
        token_factors: Any = None,
        step: int | None = None,
        attempt: int | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Adds an explicit micro-batch, times `factor`, to its step. The same factors again are answered alike.

        One of several heads (`multi`) is decided by `LossResult.commit`, which names them all.

        Args:
            factor: finite in float32; multiplies the contribution.
            token_factors: (num_tokens,) finite, a factor for each row beside `factor`: a vector upstream gradient. Only for a
                contribution that is HELD: submit it with late_token_factors=True.
            attempt: the attempt that is committed. None: the one that this client has submitted.
        Returns:
            True if an equal call had committed it before.
        Raises:
            InvalidArgumentError: `INVALID_COMBINATION`: token_factors for one that is not HELD, or a micro-batch of several heads.
            NotFoundError: the step knows no such micro-batch.
            MicroBatchConflictError: it was committed with other factors.
            AbortedError: `MICRO_BATCH_DISCARDED`: it was discarded: by a call, with its session, or by another of its heads
                (`metadata["discardedBy"]`).
            FailedPreconditionError: `WEIGHT_VERSION_MISMATCH`: it was HELD, and its teacher's weights have changed.
            PermissionDeniedError: `NOT_SESSION_OWNER`: another client submitted it.
        """
        return self._commit((self._key(step),), micro_batch, factor, token_factors, timeout_s, attempt)

    def discard(
        self, *, micro_batch: int, step: int | None = None, attempt: int | None = None, timeout_s: float | None = None
    ) -> bool:
        """Drops an uncommitted micro-batch; its id cannot be used again in this step, unless with a higher `attempt`. Idempotent.

        To submit it again, pass the next attempt to the loss (1 if it was never retried; `LossResult.attempt` + 1), or another id.

        Args:
            attempt: the highest attempt that is dropped. None: the one that this client has submitted. A higher one than is there
                drops another client's leftover, too.
        Returns:
            True if a contribution was dropped.
        Raises:
            MicroBatchConflictError: it was committed, and stays.
            PermissionDeniedError: `NOT_SESSION_OWNER`: another client submitted it.
        """
        return self._discard((self._key(step),), micro_batch, timeout_s, attempt)

    def add_gradient(
        self,
        rows: Any,
        *,
        micro_batch: int,
        row_start: int = 0,
        factor: float = 1.0,
        step: int | None = None,
        attempt: int | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Adds a trainer's own part of the weight's gradient to the step: that of a tied embedding, say.

        It is a contribution with an id of its own, and committed when the call returns. The same rows again add nothing.

        Args:
            rows: (num_rows, hidden_size) float32, float16 or bfloat16, of the weight's gradient. Added in float32:
                gradient[row_start : row_start + num_rows] += factor * rows.
            micro_batch: id in the step, unique among all micro-batches of all trainers.
            row_start: first row of the weight that `rows` belongs to.
            factor: finite in float32.
        Returns:
            True if an equal call had added it before.
        Raises:
            InvalidArgumentError: shape or range. `LIMIT_EXCEEDED`: too large for one contribution; send it in parts.
            MicroBatchConflictError: the step knows `micro_batch` with other content.
        """
        array = _requests.check_rows(rows, "rows", self._spec.hidden_size)
        row_count = array.shape[0]
        if row_count == 0:
            raise invalid_argument("INVALID_FIELD", "rows must have at least one row", field="rows", actual=0)
        row_start = check_integer(row_start, "row_start", high=max(0, self._spec.vocab_size - row_count))
        if row_start + row_count > self._spec.vocab_size:
            raise wrong_shape("rows", f"(at most {self._spec.vocab_size}, {self._spec.hidden_size})", array.shape)
        return self._backend.add_gradient(
            self._key(step),
            _arrays.to_float32(array) if array.data_type != _arrays.FLOAT32 else array.data,
            self._timeout(timeout_s),
            micro_batch=check_integer(micro_batch, "micro_batch"),
            attempt=None if attempt is None else check_integer(attempt, "attempt"),
            row_start=row_start,
            factor=check_factor(factor),
        )

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step_state(self, *, timeout_s: float | None = None) -> StepStatus:
        """The open and the last closed step, with every micro-batch: how a client that lost an answer finds out."""
        reply = self._call("GetStep", timeout_s, head={"head": self._name, "head_epoch": self.epoch})
        return StepStatus(step_of(reply.open), step_of(reply.last_closed) if reply.HasField("last_closed") else None)

    def seal(
        self,
        *,
        expected_micro_batches: Expected,
        step: int | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> SealResult:
        """Refuses further micro-batches for the step and returns its totals. Idempotent.

        Args:
            expected_micro_batches: exactly these ids, or n for 0 ... n-1. A discarded one counts as missing.
            wait: wait for micro-batches that are missing or undecided, at most `timeout_s`, instead of failing at once.
        Raises:
            FailedPreconditionError: `MICRO_BATCH_MISSING`, `MICRO_BATCH_UNCOMMITTED` or `MICRO_BATCH_UNEXPECTED`; nothing changed.
        """
        expected = _check_expected(expected_micro_batches)
        wait = _requests.check_bool(wait, "wait")
        key = self._key(step)
        reply = self._call("SealStep", timeout_s, head=head_step(key), expected=expected_message(expected), wait=wait)
        result = step_result(SealResult, reply)
        self._last_seal = key, result.totals.micro_batch_count
        return result

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
        allow_empty: bool = False,
        timeout_s: float | None = None,
    ) -> ApplyResult:
        """Updates the weights from the step's gradient and opens the next step; seals an open one first.

        Idempotent: the same arguments for the last closed step are answered alike. Only one of several trainers calls it.

        Args:
            learning_rate: >= 0, finite in float32.
            expected_micro_batches: as in `seal`; needed unless the step is sealed.
            gradient_factor: finite in float32; multiplies the gradient once, before norm and clipping: 1 / (loss scale) with a
                GradScaler.
            max_grad_norm: >= 0; clips by the global norm, as torch.nn.utils.clip_grad_norm_ does. None, 0, inf: no clipping.
            other_grad_norm_squared: >= 0; squared norm of the trainer's own gradients, which the global norm includes.
            weight_decay, beta1, beta2, epsilon, momentum: override the head's optimizer for this step, within the same ranges.
            allow_empty: apply a step without any micro-batch, too. Its gradient is 0: weight decay and momentum alone move the
                weights, which PyTorch's optimizers do not do where `.grad` is None. False: such a step is refused.
        Returns:
            ApplyResult; multiply the trainer's own gradients by its `clip_factor`.
        Raises:
            InvalidArgumentError: `MISSING_FIELD`: the step is empty, and `allow_empty` is not set; nothing changed.
            FailedPreconditionError: `NON_FINITE_GRADIENT`: nothing changed; call `discard_gradient`. Also the errors of `seal`.
            StepConflictError: the step was closed otherwise.
        """
        given = {"weight_decay": weight_decay, "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "momentum": momentum}
        settings = {
            "learning_rate": check_not_negative(learning_rate, "learning_rate"),
            "gradient_factor": check_factor(gradient_factor, "gradient_factor"),
            "max_grad_norm": check_max_grad_norm(max_grad_norm),
            "other_grad_norm_squared": check_number(other_grad_norm_squared, "other_grad_norm_squared", low=0),
            **{name: OPTIMIZER_SETTINGS[name](value, name) for name, value in given.items() if value is not None},
        }
        expected = None if expected_micro_batches is None else _check_expected(expected_micro_batches)
        key = self._key(step)
        sealed_empty = expected is None and self._last_seal == (key, 0)
        if not _requests.check_bool(allow_empty, "allow_empty") and (expected in (0, []) or sealed_empty):
            raise invalid_argument(
                "MISSING_FIELD",
                f"step {key.step} of {self._name} has no micro-batch: was backward forgotten, or the loss computed under no_grad? "
                "Applying it would move the weights by weight decay and momentum alone: allow_empty=True does so, "
                "discard_gradient() closes the step unchanged",
                field="expected_micro_batches",
            )
        ids = None if expected is None else expected_message(expected)
        reply = self._call("ApplyOptimizerStep", timeout_s, head=head_step(key), expected=ids, **settings)
        result = step_result(ApplyResult, reply)
        self.step = result.open_step
        return result

    def discard_gradient(self, *, step: int | None = None, timeout_s: float | None = None) -> DiscardGradientResult:
        """Closes the step with the weights unchanged, and opens the next one. Idempotent."""
        result = read(DiscardGradientResult, self._call("DiscardGradient", timeout_s, head=head_step(self._key(step))))
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
        """Downloads the accumulated gradient of the open or sealed step, times `gradient_factor`.

        Returns:
            float32 (vocab_size, hidden_size); with bias=True a pair of that and float32 (vocab_size,).
        """
        if bias and not self._spec.has_bias:
            raise refused(f"{self._name} has no bias", "bias")
        fields = {"head": head_step(self._key(step)), "gradient_factor": check_factor(gradient_factor, "gradient_factor")}
        remaining_s = self._timeout(timeout_s)
        weight, *rest = (
            self._backend.receive("DownloadGradient", tensor, self._spec, _arrays.FLOAT32, remaining_s, **fields)
            for tensor in ("weight", "bias")[: 1 + bias]
        )
        return (weight, *rest) if bias else weight

    def gradient_norm(self, *, gradient_factor: float = 1.0, step: int | None = None, timeout_s: float | None = None) -> float:
        """L2 norm of the accumulated gradient of the open or sealed step (weight and bias together), times |gradient_factor|."""
        factor = check_factor(gradient_factor, "gradient_factor")
        reply = self._call("GetGradientNorm", timeout_s, head=head_step(self._key(step)), gradient_factor=factor)
        return math.sqrt(reply.gradient_norm_squared)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def weight(self, *, dtype: Any = None, timeout_s: float | None = None) -> Any:
        """Downloads the weight, (vocab_size, hidden_size).

        A trainable head must be at this object's epoch. Otherwise raises EpochFencedError if another run has taken the head over,
        StepLostError if the server has restored an older checkpoint.

        Args:
            dtype: None: the storage type (bfloat16 as ml_dtypes' if that is imported, else `headwater.BFloat16`). "float32": the
                master weights where the head has them.
        """
        return self._download("weight", dtype, timeout_s)

    def bias(self, *, dtype: Any = None, timeout_s: float | None = None) -> Any:
        """Downloads the bias, (vocab_size,), as `weight` does."""
        if not self._spec.has_bias:
            raise refused(f"{self._name} has no bias", "bias")
        return self._download("bias", dtype, timeout_s)

    def _download(self, tensor: str, dtype: Any, timeout_s: float | None) -> Any:
        wanted = self._spec.data_type if dtype is None else _arrays.data_type_name(dtype)
        if wanted not in (_arrays.FLOAT32, self._spec.data_type):
            raise wrong_type("dtype", f"float32 or {self._spec.data_type}", wanted)
        # Frozen weights are the same at any epoch.
        epoch = self.epoch if self._spec.trainable else b""
        data = self._backend.download(self._name, epoch, tensor, self._spec, wanted, self._timeout(timeout_s))
        return _arrays.to_numpy(HostArray(data, wanted, _arrays.to_numpy))

    def export(
        self, target: Any, *, tensor: str = "", dtype: Any = None, untie: bool = False, timeout_s: float | None = None
    ) -> None:
        """Writes weight and bias as they are now into the model that they belong to, whose own output layer was not trained.

            model.save_pretrained("trained")       # everything but the head
            head.export("trained")                 # now from_pretrained("trained") computes what was trained

        Everything else of the target stays as it is. A file is replaced when the new one is complete; a shard's whole content is
        copied for that.

        Args:
            target: a folder of safetensors files that save_pretrained has written, or a .safetensors file, which is made if it is
                missing. A torch.nn.Linear, or a model with get_output_embeddings(), has its parameters overwritten in place.
            tensor: name of the weight's tensor in a file. Empty: `lm_head.weight`, else the only tensor of the head's shape that
                has a name of an output layer (`embed_out.weight`, `output.weight`, ...). A name that is not there is added to a
                model that was saved without its head. The bias is beside it.
            dtype: of the tensors in a file. None: that which they have; in a new file that of the head. "float32" has the master
                weights.
            untie: gives the model an output layer of its own, and sets that in the config. It is for a model whose config says that
                its input embedding is its head (`tie_word_embeddings`), and a head that was not attached with tied=. Otherwise such
                a model is refused. A head that was attached with tied= is written into the embedding.
        Raises:
            InvalidArgumentError: `INVALID_COMBINATION`: a tied model, see `untie`; a bias on one side only. `SHAPE_MISMATCH`.
            NotFoundError: `WEIGHTS_NOT_FOUND`: no file, or no tensor or several that can be the head; the message lists them.
            DataLossError: `FILE_CORRUPT`. Also the errors of `weight`.
        """
        export(self, target, tensor, dtype, _requests.check_bool(untie, "untie"), timeout_s)

    def set_weight(
        self,
        weight: Any,
        bias: Any = None,
        *,
        upload_id: str | None = None,
        on_progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> HeadInfo:
        """Replaces weight and, if given, bias. The head gets a new epoch, and the open step's accumulated gradient is dropped.

        An interrupted upload continues where it stopped if it is called again with the same `upload_id` and the same arrays.
        Nothing is visible before a tensor's last byte.

        Args:
            weight: (vocab_size, hidden_size) in the head's dtype or float32, or None to leave it; uint16 are bits of bfloat16.
            bias: (vocab_size,), or None to leave it.
            upload_id: at most 59 characters, chosen by the caller. None: a random one.
            on_progress: called with bytes sent and total bytes; an exception that it raises ends the upload.
        """
        upload_id = uuid.uuid4().hex if upload_id is None else upload_id
        if not isinstance(upload_id, str) or not 1 <= len(upload_id.encode()) <= 59:
            raise invalid_argument("INVALID_FIELD", "upload_id must have 1 to 59 bytes", field="upload_id", actual=upload_id)
        arrays = self._check_weights(weight, bias)
        for tensor, array in arrays.items():
            info = self._upload(tensor, array, f"{upload_id}-{tensor[0]}", on_progress, self._timeout(timeout_s))
        self._confirm()
        return info

    def replace_weight(self, weight: Any, bias: Any = None, *, step: int | None = None, timeout_s: float | None = None) -> HeadInfo:
        """Closes a sealed step with weights that the trainer's own optimizer has made, and opens the next one.

        Nothing is visible before the last byte; then weight and bias are swapped in whole. The epoch stays, and so does the state
        of the server's optimizer. A cut leaves the sealed step as it was, and the same arrays again are answered alike: only one of
        several trainers calls it.

        Args:
            weight: (vocab_size, hidden_size) in the head's dtype or float32; uint16 are bits of bfloat16.
            bias: (vocab_size,); required if the head has a bias.
        Raises:
            FailedPreconditionError: `STEP_NOT_SEALED`: call `seal` first.
            StepConflictError: the step was closed otherwise, or with other weights.
        """
        if weight is None or (self._spec.has_bias and bias is None):
            missing = "weight" if weight is None else "bias"
            raise invalid_argument("MISSING_FIELD", f"the whole head is replaced: {missing} is required", field=missing)
        arrays = self._check_weights(weight, bias)
        key = self._key(step)
        upload_id = uuid.uuid4().hex
        remaining_s = self._timeout(timeout_s)
        for _ in range(_REPLACE_TRIES):
            for tensor, array in arrays.items():
                part = f"{upload_id}-{tensor[0]}"
                fields = {"name": self._name, "epoch": key.epoch, "upload_id": part, "closes_step": key.step}
                info = self._backend.upload(tensor, array, remaining_s, **fields)
            if info.open_step != key.step:
                break  # otherwise the server was started again in between, and has lost the first tensor
        self.step = info.open_step
        return info

    def _check_weights(self, weight: Any, bias: Any) -> dict[str, HostArray]:
        """The given ones of weight and bias, of the head's shapes and a dtype that it takes."""
        shapes = {"weight": (self._spec.vocab_size, self._spec.hidden_size), "bias": (self._spec.vocab_size,)}
        arrays = {}
        for tensor, value in (("weight", weight), ("bias", bias)):
            if value is None:
                continue
            if tensor == "bias" and not self._spec.has_bias:
                raise refused(f"{self._name} has no bias", "bias")
            array = _arrays.from_any(value, tensor, bits_of=self._spec.data_type)
            _arrays.check_shape(array.shape, shapes[tensor], tensor)
            _arrays.check_fits(array, self._spec.data_type, tensor)
            arrays[tensor] = array
        if not arrays:
            raise invalid_argument("MISSING_FIELD", "weight or bias is required", field="weight")
        return arrays

    def _upload(self, tensor: str, array: HostArray, upload_id: str, on_progress: Progress | None, timeout_s: float) -> HeadInfo:
        fields = {**self._at_epoch(), "upload_id": upload_id}
        return self._adopt(self._backend.upload(tensor, array, timeout_s, on_progress=on_progress, **fields))

    def load(self, path: str, *, weight_tensor: str = "", bias_tensor: str = "", timeout_s: float | None = None) -> HeadInfo:
        """Reads weights from a safetensors file or a Hugging Face model folder under the server's load root. A new epoch follows.

        Args:
            path: relative to the load root.
            weight_tensor: empty: the first match of `lm_head.weight`, the one tensor of the head's shape with another head's name,
                and the embedding of a tied model (config.json).
            bias_tensor: empty: the weight's own (`lm_head.bias`), else the one tensor with the name of a head's bias.

        Raises:
            NotFoundError: `WEIGHTS_NOT_FOUND`: no such file or tensor, or none that can be chosen; the message lists the tensors.
            FailedPreconditionError: `CHECKPOINT_SPEC_MISMATCH`: another shape, or a bias and the head has none (`bias=True`).
        """
        tensors = {"weight_tensor": weight_tensor, "bias_tensor": bias_tensor}
        info = self._call("LoadWeights", timeout_s, **self._at_epoch(), path=path, **tensors)
        self._confirm()
        return self._adopt(head_info(info))

    # ---- checkpoints and life ---------------------------------------------------------------------------------------

    def save(self, checkpoint: str, *, overwrite: bool = False, timeout_s: float | None = None) -> SaveResult:
        """Writes weights, optimizer state and step, as they were when the open step began. Complete or not there at all."""
        checkpoint = _requests.check_checkpoint_name(checkpoint)
        fields = {**self._at_epoch(), "checkpoint": checkpoint, "overwrite": overwrite}
        return read(SaveResult, self._call("SaveCheckpoint", timeout_s, **fields))

    def checkpoints(self, *, timeout_s: float | None = None) -> list[CheckpointInfo]:
        """The checkpoints under this head's name, newest first; damaged ones last.

        Checkpoints of a former head of this name are among them.

        Raises:
            FailedPreconditionError: `STORAGE_NOT_CONFIGURED`.
        """
        pages = self._backend.pages("ListCheckpoints", self._timeout(timeout_s), name=self._name)
        return [checkpoint_info(checkpoint) for page in pages for checkpoint in page.checkpoints]

    def delete_checkpoint(self, checkpoint: str, *, timeout_s: float | None = None) -> bool:
        """Removes one checkpoint of this head's name from the server's disk. Idempotent.

        After a restart of the server the head comes back from the newest checkpoint that is left, and not at all without any.

        Returns:
            True if this call has removed it; False if there was none.
        Raises:
            FailedPreconditionError: `STORAGE_NOT_CONFIGURED`.
        """
        checkpoint = _requests.check_checkpoint_name(checkpoint)
        return bool(self._call("DeleteCheckpoint", timeout_s, name=self._name, checkpoint=checkpoint).deleted)

    def restore(self, checkpoint: str, *, timeout_s: float | None = None) -> HeadInfo:
        """Sets the head to a checkpoint: a new epoch, the checkpoint's step, nothing accumulated."""
        checkpoint = _requests.check_checkpoint_name(checkpoint)
        info = self._call("RestoreCheckpoint", timeout_s, **self._at_epoch(), checkpoint=checkpoint)
        self._confirm()
        return self._adopt(head_info(info))

    def take(self, *, only_if_current: bool = False, expected_step: int | None = None, timeout_s: float | None = None) -> HeadInfo:
        """Takes the head over for a new run: a new epoch, an empty open step; weights, optimizer state and the step's number stay.

        Every other client's calls are `EpochFencedError` from then on. It also continues with a head that a restarted server has
        brought back (`StepLostError`, state "RESTORED").

        Args:
            only_if_current: only if no other client has taken it since this object was made: of several that try, one succeeds.
            expected_step: only if the head stands at this step, the one that the trainer continues from. None: at any.
        Raises:
            EpochFencedError: only_if_current, and it is not.
            StepMismatchError: the head is at another step; `.checkpoints` are the steps that `restore` can go to. It is not taken.
            FailedPreconditionError: `HEAD_NOT_TRAINABLE`.
            StepLostError: the engine failed; restore a checkpoint.
        """
        epoch = self.epoch if _requests.check_bool(only_if_current, "only_if_current") else b""
        remaining_s = self._timeout(timeout_s)
        if expected_step is not None:
            Head(self._backend, self.info(timeout_s=remaining_s))._check_step(expected_step, remaining_s)
        return self._adopt(head_info(self._call("TakeHead", remaining_s, name=self._name, epoch=epoch)))

    def info(self, *, timeout_s: float | None = None) -> HeadInfo:
        """The head as the server has it now. Does not change this object's epoch: compare `epoch`."""
        return head_info(self._call("GetHead", timeout_s, name=self._name))

    def delete(self, *, force: bool = False, timeout_s: float | None = None) -> None:
        """Frees the head; checkpoints stay.

        Raises:
            FailedPreconditionError: `HEAD_IN_USE`: the open step is not empty, and `force` is not set.
        """
        self._call("DeleteHead", timeout_s, **self._at_epoch(), force=force)

    add_gradient_future = as_future(add_gradient, threads="gradient")
    commit_future = as_future(commit)
    discard_future = as_future(discard)
    step_state_future = as_future(step_state)
    seal_future = as_future(seal, threads="waiting")
    apply_optimizer_step_future = as_future(apply_optimizer_step)
    discard_gradient_future = as_future(discard_gradient)
    gradient_future = as_future(gradient)
    gradient_norm_future = as_future(gradient_norm)
    weight_future = as_future(weight)
    bias_future = as_future(bias)
    export_future = as_future(export)
    set_weight_future = as_future(set_weight)
    replace_weight_future = as_future(replace_weight)
    take_future = as_future(take)
    load_future = as_future(load)
    save_future = as_future(save)
    restore_future = as_future(restore)
    checkpoints_future = as_future(checkpoints)
    delete_checkpoint_future = as_future(delete_checkpoint)
    info_future = as_future(info)
    delete_future = as_future(delete)


def _check_expected(expected: Any) -> Expected:
    # An array has __index__, too, but is the ids.
    if not hasattr(expected, "__iter__") or getattr(expected, "ndim", 1) == 0:
        return check_integer(expected, "expected_micro_batches")
    ids = [check_integer(value, "expected_micro_batches") for value in expected]
    if len(set(ids)) != len(ids):
        raise invalid_argument("INVALID_FIELD", "expected_micro_batches has an id twice", field="expected_micro_batches")
    return ids
