"""ctypes over the C ABI of the client core (headwater/client/c_api.h). Translates; decides nothing. Calls release the GIL."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from headwater._errors import ClientClosedError, HeadwaterError, code_name, from_status

ABI_VERSION = 1
LIBRARY_NAME = "libheadwater_client.so"
LIBRARY_VARIABLE = "HEADWATER_CLIENT_LIBRARY"

HOST, CUDA = 0, 1
# A thread that waits for a call looks this often whether Python wants it for something else, such as Ctrl-C, in seconds.
_WAIT_SLICE_S = 0.25


class Rows(Structure):
    """hw_client_rows."""

    _fields_ = [
        ("struct_bytes", c_int64),
        ("data", c_void_p),
        ("row_count", c_int64),
        ("hidden_size", c_int64),
        ("data_type", c_int32),
        ("memory", c_int32),
    ]


_Done = ctypes.CFUNCTYPE(None, c_void_p)


class _MicroBatch(Structure):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("header", c_char_p),
        ("header_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("hidden", Rows),
        ("teachers", POINTER(Rows)),
        ("teacher_count", c_int64),
        ("grad_hidden", Rows),
        ("cuda_stream", c_void_p),
        ("done", _Done),
        ("context", c_void_p),
    ]


class _TeacherRows(Structure):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("header", c_char_p),
        ("header_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("rows", Rows),
        ("cuda_stream", c_void_p),
        ("done", _Done),
        ("context", c_void_p),
    ]


# Name, result, arguments. A result of c_void_p is an error or NULL, but for those that say otherwise.
_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("hw_client_abi_version", c_int32, []),
    ("hw_client_error_code", c_int32, [c_void_p]),
    ("hw_client_error_message", c_char_p, [c_void_p]),
    ("hw_client_error_details", c_void_p, [c_void_p, POINTER(c_int64)]),  # bytes
    ("hw_client_error_free", None, [c_void_p]),
    ("hw_client_connect", c_void_p, [c_char_p, c_char_p, POINTER(c_void_p)]),
    ("hw_client_free", None, [c_void_p]),
    ("hw_client_forget_session", c_void_p, [c_void_p, c_char_p, c_int64]),
    ("hw_client_info", c_int64, [c_void_p, c_char_p, c_int64]),
    ("hw_client_allocate", c_void_p, [c_void_p, c_int64, POINTER(c_void_p)]),
    ("hw_client_memory_data", c_void_p, [c_void_p]),  # an address
    ("hw_client_memory_shared", c_int32, [c_void_p]),
    ("hw_client_memory_free", None, [c_void_p]),
    ("hw_client_submit", c_void_p, [c_void_p, POINTER(_MicroBatch), POINTER(c_void_p)]),
    ("hw_client_stream_teacher", c_void_p, [c_void_p, POINTER(_TeacherRows), POINTER(c_void_p)]),
    ("hw_client_call_wait", c_void_p, [c_void_p, c_int64, POINTER(c_int32)]),
    ("hw_client_call_result", c_void_p, [c_void_p, POINTER(c_void_p), POINTER(c_int64)]),
    ("hw_client_call_cancel", None, [c_void_p]),
    ("hw_client_call_free", None, [c_void_p]),
)


class LibraryNotFound(Exception):
    """The library cannot be used; the text says why, as one sentence."""


@functools.cache
def library() -> ctypes.CDLL:
    """The library; raises LibraryNotFound."""
    path = os.environ.get(LIBRARY_VARIABLE) or str(Path(__file__).parent / LIBRARY_NAME)
    if not os.path.exists(path):
        raise LibraryNotFound(f"{path} is not there ({LIBRARY_VARIABLE} may name another place)")
    try:
        loaded = ctypes.CDLL(path)
        for name, result, arguments in _FUNCTIONS:
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryNotFound(f"{path} cannot be loaded: {error}") from None
    version = loaded.hw_client_abi_version()
    if version != ABI_VERSION:
        raise LibraryNotFound(f"{path} has version {version} of the C ABI, this package needs {ABI_VERSION}")
    # No thread of the library may call back once the interpreter is gone.
    atexit.register(_close_connections)
    return loaded


def _error(handle: int) -> HeadwaterError:
    """The error that the library has returned; frees it."""
    functions = library()
    try:
        size = c_int64()
        details = functions.hw_client_error_details(handle, byref(size))
        return from_status(
            code_name(functions.hw_client_error_code(handle)),
            (functions.hw_client_error_message(handle) or b"").decode(errors="replace"),
            ctypes.string_at(details, size.value) if details and size.value > 0 else b"",
        )
    finally:
        functions.hw_client_error_free(handle)


def _check(handle: int | None) -> None:
    if handle:
        raise _error(handle)


def _nanoseconds(seconds: float) -> int:
    return min(max(1, int(seconds * 1e9)), 2**63 - 1)


class Memory:
    """Memory that the library has handed out; freed with this object."""

    def __init__(self, handle: c_void_p, nbytes: int):
        self._handle: c_void_p | None = handle
        self._pid = os.getpid()
        self.nbytes = nbytes
        self.address = int(library().hw_client_memory_data(handle))
        self.shared = bool(library().hw_client_memory_shared(handle))

    def free(self) -> None:
        """Gives it back. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            library().hw_client_memory_free(handle)

    def __del__(self) -> None:
        self.free()


