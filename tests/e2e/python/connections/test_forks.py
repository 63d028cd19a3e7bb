"""Processes that are forked: which of them may connect, and that the others are told at once instead of hanging.

Each case is a process of its own, because this one has used gRPC, and because a child that hangs must not take the tests with it.
"""

import pytest
from expectations import run_python

IN_A_FORK = """
import os, select, signal, sys

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
"""
CONNECTING = """
import headwater

address, parent = sys.argv[1:]

def use():
    with headwater.connect(address) as client:
        return client.health()

if parent == "has closed":
    use()
client = headwater.connect(address) if parent == "is connected" else None
print(in_a_fork(use))
print(in_a_fork(lambda: in_a_fork(use)))
print(use() if client is None else client.health())  # the children have done nothing to it
"""
OF_ITS_OWN = """
import headwater.local
import numpy as np

def use():
    with headwater.local.connect(engine="cpu") as client:
        head = client.create_head("head", np.ones((8, 4), np.float32), optimizer=headwater.SGD())
        out = head.cross_entropy(np.ones((2, 4), np.float32), [1, 2], micro_batch=0)
        return f"{out.state} {client._backend.connection.owner._process.args[-1] == f'--parent_pid={os.getpid()}'}"

print(in_a_fork(use))
print(use())
client = headwater.local.connect(engine="cpu")
print(in_a_fork(lambda: str(client.close())), client.health(), flush=True)
if os.fork() == 0:
    sys.exit()  # not by os._exit: the child's own cleaning up
os.wait()
print(client.health())
"""
USING_ITS_PARENTS = """
import headwater
import numpy as np

rows = np.ones((2, 4), np.float32), [1, 2]
client = headwater.connect(sys.argv[1])
head = client.create_head("forked", np.ones((8, 4), np.float32))
client.health_future().result(60)  # there is a thread that waits for work
head.cross_entropy_future(*rows, micro_batch=0).result(60)
for work in (
    lambda: client.health_future().result(),
    lambda: head.cross_entropy_future(*rows, micro_batch=1).result(),
    lambda: head.cross_entropy(*rows, micro_batch=1),
    lambda: head.seal(expected_micro_batches=1),
    lambda: head.info(),
):
    print(in_a_fork(lambda: str(work())).partition(":")[0])
print(in_a_fork(lambda: str(client.close())), head.seal(expected_micro_batches=1).totals.micro_batch_count)
head.delete(force=True)
"""


def run(program, *arguments):
    """Its output, line by line."""
    return run_python(IN_A_FORK + program, *arguments).splitlines()


@pytest.mark.parametrize("parent", ("is new", "is connected", "has closed"))
def test_a_fork_may_connect_whatever_its_parent_has_done(remote, parent):
    assert run(CONNECTING, remote.address, parent) == ["SERVING"] * 3


def test_a_fork_gets_a_local_server_of_its_own_and_leaves_the_parents_alone():
    assert run(OF_ITS_OWN) == ["COMMITTED True"] * 2 + ["None SERVING", "SERVING"]


def test_a_fork_is_refused_its_parents_client_at_once(remote):
    """Threads stay behind in a fork."""
    assert run(USING_ITS_PARENTS, remote.address) == ["ClientClosedError"] * 5 + ["None 1"]
