"""The Python side of the client core's C ABI, on a library that only notes what is asked of it: calls that are interrupted, closed
and forgotten, the memory that they use, and the thread that reads their ends."""

import contextlib
import gc
import os
import re
import threading
import weakref
from pathlib import Path

import cffi
import pytest
from expectations import eventually, refused

import headwater
from headwater import _core, _wire
from headwater._core import Call, Connection, Tensors

PACKAGE = Path(_core.__file__).parent


@pytest.fixture(scope="module")
def ffi():
    made = cffi.FFI()
    made.cdef(_core._declarations((PACKAGE / "c_api.h").read_text()))
    return made


class FakeLibrary:
    """Calls end as soon as they are begun, unless `ended` is not set."""

    def __init__(self, ffi):
        self.ffi = ffi
        self.options = {}
        self.calls = 0
        self.freed = []
        self.waiting = []  # threads that free
        self.cancelled = []
        self.ended = threading.Event()
        self.ended.set()
        self.on_start = lambda request: None
        self.on_wait = lambda: None
        self.on_free = lambda: None
        self.progress = iter(())
        self.error = None  # code, message and serialized details of what calls end with
        self.closed = 0
        self.clients_freed = []
        self.abandoned = []
        self.queue = os.eventfd(0, os.EFD_NONBLOCK)
        self.tags = []
        self.notices = []

    def hw_client_error_code(self, error):
        return self.error[0]

    def hw_client_error_message(self, error):
        self.kept = self.ffi.new("char[]", self.error[1].encode())
        return self.kept

    def hw_client_error_details(self, error, size):
        self.details = self.ffi.from_buffer(self.error[2])
        size[0] = len(self.error[2])
        return self.details

    def hw_client_error_free(self, error):
        self.error = None

    def hw_client_connect(self, target, options, out):
        lines = options.decode().splitlines()
        self.target, self.options = target.decode(), dict(line.split("=", 1) for line in lines)
        out[0] = self.ffi.cast("hw_client*", 1)
        return self.ffi.NULL

    def hw_client_close(self, client, timeout_ns):
        self.closed += 1
        return self.ffi.NULL

    def hw_client_free(self, client):
        self.clients_freed.append(threading.current_thread())

    def hw_client_start(self, client, request, out):
        self.calls += 1
        out[0] = self.ffi.cast("hw_client_call*", self.calls)
        self.on_start(request)
        if request.tag and self.ended.is_set():
            self.end(request.tag)
        return self.ffi.NULL

    def end(self, tag):
        self.tags.append(tag)
        os.eventfd_write(self.queue, 1)

    def hw_client_call_wait(self, call, timeout_ns, ended):
        self.on_wait()
        ended[0] = self.ended.wait(timeout_ns * 1e-9)
        return self.ffi.NULL

    def hw_client_call_result(self, call, result, size):
        size[0] = 0
        return self.ffi.cast("hw_client_error*", 1) if self.error else self.ffi.NULL

    def hw_client_call_attempt(self, call):
        return 3

    def hw_client_call_progress(self, call, sent, total):
        sent[0], total[0] = next(self.progress)

    def hw_client_call_cancel(self, call):
        self.cancelled.append(int(self.ffi.cast("intptr_t", call)))
        self.ended.set()

    def hw_client_call_free(self, call):
        self.waiting.append(threading.current_thread())
        assert self.ended.wait(60)
        self.on_free()
        self.freed.append(int(self.ffi.cast("intptr_t", call)))

    def hw_client_completion_fd(self, client):
        return self.queue

    def hw_client_completions(self, client, tags, most):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.queue)
        taken, self.tags = self.tags[:most], self.tags[most:]
        for index, tag in enumerate(taken):
            tags[index] = tag
        return len(taken)

    def hw_client_abandon(self, client, message, size):
        self.abandoned.append(message)

    def hw_client_notice(self, client, text, size):
        if not self.notices:
            return 0
        notice = self.notices.pop(0).encode()
        text[0 : len(notice) + 1] = notice + b"\0"
        return len(notice)

    def hw_client_stop_waiting(self, client):
        pass


