"""Sessions: opened when first needed, kept alive, owners of what is undecided, gone with their process."""

import functools
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from expectations import refused
from scripted_server import HIDDEN_SIZE, VOCAB_SIZE, scripted_server

import headwater

HIDDEN = np.ones((3, HIDDEN_SIZE), np.float32)
TARGETS = [1, 2, 3]
WAIT_S = 30


@pytest.fixture
def server():
    with scripted_server() as server:
        yield server


def submit(head, micro_batch=0, **options):
    return head.cross_entropy(HIDDEN, TARGETS, micro_batch=micro_batch, commit="explicit", **options)


def until(condition):
    """Waits for it; fails the test if it does not come true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Shared memory would bring a session of its own.
connect = functools.partial(headwater.connect, transport="grpc")


def test_a_client_that_is_forgotten_ends_its_thread(server):
    client = connect(server.address, session_lease=0.3)
    submit(client.head("scripted"))
    until(lambda: server.count("KeepAlive") >= 1)
    del client

    def is_quiet():
        renewals = server.count("KeepAlive")
        time.sleep(0.5)
        return server.count("KeepAlive") == renewals

    until(is_quiet)


def test_a_forked_process_leaves_the_session_alone(server):
    with connect(server.address) as client:
        head = client.head("scripted")
        out = submit(head)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                head.info()
            except headwater.ClientClosedError:
                client.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert out.commit() is False
        assert server.count("CloseSession") == 0 and server.count("GetHead") == 1


# ---- on a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def head(remote, make_head, rng):
    return make_head(remote.client, rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32), staging_slots=1)


def test_closing_a_client_discards_what_it_left_undecided(remote, head):
    with connect(remote.address) as other:
        theirs = other.head(head.name)
        theirs.cross_entropy(HIDDEN, TARGETS, micro_batch=0)
        submit(theirs, 1)
        with refused("STAGING_FULL", headwater.StagingFullError):
            submit(head, 2)
    states = {id_: entry.state for id_, entry in head.step_state().open.micro_batches.items()}
    assert states[0] == "COMMITTED" and states[1] == "DISCARDED"
    assert submit(head, 2).commit() is False  # the slot is free again


def test_a_dead_process_loses_its_lease(remote, head):
    """What it had committed stays; what it left undecided goes, and its successor submits it anew."""
    program = f"""
import os, sys
import numpy as np
import headwater
client = headwater.connect({remote.address!r}, session_lease=1.0)
head = client.head({head.name!r})
hidden = np.ones((3, {HIDDEN_SIZE}), np.float32)
head.cross_entropy(hidden, [1, 2, 3], micro_batch=0)
head.cross_entropy(hidden, [1, 2, 3], micro_batch=1, commit="explicit")
print("staged", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"staged\n"
        time.sleep(2.0)  # twice the lease: the thread keeps it alive
        assert head.step_state().open.micro_batches[1].state == "STAGED"
        process.kill()
    until(lambda: head.step_state().open.micro_batches[1].state == "DISCARDED")
    assert head.step_state().open.micro_batches[0].state == "COMMITTED"
    with refused("MICRO_BATCH_DISCARDED", headwater.AbortedError):
        submit(head, 1)
    assert submit(head, 1, attempt=1).commit() is False
