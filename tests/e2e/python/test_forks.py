"""Processes that are forked: which of them may connect, and that the others are told at once instead of hanging.

Each case is a process of its own, because this one has used gRPC, and because a child that hangs must not take the tests with it.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import os, select, signal, sys
import headwater

address, transport, parent = sys.argv[1:]

def use():
    with headwater.connect(address, transport=transport) as client:
        return client.health()

def in_a_fork(work):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = work()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    outcome = os.read(reading, 1000).decode() if select.select([reading], [], [], 20)[0] else "hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return outcome

if parent == "has closed":
    use()
client = headwater.connect(address, transport=transport) if parent == "is connected" else None
print(in_a_fork(use))
print(in_a_fork(lambda: in_a_fork(use)))
print(use() if client is None else client.health())  # the children have done nothing to it
"""


def outcomes(address, transport, parent):
    """What a fork gets of its connection, what a fork of a fork does, and what their parent does afterwards."""
    command = [sys.executable, "-c", PROGRAM, address, transport, parent]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()


@pytest.mark.parametrize("transport", ("auto", "python"))
def test_a_fork_of_a_process_that_had_not_connected_may_connect(remote, transport):
    assert outcomes(remote.address, transport, "is new") == ["SERVING"] * 3


@pytest.mark.parametrize("transport", ("auto", "python"))
@pytest.mark.parametrize("parent", ("is connected", "has closed"))
def test_a_fork_of_a_process_that_had_connected_is_told_at_once(remote, transport, parent):
    *forks, after = outcomes(remote.address, transport, parent)
    assert len(forks) == 2 and after == "SERVING"
    for outcome in forks:
        assert outcome.startswith("ClientClosedError: ") and "spawn or forkserver" in outcome and "after forking" in outcome
