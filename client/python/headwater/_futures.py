"""Futures: one class that serves `.result()` and `await` alike, and the threads that carry the calls."""

from __future__ import annotations

import asyncio
import collections
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
# What cancels a call; what returns or raises its outcome, and may block; what is called with that at the call's end.
Cancel = Callable[[], Any]
Outcome = Callable[[], Any]
Done = Callable[[Outcome], Any]

# Loss calls in flight at once. A call for the step after the open one waits on the server, so calls that close a step must never
# queue up behind loss calls: they have threads of their own.
LOSS_THREADS = 16
CONTROL_THREADS = 4
# A trainer's own gradients, without which no step is closed: neither do they queue up behind loss calls for the step after it.
GRADIENT_THREADS = 4
# Streams of a teacher's rows, which the loss calls that join them wait for.
STREAM_THREADS = 16
# Calls that may wait for other calls (`Head.seal` with wait=True), so that those do not queue up behind them.
WAITING_THREADS = 4


_main_returned = threading.Event()

# Not atexit, whose functions are called when the threads of all pools have been joined. These are called before, in reverse order;
# the one that joins the threads is there already, because its module has been imported. RuntimeError: the interpreter exits now.
# AttributeError: a Python without it, whose exit waits for what waits for a server.
with contextlib.suppress(RuntimeError, AttributeError):
    threading._register_atexit(_main_returned.set)  # type: ignore[attr-defined]