class Call:
    """A call that is under way, then its result. What it reads and writes stays alive with it."""

    def __init__(self, keep_alive: Any):
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._handle: c_void_p | None = None
        self._submitted = threading.Event()
        self._keep_alive = keep_alive

    def submitted(self, handle: c_void_p) -> None:
        """The library knows the call. Idempotent."""
        if not self._submitted.is_set():
            self._handle = handle
            self._submitted.set()

    def cancel(self) -> None:
        """Asks it to end; returns at once."""
        with self._lock:
            if self._handle is not None:
                library().hw_client_call_cancel(self._handle)

    def wait(self) -> None:
        """Blocks until it has ended."""
        ended = c_int32()
        while not ended.value:
            _check(library().hw_client_call_wait(self._handle, _nanoseconds(_WAIT_SLICE_S), byref(ended)))

    def result(self) -> bytes:
        """The serialized answer of a call that has ended; raises HeadwaterError. Frees it."""
        self._submitted.wait()
        try:
            data, size = c_void_p(), c_int64()
            with self._lock:
                _check(library().hw_client_call_result(self._handle, byref(data), byref(size)))
                return ctypes.string_at(data, size.value) if size.value else b""
        finally:
            self.free()

    def free(self) -> None:
        """Cancels what is under way and waits for its end, which is near. Idempotent."""
        if os.getpid() != self._pid:
            return
        free, handle = library().hw_client_call_free, None
        try:
            with self._lock:
                handle, self._handle = self._handle, None
        finally:  # at Ctrl-C, too: nobody else knows the handle any more
            # Another one that frees it may still wait: what the call uses goes with that.
            if handle is not None:
                free(handle)
                self._keep_alive = None

    def __del__(self) -> None:
        # Whoever was to wait for it was interrupted. This may be anywhere, a callback of the library's included, where nothing may
        # wait for a call that is under way.
        if self._handle is None or os.getpid() != self._pid:
            return
        ended = c_int32()
        _check(library().hw_client_call_wait(self._handle, 1, byref(ended)))
        if not ended.value and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # no thread can be had
                _thread.start_new_thread(self.free, ())  # threading's would take locks, which whoever is here may hold
                return
        self.free()


# Calls that end with a callback, by the number that the library gets as context, and what is to be done then.
_pending: dict[int, tuple[Call, Callable[[Call], Any]]] = {}
_numbers = itertools.count(1)
# Callbacks that have begun and not returned, by the same number.
_running: dict[int, None] = {}
# The threads of the library stay behind in the parent of a fork.
os.register_at_fork(after_in_child=_pending.clear)
os.register_at_fork(after_in_child=_running.clear)


@_Done
def _ended(context: int) -> None:
    # On a thread of the library, which must not block.
    _running[context] = None
    # Nobody is told of a call whose start was interrupted.
    call, done = _pending.pop(context, (None, None))
    try:
        if call is not None and done is not None:
            done(call)
    finally:
        # The last thing of all, and no call, after which another thread might have its turn: when nothing is noted here any more,
        # no thread of the library is in Python.
        del call, done
        del _running[context]


_no_callback = _Done(0)


