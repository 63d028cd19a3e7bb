"""Ids of micro-batches: unique in a step over all trainers of a head."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from headwater._head import Head
from headwater._types import check_integer


class MicroBatchSource:
    """Draws the ids k * world_size + rank, k = 0, 1, ... within each step.

    Loss functions of one `Head` share one source unless told otherwise. Thread-safe.

    Args:
        rank: of this trainer among those that submit to the head. None: that of torch.distributed, 0 without it.
        world_size: number of trainers that submit. None: that of torch.distributed, 1 without it. Trainers that do not submit (all
            but one rank of a tensor-parallel group, the earlier stages of a pipeline) need no id, but then ids have gaps: pass the
            list of ids, not their number, as `expected_micro_batches`.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None):
        if rank is None or world_size is None:
            default_rank, default_size = _distributed_place()
            rank = default_rank if rank is None else rank
            world_size = default_size if world_size is None else world_size
        self.world_size = check_integer(world_size, "world_size", low=1)
        self.rank = check_integer(rank, "rank", high=self.world_size - 1)
        self._lock = threading.Lock()
        self._step: int | None = None
        self._count = 0
        self._ids: set[int] = set()
        self._attempts: tuple[int | None, Mapping[int, int]] = (None, {})  # a step, and the attempts that ids of it carry

    def __deepcopy__(self, memo: object) -> MicroBatchSource:
        return self  # two that draw for one head would draw the same ids

    def draw(self, step: int) -> int:
        """A new id of the step; the first of another step starts at `rank` again."""
        with self._lock:
            if step != self._step:
                self._step, self._count, self._ids = step, 0, set()
            id_ = self._count * self.world_size + self.rank
            self._count += 1
            self._ids.add(id_)
            return id_

    def begin_again(self, step: int | None = None, attempts: Mapping[int, int] | None = None) -> None:
        """Forgets what was drawn: the next id of any step is its first.

        For a trainer that does a step anew, after it has taken the head or in the place of a process that is gone.

        Args:
            attempts: the attempt with which an id of `step` is submitted, where the process that is gone has submitted it before.
        """
        with self._lock:
            self._step, self._count, self._ids = None, 0, set()
            self._attempts = (step, dict(attempts or {}))

    def attempt(self, step: int, id_: int) -> int | None:
        """The attempt with which an id is submitted; None: the client counts."""
        with self._lock:
            return self._attempts[1].get(id_) if self._attempts[0] == step else None

    def forget(self, ids: set[int], id_: int) -> None:
        """An id whose contribution was dropped. May run in a finalizer: takes no lock."""
        ids.discard(id_)

    def current_ids(self) -> set[int]:
        """The set that `draw` fills now: for `forget` later on."""
        return self._ids

    def ids(self, step: int | None) -> list[int]:
        """Ids that were drawn here in the step and not dropped, ascending."""
        with self._lock:
            return sorted(self._ids) if step == self._step else []

    def drawn(self, step: int | None) -> int:
        """How many ids were drawn here in the step, those that were dropped among them."""
        with self._lock:
            return self._count if step == self._step else 0


def _distributed_place() -> tuple[int, int]:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def source_of(head: Head) -> MicroBatchSource:
    """The source that loss functions of a head share."""
    if head._micro_batch_source is None:
        head._micro_batch_source = MicroBatchSource()
    return head._micro_batch_source