def main_has_returned() -> bool:
    """Whether the main program has, and the interpreter waits for threads to end."""
    return _main_returned.is_set()


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

    @property
    def is_cancelled(self) -> bool:
        """Whether the future is."""
        return self._cancelled.is_set()

    def sleep(self, seconds: float) -> bool:
        """Waits; returns True at once if the future is cancelled."""
        return self._cancelled.wait(seconds)


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

    `future.result()` blocks; `await future` does not block the event loop. Both raise what the blocking call would raise.
    """

    def __init__(self, inner: concurrent.futures.Future[R], scope: CancelScope):
        self._inner = inner
        self._scope = scope

    @classmethod
    def failed(cls, error: Exception) -> Future[R]:
        """That of a call which could not begin."""
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
    """The threads of one client."""

    def __init__(self) -> None:
        self.loss = concurrent.futures.ThreadPoolExecutor(LOSS_THREADS, "headwater-loss")
        self.control = concurrent.futures.ThreadPoolExecutor(CONTROL_THREADS, "headwater-control")
        self.gradient = concurrent.futures.ThreadPoolExecutor(GRADIENT_THREADS, "headwater-gradient")
        self.stream = concurrent.futures.ThreadPoolExecutor(STREAM_THREADS, "headwater-stream")
        self.waiting = concurrent.futures.ThreadPoolExecutor(WAITING_THREADS, "headwater-waiting")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._flying = 0
        self._waiting: collections.deque[_Flight] = collections.deque()

    def shutdown(self) -> None:
        """Lets running calls end and drops those that have not begun."""
        if os.getpid() != self._pid:
            return  # the threads are the parent's, and may have held a lock at the fork
        for threads in (self.loss, self.control, self.gradient, self.stream, self.waiting):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = list(self._waiting), collections.deque()
        for flight in waiting:
            flight.inner.cancel()

    def run(self, threads: str, work: Callable[[], R]) -> Future[R]:
        """That of `work`, which runs on one of these threads ("loss", "control", ...), with this thread's CUDA stream."""
        if os.getpid() != self._pid:
            return Future.failed(ClientClosedError.of_parent())
        scope = CancelScope()
        try:
            return Future(getattr(self, threads).submit(_scoped(scope, work, current_streams())), scope)
        except RuntimeError:
            return Future.failed(ClientClosedError("the client is closed"))

    def begin_loss(self, begin: Callable[[Done], Cancel | None], finish: Callable[[Outcome], R], run: Callable[[], R]) -> Future[R]:
        """A call that no thread waits for; at most LOSS_THREADS of them are under way at once.

        Args:
            begin: starts it and returns what cancels it, or None if that would block.
            finish: makes the result of the outcome that `begin`'s argument gets; runs on a thread, and may block.
            run: the whole call, where `begin` has returned None.
        """
        if os.getpid() != self._pid:
            return Future.failed(ClientClosedError.of_parent())
        flight = _Flight(begin, finish, run)
        with self._lock:
            flies = self._flying < LOSS_THREADS
            if flies:
                self._flying += 1
            else:
                self._waiting.append(flight)
        if flies:
            self._launch(flight)
        return Future(flight.inner, flight.scope)

    def _launch(self, flight: _Flight | None) -> None:
        """Begins this call, or the first after it that begins; those that do not are told of only then."""
        ended: list[tuple[_Flight, Exception | None]] = []
        try:
            while flight is not None and not self._begin(flight, ended):
                flight = self._next()
        finally:
            for over, error in ended:
                _settle(over, error)

    def _begin(self, flight: _Flight, ended: list[tuple[_Flight, Exception | None]]) -> bool:
        """Whether the call flies, or has landed by other ways; if not, it is among those that have ended."""
        error: Exception | None = None
        if flight.inner.set_running_or_notify_cancel():
            try:
                with flight.streams():
                    cancel = flight.begin(lambda outcome: self._on_thread(flight, lambda: flight.finish(outcome)))
            except Exception as raised:
                error = raised
            except BaseException as raised:  # Ctrl-C, in the caller's thread
                self._land(flight, raised)
                raise
            else:
                if cancel is None:
                    self._on_thread(flight, flight.run)
                else:
                    flight.scope.attach(cancel)
                return True
        if not self._lands(flight):
            return True
        ended.append((flight, error))
        return False

    def _next(self) -> _Flight | None:
        """The call that takes over a slot; without one the slot is free."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._flying -= 1
            return None

    def _lands(self, flight: _Flight) -> bool:
        """Whether this is the first end of the call: an interrupted beginning may be followed by the call's own."""
        with self._lock:
            first, flight.landed = not flight.landed, True
            return first

    def _on_thread(self, flight: _Flight, work: Callable[[], Any]) -> None:
        def end() -> None:
            try:
                result = flight.scoped(work)()
            except BaseException as error:
                self._land(flight, error)
            else:
                self._land(flight, None, result)

        try:
            self.loss.submit(end)
        except RuntimeError:
            end()  # the client is closed, and every call fails at once

    def _land(self, flight: _Flight, error: BaseException | None, result: Any = None) -> None:
        if not self._lands(flight):
            return
        self._launch(self._next())
        _settle(flight, error, result)


class _Flight:
    """A loss call without a thread of its own."""

    def __init__(self, begin: Callable[[Done], Cancel | None], finish: Callable[[Outcome], Any], run: Callable[[], Any]):
        self.begin = begin
        self.finish = finish
        self.run = run
        self.inner: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.scope = CancelScope()
        self.streams = current_streams()
        self.landed = False

    def scoped(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work` with the flight's scope and the CUDA stream of its beginning."""
        return _scoped(self.scope, work, self.streams)


def _settle(flight: _Flight, error: BaseException | None, result: Any = None) -> None:
    if error is not None:
        flight.inner.set_exception(error)
    elif not flight.inner.cancelled():
        flight.inner.set_result(result)


def as_future(method: Callable[Concatenate[Any, P], R], *, threads: str = "control") -> Callable[Concatenate[Any, P], Future[R]]:
    """The variant of a blocking method that returns a `Future` at once. The object must have `_executors`."""

    @functools.wraps(method)
    def start(self: Any, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        executors: Executors = self._executors
        return executors.run(threads, lambda: method(self, *args, **kwargs))

    start.__name__ = method.__name__ + "_future"
    start.__qualname__ = method.__qualname__ + "_future"
    start.__doc__ = f"Starts `{method.__name__}` with these arguments and returns its `Future` at once."
    return start
