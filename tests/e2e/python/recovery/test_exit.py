"""The end of a process that has not closed its client: it waits for its futures, but not for a server that is away.

Each case is a process of its own, which ends by returning from its main program.
"""

import subprocess
import sys
import time

import pytest
from scripted_server import CUT, answer, scripted_server

PROGRAM = """
import sys, threading
import headwater, numpy

address, replay = sys.argv[1:]
client = headwater.connect(address, replay=replay == "True", transport="grpc")
head = client.head("scripted")
print("connected", flush=True)
sys.stdin.readline()
"""
# By what they wait for: mostly more of them than there are threads.
WAITING = {
    "a try": "futures = [head.seal_future(expected_micro_batches=0) for _ in range(6)]",
    "a loss": "futures = [head.cross_entropy_future(numpy.zeros((1, 4), 'f'), [1], micro_batch=i) for i in range(20)]",
    "a recovery": "futures = [head.seal_future(expected_micro_batches=0) for _ in range(6)]",
    "abandoned contributions": """
head._backend.abandon(head._key(None), 0)()
futures = [head.info_future(), head.seal_future(expected_micro_batches=0)]
""",
}
THREAD = """
threading.Thread(target=lambda: print(head.seal(expected_micro_batches=0).replayed)).start()
"""
FUTURE = """
head.seal_future(expected_micro_batches=0).add_done_callback(lambda future: print(future.exception()))
"""
# On a machine that is busy; the calls' own time-out is 120 s.
PROMPTLY_S = 40


def begin(server, work, *, replay=True):
    """A process that has connected, and waits to be told to go on."""
    command = [sys.executable, "-c", PROGRAM + work, server.address, str(replay)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "connected\n", process.communicate()
    return process


def finish(process, timeout_s):
    try:
        output, errors = process.communicate("go on\n", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        pytest.fail("the process does not end", pytrace=False)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in errors and "Exception" not in errors, errors
    return output


@pytest.mark.parametrize("what", WAITING)
def test_futures_that_wait_for_a_server_that_is_away_do_not_hold_up_the_exit(what):
    with scripted_server() as server:
        process = begin(server, WAITING[what])
        if what == "a recovery":
            server.fail("SealStep", *[answer("STEP_LOST")] * 1000)
            server.fail("GetServerInfo", *[CUT] * 1000)
        else:
            server.stop()
        finish(process, PROMPTLY_S)


def test_a_thread_of_ones_own_waits_on_when_the_main_program_has_returned():
    with scripted_server() as server:
        process = begin(server, THREAD)
        server.fail("SealStep", *[CUT] * 4)
        assert finish(process, PROMPTLY_S) == "False\n"
        assert server.count("SealStep") == 5


def test_a_client_that_outlives_the_modules_ends_in_silence():
    """As one does that a module of torch keeps alive: the names of its own module are gone then."""
    with scripted_server() as server:
        process = begin(server, "head.info_future().cancel()\nthreading.kept = client, headwater._core\ndel client, head\n")
        assert finish(process, PROMPTLY_S) == ""


@pytest.mark.parametrize("replay", (True, False))
def test_a_connection_that_is_cut_is_no_server_that_is_away(replay):
    with scripted_server() as server:
        process = begin(server, FUTURE, replay=replay)
        server.fail("SealStep", CUT)
        assert finish(process, PROMPTLY_S) == "None\n"
        assert server.count("SealStep") == 2


def test_a_call_that_the_server_asks_to_repeat_is_waited_for():
    """Its outcome matters: a checkpoint, say. Only a server that is away is given up."""
    with scripted_server() as server:
        process = begin(server, FUTURE)
        server.fail("SealStep", answer("QUEUE_FULL/1000"))
        assert finish(process, PROMPTLY_S) == "None\n"
        assert server.count("SealStep") == 2


# The thread that closes a client which was forgotten is late: the exit waits for it.
LATE = """
import _thread, time
start = _thread.start_new_thread
_thread.start_new_thread = lambda function, arguments: start(lambda: (time.sleep(0.1), function(*arguments)), ())
"""
LEFT_OPEN = """
def main():
    import os
    own = headwater.connect(address, transport="grpc", replay=replay == "True")
    own.head("scripted").cross_entropy(numpy.zeros((1, 4), "f"), [1], micro_batch=0, commit="explicit")
    if os.fork() == 0:
        sys.exit()  # the parent's session is not its own
    os.wait()

head.cross_entropy(numpy.zeros((1, 4), "f"), [1], micro_batch=0, commit="explicit")
main()
"""


@pytest.mark.parametrize("replay", (True, False))
def test_sessions_that_are_left_open_are_closed_at_exit(replay):
    """That of a client in use, and that of one that a function has forgotten; by this process alone."""
    with scripted_server() as server:
        process = begin(server, LATE + LEFT_OPEN, replay=replay)
        assert finish(process, PROMPTLY_S) == ""
        opened = server.count("OpenSession")
        assert opened == 2
        assert sorted(request.session_id for request in server.calls["CloseSession"]) == [id_.to_bytes(32, "big") for id_ in (1, 2)]


class Silence:
    """In the place of an answer."""

    def abort(self, context):
        time.sleep(12)


@pytest.mark.parametrize("silent", (True, False))
def test_a_server_that_is_silent_or_away_does_not_hold_up_the_exit(silent):
    """Two sessions, and about a second for both."""
    with scripted_server() as server:
        process = begin(server, LEFT_OPEN + "print('open', flush=True)\nsys.stdin.readline()\n")
        server.fail("CloseSession", *[Silence()] * 4)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "open\n"
        if not silent:
            server.stop()
        began = time.monotonic()
        assert finish(process, PROMPTLY_S) == ""
        assert time.monotonic() - began < 8
