"""The end of a process that has not closed its client: it waits for its futures, but not for a server that is away.

Each case is a process of its own, which ends by returning from its main program.
"""

import time

import pytest
from expectations import ClientProgram
from scripted_server import CUT, answer

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
    """A process that has connected, and waits for its work."""
    return ClientProgram(server.address, work, transport="grpc", replay=replay)


@pytest.mark.parametrize("what", WAITING)
def test_futures_that_wait_for_a_server_that_is_away_do_not_hold_up_the_exit(scripted, what):
    program = begin(scripted, WAITING[what])
    if what == "a recovery":
        scripted.fail_always("SealStep", answer("STEP_LOST"))
        scripted.fail_always("GetServerInfo", CUT)
    else:
        scripted.stop()
    program.finish(PROMPTLY_S)


def test_a_client_that_outlives_the_modules_ends_in_silence(scripted):
    """As one does that a module of torch keeps alive: the names of its own module are gone then."""
    work = "head.info_future().cancel()\nthreading.kept = client, headwater._core\ndel client, head\n"
    assert begin(scripted, work).finish(PROMPTLY_S) == ""


# A connection that is cut is no server that is away. What the server asks to repeat matters: a checkpoint, say.
@pytest.mark.parametrize(
    ("work", "replay", "answers", "told"),
    (
        (THREAD, True, "CUT CUT CUT CUT", "False\n"),
        (FUTURE, True, "CUT", "None\n"),
        (FUTURE, False, "CUT", "None\n"),
        (FUTURE, True, "QUEUE_FULL/1000", "None\n"),
    ),
    ids=("a thread of ones own", "cut, replay", "cut", "asked to repeat"),
)
def test_a_call_that_is_made_again_is_waited_for_when_the_main_program_has_returned(scripted, work, replay, answers, told):
    program = begin(scripted, work, replay=replay)
    scripted.fail("SealStep", *map(answer, answers.split()))
    assert program.finish(PROMPTLY_S) == told
    assert scripted.count("SealStep") == len(answers.split()) + 1


# The thread that closes a client which was forgotten is late: the exit waits for it.
LATE = """
import _thread, time
start = _thread.start_new_thread
_thread.start_new_thread = lambda function, arguments: start(lambda: (time.sleep(0.1), function(*arguments)), ())
"""
LEFT_OPEN = """
def main():
    import os
    own = headwater.connect(address, **eval(options))
    own.head("scripted").cross_entropy(numpy.zeros((1, 4), "f"), [1], micro_batch=0, commit="explicit")
    if os.fork() == 0:
        sys.exit()  # the parent's session is not its own
    os.wait()

head.cross_entropy(numpy.zeros((1, 4), "f"), [1], micro_batch=0, commit="explicit")
main()
"""


@pytest.mark.parametrize("replay", (True, False))
def test_sessions_that_are_left_open_are_closed_at_exit(scripted, replay):
    """That of a client in use, and that of one that a function has forgotten; by this process alone."""
    assert begin(scripted, LATE + LEFT_OPEN, replay=replay).finish(PROMPTLY_S) == ""
    assert scripted.count("OpenSession") == 2
    assert sorted(request.session_id for request in scripted.calls["CloseSession"]) == [id_.to_bytes(32, "big") for id_ in (1, 2)]


@pytest.mark.parametrize("silent", (True, False))
def test_a_server_that_is_silent_or_away_does_not_hold_up_the_exit(scripted, silent):
    """Two sessions, and about a second for both."""
    program = begin(scripted, LEFT_OPEN + "print('open', flush=True)\nsys.stdin.readline()\n")
    scripted.fail_always("CloseSession", lambda: time.sleep(12))
    program.go_on()
    assert program.process.stdout.readline() == "open\n"
    if not silent:
        scripted.stop()
    began = time.monotonic()
    assert program.finish(PROMPTLY_S) == ""
    assert time.monotonic() - began < 8
