"""Micro-batches that programs have submitted to a head and not yet committed: the host's side of a loss inside `jit`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from headwater._errors import MicroBatchConflictError, invalid_argument, warn
from headwater._head import Head
from headwater._loss._contributions import Contribution, found_no_slot, warn_of_held
from headwater._loss._micro_batches import MicroBatchSource
from headwater._types import LossResult


class Submissions:
    """The micro-batches that programs of this process compute for one head. Thread-safe: devices call from threads of their own.

    Tokens stand for a submission between the forward and the backward of a program; they are unique in the process.
    """

    def __init__(self, head: Head):
        self._head = head
        self._source = MicroBatchSource(rank=0, world_size=1)
        self._lock = threading.Lock()
        self._pending: dict[int, Contribution] = {}  # by token
        self._last_token = -1
        self._without_gradient = 0  # losses that ran forward alone although a gradient may have been taken around them
        self._error: BaseException | None = None
        self._told: list[str] = []  # texts of errors since the last wait that has come to its end

    def submit(self, run: Callable[..., LossResult], first: int, stride: int, per_token: bool, timeout_s: float | None) -> Any:
        """Submits a micro-batch that `commit` adds; its result and its token.

        Args:
            run: the loss call, without the arguments that say how it is submitted.
            first, stride: of the ids of its place in the program, as of `MicroBatchSource.draw`.
            per_token: whether a factor for each row will come.
        """
        contribution = Contribution(self._head, self._source, timeout_s, first=first, stride=stride)
        try:
            result = contribution.submit(functools.partial(run, commit="explicit", allow_held=True, late_token_factors=per_token))
        except BaseException:
            contribution.drop()
            raise
        contribution.staged(dataclasses.replace(result, grad_hidden=None))  # which the program has
        if not per_token and found_no_slot(self._head, result.form):
            warn_of_held(self._head)
        with self._lock:
            # Submissions of a step that was closed without `settle`.
            for token in [token for token, pending in self._pending.items() if pending.step != contribution.step]:
                self._pending.pop(token).drop()
            self._last_token = (self._last_token + 1) % (1 << 31)
            self._pending[self._last_token] = contribution
            return result, self._last_token

    def draw(self, first: int, stride: int, timeout_s: float | None) -> Contribution:
        """A micro-batch that the caller submits, adds and gives back itself; its id is in `ids` from now on."""
        return Contribution(self._head, self._source, timeout_s, first=first, stride=stride)

    def add(self, run: Callable[..., LossResult], first: int, stride: int, timeout_s: float | None) -> LossResult:
        """Adds a micro-batch at once."""
        contribution = Contribution(self._head, self._source, timeout_s, first=first, stride=stride)
        try:
            result = contribution.submit(functools.partial(run, commit="eager"))
        except BaseException:
            contribution.drop()
            raise
        contribution.added()
        return result

    def commit(self, token: int, factor: np.ndarray) -> None:
        """Adds a submission times `factor`: () or (num_tokens,) float32."""
        with self._lock:
            contribution = self._pending.pop(token, None)
        if contribution is None:
            raise MicroBatchConflictError(
                f"backward ran twice through one headwater loss of {self._head.name} (jax.jacrev, or a pullback that is called "
                "twice), or after the step's end. Compute the loss again to add it again",
                reason="MICRO_BATCH_CONFLICT",
            )
        finite = np.isfinite(factor)
        if not finite.all():
            contribution.drop()
            raise invalid_argument(
                "INVALID_FIELD",
                f"the upstream gradient of a headwater loss must be finite, got {factor[~finite].flat[0]}",
                field="factor",
            )
        if factor.ndim:
            contribution.commit(1.0, factor)
        else:
            contribution.commit(float(factor))

    def keep_error(self, error: BaseException) -> None:
        """Keeps the error of a callback, of which JAX passes only the text on."""
        with self._lock:
            self._error = self._error or error
            self._told.append(str(error))

    def raise_kept(self) -> None:
        """Raises the error of a callback, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def has_told(self, failure: Exception) -> bool:
        """Whether an error from JAX only repeats a callback's error: on a GPU it comes with each wait until the next program."""
        with self._lock:
            return any(text in str(failure) for text in self._told)

    def forget_told(self) -> None:
        """A wait has come to its end."""
        with self._lock:
            self._told.clear()

    def note_without_gradient(self) -> None:
        """Counts a loss that ran forward alone, although a gradient may have been taken around it."""
        with self._lock:
            self._without_gradient += 1

    def close(self) -> list[str]:
        """Discards uncommitted submissions. Returns warnings about the step for the user."""
        with self._lock:
            pending, self._pending = self._pending, {}
            without_gradient, self._without_gradient = self._without_gradient, 0
        for contribution in pending.values():
            contribution.drop()
        notes = []
        if pending:
            notes.append(
                f"losses of {self._head.name} were computed for a gradient that was not taken, and are discarded ({len(pending)}): "
                "an unused pullback, jax.linearize, or a loss in has_aux. For a loss that is only looked at, pass "
                "jax.lax.stop_gradient(x) and train=False"
            )
        if without_gradient:
            notes.append(
                f"losses of {self._head.name} ran forward alone and added nothing to it ({without_gradient}): their x had no "
                "gradient, or none was taken. Pass train=True to add it at forward, for an upstream gradient of 1, or train=False "
                "to a loss that is only looked at"
            )
        return notes

    def ids(self) -> list[int]:
        """Ids that this process has added or submitted in the open step, ascending."""
        return self._source.ids(self._head)


def submissions_of(head: Head) -> Submissions:
    """The submissions of a head."""
    if head._submissions is None:
        head._submissions = Submissions(head)
    return head._submissions


def settle(head: Head) -> list[int]:
    """Waits until all programs have done their work on the head's losses, and discards uncommitted submissions.

    Returns:
        Ids of this process's micro-batches in the open step, ascending: its part of `expected_micro_batches`.
    Raises:
        The original error that a callback has raised since the last call.
    """
    submissions = submissions_of(head)
    failure: Exception | None = None
    try:
        jax.effects_barrier()
        submissions.forget_told()
    except Exception as error:
        failure = error
    notes = submissions.close()
    submissions.raise_kept()
    if failure is not None and not submissions.has_told(failure):
        raise failure
    for note in notes:
        warn(note)
    return submissions.ids()