@pytest.fixture
def library(monkeypatch, ffi):
    fake = FakeLibrary(ffi)
    monkeypatch.setattr(_core, "_library", lambda: (fake, ffi))
    yield fake
    fake.on_free = lambda: None
    fake.ended.set()
    gc.collect()
    os.close(fake.queue)
    assert not _core._pending


@pytest.fixture
def connection(library):
    made = Connection("nowhere", {})
    yield made
    made.close()


class Used:
    """What a call reads and writes."""


def interrupt(*_):
    raise KeyboardInterrupt


def begin(connection):
    """Begins a call; returns the event of its end."""
    ended = threading.Event()
    connection.start(lambda call: ended.set(), b"/x", b"", 1.0)
    return ended


# ---- the library and its options -----------------------------------------------------------------------------------------


def test_the_library_has_every_function_that_is_used():
    library, _ = _core._library()
    names = set(re.findall(r"library\.(hw_client_\w+)", (PACKAGE / "_core.py").read_text()))
    assert len(names) > 15 and all(getattr(library, name) for name in names)


@pytest.mark.parametrize("content", (None, b"not a library"))
def test_a_library_that_is_not_there_or_is_none_is_said_with_its_wheel(monkeypatch, tmp_path, content):
    path = tmp_path / "library.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("HEADWATER_CLIENT_LIBRARY", str(path))
    monkeypatch.setattr(_core, "_library", _core._library.__wrapped__)
    with refused("FEATURE_NOT_BUILT", headwater.FeatureNotBuiltError, str(path), "wheel `headwater`"):
        headwater.connect("localhost:1")


def test_grpcio_alone_is_refused_and_names_the_wheel():
    with refused("INVALID_FIELD", headwater.InvalidArgumentError, "wheel `headwater`", field="transport"):
        headwater.connect("localhost:1", transport="python")


def options_of(library, **arguments):
    headwater.connect("host:1", **arguments).close()
    return library.options


def test_options_reach_the_core(library):
    plain = options_of(library)
    assert library.target == "host:1" and plain.pop("client_name").startswith(f"python-{os.getpid()}-")
    assert plain == {
        "connect_timeout_ms": "10000",
        "session_lease_ms": "30000",
        "max_attempts": "5",
        "initial_backoff_ms": "100",
        "max_backoff_ms": "5000",
        "transport": "auto",
        "stripes": "8",
    }
    assert "tls" not in options_of(library, tls=False)
    assert "replay_bytes" not in options_of(library, replay_bytes=5)
    named = {"token": "t", "traceparent": "p"}
    tls = headwater.TLS(ca_certificate="/ca", server_name="name")
    for arguments, expected in (
        ({"tls": True}, {"tls": "1"}),
        ({"session": False}, {"session_lease_ms": "0"}),
        ({"session_lease": 0.0001}, {"session_lease_ms": "1"}),
        ({"session_lease": 2147483.0}, {"session_lease_ms": "2147483000"}),
        ({"retries": None}, {"max_attempts": "1"}),
        ({"retries": headwater.RetryPolicy(3, 0.25, 2)}, {"initial_backoff_ms": "250"}),
        ({"transport": "grpc", "stripes": 2}, {"stripes": "2"}),
        ({"replay": True}, {"replay_bytes": str(1 << 30)}),
        ({"replay": True, "replay_bytes": 0}, {"replay_bytes": "1"}),
        ({"replay": True, "replay_steps": 0}, {"replay_steps": "0"}),
        ({"tls": tls, **named}, {"tls": "1", "ca_certificate": "/ca", "server_name": "name", **named}),
        ({"allow_plaintext_token": True, **named}, {"allow_plaintext_token": "1"}),
    ):
        assert expected.items() <= options_of(library, **arguments).items()


