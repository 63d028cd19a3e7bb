"""The client core by its C ABI (headwater/client/c_api.h), through cffi: translates, decides nothing. Calls release the GIL.

No thread of the library enters Python. A blocking call waits in C; one thread of this module reads the ends of the others from the
client's completion queue. Handles live as long as their objects here, so nothing is locked. `close` ends a client's calls and
session, and its handle is freed with the last reference to it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import itertools
import os
import re
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cffi

from headwater import _wire
from headwater._errors import ClientClosedError, FeatureNotBuiltError, HeadwaterError, code_name, make_error, warn
from headwater._futures import at_main_return, current_scope

ABI_VERSION = 2
LIBRARY_NAME = "libheadwater_client.so"
LIBRARY_VARIABLE = "HEADWATER_CLIENT_LIBRARY"

HOST, CUDA, CUDA_PRIVATE = 0, 1, 2
DO_NOT_WAIT, OWNED, _BACKGROUND = 1, 2, 4

# How often, in nanoseconds, a waiting thread looks whether Python needs it for something else, such as Ctrl-C, and how far an
# upload has come.
_WAIT_SLICE_NS = 250_000_000
_PROGRESS_SLICE_NS = 2_000_000
# Bounds of closing one client, and all that are left open when the interpreter exits, in seconds.
_CLOSE_TIMEOUT_S = 2.0
_EXIT_TIMEOUT_S = 1.0
_MAX_COMPLETIONS = 64

_ERROR_INFO_TYPE = "google.rpc.ErrorInfo"
_RETRY_INFO_TYPE = "google.rpc.RetryInfo"


class Rows(NamedTuple):
    """hw_client_rows: where rows lie."""

    data: Any  # an array in C order, or an address
    row_count: int
    hidden_size: int
    data_type: int  # the wire's number
    memory: int = HOST


class Tensors(NamedTuple):
    """The tensors that a call reads and writes besides its message."""

    rows: Rows | None = None
    teachers: list[Rows | None] | None = None
    result_rows: Rows | None = None
    cuda_stream: int = 0
    keep_alive: Any = None  # the objects that own that memory


NO_TENSORS = Tensors()


class Answer(NamedTuple):
    """The answer of a call."""

    message: bytes
    attempt: int  # of the micro-batch that it is about; 0 elsewhere


@functools.cache
def _library() -> tuple[Any, Any]:
    """The library and its FFI."""
    path = os.environ.get(LIBRARY_VARIABLE) or str(Path(__file__).with_name(LIBRARY_NAME))
    if not os.path.exists(path):
        raise _not_built(f"{path} is not there")
    ffi = cffi.FFI()
    ffi.cdef(_declarations(Path(__file__).with_name("c_api.h").read_text()))
    try:
        library = ffi.dlopen(_loaded_again(path) if _Process.is_forked else path)
        version = library.hw_client_abi_version()
    except (OSError, AttributeError) as error:
        raise _not_built(f"{path} cannot be loaded: {error}") from None
    if version != ABI_VERSION:
        raise _not_built(f"{path} has version {version} of the C ABI, this package needs {ABI_VERSION}")
    return library, ffi


def _loaded_again(path: str) -> Any:
    """The library in a link namespace of its own: in a fork the one that is there has lost its threads, and perhaps its locks."""
    loader = cffi.FFI()
    loader.cdef("void* dlmopen(long, const char*, int);")
    handle = loader.dlopen(None).dlmopen(-1, path.encode(), os.RTLD_NOW)  # LM_ID_NEWLM
    if not handle:
        raise ClientClosedError.of_fork()
    return handle


def _declarations(header: str) -> str:
    """The declarations of a C header for cffi: without directives except numbers, and without the parts for C++ and the linker."""
    header = re.sub(r"#ifdef __cplusplus.*?#endif", "", header, flags=re.DOTALL)
    numbers = re.sub(r"^#(?!define \w+ \d+\b).*$", "", header, flags=re.MULTILINE)
    return re.sub(r"\bHW_CLIENT_API\b|__attribute__\(\(.*?\)\)\)?", "", numbers)


def _not_built(why: str) -> HeadwaterError:
    return FeatureNotBuiltError(
        f"the client library cannot be used: {why}. The wheel `headwater` for Linux on x86-64 and arm64 has it inside; in a build "
        f"of the sources it is beside the package, or where {LIBRARY_VARIABLE} says",
        reason="FEATURE_NOT_BUILT",
        metadata={"feature": "client library"},
    )


def error_from_status(code: str, message: str, details: bytes) -> HeadwaterError:
    """The error of a canonical code, a message and a serialized google.rpc.Status; empty `details`: there are none."""
    reason = ""
    metadata: dict[str, str] = {}
    retry_after_s = None
    for detail in _wire.RpcStatus.FromString(details).details:
        if detail.type_url.endswith(_ERROR_INFO_TYPE):
            info = _wire.ErrorInfo.FromString(detail.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.type_url.endswith(_RETRY_INFO_TYPE):
            delay = _wire.RetryInfo.FromString(detail.value).retry_delay
            retry_after_s = delay.seconds + delay.nanos * 1e-9
    if not reason and code in ("CANCELLED", "DEADLINE_EXCEEDED"):
        reason = code  # decided on this side, before the server could answer
    return make_error(code, reason, message or "the transport gave no message", metadata, retry_after_s)


def _taken_error(library: Any, ffi: Any, handle: Any) -> HeadwaterError:
    """The error that the library has returned; frees it."""
    try:
        size = ffi.new("int64_t*")
        details = library.hw_client_error_details(handle, size)
        return error_from_status(
            code_name(library.hw_client_error_code(handle)),
            ffi.string(library.hw_client_error_message(handle)).decode(errors="replace"),
            bytes(ffi.buffer(details, size[0])) if size[0] > 0 else b"",
        )
    finally:
        library.hw_client_error_free(handle)


def _nanoseconds(seconds: float) -> int:
    return min(max(1, int(seconds * 1e9)), 2**63 - 1)


class Memory:
    """Memory that the library has handed out; freed with this object."""

    def __init__(self, library: Any, ffi: Any, handle: Any, nbytes: int):
        self._handle = handle
        self._pid = os.getpid()
        self._free = library.hw_client_memory_free
        self.nbytes = nbytes
        self.address = int(ffi.cast("intptr_t", library.hw_client_memory_data(handle)))

    def free(self) -> None:
        """Gives it back. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            self._free(handle)

    def __del__(self) -> None:
        self.free()


