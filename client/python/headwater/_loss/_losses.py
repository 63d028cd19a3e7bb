"""The losses of a head: one micro-batch, one term or several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec

from headwater import _arrays
from headwater._errors import FailedPreconditionError, invalid_argument, refused
from headwater._futures import Future, named_future
from headwater._loss import _requests, _terms
from headwater._loss._requests import FACTORS, ComputeRequest, StepKey
from headwater._loss._terms import CrossEntropyCall, HeadReference, JsdCall, LossCall, MultiCall, Term, spread
from headwater._messages import head_step, tensor_message
from headwater._types import LossResult, check_factor, check_integer, check_number, result_of

P = ParamSpec("P")


@dataclass(slots=True)
class _Prepared:
    """A loss whose arguments are checked."""

    request: ComputeRequest
    compaction: _requests.Compaction
    grad_hidden_out: Any  # as the caller has given it
    timeout_s: float


def _as_loss_future(method: Callable[Concatenate[Any, P], LossResult]) -> Callable[Concatenate[Any, P], Future[LossResult]]:
    """The variant of a loss method that returns a `Future` at once; no thread waits for its answer."""
    options = method.options  # type: ignore[attr-defined]

    @functools.wraps(method)
    def start(self: HeadLosses, *args: P.args, **kwargs: P.kwargs) -> Future[LossResult]:
        try:
            prepared = self._prepare(options(*args, **kwargs))
        except Exception as error:
            return Future.failed(error)
        return self._backend.executors.begin(
            lambda done: self._backend.start(prepared.compaction.request, prepared.timeout_s, done),
            lambda answer: self._finish(prepared, answer),
        )

    return named_future(method, start)


class _Decision(NamedTuple):
    """The functions behind `LossResult.commit` and `LossResult.discard`."""

    commit: Callable[[float, Any, float | None], bool]
    discard: Callable[[float | None], bool]


class HeadLosses(HeadReference):
    """The part of `Head` that computes losses, and decides explicit micro-batches."""

    @spread(CrossEntropyCall)
    def cross_entropy(self, call: CrossEntropyCall) -> LossResult:
        """Computes one micro-batch's cross entropy and gradients, and adds its `grad_weight` to the step.

        Same numbers as, but without building the (num_tokens, vocab_size) logits:
            logits = transform(hidden.float() @ weight.float().T + bias) / temperature
            lse, log_p = logits.logsumexp(-1), logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            per_token = F.cross_entropy(logits, targets, weight=class_weights, label_smoothing=label_smoothing,
                                        ignore_index=ignore_index, reduction="none") + z_loss * lse ** 2
            (loss_scale * (token_weights * per_token + entropy_factors * entropy + lse_factors * lse).sum()).backward()

        Args:
            hidden: (num_tokens, hidden_size), float32, float16 or bfloat16; need not be the head's dtype. Not modified.
            targets: (num_tokens,) integers, each in [0, valid_vocab_size) or `ignore_index`; aligned with the rows.
            step: None: `self.step`. Ignored by frozen heads and with backward=False.
            micro_batch: id in the step, unique among all trainers: k * world_size + rank. Required where something is added.
            loss_scale: finite in float32; multiplies both gradients, not the reported sums. 1 / (number of tokens of the step)
                makes a mean.
            token_weights: (num_tokens,) finite, any sign. None: 1.
            attempt: rises when a micro-batch is to be submitted again after a discard, or after a process that has left it
                undecided. A repeated attempt continues with the result of this client's retries. None: the client counts its own
                retries. It does not count a discard, which is final unless the caller says otherwise. Pass 1 (after a discard of
                attempt n, n + 1), or take another id.
            label_smoothing: in [0, 1], spread evenly over the valid vocabulary.
            z_loss: >= 0, coefficient of lse^2 (nats^2).
            class_weights: (valid_vocab_size,) or (vocab_size,), finite. They scale a row's loss, not its z-loss; see
                `target_weight_sum` for means.
            temperature: > 0; divides the logits in the loss and in all outputs.
            token_scaling: multiplies each row's loss and its gradient by the probability of the target, as a constant. Gradients of
                entropy and lse are not multiplied.
            entropy_factors, lse_factors: (num_tokens,) finite, any sign: the upstream gradients of each row's `entropy` and `lse`.
                The reported sums are of the loss alone. None: 0.
            gradient_resolution: a share in [2**-24, 1], or 0 for exact gradients. Entries of a row's gradient of the logits below
                this share of its missing probability become 0 or that size, at random and without bias. Losses and outputs stay
                bitwise as they are; `dither` of the result has the expected error. Not for frozen heads, nor with factors, nor with
                label_smoothing behind a softcap; on GPUs without label_smoothing, for heads on one GPU. docs/math.md, "Gradient
                resolution", has the rule.
            commit: "eager" adds at once; "explicit" waits for `commit` or `discard`, and takes a staging slot. Where the slots are
                this client's own, `StagingFullError` comes at once, because only this client frees them.
            allow_held: an explicit micro-batch (or one with non_finite="refuse") that finds no free slot is HELD instead: its rows
                are kept, and computed again at commit. Rows that are ignored may be left out: see late_token_factors.
            late_token_factors: a factor for each row will come with `commit(token_factors=...)`: it is HELD in any case.
            outputs: among "token_loss", "lse", "target_log_probability", "entropy", "argmax", "mean_logits", "log_sum_sq_probs".
            backward: False computes losses and outputs only, in any state, and adds nothing.
            return_grad_hidden: None: as `backward` says. False if the hidden states are not trained.
            grad_hidden_scale: finite in float32; multiplies `grad_hidden` alone; world_size under data parallelism that averages.
            grad_hidden_dtype: None: that of `hidden`.
            grad_hidden_out: contiguous array or tensor of shape (num_tokens, hidden_size) and grad_hidden's dtype that receives the
                gradient. It must not overlap rows that are sent; `LossResult.grad_hidden` is this object then. After an error its
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
        return self._compute(call)

    @spread(JsdCall)
    def jsd(self, call: JsdCall) -> LossResult:
        """Computes the generalized Jensen-Shannon divergence to a teacher over the full vocabulary, and its gradients.

        With P the teacher's and Q the student's distribution, and M = beta P + (1 - beta) Q:
            jsd = beta * KL(P || M) + (1 - beta) * KL(Q || M)          # beta = 0: KL(P || Q); beta = 1: KL(Q || P)
            per_token = (1 - hard_loss_weight) * jsd + hard_loss_weight * cross_entropy
            (loss_scale * (token_weights * per_token).sum()).backward()

        Args:
            student_hidden: (num_tokens, hidden_size), as `hidden` of `cross_entropy`.
            teacher: the head that the teacher's hidden states go through; usually a frozen one. It gets no gradient. Or a
                `headwater.TopKTeacher`, which requires beta=0, and takes student_temperature but no other option of the divergence
                or the cross entropy. `outputs` may have "token_loss" then.
            teacher_hidden: (num_tokens, hidden_size of the teacher's head), or `headwater.JOIN`. With JOIN another stream brings
                these rows, of this process or another (`Client.teacher`), before this call or while it waits. None with a
                TopKTeacher.
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
            gradient_resolution: as in `cross_entropy`, with half of the sum of a row's magnitudes for its missing probability; not
                with hard_loss_weight > 0.
            truncate_to_common: vocabularies of different sizes are compared over the columns that both have; otherwise refused.
        Other arguments, return value and errors are those of `cross_entropy`.
        Raises:
            FailedPreconditionError: `JOIN_INCOMPLETE`: rows of the set did not come within the server's max_join_wait (60 s), or
                the set is not as this call says.
            DeadlineExceededError: rows did not come within `timeout_s`: a shorter one finds a dead teacher sooner.
        """
        return self._compute(call)

    @spread(MultiCall)
    def multi(self, call: MultiCall) -> LossResult:
        """Computes several loss terms over one set of rows: heads that look at the same rows, teachers for different rows.

        The rows are sent once. All terms are added to the steps of their heads together, or none is; `grad_hidden` is the sum of
        the terms' gradients, taken in float32. The result equals a call for each term, except for the rounding of that sum.

        Args:
            hidden: (num_tokens, hidden_size), as of `cross_entropy`.
            terms: `headwater.CrossEntropy` and `headwater.JSD`, in any mix; heads of this client with this hidden_size.
            micro_batch: id in the steps of all trainable heads of the terms. Required where something is added.
            outputs: computed for every term.
        Other arguments are those of `cross_entropy`.
        Returns:
            LossResult; the results of the terms are in `.terms`, `grad_hidden` is the sum. `.commit()` and `.discard()` decide an
            explicit one in all its heads.
        Raises:
            InvalidArgumentError: also `INVALID_COMBINATION` for terms that name different steps of one head.
        """
        return self._compute(call)

    def _timeout(self, timeout_s: float | None) -> float:
        return self._backend.timeout_s if timeout_s is None else check_number(timeout_s, "timeout_s", low=0, low_open=True)

    def _call(self, method: str, timeout_s: float | None, **fields: Any) -> Any:
        """Makes a call of an RPC, by its name, with these fields of its request, and returns the answer's message."""
        return self._backend.call(method, self._timeout(timeout_s), **fields)

    def _prepare(self, call: LossCall) -> _Prepared:
        timeout_s = self._timeout(call.timeout_s)
        hidden_name = call.rows_field
        hidden = getattr(call, hidden_name)
        several = call.terms if isinstance(call, MultiCall) else (call,)
        terms: tuple[Term, ...] = tuple(several) if hasattr(several, "__iter__") else (several,)
        if not terms:
            raise invalid_argument("MISSING_FIELD", "at least one term is required", field="terms")
        rows = _requests.check_rows(hidden, hidden_name, self._spec.hidden_size, on_device=True)
        options = _requests.check_options(call)
        checked = tuple(_terms.check_term(self, term, rows, hidden_name, options.backward) for term in terms)
        _terms.check_one_step(checked)
        contributes = any(term.step is not None for term in checked)
        for sent in checked:
            if sent.step is not None:
                self._backend.warn_unconfirmed(sent.head)
        micro_batch = _requests.check_micro_batch(contributes, options.backward, call.micro_batch)
        if options.explicit and not contributes:
            raise refused('commit="explicit" needs something to commit', "commit")
        for name in FACTORS:
            if options.late_token_factors and any(getattr(term, name) is not None for term in checked):
                raise refused(f"{name} are for a call of their own: late_token_factors multiply the loss", name)
        if set(options.outputs) - {"token_loss"} and any(term.top_k is not None for term in checked):
            raise refused('outputs may have "token_loss" alone with a TopKTeacher', "outputs")
        attempt = call.attempt
        if attempt is not None:
            attempt = check_integer(attempt, "attempt")
            if not contributes:
                raise refused("attempt must be left out: nothing is added", "attempt")
        data_type = rows.data_type
        if call.grad_hidden_dtype is not None:
            data_type = _arrays.data_type_name(call.grad_hidden_dtype, "grad_hidden_dtype")
        out = None
        if call.grad_hidden_out is not None:
            if not options.return_grad_hidden:
                raise refused("there is no grad_hidden to write", "grad_hidden_out")
            out = _requests.check_grad_hidden_out(call.grad_hidden_out, rows.shape, data_type)
            _requests.check_apart(out, rows, hidden_name)
            for term in checked:
                if term.teacher is not None and term.teacher.sent is not None:
                    _requests.check_apart(out, term.teacher.sent, "teacher_hidden")
        request = ComputeRequest(
            terms=checked,
            micro_batch=micro_batch,
            attempt=attempt,
            options=options,
            hidden=rows,
            grad_hidden_data_type=data_type,
            grad_hidden_scale=check_factor(call.grad_hidden_scale, "grad_hidden_scale"),
            grad_hidden_out=out,
        )
        if features := [name for term in checked for name in term.features]:
            self._backend.require(features, timeout_s)
        return _Prepared(request, _requests.compact(request), call.grad_hidden_out, timeout_s)

    def _compute(self, call: LossCall) -> LossResult:
        prepared = self._prepare(call)
        return self._finish(prepared, lambda: self._backend.compute(prepared.compaction.request, prepared.timeout_s))

    def _finish(self, prepared: _Prepared, answer: Callable[[], dict[str, Any]]) -> LossResult:
        request = prepared.request
        try:
            answered = answer()
        except FailedPreconditionError as error:
            raise _terms.explained(error) from None
        fields = _requests.finish(prepared.compaction, request, answered, prepared.grad_hidden_out)
        decision = None
        if request.micro_batch is not None and request.options.explicit:
            place = request.keys, request.micro_batch
            decision = _Decision(functools.partial(self._commit, *place), functools.partial(self._discard, *place))
        fields["_decision"] = decision
        return result_of(LossResult, fields)

    cross_entropy_future = _as_loss_future(cross_entropy)
    jsd_future = _as_loss_future(jsd)
    multi_future = _as_loss_future(multi)

    def _commit(
        self,
        keys: tuple[StepKey, ...],
        micro_batch: int,
        factor: float,
        token_factors: Any,
        timeout_s: float | None,
        attempt: int | None = None,
    ) -> bool:
        micro_batch = check_integer(micro_batch, "micro_batch")
        attempt = None if attempt is None else check_integer(attempt, "attempt")
        factor, vector = check_factor(factor), _requests.check_token_factors(token_factors)
        fields = {"micro_batch": micro_batch, "attempt": attempt, "factor": factor}
        if vector is not None:
            fields["token_factors"] = tensor_message(vector)
        return bool(self._call("CommitMicroBatch", timeout_s, heads=map(head_step, keys), **fields).replayed)

    def _discard(self, keys: tuple[StepKey, ...], micro_batch: int, timeout_s: float | None, attempt: int | None = None) -> bool:
        micro_batch = check_integer(micro_batch, "micro_batch")
        attempt = None if attempt is None else check_integer(attempt, "attempt")
        fields = {"micro_batch": micro_batch, "attempt": attempt}
        return bool(self._call("DiscardMicroBatch", timeout_s, heads=map(head_step, keys), **fields).dropped)
