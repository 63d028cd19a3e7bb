"""Explicit micro-batches that nobody can commit any more, and the thread that discards them."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING

from headwater._backend import Backend
from headwater._errors import HeadwaterError
from headwater._requests import StepKey

if TYPE_CHECKING:
    from headwater._head import Head

_Item = tuple[tuple[StepKey, ...], int] | threading.Event | None


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

    def settle(self) -> None:
        """Waits until everything that was handed over is discarded: for calls whose outcome depends on it."""
        if self._thread is not None and self._thread.is_alive():  # it stays behind in a fork
            settled = threading.Event()
            self._queue.put(settled)
            settled.wait(self._timeout_s)


def _discard_abandoned(abandoned: queue.SimpleQueue[_Item], backend: Backend, timeout_s: float) -> None:
    while (item := abandoned.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        # Where this fails, the step is closed or the head is gone, and the contribution with it.
        with contextlib.suppress(HeadwaterError):
            backend.discard(item[0], item[1], None, timeout_s)