class Call:
    """A call that is under way, then its result. Its inputs and outputs stay alive with it."""

    def __init__(self, connection: Connection, keep_alive: Any):
        self._connection = connection
        self._library = connection._library
        self._cell = connection._types.new(connection._types.call)  # NULL until the library knows the call
        self._keep_alive = keep_alive
        self._ended = False

    def cancel(self) -> None:
        """Asks it to end; returns at once."""
        if self._cell[0] and self._connection.is_own:
            self._library.hw_client_call_cancel(self._cell[0])

    def wait(self, on_progress: Callable[[int, int], Any] | None = None) -> None:
        """Blocks until it has ended. If it is interrupted, by Ctrl-C or by `on_progress`, it is cancelled first.

        Args:
            on_progress: called with the bytes of an upload that are sent, and all of them.
        """
        try:
            if on_progress is None:
                self._wait(_WAIT_SLICE_NS)
                return
            sent, reported = self._connection._ffi.new("int64_t[2]"), (0, 0)
            while not self._ended:
                self._wait(_PROGRESS_SLICE_NS, slices=1)
                self._library.hw_client_call_progress(self._cell[0], sent, sent + 1)
                if reported != (reported := (sent[0], sent[1])):
                    on_progress(*reported)
        except BaseException:
            self.cancel()
            self._wait(_WAIT_SLICE_NS)
            raise

    def _wait(self, slice_ns: int, slices: float = float("inf")) -> None:
        ended = self._connection._types.new(self._connection._types.flag)
        while not self._ended and slices > 0:
            self._connection._check(self._library.hw_client_call_wait(self._cell[0], slice_ns, ended))
            self._ended = bool(ended[0])
            slices -= 1

    def result(self) -> Answer:
        """The answer of a call that has ended; raises HeadwaterError."""
        self._ended = True
        self._keep_alive = None  # the library does not refer to it any more
        ffi, library, types = self._connection._ffi, self._library, self._connection._types
        self._connection.warn_notices()
        data, size = types.new(types.data), types.new(types.size)
        self._connection._check(library.hw_client_call_result(self._cell[0], data, size))
        message = bytes(ffi.buffer(data[0], size[0])) if size[0] else b""
        return Answer(message, library.hw_client_call_attempt(self._cell[0]))

    def __del__(self) -> None:
        cell = self._cell
        if not cell[0] or not self._connection.is_own:
            return
        free = self._library.hw_client_call_free
        if not self._ended and not sys.is_finalizing():
            # Interrupted, or forgotten. This may be anywhere, where nothing may wait for a call that is under way.
            kept = [self._keep_alive, self._connection]

            def cancel_and_free() -> None:
                free(cell[0])
                kept.clear()

            with contextlib.suppress(RuntimeError):  # no thread can be had
                _thread.start_new_thread(cancel_and_free, ())  # threading's would take locks, which this thread may hold
                return
        free(cell[0])


