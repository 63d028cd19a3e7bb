"""The losses of a head: one micro-batch, one term or several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from headwater import _arrays, _requests, _terms
from headwater._abandoned import AbandonedContributions
from headwater._backend import Backend
from headwater._errors import invalid_argument
from headwater._futures import Cancel, Done, Executors, Future, as_future
from headwater._requests import ComputeRequest, StepKey
from headwater._types import HeadSpec, LossResult, check_factor, check_integer

if TYPE_CHECKING:
    from headwater._head import Head

P = ParamSpec("P")


@dataclass(frozen=True)
class _Prepared:
    """A loss whose arguments are checked."""

    request: ComputeRequest
    compaction: _requests.Compaction
    grad_hidden_out: Any  # as the caller has given it
    timeout_s: float


class _Preparing:
    """Stands in for a head in its own loss methods, so that they return what they would send."""

    def __init__(self, head: HeadLosses):
        self._submit = head._prepare


def _as_loss_future(method: Callable[Concatenate[Any, P], LossResult]) -> Callable[Concatenate[Any, P], Future[LossResult]]:
    """The variant of a loss method that returns a `Future` at once."""
    on_a_thread = as_future(method, threads="loss")

    @functools.wraps(on_a_thread)
    def start(self: HeadLosses, *args: P.args, **kwargs: P.kwargs) -> Future[LossResult]:
        if not self._backend.can_start:
            return on_a_thread(self, *args, **kwargs)
        return self._start(lambda: method(_Preparing(self), *args, **kwargs))  # type: ignore[arg-type,return-value]

    return start


class HeadLosses:
    """What of `Head` computes losses."""

    _backend: Backend
    _executors: Executors
    _spec: HeadSpec
    _abandoned: AbandonedContributions

    if TYPE_CHECKING:  # what Head has

        def _timeout(self, timeout_s: float | None) -> float: ...
        def _warn_unconfirmed(self) -> None: ...
        def _commit(
            self,
            keys: tuple[StepKey, ...],
            micro_batch: int,
            factor: float,
            token_factors: Any,
            attempt: int | None,
            timeout_s: float | None,
        ) -> bool: ...
        def _discard(self, keys: tuple[StepKey, ...], micro_batch: int, attempt: int | None, timeout_s: float | None) -> bool: ...

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
        allow_held: bool = False,
        late_token_factors: bool = False,
        attempt: int | None = None,
        outputs: Sequence[str] = (),
        backward: bool = True,
        return_grad_hidden: bool | None = None,
        grad_hidden_scale: float = 1.0,
        grad_hidden_dtype: Any = None,
        grad_hidden_out: Any = None,
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
            loss_scale: finite in float32; multiplies both gradients, not the reported sums. 1 / (number of tokens of the step)
                makes a mean.
            token_weights: (num_tokens,) finite, any sign. None: 1.
            attempt: rises when a micro-batch is to be submitted anew although it was discarded, or although a process that is gone
                has left it undecided; the same one again goes on with what this client's retries have made of it. None: the client
                counts, one more for each of its retries; not for a discard, which is final unless the caller says otherwise: pass 1
                after one's own (of attempt n, n + 1), or take another id.
            label_smoothing: in [0, 1), spread evenly over the valid vocabulary.
            z_loss: >= 0, coefficient of lse^2 (nats^2).
            class_weights: (valid_vocab_size,) or (vocab_size,), >= 0. They scale a row's loss; see `target_weight_sum` for means.
            commit: "eager" adds at once; "explicit" waits for `commit` or `discard`, and takes a staging slot. Where the slots are
                this client's own, `StagingFullError` comes at once: nobody else frees them.
            allow_held: an explicit micro-batch (or one with non_finite="refuse") that finds no free slot is HELD instead: its rows
                are kept, and computed again at commit. Rows that are ignored may be left out: see late_token_factors.
            late_token_factors: a factor for each row will come with `commit(token_factors=...)`: it is HELD in any case.
            outputs: among "token_loss", "lse", "target_log_probability", "entropy", "argmax".
            backward: False computes losses and outputs only, in any state, and adds nothing.
            return_grad_hidden: None: as `backward` says. False if the hidden states are not trained.
            grad_hidden_scale: finite in float32; multiplies `grad_hidden` alone; world_size under data parallelism that averages.
            grad_hidden_dtype: None: that of `hidden`.
            grad_hidden_out: contiguous array or tensor of shape (num_tokens, hidden_size) and grad_hidden's dtype, which it is
                written into, apart from all rows that are sent; `LossResult.grad_hidden` is this object then. After an error its
                content means nothing. None: memory of the client's, which is used again once `grad_hidden` is gone.
            on_mismatch: a repeat of `micro_batch` with other content is a "conflict", or "first_wins" computes and adds nothing.
            non_finite: "report" counts NaN and infinities; "refuse" fails and adds nothing.
            expected_weight_version: fail unless the weights are of this version.
        Returns:
            LossResult; `grad_hidden` is in the kind and dtype of `hidden`.
        Raises:
            InvalidArgumentError: shape, dtype or range; checked before anything is sent.
            StepMismatchError, EpochFencedError, MicroBatchConflictError, StagingFullError: nothing was added.
            AbortedError: `MICRO_BATCH_DISCARDED`, `ATTEMPT_SUPERSEDED`: nothing was added.
        """
        term = _terms.CrossEntropy(
            targets,
            token_weights=token_weights,
            loss_scale=loss_scale,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            class_weights=class_weights,
            step=step,
            expected_weight_version=expected_weight_version,
        )
        return self._submit(
            hidden,
            "hidden",
            (term,),
            micro_batch=micro_batch,
            commit=commit,
            allow_held=allow_held,
            late_token_factors=late_token_factors,
            attempt=attempt,
            outputs=outputs,
            backward=backward,
            return_grad_hidden=return_grad_hidden,
            grad_hidden_scale=grad_hidden_scale,
            grad_hidden_dtype=grad_hidden_dtype,
            grad_hidden_out=grad_hidden_out,
            on_mismatch=on_mismatch,
            non_finite=non_finite,
            timeout_s=timeout_s,
        )

    def jsd(
        self,
        student_hidden: Any,
        teacher: Head,
        teacher_hidden: Any,
        *,
        join_key: str | None = None,
        total_rows: int | None = None,
        row_indices: Any = None,
        teacher_dtype: Any = None,
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
        allow_held: bool = False,
        late_token_factors: bool = False,
        attempt: int | None = None,
        outputs: Sequence[str] = (),
        backward: bool = True,
        return_grad_hidden: bool | None = None,
        grad_hidden_scale: float = 1.0,
        grad_hidden_dtype: Any = None,
        grad_hidden_out: Any = None,
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
            teacher_hidden: (num_tokens, hidden_size of the teacher's head), or `headwater.JOIN`: another stream brings these rows,
                of this process or another (`Client.teacher`), before this call or while it waits.
            join_key: with JOIN, the set's name: 1 to 256 bytes, of the tenant of the teacher's head alone.
            total_rows: with JOIN, the number of rows of the set, >= 1.
            row_indices: with JOIN, (num_tokens,) integers in [0, total_rows): which row of the set belongs to which token. None:
                row i to token i.
            teacher_dtype: with JOIN, of the set's rows. None: that of student_hidden.
            targets: (num_tokens,); needed with hard_loss_weight > 0, otherwise only `ignore_index` in it matters.
            beta: in [0, 1].
            student_temperature, teacher_temperature: > 0; divide the logits. There is no factor of temperature squared.
            hard_loss_weight: in [0, 1], share of the cross entropy, which never sees a temperature.
            label_smoothing, z_loss, class_weights: options of the cross entropy; only with hard_loss_weight > 0.
            truncate_to_common: vocabularies of different sizes are compared over the columns that both have; otherwise refused.
        Other arguments, return value and errors are those of `cross_entropy`.
        Raises:
            FailedPreconditionError: `JOIN_INCOMPLETE`: rows of the set did not come within the server's max_join_wait (60 s), or
                the set is not as this call says.
            DeadlineExceededError: rows did not come within `timeout_s`: a shorter one finds a dead teacher sooner.
        """
        term = _terms.JSD(
            teacher,
            teacher_hidden,
            targets=targets,
            beta=beta,
            student_temperature=student_temperature,
            teacher_temperature=teacher_temperature,
            hard_loss_weight=hard_loss_weight,
            token_weights=token_weights,
            loss_scale=loss_scale,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            class_weights=class_weights,
            truncate_to_common=truncate_to_common,
            step=step,
            expected_weight_version=expected_weight_version,
            join_key=join_key,
            total_rows=total_rows,
            row_indices=row_indices,
            teacher_dtype=teacher_dtype,
        )
        return self._submit(
            student_hidden,
            "student_hidden",
            (term,),
            micro_batch=micro_batch,
            commit=commit,
            allow_held=allow_held,
            late_token_factors=late_token_factors,
            attempt=attempt,
            outputs=outputs,
            backward=backward,
            return_grad_hidden=return_grad_hidden,
            grad_hidden_scale=grad_hidden_scale,
            grad_hidden_dtype=grad_hidden_dtype,
            grad_hidden_out=grad_hidden_out,
            on_mismatch=on_mismatch,
            non_finite=non_finite,
            timeout_s=timeout_s,
        )

    def multi(
        self,
        hidden: Any,
        terms: Iterable[_terms.Term],
        *,
        micro_batch: int | None = None,
        commit: str = "eager",
        allow_held: bool = False,
        late_token_factors: bool = False,
        attempt: int | None = None,
        outputs: Sequence[str] = (),
        backward: bool = True,
        return_grad_hidden: bool | None = None,
        grad_hidden_scale: float = 1.0,
        grad_hidden_dtype: Any = None,
        grad_hidden_out: Any = None,
        on_mismatch: str = "conflict",
        non_finite: str = "report",
        timeout_s: float | None = None,
    ) -> LossResult:
        """Computes several loss terms over one set of rows: heads that look at the same rows, teachers for different rows.

        The rows are sent once. All terms are added to the steps of their heads together, or none is; `grad_hidden` is the sum of
        what the terms yield, taken in float32. The same as a call for each term, but for the rounding of that sum.

        Args:
            hidden: (num_tokens, hidden_size), as of `cross_entropy`.
            terms: `headwater.CrossEntropy` and `headwater.JSD`, in any mix; heads of this client with this hidden_size.
            micro_batch: id in the steps of all trainable heads of the terms. Required where something is added.
            outputs: computed for every term.
        Other arguments are those of `cross_entropy`.
        Returns:
            LossResult; what each term yields is in `.terms`, `grad_hidden` is the sum. `.commit()` and `.discard()` decide an
            explicit one in all its heads.
        Raises:
            InvalidArgumentError: also `INVALID_COMBINATION` for terms that name different steps of one head.
        """
        return self._submit(
            hidden,
            "hidden",
            tuple(terms) if hasattr(terms, "__iter__") else (terms,),
            micro_batch=micro_batch,
            commit=commit,
            allow_held=allow_held,
            late_token_factors=late_token_factors,
            attempt=attempt,
            outputs=outputs,
            backward=backward,
            return_grad_hidden=return_grad_hidden,
            grad_hidden_scale=grad_hidden_scale,
            grad_hidden_dtype=grad_hidden_dtype,
            grad_hidden_out=grad_hidden_out,
            on_mismatch=on_mismatch,
            non_finite=non_finite,
            timeout_s=timeout_s,
        )

    def _prepare(
        self,
        hidden: Any,
        hidden_name: str,
        terms: tuple[_terms.Term, ...],
        *,
        micro_batch: int | None,
        commit: str,
        allow_held: bool,
        late_token_factors: bool,
        attempt: int | None,
        outputs: Sequence[str],
        backward: bool,
        return_grad_hidden: bool | None,
        grad_hidden_scale: float,
        grad_hidden_dtype: Any,
        grad_hidden_out: Any,
        on_mismatch: str,
        non_finite: str,
        timeout_s: float | None,
    ) -> _Prepared:
        timeout_s = self._timeout(timeout_s)
        if not terms:
            raise invalid_argument("MISSING_FIELD", "at least one term is required", field="terms")
        rows = _requests.check_rows(hidden, hidden_name, self._spec.hidden_size, self._backend.row_memory)
        backward = _requests.check_bool(backward, "backward")
        wants_grad = backward if return_grad_hidden is None else _requests.check_bool(return_grad_hidden, "return_grad_hidden")
        if wants_grad and not backward:
            raise invalid_argument("INVALID_COMBINATION", "backward=False computes no grad_hidden", field="return_grad_hidden")
        checked = tuple(_terms.check_term(self, term, rows, hidden_name, backward) for term in terms)
        _terms.check_one_step(checked)
        contributes = any(term.step is not None for term in checked)
        for term, sent in zip(terms, checked, strict=True):
            if sent.step is not None:
                (self if term.head is None else term.head)._warn_unconfirmed()
        micro_batch = _requests.check_micro_batch(contributes, backward, micro_batch)
        explicit = _requests.check_choice(commit, "commit", ("eager", "explicit")) == "explicit"
        if explicit and not contributes:
            raise invalid_argument("INVALID_COMBINATION", 'commit="explicit" needs something to commit', field="commit")
        late_token_factors = _requests.check_bool(late_token_factors, "late_token_factors")
        if late_token_factors and not explicit:
            raise invalid_argument(
                "INVALID_COMBINATION", 'late_token_factors needs commit="explicit": they come with it', field="late_token_factors"
            )
        if attempt is not None:
            attempt = check_integer(attempt, "attempt")
            if not contributes:
                raise invalid_argument("INVALID_COMBINATION", "attempt must be left out: nothing is added", field="attempt")
        data_type = rows.data_type
        if grad_hidden_dtype is not None:
            data_type = _arrays.data_type_name(grad_hidden_dtype, "grad_hidden_dtype")
        out = None
        if grad_hidden_out is not None:
            if not wants_grad:
                raise invalid_argument("INVALID_COMBINATION", "there is no grad_hidden to write", field="grad_hidden_out")
            out = _requests.check_grad_hidden_out(grad_hidden_out, rows.shape, data_type)
            _requests.check_apart(out, rows, hidden_name)
            for term in checked:
                if term.teacher is not None and term.teacher.sent is not None:
                    _requests.check_apart(out, term.teacher.sent, "teacher_hidden")
        request = ComputeRequest(
            terms=checked,
            micro_batch=micro_batch,
            attempt=attempt,
            backward=backward,
            explicit=explicit,
            allow_held=_requests.check_bool(allow_held, "allow_held"),
            late_token_factors=late_token_factors,
            first_wins=_requests.check_choice(on_mismatch, "on_mismatch", ("conflict", "first_wins")) == "first_wins",
            refuse_non_finite=_requests.check_choice(non_finite, "non_finite", ("report", "refuse")) == "refuse",
            hidden=rows,
            outputs=_requests.check_outputs(outputs),
            return_grad_hidden=wants_grad,
            grad_hidden_data_type=data_type,
            grad_hidden_scale=check_factor(grad_hidden_scale, "grad_hidden_scale"),
            grad_hidden_out=out,
        )
        return _Prepared(request, _requests.compact(request), grad_hidden_out, timeout_s)

    def _submit(self, *args: Any, **kwargs: Any) -> LossResult:
        """What a loss does with its arguments, those of `_prepare`."""
        return self._run(self._prepare(*args, **kwargs))

    def _run(self, prepared: _Prepared) -> LossResult:
        remaining_s = self._abandoned.settle(prepared.timeout_s)
        return self._finish(prepared, lambda: self._backend.compute(prepared.compaction.request, remaining_s))

    def _start(self, prepare: Callable[[], _Prepared]) -> Future[LossResult]:
        """A loss whose arguments `prepare` checks; no thread waits for its answer."""

        def begin(done: Done) -> Cancel | None:
            if not self._abandoned.idle:
                return None
            return self._backend.start(prepared.compaction.request, prepared.timeout_s, done)

        try:
            prepared = prepare()
        except Exception as error:
            return Future.failed(error)
        return self._executors.begin_loss(begin, lambda outcome: self._finish(prepared, outcome), lambda: self._run(prepared))

    def _finish(self, prepared: _Prepared, answer: Callable[[], LossResult]) -> LossResult:
        request = prepared.request
        with _terms.joining():
            answered = answer()
        result = _requests.finish(prepared.compaction, request, answered, prepared.grad_hidden_out)
        if request.micro_batch is None or not request.explicit:
            return result
        return dataclasses.replace(result, _decision=_Decision(self, request.keys, request.micro_batch))

    cross_entropy_future = _as_loss_future(cross_entropy)
    jsd_future = _as_loss_future(jsd)
    multi_future = _as_loss_future(multi)


class _Decision:
    """What `LossResult.commit` and `LossResult.discard` decide."""

    def __init__(self, head: HeadLosses, keys: tuple[StepKey, ...], micro_batch: int):
        self._head = head
        self._keys = keys
        self._micro_batch = micro_batch

    def commit(self, factor: float, token_factors: Any, timeout_s: float | None) -> bool:
        """Adds it to all heads."""
        return self._head._commit(self._keys, self._micro_batch, factor, token_factors, None, timeout_s)

    def discard(self, timeout_s: float | None) -> bool:
        """Drops it in all heads."""
        return self._head._discard(self._keys, self._micro_batch, None, timeout_s)
