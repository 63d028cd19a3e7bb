"""Which failures are worth another attempt, how long to wait before it, and which attempt of a micro-batch it is.

Only calls that can be repeated without harm are repeated: those that answer a repeat like the first call, and calls that the server
says it has not carried out. gRPC's own retries and hedging are off: they would repeat a call under the same attempt.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headwater._errors import ClientClosedError, HeadwaterError, make_error
from headwater._futures import current_scope, main_has_returned
from headwater._requests import StepKey
from headwater._types import check_integer, check_number

R = TypeVar("R")

# Refusals for want of room, which goes by; and what only this attempt lacked: one of its streams, or memory (registered anew).
_TRANSIENT_REASONS = frozenset({"QUEUE_FULL", "IN_FLIGHT_BYTES_EXCEEDED", "ORDERED_WINDOW_FULL", "STRIPE_LOST", "REGION_NOT_FOUND"})
# Failures that leave open whether the call was carried out.
AMBIGUOUS_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
# Steps of a head whose attempts are remembered: the open one, the one before it, and one that a call waits for.
_REMEMBERED_STEPS = 3
# A server that is waited for is looked for at least this often, in seconds, as gRPC does (_channel.py); and no more once only this
# is left.
AWAY_BACKOFF_S = 1.0
_SHORTEST_AWAY_TRY_S = 0.1
# How often a wait looks whether the main program has returned, in seconds.
EXIT_POLL_S = 0.25
_threads_awaiting_server: set[threading.Thread] = set()


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is tried, and how long to wait in between. The call's `timeout_s` bounds all of it together."""

    max_attempts: int = 5  # >= 1; 1: no retries
    initial_backoff: float = 0.1  # > 0, seconds before the second attempt; doubles with each one
    max_backoff: float = 5.0  # >= initial_backoff, seconds

    def __post_init__(self) -> None:
        check_integer(self.max_attempts, "max_attempts", low=1)
        check_number(self.initial_backoff, "initial_backoff", low=0, low_open=True)
        check_number(self.max_backoff, "max_backoff", low=self.initial_backoff)

    def backoff(self, retry: int, retry_after_s: float | None) -> float:
        """Seconds to wait before retry 0, 1, ...: half of it fixed, half random; at least what the server asks for."""
        full = min(self.max_backoff, self.initial_backoff * 2.0 ** min(retry, 60))
        return max(full * random.uniform(0.5, 1.0), retry_after_s or 0.0)


DEFAULT_RETRIES = RetryPolicy()


def is_transient(error: HeadwaterError, *, repeatable: bool) -> bool:
    """Whether the same call may succeed later.

    Args:
        repeatable: whether a repeat of the call is answered like the first one. If not, only an answer of the server that nothing
            was changed (it has a reason) makes a repeat safe; a cut connection does not.
    """
    if isinstance(error, ClientClosedError):
        return False
    if error.reason in _TRANSIENT_REASONS:
        return True
    if error.reason == "STAGING_FULL":
        # A slot that this client's own session has is not awaited: nobody else frees it. The server says which it is.
        return error.retry_after_s is not None
    return error.code == "UNAVAILABLE" and (repeatable or bool(error.reason))


def is_away(error: HeadwaterError) -> bool:
    """Whether nobody is there who could say what is wrong, or soon will not be. `SHARD_NOT_READY` is an answer."""
    if isinstance(error, ClientClosedError):
        return False
    return is_restarting(error) or (error.code == "UNAVAILABLE" and error.reason in ("", "DRAINING", "STARTING"))


def is_restarting(error: HeadwaterError) -> bool:
    """Whether the server has lost a rank or its device with what its heads held, and begins anew."""
    return "serverRestarts" in error.metadata


def may_wait(delay_s: float, deadline: float) -> bool:
    """Whether a server that is away may be looked for after so long.

    Not if next to nothing is left then: the caller is to learn that nobody answers, and not that its time is up.
    """
    return time.monotonic() + delay_s < deadline - _SHORTEST_AWAY_TRY_S


def waits_for_server(thread: threading.Thread) -> bool:
    """Whether a thread is between two tries to reach a server that is away."""
    return thread in _threads_awaiting_server