BAD_OPTIONS = {
    "address": (None, "", 50051, ("localhost", 50051), "host:1\ntls=0"),
    "token": (5, "", b"secret", "a\nstripes=1"),
    "tls": ("yes", headwater.TLS(ca_certificate="/a\nb")),
    "traceparent": (7,),
    "allow_plaintext_token": ("yes",),
    "session_lease": (0, 2147484),
    "session": ("yes",),
    "retries": (3,),
    "replay": (1,),
    "replay_bytes": (-1,),
    "replay_steps": (-1,),
    "transport": ("pigeon",),
    "stripes": (0, 65, 1.5),
    "tenant": ("Two Words",),
    "timeout_s": (0,),
    "connect_timeout_s": (0,),
}


@pytest.mark.parametrize("bad", [{name: value} for name, values in BAD_OPTIONS.items() for value in values], ids=str)
def test_arguments_that_the_core_cannot_take_are_refused_here(library, bad):
    with pytest.raises(headwater.InvalidArgumentError) as info:
        headwater.connect(**{"address": "host:1", **bad})
    assert library.options == {} and "stripes=1" not in str(info.value) and "secret" not in str(info.value)
    if "address" in bad and "\n" not in str(bad["address"]):
        assert str(bad["address"]) in str(info.value) and info.value.metadata["field"] == "address"


def test_an_error_has_code_reason_metadata_and_delay(library, connection):
    status = _wire.RpcStatus()
    info = _wire.ErrorInfo(reason="STAGING_FULL", metadata={"head": "h"})
    delay = _wire.RetryInfo()
    delay.retry_delay.seconds, delay.retry_delay.nanos = 2, 500_000_000
    for kind, detail in (("ErrorInfo", info), ("RetryInfo", delay)):
        status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=detail.SerializeToString())
    library.error = 8, "no slot", status.SerializeToString()
    with refused("STAGING_FULL", headwater.StagingFullError) as raised:
        connection.call(b"/x", b"", 1.0)
    assert (raised.value.retry_after_s, raised.value.metadata, raised.value.message) == (2.5, {"head": "h"}, "no slot")
    library.error = 14, "gone", b""
    with refused("", headwater.UnavailableError, "gone"):
        connection.call(b"/x", b"", 1.0)
    library.error = 1, "", b""
    with refused("CANCELLED", headwater.CancelledError):
        connection.call(b"/x", b"", 1.0)


# ---- calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ("call", "start"))
def test_an_interrupt_as_the_library_takes_a_call_ends_it_with_its_memory_there(library, connection, way):
    used = Used()
    there = weakref.ref(used)
    freed = []
    library.on_free = lambda: freed.append(there() is not None)
    library.on_start = interrupt
    done = (lambda call: pytest.fail("it is not called back"),) if way == "start" else ()
    with pytest.raises(KeyboardInterrupt):
        getattr(connection, way)(*done, b"/x", b"", 1.0, Tensors(keep_alive=used))
    assert not _core._pending
    del used
    eventually(lambda: library.freed == [1])
    assert freed == [True]
    eventually(lambda: there() is None)


def test_ctrl_c_in_a_wait_cancels_the_call_and_waits_for_its_end(library, connection):
    library.ended.clear()
    waits = iter((interrupt,))
    library.on_wait = lambda: next(waits, lambda: None)()
    with pytest.raises(KeyboardInterrupt):
        connection.call(b"/x", b"", 1.0)
    assert library.cancelled == [1] and library.ended.is_set()
    gc.collect()
    assert library.freed == [1] and library.waiting == [threading.current_thread()]


def test_the_end_of_an_unknown_call_is_nothing(library, connection):
    connection._read_completions()
    library.end(123456789)
    assert begin(connection).wait(60)


