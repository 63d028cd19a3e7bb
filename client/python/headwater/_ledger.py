"""The state machine of one head's steps and micro-batches, as the server keeps it (server/heads/step_ledger.h). No numbers here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from headwater._backend import Expected
from headwater._errors import HeadwaterError, make_error
from headwater._types import LossResult, MicroBatchState, Step, StepTotals

_MAX_LISTED_IDS = 16


@dataclass
class Record:
    """One micro-batch."""

    state: str  # "IN_PROGRESS", "STAGED", "COMMITTED" or "DISCARDED"
    form: str = "UNSPECIFIED"
    digest: bytes = b""
    counts: StepTotals = field(default_factory=StepTotals)
    factor: float = 1.0


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
                id_: MicroBatchState(id_, 0, record.state, record.digest, record.counts.valid_token_count, record.factor)
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

    def begin(self, step: int, micro_batch: int, digest: bytes, first_wins: bool) -> str:
        """ "compute" (it is IN_PROGRESS now), "replay" or "payload_differs"."""
        self.check_step(step)
        key = {"step": step, "microBatch": micro_batch}
        record = self.open.records.get(micro_batch)
        if record is None:
            if self.open.state != "OPEN":
                raise _error(
                    "FAILED_PRECONDITION",
                    "STEP_SEALED",
                    f"step {step} is sealed and takes no further micro-batches; the call is for micro-batch {micro_batch}",
                    **key,
                )
            self.open.records[micro_batch] = Record("IN_PROGRESS", digest=digest)
            return "compute"
        if record.state == "DISCARDED":
            raise _error("ABORTED", "MICRO_BATCH_DISCARDED", f"micro-batch {micro_batch} of step {step} was discarded", **key)
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

    def finish(self, micro_batch: int, *, staged: bool, committed: bool, result: LossResult) -> Record:
        """The micro-batch was computed."""
        record = self.open.records[micro_batch]
        record.state = "COMMITTED" if committed else "STAGED"
        record.form = "STAGED" if staged else "DIRECT"
        record.counts = StepTotals(
            1, result.valid_token_count, result.loss_sum, result.token_weight_sum, result.non_finite_row_count
        )
        return record

    def abort(self, micro_batch: int) -> None:
        """The micro-batch failed before it added anything: it is forgotten."""
        del self.open.records[micro_batch]

    def check_commit(self, step: int, micro_batch: int, factor: float) -> bool:
        """True if the commit is to be carried out now, False if an equal one was before."""
        self.check_step(step)
        key = {"step": step, "microBatch": micro_batch}
        record = self.open.records.get(micro_batch)
        if record is None:
            raise _error("NOT_FOUND", "MICRO_BATCH_NOT_FOUND", f"step {step} knows no micro-batch {micro_batch}", **key)
        if record.state == "DISCARDED":
            raise _error("ABORTED", "MICRO_BATCH_DISCARDED", f"micro-batch {micro_batch} of step {step} was discarded", **key)
        if record.state == "COMMITTED":
            if record.factor == factor:
                return False
            raise _error(
                "ABORTED",
                "MICRO_BATCH_CONFLICT",
                f"micro-batch {micro_batch} of step {step} was committed with factor {record.factor:g}, the call has {factor:g}",
                expected=record.factor,
                actual=factor,
                **key,
            )
        if self.open.state != "OPEN":
            raise _error("FAILED_PRECONDITION", "STEP_SEALED", f"step {step} is sealed", **key)
        return True

    def discard(self, step: int, micro_batch: int) -> bool:
        """True if an uncommitted contribution was dropped. Leaves a tombstone."""
        self.check_step(step)
        record = self.open.records.get(micro_batch)
        if record is None:
            if self.open.state == "OPEN":
                self.open.records[micro_batch] = Record("DISCARDED")
            return False
        if record.state == "COMMITTED":
            raise _error(
                "ABORTED",
                "MICRO_BATCH_CONFLICT",
                f"micro-batch {micro_batch} of step {step} is committed and cannot be discarded",
                step=step,
                microBatch=micro_batch,
            )
        dropped = record.state == "STAGED"
        record.state = "DISCARDED"
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
                record.state = "DISCARDED"
        self.open.state = how
        self.last_closed = self.open
        self.open = StepRecord(self.open.step + 1)
