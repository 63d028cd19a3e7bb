"""Ids of micro-batches: unique in a step over all trainers of a head."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater._errors import MicroBatchConflictError, invalid_argument
from headwater._head import Head
from headwater._remote import RemoteBackend
from headwater._types import check_integer

# Epochs of a head under which a source remembers its draws: a `Head` that another one has fenced off may still be used.
_REMEMBERED_EPOCHS = 4


@dataclass(eq=False)
class _Drawn:
    """The ids drawn in one step of a head."""

    # Another one after `take`, `restore` or new weights, which empty the step. An epoch after a restart that `connect(replay=True)`
    # has followed counts as the same, because the step's contributions were put back.
    epoch: bytes
    step: int
    attempts: Mapping[int, int] = field(default_factory=dict)  # by id, with which it is submitted; absent: the client counts
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)  # by sequence, with those that were dropped
    ids: set[int] = field(default_factory=set)


class MicroBatchSource:
    """Draws the ids k * world_size + rank, k = 0, 1, ... within each step of each head.

    Ids start again when the head is taken, restored or given weights from outside, which empties the step.

    Loss functions of one `Head` share one source by default. Thread-safe.

    Args:
        rank: of this trainer among those that submit to the head. None: that of torch.distributed, 0 without it.
        world_size: number of trainers that submit. None: that of torch.distributed, 1 without it. Trainers that do not submit (all
            but one rank of a tensor-parallel group, the earlier stages of a pipeline) need no id. Ids then have gaps: pass the list
            of ids, not their number, as `expected_micro_batches`.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None):
        if rank is None or world_size is None:
            default_rank, default_size = distributed_place()
            rank = default_rank if rank is None else rank
            world_size = default_size if world_size is None else world_size
        self.world_size = check_integer(world_size, "world_size", low=1)
        self.rank = check_integer(rank, "rank", high=self.world_size - 1)
        self._lock = threading.Lock()
        # By backend, two of which may have heads of the same name, and head: one for each of the newest epochs.
        self._drawn: weakref.WeakKeyDictionary[RemoteBackend, dict[str, list[_Drawn]]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: object) -> MicroBatchSource:
        return self  # two that draw for one head would draw the same ids

    def draw(self, head: Head, step: int, first: int | None = None, stride: int | None = None) -> tuple[int, set[int]]:
        """The next id of a sequence, which starts again with each step, and the set that it was put into, for `forget`.

        Args:
            first: the sequence is first, first + stride, ... None: the rank.
            stride: 0 makes a sequence of one id. None: the world size.
        Raises:
            MicroBatchConflictError: the id was drawn in this step.
        """
        sequence = self._sequence(first, stride)
        with self._lock:
            drawn = self._known(head)
            if drawn is None or drawn.step != step:
                if drawn is not None:
                    self._drawn[head._backend][head.name].remove(drawn)
                drawn = self._remember(head, _Drawn(head.epoch, step))
            id_ = sequence[0] + drawn.counts[sequence] * sequence[1]
            if id_ in drawn.ids:
                raise MicroBatchConflictError(
                    f"micro-batch {id_} of step {step} of {head.name} was submitted twice: each loss of a step needs its own id",
                    reason="MICRO_BATCH_CONFLICT",
                    metadata={"head": head.name, "microBatch": str(id_)},
                )
            drawn.counts[sequence] += 1
            drawn.ids.add(id_)
            return id_, drawn.ids

    def give_back(self, head: Head, step: int, id_: int, first: int | None = None, stride: int | None = None) -> None:
        """Makes the id that a sequence has drawn last its next one again, for a call that is to be repeated as it was."""
        with self._lock:
            drawn = self._known(head)
            if drawn is not None and drawn.step == step and id_ in drawn.ids:
                drawn.counts[self._sequence(first, stride)] -= 1
                drawn.ids.discard(id_)

    def _sequence(self, first: int | None, stride: int | None) -> tuple[int, int]:
        return self.rank if first is None else first, self.world_size if stride is None else stride

    def _remember(self, head: Head, drawn: _Drawn) -> _Drawn:
        records = self._drawn.setdefault(head._backend, {}).setdefault(head.name, [])
        records.append(drawn)
        del records[:-_REMEMBERED_EPOCHS]
        return drawn

    def _known(self, head: Head) -> _Drawn | None:
        """The last draw under the head's epoch."""
        records = self._drawn.get(head._backend, {}).get(head.name, ())
        epoch = head.epoch
        return next((drawn for drawn in records if head._backend.current_epoch(head.name, drawn.epoch) == epoch), None)

    def _in_open_step(self, head: Head) -> _Drawn | None:
        drawn = self._known(head)
        return drawn if drawn is not None and drawn.step == head.step else None

    def begin_again(self, step: int | None = None, attempts: Mapping[int, int] | None = None, *, head: Head | None = None) -> None:
        """Forgets the draws for a head: the next id of its step is its first.

        For a trainer that repeats a step, after it has taken the head or in the place of a process that is gone.

        Args:
            step: that `attempts` belong to; without them it says nothing.
            attempts: the attempt with which an id of `step` is submitted, where the process that is gone has submitted it before.
                `head` must be named then, because an id has its own attempts in each head.
            head: None: all that have drawn here.
        """
        if attempts and (head is None or step is None):
            raise invalid_argument(
                "MISSING_FIELD", "attempts are those of one head's step: name both", field="head" if head is None else "step"
            )
        with self._lock:
            if head is None:
                self._drawn.clear()
                return
            self._drawn.get(head._backend, {}).pop(head.name, None)
            if attempts and step is not None:
                self._remember(head, _Drawn(head.epoch, step, dict(attempts)))

    def attempt(self, head: Head, step: int, id_: int) -> int | None:
        """The attempt with which an id is submitted; None: the client counts."""
        with self._lock:
            drawn = self._known(head)
            return drawn.attempts.get(id_) if drawn is not None and drawn.step == step else None

    def forget(self, ids: set[int], id_: int) -> None:
        """An id whose contribution was dropped. May run in a finalizer: takes no lock."""
        ids.discard(id_)

    def ids(self, head: Head) -> list[int]:
        """Ids that were drawn here in the head's open step and not dropped, ascending."""
        with self._lock:
            drawn = self._in_open_step(head)
            return [] if drawn is None else sorted(drawn.ids)

    def count(self, head: Head) -> int:
        """How many ids were drawn here in the head's open step, those that were dropped among them."""
        with self._lock:
            drawn = self._in_open_step(head)
            return 0 if drawn is None else drawn.counts.total()


def distributed_place() -> tuple[int, int]:
    """Rank and world size of torch.distributed; (0, 1) without it."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def source_of(head: Head) -> MicroBatchSource:
    """The source that loss functions of a head share."""
    if head._micro_batch_source is None:
        head._micro_batch_source = MicroBatchSource()
    return head._micro_batch_source