def pause(delay_s: float, *, away: HeadwaterError | None = None) -> None:
    """Waits before the next try; `away`: what tells that the server is, which is not waited for when the main program has returned.

    Raises:
        CancelledError: the future is cancelled. Or the server is away and the main program has returned: the interpreter's exit
            waits for the threads of futures. A blocking call in a thread of the caller's own waits on.
    """
    if away is None:
        _sleep(delay_s)
        return
    scope = current_scope()
    thread = threading.current_thread()
    deadline = time.monotonic() + delay_s
    _threads_awaiting_server.add(thread)
    try:
        while (remaining_s := deadline - time.monotonic()) > 0:
            if scope is not None and main_has_returned():
                raise make_error("CANCELLED", "CANCELLED", "the main program has returned, and the server is away") from away
            _sleep(min(remaining_s, EXIT_POLL_S) if scope is not None else remaining_s)
    finally:
        _threads_awaiting_server.discard(thread)


def _sleep(delay_s: float) -> None:
    scope = current_scope()
    if scope is None:
        time.sleep(delay_s)
    elif scope.sleep(delay_s):
        raise make_error("CANCELLED", "CANCELLED", "the call was cancelled by this client while it waited for a retry")


def with_retries(
    policy: RetryPolicy, timeout_s: float, call: Callable[[float, int], R], *, repeatable: bool = True, awaits_server: bool = False
) -> R:
    """Runs `call(seconds that are left, number of earlier tries)` until it succeeds or is not worth another try.

    Args:
        awaits_server: one that is away is waited for until shortly before the deadline, by a back-off of its own: the policy's
            tries and waits are whole for what the server answers when it is back.
    Raises:
        HeadwaterError: that of the last try. CancelledError: as `pause`.
    """
    deadline = time.monotonic() + timeout_s
    refusals = away = tries = 0
    while True:
        try:
            return call(max(deadline - time.monotonic(), 0.001), tries)
        except HeadwaterError as error:
            tries += 1
            away_error = None
            if awaits_server and is_away(error):
                # A connection that was cut is no server that is away: it is given up at exit after as many tries as others make.
                away_error = error if away >= policy.max_attempts else None
                delay = max(min(policy.backoff(away, None), AWAY_BACKOFF_S), error.retry_after_s or 0.0)
                away += 1
                worth_it = may_wait(delay, deadline)
            else:
                delay = policy.backoff(refusals, error.retry_after_s)
                refusals, away = refusals + 1, 0
                worth_it = refusals < policy.max_attempts and time.monotonic() + delay < deadline
            transient = repeatable and awaits_server if is_restarting(error) else is_transient(error, repeatable=repeatable)
            if not worth_it or not transient:
                raise
        pause(delay, away=away_error)


class AttemptBook:
    """The attempts under which this client has submitted micro-batches; only those above 0. Thread-safe.

    A decision must name the attempt that was submitted, and a new submission must not name a lower one than was announced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By (head, epoch): by step: by micro-batch: the highest attempt, and the one that it was come to from by retries alone.
        self._attempts: dict[tuple[str, bytes], dict[int, dict[int, tuple[int, int]]]] = {}

    def _known(self, key: StepKey, micro_batch: int) -> tuple[int, int]:
        with self._lock:
            return self._attempts.get((key.head, key.epoch), {}).get(key.step, {}).get(micro_batch, (0, 0))

    def get(self, key: StepKey, micro_batch: int) -> int:
        """The attempt that is known; 0 if none is."""
        return self._known(key, micro_batch)[0]

    def first(self, key: StepKey, micro_batch: int, named: int | None) -> int:
        """The attempt that a submission begins with; `named` is the caller's, None if it leaves that to the client.

        The caller does not know of this client's retries: an attempt that they have begun with is the one that they have come to.
        One that the caller itself has gone beyond stays what it is, for the server to refuse.
        """
        highest, begun = self._known(key, micro_batch)
        return highest if named is None or begun <= named <= highest else named

    def note(self, key: StepKey, micro_batch: int, attempt: int, named: int | None = None) -> None:
        """Remembers an attempt of a submission whose caller has named `named`; a lower one than is known changes nothing."""
        if attempt == 0:
            return
        with self._lock:
            steps = self._attempts.setdefault((key.head, key.epoch), {})
            known = steps.setdefault(key.step, {})
            highest, begun = known.get(micro_batch, (0, 0))
            if attempt > highest:
                known[micro_batch] = (attempt, begun if named is None or named <= highest else named)
            while len(steps) > _REMEMBERED_STEPS:
                del steps[min(steps)]

    def forget_head(self, head: str, epoch: bytes) -> None:
        """The head has another epoch now: nothing of this one can be decided any more."""
        with self._lock:
            self._attempts.pop((head, epoch), None)
