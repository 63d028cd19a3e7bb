"""Futures: one class that serves `.result()` and `await` alike, and the threads that carry the calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Loss calls in flight at once. A call for the step after the open one waits on the server, so calls that close a step must never
# queue up behind loss calls: they have threads of their own.
LOSS_THREADS = 16
CONTROL_THREADS = 4
# Calls that may wait for other calls (`Head.seal` with wait=True), so that those do not queue up behind them.
WAITING_THREADS = 4


class CancelScope:
    """Where a running call puts what stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], Any] | None = None
        self._cancelled = threading.Event()

    def attach(self, cancel: Callable[[], Any]) -> None:
        """Names what stops the call; stops it at once if the future was cancelled before."""
        with self._lock:
            self._cancel = cancel
        if self._cancelled.is_set():
            cancel()

    def cancel(self) -> None:
        """Stops the call that is running, or the next one."""
        self._cancelled.set()
        with self._lock:
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def sleep(self, seconds: float) -> bool:
        """Waits; returns True at once if the future is cancelled."""
        return self._cancelled.wait(seconds)


_current = threading.local()


def current_scope() -> CancelScope | None:
    """The scope of the future that this thread is working on; None in a blocking call."""
    return getattr(_current, "scope", None)


class Future(Generic[R]):
    """The outcome of a call that runs in the background.

    `future.result()` blocks; `await future` does not block the event loop. Both raise what the blocking call would raise.
    """

    def __init__(self, executor: concurrent.futures.Executor, work: Callable[[], R]):
        self._scope = CancelScope()

        def run() -> R:
            _current.scope = self._scope
            try:
                return work()
            finally:
                _current.scope = None

        self._inner = executor.submit(run)

    def result(self, timeout: float | None = None) -> R:
        """Waits for the outcome; `timeout` in seconds bounds the waiting, not the call (that is the call's `timeout_s`)."""
        return self._inner.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits, and returns the error instead of raising it; None after success."""
        return self._inner.exception(timeout)

    def done(self) -> bool:
        """Whether there is an outcome."""
        return self._inner.done()

    def cancel(self) -> None:
        """Asks the call to stop. Too late if its contribution was committed meanwhile: then the outcome is the result."""
        if not self._inner.cancel():
            self._scope.cancel()

    def add_done_callback(self, callback: Callable[[Future[R]], Any]) -> None:
        """Calls `callback(self)` from some thread once there is an outcome; at once if there is one."""
        self._inner.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, R]:
        try:
            return (yield from asyncio.wrap_future(self._inner).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise


class Executors:
    """The threads of one client."""

    def __init__(self) -> None:
        self.loss = concurrent.futures.ThreadPoolExecutor(LOSS_THREADS, "headwater-loss")
        self.control = concurrent.futures.ThreadPoolExecutor(CONTROL_THREADS, "headwater-control")
        self.waiting = concurrent.futures.ThreadPoolExecutor(WAITING_THREADS, "headwater-waiting")

    def shutdown(self) -> None:
        """Lets running calls end and drops those that have not begun."""
        for threads in (self.loss, self.control, self.waiting):
            threads.shutdown(wait=False, cancel_futures=True)


def as_future(method: Callable[Concatenate[Any, P], R], *, threads: str = "control") -> Callable[Concatenate[Any, P], Future[R]]:
    """The variant of a blocking method that returns a `Future` at once. The object must have `_executors`."""

    @functools.wraps(method)
    def start(self: Any, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return Future(getattr(self._executors, threads), lambda: method(self, *args, **kwargs))

    start.__name__ = method.__name__ + "_future"
    start.__qualname__ = method.__qualname__ + "_future"
    start.__doc__ = f"Starts `{method.__name__}` with these arguments and returns its `Future` at once."
    return start