class Connection:
    """A connection of the library. Thread-safe."""

    def __init__(self, target: str, options: dict[str, Any]):
        text = "".join(f"{key}={value}\n" for key, value in options.items())
        self._handle = c_void_p()
        self._pid = os.getpid()
        self._users = 0
        self._closed = False
        self._unused = threading.Condition()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        _check(library().hw_client_connect(target.encode(), text.encode(), byref(self._handle)))
        _connections.add(self)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[c_void_p]:
        if os.getpid() != self._pid:
            raise ClientClosedError.of_parent()
        with self._unused:
            if self._closed:
                raise ClientClosedError("the client is closed")
            self._users += 1
        try:
            yield self._handle
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process is a fork."""
        return self._closed or os.getpid() != self._pid

    def close(self) -> None:
        """Cancels the calls that are under way, and lets go of the connection. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._unused:
            if self._closed:
                return
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        del calls
        with self._unused:
            self._unused.wait_for(lambda: self._users == 0)
        library().hw_client_free(self._handle)

    def forget_session(self, session_id: bytes) -> None:
        """Forgets what was registered for a session that has ended."""
        with contextlib.suppress(ClientClosedError), self._in_use() as handle:
            _check(library().hw_client_forget_session(handle, session_id, len(session_id)))

    def info(self) -> dict[str, str]:
        """What is known of the paths."""
        with self._in_use() as handle:
            size = 1 << 12
            while True:
                text = ctypes.create_string_buffer(size)
                needed = library().hw_client_info(handle, text, size)
                if needed < size:
                    break
                size = needed + 1
        lines = (line.partition("=") for line in text.value.decode(errors="replace").splitlines())
        return {key: value for key, separator, value in lines if separator}

    def allocate(self, nbytes: int) -> Memory:
        """Memory that the server can map, where the system has such memory."""
        handle = c_void_p()
        with self._in_use() as client:
            _check(library().hw_client_allocate(client, nbytes, byref(handle)))
        return Memory(handle, nbytes)

    def submit(
        self,
        header: bytes,
        timeout_s: float,
        hidden: Rows,
        teachers: list[Rows],
        grad_hidden: Rows,
        cuda_stream: int,
        keep_alive: Any,
        done: Callable[[Call], Any] | None = None,
    ) -> Call:
        """Starts one attempt of one micro-batch. `done` is called on a thread of the library, and must not block."""
        micro_batch = _MicroBatch(
            struct_bytes=ctypes.sizeof(_MicroBatch),
            header=header,
            header_bytes=len(header),
            timeout_ns=_nanoseconds(timeout_s),
            hidden=hidden,
            teachers=(Rows * len(teachers))(*teachers) if teachers else None,
            teacher_count=len(teachers),
            grad_hidden=grad_hidden,
            cuda_stream=cuda_stream,
        )
        return self._start(library().hw_client_submit, micro_batch, keep_alive, done)

    def stream_teacher(self, header: bytes, timeout_s: float, rows: Rows, cuda_stream: int, keep_alive: Any) -> Call:
        """Starts a stream of teacher rows."""
        message = _TeacherRows(
            struct_bytes=ctypes.sizeof(_TeacherRows),
            header=header,
            header_bytes=len(header),
            timeout_ns=_nanoseconds(timeout_s),
            rows=rows,
            cuda_stream=cuda_stream,
        )
        return self._start(library().hw_client_stream_teacher, message, keep_alive, None)

    def _start(self, function: Any, message: Any, keep_alive: Any, done: Callable[[Call], Any] | None) -> Call:
        call = Call(keep_alive)
        number = 0
        message.done = _no_callback
        if done is not None:
            number = next(_numbers)
            _pending[number] = (call, done)
            message.done, message.context = _ended, number
        handle = c_void_p()
        try:
            with self._in_use() as client:
                with self._unused:
                    self._calls.add(call)
                _check(function(client, byref(message), byref(handle)))
                call.submitted(handle)
        except HeadwaterError:
            _pending.pop(number, None)
            raise
        except BaseException:
            # Ctrl-C, perhaps as the library's function returned: then the call is under way.
            _pending.pop(number, None)
            if handle.value:
                call.submitted(handle)
                call.free()
            raise
        if self._closed:
            call.cancel()  # `close` may have looked before the library knew it
        return call


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_connections() -> None:
    for connection in list(_connections):
        connection.close()
    # A thread that came back to an interpreter that is gone would be ended within the library, and the process with it.
    while _pending or _running:
        for call, _ in list(_pending.values()):
            call.free()
        time.sleep(0.001)
