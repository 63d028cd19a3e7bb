"""Micro-batches whose gradient a framework's backward commits: the common part of every framework's loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from headwater._errors import AMBIGUOUS_CODES, HeadwaterError, warn
from headwater._head import Head
from headwater._loss._micro_batches import MicroBatchSource
from headwater._types import LossResult

# Heads that have staged a micro-batch of this process, by whether the user was warned that they have held one instead.
_warned: weakref.WeakKeyDictionary[Head, bool] = weakref.WeakKeyDictionary()


def found_no_slot(head: Head, form: str) -> bool:
    """Whether a micro-batch had to be HELD for want of a slot.

    Where nothing is ever STAGED, no slot is missing: deterministic mode holds everything.
    """
    if form == "STAGED":
        _warned.setdefault(head, False)
    return form == "HELD" and head in _warned


def warn_of_held(head: Head) -> None:
    """Warns, once for each head, that a loss had no slot."""
    if not _warned[head]:
        _warned[head] = True
        warn(
            f"a loss of {head.name} found all {head.spec.staging_slots} staging slots taken by losses that wait for backward; "
            "the server keeps its rows and computes the head's gradient again in backward, a third more work. "
            f"Create the head with staging_slots={head.spec.staging_slots + 1} or more, one for each loss before one backward",
            RuntimeWarning,
        )


class Contribution:
    """A micro-batch of this process in the head's open step, from the draw of its id until it is added or dropped."""

    def __init__(
        self,
        head: Head,
        source: MicroBatchSource,
        timeout_s: float | None,
        *,
        first: int | None = None,
        stride: int | None = None,
    ):
        """`first`, `stride`: of the sequence that its id is drawn from, as of `MicroBatchSource.draw`."""
        self.head = head
        self._timeout_s = timeout_s  # of its commit
        self._source, self._sequence = source, (first, stride)
        self._key = head._key(None)
        self._micro_batch, ids = source.draw(head, self._key.step, first, stride)
        self._attempt = source.attempt(head, self._key.step, self._micro_batch)
        self._staged: LossResult | None = None
        self._discards: list[Callable[[], None]] = []  # drop it on the server, if it may be there
        self._finalizer = weakref.finalize(self, _drop, source, ids, self._micro_batch, self._discards)
        self._finalizer.atexit = False

    @property
    def step(self) -> int:
        """The head's step that it belongs to."""
        return self._key.step

    def submit(self, run: Callable[..., LossResult]) -> LossResult:
        """`run` of this micro-batch, with an attempt above the one that is staged."""
        attempt = self._attempt if self._staged is None else self._staged.attempt + 1
        try:
            return run(step=self._key.step, micro_batch=self._micro_batch, attempt=attempt)
        except BaseException as error:
            # An answer with a reason is a refusal: it left nothing there.
            if not (isinstance(error, HeadwaterError) and error.reason and error.code not in AMBIGUOUS_CODES):
                self._may_be_there()
            raise

    def staged(self, result: LossResult) -> None:
        """It waits for its decision now, and is discarded if no object is left to decide it."""
        self._staged = result
        self._may_be_there()

    def _may_be_there(self) -> None:
        self._discards[:] = [self.head._backend.abandon(self._key, self._micro_batch)]

    def commit(self, factor: float, token_factors: Any = None) -> None:
        """Adds the staged contribution, times `factor` and, row by row, times `token_factors`, as `Head.commit` takes them."""
        assert self._staged is not None
        self._staged.commit(factor, token_factors, timeout_s=self._timeout_s)
        self.added()

    def added(self) -> None:
        """It is in the step."""
        self._staged = None  # which keeps grad_hidden alive
        self._finalizer.detach()

    def give_back(self) -> None:
        """Forgets its id, which the same call will draw again; a contribution added meanwhile is not added twice."""
        self._finalizer.detach()
        self._source.give_back(self.head, self.step, self._micro_batch, *self._sequence)

    def drop(self) -> None:
        """Forgets its id, and discards its contribution to the step, if any."""
        self._finalizer()


def _drop(source: MicroBatchSource, ids: set[int], micro_batch: int, discards: list[Callable[[], None]]) -> None:
    source.forget(ids, micro_batch)
    for discard in discards:
        discard()
