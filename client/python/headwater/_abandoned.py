"""Explicit micro-batches that nobody can commit any more, and the thread that discards them."""

from __future__ import annotations

import collections
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

from headwater._backend import Backend
from headwater._errors import ClientClosedError, HeadwaterError, make_error
from headwater._futures import current_scope, main_has_returned
from headwater._requests import StepKey
from headwater._retry import AMBIGUOUS_CODES, EXIT_POLL_S, waits_for_server

if TYPE_CHECKING:
    from headwater._head import Head

_WAITED = "waited for contributions that nobody can commit any more to be discarded"

_Contribution = tuple[tuple[StepKey, ...], int]
_Item = _Contribution | threading.Event | None


class AbandonedContributions:
    """What was left undecided on one head.

    `add` may run inside a finalizer, in any thread at any point: it only puts into a SimpleQueue, which is reentrant, and makes no
    call. The thread is started by the first explicit contribution that could be abandoned.
    """

    def __init__(self, head: Head):
        self._backend = head._backend
        self._timeout_s = head._client.timeout_s
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Ends the thread with the head; the thread knows only the queue and the backend.
        weakref.finalize(head, self._queue.put, None).atexit = False

    def watch(self) -> None:
        """Makes sure that the thread runs."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                arguments = (self._queue, self._backend, self._timeout_s)
                self._thread = threading.Thread(target=_discard_abandoned, args=arguments, name="headwater-discard", daemon=True)
                self._thread.start()

    def add(self, keys: StepKey | tuple[StepKey, ...], micro_batch: int) -> None:
        """Hands a contribution to these heads over; returns at once."""
        self._queue.put((keys if isinstance(keys, tuple) else (keys,), micro_batch))

    @property
    def idle(self) -> bool:
        """Whether nothing was ever handed over: `settle` returns at once."""
        return self._thread is None

    def settle(self, timeout_s: float) -> float:
        """Waits until everything that was handed over is discarded: for calls whose outcome depends on it. What could not be,
        because the server was away, is tried once more.

        Args:
            timeout_s: bound on the whole call that waits here.
        Returns:
            What is left of it.
        Raises:
            DeadlineExceededError: nothing is. CancelledError: the future was cancelled while it waited, or the main program has
                returned and the server is away (`_retry.pause`). Nothing was sent.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():  # it stays behind in a fork
            return timeout_s
        deadline = time.monotonic() + timeout_s
        settled = threading.Event()
        scope = current_scope()
        if scope is not None:
            scope.attach(settled.set)
        self._queue.put(settled)
        poll_s = threading.TIMEOUT_MAX if scope is None else EXIT_POLL_S
        while (remaining_s := deadline - time.monotonic()) > 0 and not settled.wait(min(remaining_s, poll_s)):
            if scope is not None and main_has_returned() and waits_for_server(thread):
                scope.cancel()
        if scope is not None and scope.is_cancelled:
            raise make_error("CANCELLED", "CANCELLED", f"the call was cancelled by this client while it {_WAITED}")
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise make_error("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", f"the call's {timeout_s:g} s ended while it {_WAITED}")
        return remaining_s


def _discard_abandoned(abandoned: queue.SimpleQueue[_Item], backend: Backend, timeout_s: float) -> None:
    left: collections.deque[_Contribution] = collections.deque()  # in order; more than one only while the server is away
    while (item := abandoned.get()) is not None:
        if not isinstance(item, threading.Event):
            left.append(item)
        while left and _is_decided(backend, *left[0], timeout_s):
            left.popleft()
        if isinstance(item, threading.Event):
            item.set()


def _is_decided(backend: Backend, keys: tuple[StepKey, ...], micro_batch: int, timeout_s: float) -> bool:
    """Discards a contribution. False if it may still be there: no step could be sealed with it."""
    try:
        backend.discard(keys, micro_batch, None, timeout_s)
    except ClientClosedError:
        return True
    except HeadwaterError as error:
        # Otherwise the step is closed or the head is gone, and the contribution with it.
        return error.code not in AMBIGUOUS_CODES and error.code != "RESOURCE_EXHAUSTED"
    return True
