"""Micro-batches of the backend in this process: computed, held in one of the three forms, committed or discarded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headwater._engine_library import Engine, Staged
from headwater._errors import HeadwaterError, invalid_argument, make_error
from headwater._ledger import Factors
from headwater._local_head import LocalHead, Pending, digest_of
from headwater._local_join import LocalJoins, Use
from headwater._requests import CommitRequest, ComputeRequest, GradientRequest, StepKey, TermRequest, copy_request
from headwater._types import LossResult, StepTotals, TermResult, Timing


class LocalMicroBatches:
    """What of `LocalBackend` concerns micro-batches."""

    if TYPE_CHECKING:  # what LocalBackend has

        def _turn(self, timeout_s: float) -> contextlib.AbstractContextManager[float]: ...
        def _running_engine(self) -> Engine: ...
        def _find(self, name: str, *, epoch: bytes = b"", ready: bool = False, trainable: bool = False) -> LocalHead: ...
        def _at_step(self, key: StepKey, deadline: float) -> LocalHead: ...

        _joins: LocalJoins

    def _settled_at_step(self, keys: Sequence[StepKey], deadline: float) -> tuple[LocalHead, ...]:
        """The heads of several keys. Waiting for one gives the lock away, so all are looked at again until none had to wait."""
        heads: tuple[LocalHead, ...] = ()
        while True:
            seen = heads
            heads = tuple(self._at_step(key, deadline) for key in keys)
            if heads == seen or len(keys) < 2:
                return heads

    def compute(self, request: ComputeRequest, timeout_s: float) -> LossResult:
        began = time.monotonic()
        with self._turn(timeout_s) as deadline:
            request, uses = self._joins.gather(request, lambda name: self._find(name).spec.hidden_size, deadline)
            digest = b"" if request.micro_batch is None else digest_of(request)
            targets = self._settled_at_step(request.keys, deadline)
            heads = {term.head: self._find_student(term) for term in request.terms}
            # The epoch of a teacher, or of a head that only looks, is checked as well: the weights must be those that were meant.
            for term in request.terms:
                if term.teacher is not None:
                    heads[term.teacher.head] = self._find(term.teacher.head, epoch=term.teacher.epoch, ready=True)
            decision = _decide(request, targets, digest)
            queued = time.monotonic()
            result, attempt = self._run(request, heads, targets, decision, digest, uses)
            if not (request.explicit and decision == "compute"):
                self._joins.release(uses)
            record = targets[0].ledger.open.records[request.micro_batch] if request.micro_batch is not None else None
            terms = tuple(
                dataclasses.replace(
                    values,
                    weight_version=heads[term.head].weight_version,
                    teacher_weight_version=0 if term.teacher is None else heads[term.teacher.head].weight_version,
                )
                for term, values in zip(request.terms, result.terms, strict=True)
            )
            single = terms[0] if len(terms) == 1 else None
            return dataclasses.replace(
                result,
                terms=terms,
                weight_version=0 if single is None else single.weight_version,
                teacher_weight_version=0 if single is None else single.teacher_weight_version,
                state="UNSPECIFIED" if record is None else record.state,
                form="UNSPECIFIED" if record is None else record.form,
                replayed=decision == "replay",
                payload_differs=decision == "payload_differs",
                digest=digest,
                step=request.keys[0].step if request.keys else None,
                attempt=attempt,
                timing=Timing(queue_s=queued - began, engine_s=time.monotonic() - queued),
                transport="in_process",
            )

    def _find_student(self, term: TermRequest) -> LocalHead:
        head = self._find(term.head, epoch=term.epoch, ready=True)
        version = term.expected_weight_version
        if version is not None and version != head.weight_version:
            raise make_error(
                "FAILED_PRECONDITION",
                "WEIGHT_VERSION_MISMATCH",
                f"the weights of {head.name} are of version {head.weight_version}, expected {version}",
                {"expected": str(version), "actual": str(head.weight_version)},
            )
        return head

    def _run(
        self,
        request: ComputeRequest,
        heads: dict[str, LocalHead],
        targets: tuple[LocalHead, ...],
        decision: str,
        digest: bytes,
        uses: tuple[Use, ...],
    ) -> tuple[LossResult, int]:
        """Computes, and settles the contribution if there is one. Also the attempt that was answered."""
        engine = self._running_engine()
        engine_heads = {name: head.engine_head for name, head in heads.items()}
        micro_batch = request.micro_batch
        if decision != "compute" or micro_batch is None:
            result, _ = engine.compute(request, engine_heads, "none")
            _refuse_non_finite(request, result)
            return result, 0 if micro_batch is None else targets[0].ledger.open.records[micro_batch].attempt
        attempt = _attempt_of(request.attempt, targets[0], request.keys[0].step, micro_batch)
        form = _form_of(request, targets)
        for target in targets:
            superseded = target.pending.get(micro_batch)
            staged = superseded.release() if superseded is not None else None
            if staged is not None:
                staged.discard()
            target.ledger.begin(micro_batch, attempt, digest)
        mode = {"DIRECT": "accumulate", "STAGED": "stage", "HELD": "none"}[form]
        staged: Staged | None = None
        try:
            result, staged = engine.compute(request, engine_heads, mode)
            if form == "HELD":
                _refuse_non_finite(request, result)
                if not request.explicit:
                    mode = "accumulate"
                    engine.compute(_for_commit(request, 1.0, None), engine_heads, mode)
            elif staged is not None and not request.explicit:
                mode, own, staged = "accumulate", staged, None
                own.commit(1.0)
            for target, key in zip(targets, request.keys, strict=True):
                counts = _counts_of(key.head, request, result.terms)
                target.ledger.finish(micro_batch, form=form, committed=not request.explicit, counts=counts)
            if request.explicit:
                held = copy_request(request) if form == "HELD" else None
                teachers = {
                    term.teacher.head: (heads[term.teacher.head], heads[term.teacher.head].weight_version)
                    for term in request.terms
                    if term.teacher is not None
                }
                Pending(targets, micro_batch, staged, held, teachers, lambda: self._joins.release(uses)).attach()
        except BaseException as error:
            # Also an interrupt: a contribution that nobody knows would keep its slot, and the step could not be sealed. One that is
            # interrupted while it is added may be in the sum or not: it stays IN_PROGRESS, and the step can only be discarded.
            if mode != "accumulate" or isinstance(error, HeadwaterError):
                for target in targets:
                    target.pending.pop(micro_batch, None)
                    target.ledger.abort(micro_batch)
                    target.lost |= mode == "accumulate" and getattr(error, "code", "") == "INTERNAL"
            if staged is not None:
                staged.discard()
            raise
        return result, attempt

    def commit(self, request: CommitRequest, timeout_s: float) -> bool:
        with self._turn(timeout_s) as deadline:
            micro_batch, token_factors = request.micro_batch, request.token_factors
            heads = self._settled_at_step(request.keys, deadline)
            token_digest = None if token_factors is None else hashlib.blake2b(token_factors.tobytes(), digest_size=16).digest()
            factors = Factors(request.factor, token_digest)
            attempt = _attempt_of(request.attempt, heads[0], request.keys[0].step, micro_batch)
            pending = None
            adding = []
            for head, key in zip(heads, request.keys, strict=True):
                if head.ledger.check_commit(key.step, micro_batch, attempt, factors):
                    pending = head.pending[micro_batch]
                    adding.append(head.ledger)
            if pending is None:
                return True
            _check_heads(pending, heads)
            if token_factors is not None and pending.held is None:
                raise invalid_argument(
                    "INVALID_COMBINATION",
                    f"micro-batch {micro_batch} is staged, not held, and takes no token_factors; submit it with late_token_factors",
                    field="token_factors",
                )
            # An interrupt may come when the engine has added it: then it must neither be added again nor count as dropped.
            for ledger in adding:
                ledger.begin_commit(micro_batch)
            try:
                if pending.held is not None:
                    self._add_held(pending, pending.held, request.factor, token_factors)
                staged = pending.release()
                if staged is not None:
                    _marking_lost(heads, lambda: staged.commit(request.factor))
            except HeadwaterError:
                for ledger in adding:
                    ledger.abort_commit(micro_batch)
                raise
            for head in heads:
                head.ledger.finish_commit(micro_batch, factors)
            pending.decided()
            return False

    def _add_held(self, pending: Pending, request: ComputeRequest, factor: float, token_factors: np.ndarray | None) -> None:
        row_count = request.hidden.shape[0]
        if token_factors is not None and len(token_factors) != row_count:
            raise invalid_argument(
                "SHAPE_MISMATCH",
                f"token_factors has {len(token_factors)} entries, the micro-batch has {row_count} rows",
                field="token_factors",
                expected=row_count,
                actual=len(token_factors),
            )
        heads = {head.name: head for head in pending.heads}
        for term in request.terms:
            if term.step is None:
                heads[term.head] = self._find(term.head, epoch=term.epoch, ready=True)
        for name, (teacher, version) in pending.teachers.items():
            if self._find(name, ready=True) is not teacher or teacher.weight_version != version:
                raise make_error(
                    "FAILED_PRECONDITION",
                    "WEIGHT_VERSION_MISMATCH",
                    f"the weights of the teacher {name} have changed since micro-batch {pending.micro_batch} was submitted",
                    {"head": name, "expected": str(version), "actual": str(teacher.weight_version)},
                )
            heads[name] = teacher
        engine_heads = {name: head.engine_head for name, head in heads.items()}
        again = _for_commit(request, factor, token_factors)
        _marking_lost(pending.heads, lambda: self._running_engine().compute(again, engine_heads, "accumulate"))

    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool:
        with self._turn(timeout_s) as deadline:
            heads = self._settled_at_step(keys, deadline)
            attempt = _attempt_of(attempt, heads[0], keys[0].step, micro_batch)
            for head, key in zip(heads, keys, strict=True):
                head.ledger.check_discard(key.step, micro_batch, attempt)
            pending = next((head.pending[micro_batch] for head in heads if micro_batch in head.pending), None)
            if pending is not None:
                _check_heads(pending, heads)
                staged = pending.release()
                if staged is not None:
                    staged.discard()
                pending.decided()
            dropped = False
            for head in heads:
                dropped |= head.ledger.discard(micro_batch, attempt)
            return dropped

    def add_gradient(self, request: GradientRequest, timeout_s: float) -> bool:
        digest = digest_of(request)
        with self._turn(timeout_s) as deadline:
            key, micro_batch = request.key, request.micro_batch
            head = self._at_step(key, deadline)
            attempt = _attempt_of(request.attempt, head, key.step, micro_batch)
            if head.ledger.check_begin(key.step, micro_batch, attempt, digest, False) == "replay":
                return True
            superseded = head.pending.get(micro_batch)
            staged = superseded.release() if superseded is not None else None
            if staged is not None:
                staged.discard()
            start = request.row_start * head.spec.hidden_size
            head.ledger.begin(micro_batch, attempt, digest)
            try:
                _marking_lost((head,), lambda: head.engine_head.add_to_gradient("grad_weight", start, request.rows, request.factor))
            except HeadwaterError:
                head.ledger.abort(micro_batch)
                raise
            head.ledger.finish(micro_batch, form="DIRECT", committed=True, counts=StepTotals(1))
            return False


def _attempt_of(attempt: int | None, head: LocalHead, step: int, micro_batch: int) -> int:
    """The attempt that a call is: the one that is there unless it says another."""
    return head.ledger.attempt_of(step, micro_batch) if attempt is None else attempt


def _decide(request: ComputeRequest, targets: tuple[LocalHead, ...], digest: bytes) -> str:
    """What all heads agree on: "none", "compute", "replay" or "payload_differs". Changes nothing."""
    if request.micro_batch is None:
        return "none"
    attempt = _attempt_of(request.attempt, targets[0], request.keys[0].step, request.micro_batch)
    decisions = {
        head.name: head.ledger.check_begin(key.step, request.micro_batch, attempt, digest, request.first_wins)
        for head, key in zip(targets, request.keys, strict=True)
    }
    new_to = [name for name, decision in decisions.items() if decision == "compute"]
    if new_to and len(new_to) < len(decisions):
        known_by = next(name for name in decisions if name not in new_to)
        raise make_error(
            "ABORTED",
            "MICRO_BATCH_CONFLICT",
            f"micro-batch {request.micro_batch} is known to {known_by} and not to {new_to[0]}; "
            "the heads of a micro-batch take it all or not at all",
            {"microBatch": str(request.micro_batch), "knownBy": known_by, "notKnownBy": new_to[0]},
        )
    return "payload_differs" if "payload_differs" in decisions.values() else next(iter(decisions.values()))


def _form_of(request: ComputeRequest, targets: tuple[LocalHead, ...]) -> str:
    """How the contribution is held until it is decided."""
    if request.late_token_factors:
        return "HELD"
    if not (request.explicit or request.refuse_non_finite):
        return "DIRECT"
    micro_batch = request.micro_batch
    full = any(head.engine_head.free_staging_slots() == 0 and not _frees_a_slot(head, micro_batch) for head in targets)
    return "HELD" if request.allow_held and full else "STAGED"


def _frees_a_slot(head: LocalHead, micro_batch: int | None) -> bool:
    """Whether an earlier attempt of the same micro-batch, which goes first, holds one."""
    pending = head.pending.get(micro_batch) if micro_batch is not None else None
    return pending is not None and pending.staged is not None


def _for_commit(request: ComputeRequest, factor: float, token_factors: np.ndarray | None) -> ComputeRequest:
    """The computation that adds a HELD contribution: the products alone, times the factors."""

    def weights(term: TermRequest) -> np.ndarray | None:
        if token_factors is None:
            return term.token_weights
        factors = token_factors[term.row_start : term.row_start + term.row_count]
        return np.ascontiguousarray(factors if term.token_weights is None else term.token_weights * factors)

    terms = tuple(
        dataclasses.replace(term, loss_scale=term.loss_scale * factor, token_weights=weights(term)) for term in request.terms
    )
    return dataclasses.replace(request, terms=terms, outputs=(), return_grad_hidden=False, refuse_non_finite=False)


def _refuse_non_finite(request: ComputeRequest, result: LossResult) -> None:
    if request.refuse_non_finite and result.non_finite_row_count:
        raise make_error(
            "FAILED_PRECONDITION",
            "NON_FINITE_VALUES",
            f"{result.non_finite_row_count} rows have a non-finite loss or gradient; nothing was added",
        )


def _counts_of(head: str, request: ComputeRequest, results: tuple[TermResult, ...]) -> StepTotals:
    own = [result for term, result in zip(request.terms, results, strict=True) if term.head == head]
    return StepTotals(
        1,
        sum(result.valid_token_count for result in own),
        sum(result.loss_sum for result in own),
        sum(result.token_weight_sum for result in own),
        sum(result.non_finite_row_count for result in own),
    )


def _check_heads(pending: Pending, heads: tuple[LocalHead, ...]) -> None:
    if set(map(id, pending.heads)) != set(map(id, heads)):
        raise invalid_argument(
            "INVALID_COMBINATION",
            f"micro-batch {pending.micro_batch} adds to {len(pending.heads)} heads, and its decision must name exactly those; "
            f"the call names {len(heads)}",
            field="heads",
            expected=len(pending.heads),
            actual=len(heads),
        )


def _marking_lost(heads: Sequence[LocalHead], work: Callable[[], object]) -> None:
    """Runs what changes accumulators: if the engine fails in it, what they hold is unknown."""
    try:
        work()
    except HeadwaterError as error:
        if error.code == "INTERNAL":
            for head in heads:
                head.lost = True
        raise
