"""The state machine of one head's steps and micro-batches, as the server keeps it (server/heads/step_ledger.h). No numbers here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from headwater._backend import Expected
from headwater._errors import HeadwaterError, make_error
from headwater._types import MicroBatchState, Step, StepTotals

_MAX_LISTED_IDS = 16


@dataclass(frozen=True)
class Factors:
    """What a commit multiplies a contribution by; compared to tell a replay from a conflict."""

    factor: float = 1.0
    token_factors: bytes | None = None  # of the factors of each row, if there were any

    def __str__(self) -> str:
        return f"{self.factor:g}" + (" and token_factors" if self.token_factors is not None else "")


@dataclass
class Record:
    """One micro-batch."""

    state: str  # "IN_PROGRESS", "STAGED", "COMMITTED" or "DISCARDED"
    attempt: int = 0
    form: str = "UNSPECIFIED"
    digest: bytes = b""
    counts: StepTotals = field(default_factory=StepTotals)
    factors: Factors = Factors()
    tombstone_attempt: int = -1  # the highest attempt that was discarded; -1: none

    def bury(self, attempt: int) -> None:
        """Discards this attempt and those below."""
        self.state = "DISCARDED"
        self.tombstone_attempt = max(self.tombstone_attempt, attempt)
        self.attempt = self.tombstone_attempt


@dataclass
class StepRecord:
    """One step."""

    step: int
    state: str = "OPEN"
    records: dict[int, Record] = field(default_factory=dict)

    def totals(self) -> StepTotals:
        """Sums over the committed micro-batches, in ascending id."""
        committed = [record.counts for _, record in sorted(self.records.items()) if record.state == "COMMITTED"]
        return StepTotals(**{f.name: sum(getattr(counts, f.name) for counts in committed) for f in dataclasses.fields(StepTotals)})

    def describe(self) -> Step:
        """A snapshot for callers."""
        return Step(
            self.step,
            self.state,
            {
                id_: MicroBatchState(
                    id_,
                    record.attempt,
                    record.state,
                    record.digest,
                    record.counts.valid_token_count,
                    record.factors.factor,
                    record.form,
                )
                for id_, record in sorted(self.records.items())
            },
            self.totals(),
        )


def _error(code: str, reason: str, message: str, **metadata: object) -> HeadwaterError:
    return make_error(code, reason, message, {key: str(value) for key, value in metadata.items()})


class Ledger:
    """Bookkeeping only: every method does what its name says, or raises and changes nothing. Not thread-safe."""

    def __init__(self, initial_step: int):
        self.open = StepRecord(initial_step)
        self.last_closed: StepRecord | None = None

    def reset(self, step: int) -> None:
        """Starts again with nothing known."""
        self.open = StepRecord(step)
        self.last_closed = None

    def check_step(self, step: int) -> None:
        """Raises StepMismatchError unless `step` is the open one."""
        if step != self.open.step:
            raise _error(
                "FAILED_PRECONDITION",
                "STEP_MISMATCH",
                f"the open step is {self.open.step}, the call names step {step}",
                openStep=self.open.step,
                step=step,
            )

    def attempt_of(self, step: int, micro_batch: int) -> int:
        """The attempt that is known of a micro-batch; 0 for an unknown one."""
        record = self.open.records.get(micro_batch) if step == self.open.step else None
        return 0 if record is None else record.attempt

    def check_begin(self, step: int, micro_batch: int, attempt: int, digest: bytes, first_wins: bool) -> str:
        """What `begin` would do: "compute", "replay" or "payload_differs". Changes nothing."""
        self.check_step(step)
        key = {"step": step, "microBatch": micro_batch, "attempt": attempt}
        record = self.open.records.get(micro_batch)
        if record is not None and record.tombstone_attempt >= attempt:
            raise _discarded(record, **key)
        if record is None or record.state == "DISCARDED":
            if self.open.state != "OPEN":
                raise _error(
                    "FAILED_PRECONDITION",
                    "STEP_SEALED",
                    f"step {step} is sealed and takes no further micro-batches; the call is for micro-batch {micro_batch}",
                    **key,
                )
            return "compute"
        if attempt < record.attempt:
            raise _superseded(record, **key)
        if record.state == "IN_PROGRESS":
            raise _interrupted(**key)
        if record.state == "STAGED" and attempt > record.attempt:
            return "compute"
        if record.digest == digest:
            return "replay"
        if first_wins:
            return "payload_differs"
        raise _error(
            "ABORTED",
            "MICRO_BATCH_CONFLICT",
            f"micro-batch {micro_batch} of step {step} is {record.state.lower()} with digest {record.digest.hex()}, "
            f"the call has digest {digest.hex()}",
            expected=record.digest.hex(),
            actual=digest.hex(),
            **key,
        )

    def begin(self, micro_batch: int, attempt: int, digest: bytes) -> None:
        """Carries out what `check_begin` called "compute": the micro-batch is IN_PROGRESS now."""
        known = self.open.records.get(micro_batch)
        tombstone_attempt = -1 if known is None else known.tombstone_attempt
        self.open.records[micro_batch] = Record("IN_PROGRESS", attempt, digest=digest, tombstone_attempt=tombstone_attempt)

    def finish(self, micro_batch: int, *, form: str, committed: bool, counts: StepTotals) -> None:
        """The micro-batch was computed."""
        record = self.open.records[micro_batch]
        record.state = "COMMITTED" if committed else "STAGED"
        record.form = form
        record.counts = counts

    def abort(self, micro_batch: int) -> None:
        """The micro-batch failed before it added anything: it is forgotten, but for its tombstone."""
        record = self.open.records.pop(micro_batch)
        if record.tombstone_attempt >= 0:
            tombstone = self.open.records[micro_batch] = Record("DISCARDED")
            tombstone.bury(record.tombstone_attempt)

    def check_commit(self, step: int, micro_batch: int, attempt: int, factors: Factors) -> bool:
        """True if the commit is to be carried out now, False if an equal one was before."""
        self.check_step(step)
        key = {"step": step, "microBatch": micro_batch, "attempt": attempt}
        record = self.open.records.get(micro_batch)
        if record is not None and record.tombstone_attempt >= attempt:
            raise _discarded(record, **key)
        if record is None or attempt > record.attempt:
            raise _error("NOT_FOUND", "MICRO_BATCH_NOT_FOUND", f"step {step} knows no micro-batch {micro_batch}", **key)
        if attempt < record.attempt:
            raise _superseded(record, **key)
        if record.state == "COMMITTED":
            if record.factors == factors:
                return False
            raise _error(
                "ABORTED",
                "MICRO_BATCH_CONFLICT",
                f"micro-batch {micro_batch} of step {step} was committed with factor {record.factors}, the call has {factors}",
                expected=record.factors,
                actual=factors,
                **key,
            )
        if record.state == "IN_PROGRESS":
            raise _interrupted(**key)
        if self.open.state != "OPEN":
            raise _error("FAILED_PRECONDITION", "STEP_SEALED", f"step {step} is sealed", **key)
        return True

    def begin_commit(self, micro_batch: int) -> None:
        """The contribution is about to be added: if that is interrupted, nobody knows whether it was."""
        self.open.records[micro_batch].state = "IN_PROGRESS"

    def abort_commit(self, micro_batch: int) -> None:
        """Nothing was added: it waits for its decision as before."""
        self.open.records[micro_batch].state = "STAGED"

    def finish_commit(self, micro_batch: int, factors: Factors) -> None:
        """The contribution was added."""
        record = self.open.records[micro_batch]
        record.state, record.factors = "COMMITTED", factors

    def check_discard(self, step: int, micro_batch: int, attempt: int) -> None:
        """Raises what `discard` would raise."""
        self.check_step(step)
        key = {"step": step, "microBatch": micro_batch, "attempt": attempt}
        record = self.open.records.get(micro_batch)
        if record is None:
            return
        if record.state == "COMMITTED":
            raise _error(
                "ABORTED",
                "MICRO_BATCH_CONFLICT",
                f"micro-batch {micro_batch} of step {step} is committed and cannot be discarded",
                **key,
            )
        if record.state == "IN_PROGRESS":
            raise _interrupted(**key)
        if record.state == "STAGED" and attempt < record.attempt:
            raise _superseded(record, **key)

    def discard(self, micro_batch: int, attempt: int) -> bool:
        """Leaves a tombstone; True if an uncommitted contribution was dropped. After `check_discard`."""
        record = self.open.records.get(micro_batch)
        if record is None:
            if self.open.state != "OPEN":
                return False  # nothing new can come in
            record = self.open.records[micro_batch] = Record("DISCARDED")
        dropped = record.state == "STAGED"
        record.bury(attempt)
        return dropped

    def seal(self, step: int, expected: Expected) -> bool:
        """True if this call sealed the step, False if it was sealed before (with an expectation that still holds)."""
        self.check_step(step)
        records = self.open.records
        present = {id_ for id_, record in records.items() if record.state != "DISCARDED"}
        if isinstance(expected, int):
            missing_count = expected - sum(1 for id_ in present if id_ < expected)
            missing = []
            id_ = 0
            while len(missing) < min(missing_count, _MAX_LISTED_IDS):
                if id_ not in present:
                    missing.append(id_)
                id_ += 1
            unexpected = sorted(id_ for id_ in present if id_ >= expected)
        else:
            missing = sorted(set(expected) - present)
            missing_count = len(missing)
            unexpected = sorted(present - set(expected))
        uncommitted = sorted(id_ for id_ in present if records[id_].state != "COMMITTED")
        unexpected = [id_ for id_ in unexpected if records[id_].state == "COMMITTED"]
        for name, reason, ids, count in (
            ("missing", "MICRO_BATCH_MISSING", missing, missing_count),
            ("uncommitted", "MICRO_BATCH_UNCOMMITTED", uncommitted, len(uncommitted)),
            ("unexpected", "MICRO_BATCH_UNEXPECTED", unexpected, len(unexpected)),
        ):
            if count:
                listed = ",".join(map(str, ids[:_MAX_LISTED_IDS])) + (",..." if count > _MAX_LISTED_IDS else "")
                raise _error(
                    "FAILED_PRECONDITION",
                    reason,
                    f"step {step} has {count} {name} micro-batches: {listed}",
                    step=step,
                    **{name: listed, f"{name}Count": count},
                )
        sealed_now = self.open.state == "OPEN"
        self.open.state = "SEALED"
        return sealed_now

    def close(self, how: str) -> None:
        """Closes the open step, whatever is staged with it, and opens the next one."""
        for record in self.open.records.values():
            if record.state == "STAGED":
                record.bury(record.attempt)
        self.open.state = how
        self.last_closed = self.open
        self.open = StepRecord(self.open.step + 1)


def _interrupted(**key: int) -> HeadwaterError:
    return _error(
        "ABORTED",
        "MICRO_BATCH_CONFLICT",
        f"micro-batch {key['microBatch']} of step {key['step']} was interrupted while it was added: discard the step's gradient",
        **key,
    )


def _discarded(record: Record, **key: int) -> HeadwaterError:
    return _error(
        "ABORTED",
        "MICRO_BATCH_DISCARDED",
        f"micro-batch {key['microBatch']} of step {key['step']} was discarded at attempt {record.tombstone_attempt}, "
        f"the call is for attempt {key['attempt']}",
        **key,
    )


def _superseded(record: Record, **key: int) -> HeadwaterError:
    return _error(
        "ABORTED",
        "ATTEMPT_SUPERSEDED",
        f"micro-batch {key['microBatch']} of step {key['step']} is known with attempt {record.attempt}, "
        f"the call is for attempt {key['attempt']}",
        knownAttempt=record.attempt,
        **key,
    )
