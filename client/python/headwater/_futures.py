"""Futures: one class that serves `.result()` and `await` alike, and the threads that carry the calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from headwater._errors import ClientClosedError
from headwater._memory import current_streams

P = ParamSpec("P")
R = TypeVar("R")
# Three functions: one returns or raises the outcome of a call, and may block; one receives it at the call's end; one cancels the
# call.
Outcome = Callable[[], Any]
Done = Callable[[Outcome], Any]
Cancel = Callable[[], Any]

# Threads that finish the loss calls of futures whose answers no Python code waits for.
LOSS_THREADS = 16
_THREADS = {
    "loss": LOSS_THREADS,
    "control": 4,
    # A trainer's own gradients, without which no step is closed: they do not queue up behind calls for the step after it.
    "gradient": 4,
    # Streams of a teacher's rows, which the loss calls that join them wait for.
    "stream": 16,
    # Calls that may wait for other calls (`Head.seal` with wait=True), so that those do not queue up behind them.
    "waiting": 4,
}


def at_main_return(function: Callable[[], Any]) -> None:
    """Calls it when the main program has returned, before the interpreter waits for the threads of futures."""
    # Not atexit, whose functions are called when the threads of all pools have been joined. These are called before, in reverse
    # order; the one that joins the threads is there already, because its module has been imported. RuntimeError: the interpreter
    # exits now. AttributeError: a Python without it.
    with contextlib.suppress(RuntimeError, AttributeError):
        threading._register_atexit(function)  # type: ignore[attr-defined]


class CancelScope:
    """The place where a running call registers the function that stops it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], Any] | None = None
        self._cancelled = threading.Event()

    def attach(self, cancel: Callable[[], Any]) -> None:
        """Registers the function that stops the call; stops it at once if the future was cancelled before."""
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


_current = threading.local()


def current_scope() -> CancelScope | None:
    """The scope of the future that this thread is working on; None in a blocking call."""
    return getattr(_current, "scope", None)


def _scoped(scope: CancelScope, work: Callable[[], R], streams: Callable[[], Any]) -> Callable[[], R]:
    """`work` for another thread, with this scope and these CUDA streams."""

    def run() -> R:
        _current.scope = scope
        try:
            with streams():
                return work()
        finally:
            _current.scope = None

    return run


class Future(Generic[R]):
    """The outcome of a call that runs in the background.

    `future.result()` blocks; `await future` does not block the event loop. Both raise the errors of the blocking call.
    """

    def __init__(self, inner: concurrent.futures.Future[R], scope: CancelScope):
        self._inner = inner
        self._scope = scope

    @classmethod
    def failed(cls, error: Exception) -> Future[R]:
        """The future of a call that could not begin."""
        inner: concurrent.futures.Future[R] = concurrent.futures.Future()
        inner.set_exception(error)
        return cls(inner, CancelScope())

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
    """The threads of one client, and its calls that have none."""

    def __init__(self) -> None:
        self._pools = {name: concurrent.futures.ThreadPoolExecutor(count, f"headwater-{name}") for name, count in _THREADS.items()}
        self._pid = os.getpid()

    def shutdown(self) -> None:
        """Lets running calls end and drops those that have not begun."""
        if os.getpid() != self._pid:
            return  # the threads are the parent's, and may have held a lock at the fork
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def run(self, threads: str, work: Callable[[], R]) -> Future[R]:
        """The future of `work`, which runs on one of these threads ("loss", "control", ...), with this thread's CUDA stream."""
        if os.getpid() != self._pid:
            return Future.failed(ClientClosedError.of_parent())
        scope = CancelScope()
        try:
            return Future(self._pools[threads].submit(_scoped(scope, work, current_streams())), scope)
        except RuntimeError:
            return Future.failed(ClientClosedError("the client is closed"))

    def begin(self, start: Callable[[Done], Cancel], finish: Callable[[Outcome], R]) -> Future[R]:
        """The future of a call that no thread waits for.

        Args:
            start: starts it and returns the function that cancels it.
            finish: makes the result of the outcome that `start`'s argument gets; runs on a thread, and may block.
        """
        if os.getpid() != self._pid:
            return Future.failed(ClientClosedError.of_parent())
        inner: concurrent.futures.Future[R] = concurrent.futures.Future()
        inner.set_running_or_notify_cancel()
        scope = CancelScope()
        streams = current_streams()

        def done(outcome: Outcome) -> None:
            def end() -> None:
                try:
                    result = _scoped(scope, lambda: finish(outcome), streams)()
                except BaseException as error:
                    inner.set_exception(error)
                else:
                    inner.set_result(result)

            try:
                self._pools["loss"].submit(end)
            except RuntimeError:
                end()  # the client is closed, and every call fails at once

        try:
            scope.attach(start(done))
        except Exception as error:
            return Future.failed(error)
        return Future(inner, scope)


def named_future(method: Callable[..., Any], start: Callable[P, R]) -> Callable[P, R]:
    """`start`, which is the variant of `method` that returns a `Future`, with a name and a docstring of its own."""
    start.__name__ = method.__name__ + "_future"
    start.__qualname__ = method.__qualname__ + "_future"
    start.__doc__ = f"Starts `{method.__name__}` with these arguments and returns its `Future` at once."
    return start


def as_future(method: Callable[Concatenate[Any, P], R], *, threads: str = "control") -> Callable[Concatenate[Any, P], Future[R]]:
    """The variant of a blocking method that returns a `Future` at once. The object must have a `_backend` with `executors`."""

    @functools.wraps(method)
    def start(self: Any, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        executors: Executors = self._backend.executors
        return executors.run(threads, lambda: method(self, *args, **kwargs))

    return named_future(method, start)