class _Types:
    """Types that every call needs, looked up once."""

    def __init__(self, ffi: Any):
        self.new, self.cast, self.from_buffer = ffi.new, ffi.cast, ffi.from_buffer
        self.request, self.call = ffi.typeof("hw_client_request*"), ffi.typeof("hw_client_call**")
        self.flag, self.size = ffi.typeof("int32_t*"), ffi.typeof("int64_t*")
        self.data, self.address = ffi.typeof("const void**"), ffi.typeof("void*")
        self.request_bytes, self.rows_bytes = ffi.sizeof("hw_client_request"), ffi.sizeof("hw_client_rows")


# Calls whose ends the completion queues report, by tag, with the function to call then. They live here: the program may forget
# them.
_pending: dict[int, tuple[Call, Callable[[Call], Any]]] = {}
_tags = itertools.count(1)
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_closing: set[Any] = set()  # locks of threads that close forgotten clients


class Connection:
    """A client of the library. Thread-safe."""

    # For `__del__`, which may run when the names of this module, and of cffi's, are gone.
    _getpid, _is_finalizing = staticmethod(os.getpid), staticmethod(sys.is_finalizing)

    def __init__(self, target: str, options: dict[str, Any]):
        """`options`: those of hw_client_connect()."""
        self.owner: object = None  # lives as long as this object, or until `close`
        self._closed = True
        self._pid = os.getpid()
        self._library, self._ffi = _library()
        self._free = self._library.hw_client_free
        self._types = _Types(self._ffi)
        self._has_log = options.get("replay_bytes", 0) > 0
        self._reader: _Reader | None = None
        self._reader_lock = threading.Lock()
        _Process.has_connected = True
        text = "".join(f"{key}={value}\n" for key, value in options.items())
        handle = self._ffi.new("hw_client**")
        self._cell = handle
        self._check(self._library.hw_client_connect(target.encode(), text.encode(), handle))
        self._handle = handle[0]
        self._closed = False
        _connections.add(self)

    def _check(self, error: Any) -> None:
        if error:
            raised = _taken_error(self._library, self._ffi, error)
            if self._closed and raised.code in ("CANCELLED", "FAILED_PRECONDITION") and not raised.metadata:
                raise ClientClosedError(f"the client is closed ({raised.message})") from None
            raise raised

    def check_open(self) -> None:
        """Raises ClientClosedError if the client is closed, or this process a fork of the one that has connected."""
        if not self.is_own:
            raise ClientClosedError.of_parent()
        if self._closed:
            raise ClientClosedError("the client is closed")

    def call(
        self,
        method: bytes,
        message: bytes,
        timeout_s: float,
        tensors: Tensors = NO_TENSORS,
        *,
        flags: int = 0,
        on_progress: Callable[[int, int], Any] | None = None,
    ) -> Answer:
        """Makes a call and waits for its answer, without the GIL. The future that this thread works on can cancel it."""
        scope = current_scope()
        if scope is not None:
            flags |= _BACKGROUND
        call = Call(self, tensors)
        self._start(call, method, message, timeout_s, tensors, flags, 0)
        if scope is not None:
            scope.attach(call.cancel)
        call.wait(on_progress)
        return call.result()

    def start(
        self, done: Callable[[Call], Any], method: bytes, message: bytes, timeout_s: float, tensors: Tensors = NO_TENSORS
    ) -> Call:
        """Begins a call. `done` gets it at its end, on the thread that reads the completion queue, and must not block."""
        self.check_open()
        self._read_completions()
        call = Call(self, tensors)
        tag = next(_tags)
        _pending[tag] = call, done
        try:
            self._start(call, method, message, timeout_s, tensors, _BACKGROUND, tag)
        except BaseException:
            _pending.pop(tag, None)
            raise
        return call

    def _start(self, call: Call, method: bytes, message: bytes, timeout_s: float, tensors: Tensors, flags: int, tag: int) -> None:
        self.check_open()
        ffi, types = self._ffi, self._types
        request = types.new(types.request)
        request.struct_bytes = types.request_bytes
        kept = [ffi.from_buffer(method), ffi.from_buffer(message)]
        request.method, request.message = kept
        request.message_bytes = len(message)
        request.timeout_ns = _nanoseconds(timeout_s)
        request.flags = flags
        self._put(request.rows, tensors.rows)
        self._put(request.result_rows, tensors.result_rows)
        if tensors.teachers:
            array = ffi.new("hw_client_rows[]", len(tensors.teachers))
            kept.append(array)
            for index, teacher in enumerate(tensors.teachers):
                self._put(array[index], teacher)
            request.teachers, request.teacher_count = array, len(tensors.teachers)
        if tensors.cuda_stream:
            request.cuda_stream = types.cast(types.address, tensors.cuda_stream)
        request.tag = tag
        self._check(self._library.hw_client_start(self._handle, request, call._cell))
        if self._closed:
            call.cancel()  # `close` may have looked before the library knew it

    def _put(self, struct: Any, rows: Rows | None) -> None:
        if rows is not None:
            types = self._types
            struct.struct_bytes = types.rows_bytes
            struct.data = types.cast(types.address, rows.data) if type(rows.data) is int else types.from_buffer(rows.data)
            struct.row_count, struct.hidden_size, struct.data_type, struct.memory = rows[1:]

    def _read_completions(self) -> None:
        if self._reader is None:
            with self._reader_lock:
                if self._reader is None:
                    self._reader = _Reader(self)

    def take_ended(self) -> bool:
        """Hands the tagged calls that have ended to their `done`. Whether there may be more."""
        tags = self._ffi.new("uint64_t[]", _MAX_COMPLETIONS)
        count = self._library.hw_client_completions(self._handle, tags, _MAX_COMPLETIONS)
        for index in range(count):
            call, done = _pending.pop(tags[index], (None, None))
            if call is not None and done is not None:  # otherwise its start was interrupted
                done(call)
        return bool(count == _MAX_COMPLETIONS)

    def info(self) -> dict[str, str]:
        """The facts about the paths."""
        self.check_open()
        lines = (line.partition("=") for line in self._text(self._library.hw_client_info).splitlines())
        return {key: value for key, separator, value in lines if separator}

    def _text(self, function: Any) -> str:
        """The text that a function of the client writes."""
        size = 1 << 12
        while True:
            text = self._ffi.new("char[]", size)
            needed = function(self._handle, text, size)
            if needed < size:
                return str(self._ffi.string(text).decode(errors="replace"))
            size = needed + 1

    def allocate(self, nbytes: int) -> Memory:
        """Memory that the server can map, where the system has such memory."""
        self.check_open()
        handle = self._ffi.new("hw_client_memory**")
        self._check(self._library.hw_client_allocate(self._handle, nbytes, handle))
        return Memory(self._library, self._ffi, handle[0], nbytes)

    def head_epoch(self, head: str, epoch: bytes) -> bytes:
        """The epoch that calls which name `epoch` carry now."""
        if not self.is_own:
            return epoch
        out = self._ffi.new("char[]", max(len(epoch), 16))
        size = self._library.hw_client_head_epoch(self._handle, head.encode(), epoch, len(epoch), out, len(out))
        return bytes(self._ffi.buffer(out, size)) if size > 0 else epoch

    def abandon(self, message: bytes) -> None:
        """Hands a micro-batch to the core, to be discarded: a DiscardMicroBatchRequest. For finalizers: blocks nowhere."""
        if not self._closed and self.is_own:
            self._library.hw_client_abandon(self._handle, message, len(message))

    def warn_notices(self) -> None:
        """Warns of steps that the replay log cannot keep, where there is one."""
        if self._has_log:
            while notice := self._text(self._library.hw_client_notice):
                warn(notice, RuntimeWarning)

    def stop_waiting(self) -> None:
        """Calls of futures do not wait for an absent server any more."""
        if not self._closed and self.is_own:
            self._library.hw_client_stop_waiting(self._handle)

    @property
    def is_own(self) -> bool:
        """Whether it was made by this process, and not by one that this one was forked from."""
        return self._getpid() == self._pid

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Cancels the calls that are under way, and closes the session as far as the server answers. Idempotent."""
        if self._closed or not self.is_own:
            return
        self._closed = True
        error = self._library.hw_client_close(self._handle, _nanoseconds(timeout_s))
        if error:  # the lease ends by itself
            self._library.hw_client_error_free(error)
        self.owner = None

    def __del__(self) -> None:
        # At the interpreter's end modules are gone before objects: the process takes its connections with it.
        if os is None or not self.is_own or not hasattr(self, "_handle"):
            return
        if self._reader is not None:
            self._reader.stop()
        library, handle, closed, free_handle = self._library, self._handle, self._closed, self._free

        def free() -> None:
            if not closed:
                error = library.hw_client_close(handle, _nanoseconds(_CLOSE_TIMEOUT_S))
                if error:
                    library.hw_client_error_free(error)
            free_handle(handle)

        def free_behind() -> None:
            free()
            _closing.discard(ended)
            ended.release()

        if not closed and not self._is_finalizing():
            ended = _thread.allocate_lock()
            ended.acquire()
            with contextlib.suppress(RuntimeError):  # forgotten without `close`, which may take a while; this may be anywhere
                _thread.start_new_thread(free_behind, ())
                _closing.add(ended)
                return
        free()


class _Reader:
    """The thread that reads a client's completion queue. It knows the client only weakly, and ends with it."""

    _write = staticmethod(os.eventfd_write)  # for Connection.__del__

    def __init__(self, connection: Connection):
        self._wake = os.eventfd(0)
        # A descriptor of its own: the client's may be closed, and its number be another's, while the thread looks at it.
        queue = os.dup(connection._library.hw_client_completion_fd(connection._handle))
        arguments = (weakref.ref(connection), queue, self._wake)
        threading.Thread(target=_read, args=arguments, name="headwater-completions", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread soon."""
        self._write(self._wake, 1)


def _read(reference: weakref.ref[Connection], queue: int, wake: int) -> None:
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    poll.register(wake, select.POLLIN)
    try:
        while all(descriptor != wake for descriptor, _ in poll.poll()):
            connection = reference()
            if connection is None:
                poll.modify(queue, 0)  # it is about to stop this thread
            while connection is not None and connection.take_ended():
                pass
            del connection
    finally:
        os.close(queue)
        os.close(wake)


class _Process:
    """The state of the library in this process."""

    has_connected = False
    is_forked = False  # from one that had connected

    @classmethod
    def after_fork(cls) -> None:
        """In the child: running calls are the parent's."""
        if cls.has_connected:
            cls.has_connected, cls.is_forked = False, True
            _library.cache_clear()
        _pending.clear()
        _closing.clear()


os.register_at_fork(after_in_child=_Process.after_fork)


def _end_futures() -> None:
    """The main program has returned: no future waits for a server that is away any more, and loss calls end soon."""
    for connection in list(_connections):
        connection.stop_waiting()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while _pending:
        time.sleep(0.005)
        if time.monotonic() > deadline:
            for call, _ in list(_pending.values()):
                call.cancel()


at_main_return(_end_futures)


@atexit.register
def _close_connections() -> None:
    """Clients that were not closed end with the process, so that no lease has to find that out."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for connection in list(_connections):
        connection.close(max(deadline - time.monotonic(), 0.001))
    for ended in list(_closing):
        ended.acquire(timeout=max(deadline - time.monotonic(), 0))