@pytest.mark.parametrize("ended", (True, False))
def test_a_call_that_is_forgotten_keeps_its_memory_until_it_has_ended(library, connection, ended):
    used = Used()
    there = weakref.ref(used)
    freed = threading.Event()
    library.on_free = lambda: there() is not None and freed.set()
    if not ended:
        library.ended.clear()
    call = Call(connection, used)
    connection._start(call, b"/x", b"", 1.0, Tensors(), 0, 0)
    del used
    if ended:
        call.wait()
    del call
    assert ended or there() is not None
    library.ended.set()
    assert freed.wait(60)
    assert (library.waiting[0] is threading.current_thread()) == ended  # forgetting it waits for nothing
    eventually(lambda: there() is None)


def test_progress_is_told_until_the_end(library, connection):
    library.progress = iter([(0, 10), (0, 10), (4, 10), (10, 10)])
    waits = iter([lambda: None] * 3)
    library.ended.clear()
    library.on_wait = lambda: next(waits, library.ended.set)()
    told = []
    connection.call(b"/x", b"", 1.0, on_progress=lambda *numbers: told.append(numbers))
    assert told == [(0, 10), (4, 10), (10, 10)]


def test_an_exception_of_the_progress_ends_the_call(library, connection):
    library.ended.clear()
    library.progress = iter([(1, 2)])
    with pytest.raises(ZeroDivisionError):
        connection.call(b"/x", b"", 1.0, on_progress=lambda sent, total: sent // 0)
    assert library.cancelled == [1] and library.ended.is_set()


def test_notices_of_a_replay_log_are_warnings(library):
    with contextlib.closing(Connection("nowhere", {"replay_bytes": 5})) as logged:
        library.notices = ["step 3 is not kept"]
        with pytest.warns(RuntimeWarning, match="step 3 is not kept"):
            logged.call(b"/x", b"", 1.0)


# ---- the ends of clients -------------------------------------------------------------------------------------------------


def test_the_child_of_a_fork_frees_nothing_of_its_parent(library, connection):
    call = Call(connection, None)
    connection._start(call, b"/x", b"", 1.0, Tensors(), 0, 0)
    child = os.fork()
    if child == 0:
        try:
            connection._library.hw_client_close = connection._library.hw_client_call_free = None
            connection.close()
            call.__del__()
            connection.abandon(b"")
            connection.__del__()
            with pytest.raises(headwater.ClientClosedError, match="forked"):
                connection.call(b"/x", b"", 1.0)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert library.freed == [] and library.closed == 0


def test_a_closed_client_takes_no_calls(library, connection):
    connection.owner = Used()
    owner = weakref.ref(connection.owner)
    connection.close()
    connection.close()
    assert library.closed == 1 and owner() is None
    with pytest.raises(headwater.ClientClosedError):
        connection.call(b"/x", b"", 1.0)
    with pytest.raises(headwater.ClientClosedError):
        connection.start(lambda call: None, b"/x", b"", 1.0)
    connection.abandon(b"message")
    assert library.calls == 0 and library.abandoned == []


def test_a_call_that_begins_as_the_client_is_closed_is_cancelled(library, connection):
    library.on_start = lambda request: connection.close()
    library.error = 1, "the client was closed", b""
    with pytest.raises(headwater.ClientClosedError, match="the client was closed"):
        connection.call(b"/x", b"", 1.0)
    assert library.cancelled == [1]


def test_a_client_that_is_forgotten_is_closed_and_freed_and_ends_its_thread(library):
    connection = Connection("nowhere", {})
    assert begin(connection).wait(60)
    (reader,) = [thread for thread in threading.enumerate() if thread.name == "headwater-completions"]
    there = weakref.ref(connection)
    del connection
    eventually(lambda: there() is None and library.clients_freed)
    assert library.closed == 1
    reader.join(60)
    assert not reader.is_alive()


def test_a_client_lives_as_long_as_a_call_of_a_future_is_under_way(library):
    connection = Connection("nowhere", {})
    library.ended.clear()
    tags = []
    library.on_start = lambda request: tags.append(request.tag)
    ended = begin(connection)
    there = weakref.ref(connection)
    del connection
    gc.collect()
    assert there() is not None
    library.ended.set()
    library.end(tags[0])
    assert ended.wait(60)
    eventually(lambda: there() is None)
