"""The Python side of the client core's C ABI, on a library that only notes what is asked of it: calls that are interrupted, closed
and forgotten, and the memory that they use."""

import gc
import threading
import time
import weakref

import pytest

import headwater
from headwater import _client_library
from headwater._client_library import Call, Connection, Rows
from headwater._library_transfers import LibraryTransfers


class FakeLibrary:
    """One call at a time. Its end, if it has a callback, comes as it is freed."""

    HANDLE = 5

    def __init__(self):
        self.freed = []
        self.waiting = []  # threads that free
        self.cancelled = []
        self.ended = True
        self.may_free = threading.Event()
        self.may_free.set()
        self.on_submit = lambda: None
        self.on_free = lambda: None
        self.message = None

    def hw_client_connect(self, target, options, out):
        out._obj.value = 1

    def hw_client_free(self, client):
        pass

    def hw_client_submit(self, client, message, out):
        self.message = message._obj
        out._obj.value = self.HANDLE
        self.on_submit()

    def hw_client_call_wait(self, call, timeout_ns, ended):
        ended._obj.value = self.ended

    def hw_client_call_cancel(self, call):
        self.cancelled.append(call.value)

    def hw_client_call_free(self, call):
        self.waiting.append(threading.current_thread())
        assert self.may_free.wait(60)
        if self.message is not None and self.message.context:
            self.message.done(self.message.context)
        self.on_free()
        self.freed.append(call.value)


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(_client_library, "library", lambda: fake)
    yield fake
    fake.on_free = lambda: None
    fake.ended = True
    gc.collect()
    assert not _client_library._pending and not _client_library._running


@pytest.fixture
def connection(library):
    made = Connection("nowhere", {})
    yield made
    made.close()


class Used:
    """What a call reads and writes."""


def submit(connection, keep_alive, done=None):
    return connection.submit(b"", 1.0, Rows(), [], Rows(), 0, keep_alive, done)


@pytest.mark.parametrize("done", (None, lambda call: pytest.fail("nobody is told")))
def test_an_interrupt_as_the_library_takes_a_call_ends_it_with_its_memory_there(library, connection, done):
    used = Used()
    there = weakref.ref(used)

    def interrupt():
        raise KeyboardInterrupt

    library.on_submit = interrupt
    library.on_free = lambda: (there() is not None) or pytest.fail("the memory is gone")
    with pytest.raises(KeyboardInterrupt):
        submit(connection, used, done)
    assert library.freed == [library.HANDLE]


def test_the_end_of_an_unknown_call_is_nothing(library):
    _client_library._ended(123456789)
    assert not _client_library._running


@pytest.mark.parametrize("ended", (True, False))
def test_a_call_that_is_forgotten_keeps_its_memory_until_it_has_ended(library, connection, ended):
    used = Used()
    there = weakref.ref(used)
    freed = threading.Event()
    library.ended = ended
    library.on_free = lambda: there() is not None and freed.set()
    call = submit(connection, used)
    del used
    if not ended:
        library.may_free.clear()
    del call
    assert ended or there() is not None
    library.may_free.set()
    assert freed.wait(60)
    if ended:
        assert library.waiting == [threading.current_thread()]
    else:
        # This one could be a thread of the library's, which must not wait.
        (thread,) = library.waiting
        assert thread is not threading.current_thread()
        deadline = time.monotonic() + 60
        while there() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
    assert library.freed == [library.HANDLE] and there() is None


def test_the_child_of_a_fork_frees_nothing_of_its_parent(library, connection):
    call = submit(connection, Used())
    call._pid += 1
    call.free()
    del call
    call = submit(connection, Used())
    call._pid += 1
    del call
    assert not library.freed


def test_freeing_twice_frees_once_and_keeps_the_memory_until_then(library, connection):
    used = Used()
    there = weakref.ref(used)
    call = submit(connection, used)
    del used
    library.may_free.clear()
    first = threading.Thread(target=call.free)
    first.start()
    while not library.waiting:
        first.join(0.001)
    call.free()
    assert there() is not None and not library.freed
    library.may_free.set()
    first.join(60)
    call.free()
    assert library.freed == [library.HANDLE] and there() is None


def test_close_and_new_calls_never_see_the_calls_at_once(library, connection):
    """Both under the lock: a set that grows while it is gone through is an error, and nothing is cancelled."""

    class Guarded(weakref.WeakSet):
        def check(self):
            got = []
            other = threading.Thread(target=lambda: got.append(connection._unused.acquire(blocking=False)))
            other.start()
            other.join(60)
            assert got == [False]

        def add(self, item):
            self.check()
            super().add(item)

        def __iter__(self):
            self.check()
            return super().__iter__()

    connection._calls = Guarded()
    calls = [submit(connection, None) for _ in range(3)]
    connection.close()
    assert library.cancelled == [library.HANDLE] * 3
    for call in calls:
        call.free()


def test_an_answer_to_an_interrupted_start_is_an_error(library, connection, monkeypatch):
    outcomes = []

    def submit_and_break(request, header, timeout_s, done):
        done(Call(None))
        raise KeyboardInterrupt

    transfers = LibraryTransfers(connection)
    monkeypatch.setattr(transfers, "_submit", submit_and_break)
    with pytest.raises(KeyboardInterrupt):
        transfers.start(None, None, 1.0, outcomes.append)
    (fetch,) = outcomes
    errors = []

    def get():
        try:
            fetch()
        except headwater.CancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1
    transfers.close()
