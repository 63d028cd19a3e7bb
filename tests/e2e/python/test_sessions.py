"""Sessions: opened when first needed, kept alive, owners of what is undecided, gone with their process."""

import concurrent.futures
import functools
import os
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from expectations import refused
from headwater.v1 import session_service_pb2
from scripted_server import CUT, HIDDEN_SIZE, VOCAB_SIZE, Failure, scripted_server

import headwater

HIDDEN = np.ones((3, HIDDEN_SIZE), np.float32)
TARGETS = [1, 2, 3]
WAIT_S = 30
LOST = Failure(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")


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


@pytest.fixture(params=("grpc", "python"))
def connect(request):
    """headwater.connect, by way of the client core and of grpcio alone. Shared memory would bring a session of its own."""
    return functools.partial(headwater.connect, transport=request.param)


def session_ids(server, method):
    return [getattr(call[0], "header", call[0]).session_id for call in server.calls[method]]


def test_a_session_is_opened_by_the_first_explicit_micro_batch(server, connect):
    with connect(server.address, session_lease=7.5) as client:
        head = client.head("scripted")
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=0)
        head.cross_entropy(HIDDEN, TARGETS, backward=False)
        head.commit(micro_batch=9)
        assert server.count("OpenSession") == 0
        submit(head, 1).commit()
        submit(head, 2).discard()
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=3)
        assert server.count("OpenSession") == 1
        opened = server.calls["OpenSession"][0]
        assert opened.lease.ToMilliseconds() == 7500 and 1 <= len(opened.client_name.encode()) <= 128
        session = (1).to_bytes(32, "big")
        assert session_ids(server, "ComputeLoss") == [b"", b"", session, session, b""]
        assert [request.session_id for request in server.calls["CommitMicroBatch"]] == [b"", session]
        assert [request.session_id for request in server.calls["DiscardMicroBatch"]] == [session]
        assert server.count("CloseSession") == 0
    assert [request.session_id for request in server.calls["CloseSession"]] == [session]


def test_without_sessions_nobody_owns_anything(server, connect):
    with connect(server.address, session=False) as client:
        submit(client.head("scripted")).commit()
    assert session_ids(server, "ComputeLoss") == [b""] and server.calls["CommitMicroBatch"][0].session_id == b""
    assert server.count("OpenSession") == server.count("CloseSession") == 0


def test_the_lease_is_renewed_on_a_connection_of_its_own(server, connect):
    with connect(server.address, session_lease=0.3) as client:
        submit(client.head("scripted"))
        server.fail("KeepAlive", CUT)  # that may pass
        until(lambda: server.count("KeepAlive") >= 4)
        assert server.count("OpenSession") == 1
        assert not set(server.peers["KeepAlive"]) & set(server.peers["ComputeLoss"])
    renewals = server.count("KeepAlive")
    time.sleep(0.4)
    assert server.count("KeepAlive") == renewals


def test_the_longest_lease_can_be_asked_for(server, connect):
    with connect(server.address, session_lease=2147483) as client:
        submit(client.head("scripted"))
        assert server.calls["OpenSession"][0].lease.seconds == 2147483


@pytest.mark.parametrize(("lease_s", "most"), [(0.0, 60), (3e11, 0)], ids=["none", "for ever"])
def test_a_strange_lease_is_renewed_as_far_as_that_makes_sense(server, connect, lease_s, most):
    server.lease_s = lease_s
    with connect(server.address) as client:
        submit(client.head("scripted"))
        time.sleep(0.5)
        assert server.count("KeepAlive") <= most
        assert any(thread.name == "headwater-keep-alive" for thread in threading.enumerate())


def test_a_session_that_is_gone_is_opened_anew(server, connect):
    with connect(server.address) as client:
        head = client.head("scripted")
        server.fail("ComputeLoss", LOST)
        out = submit(head)
        first, second = (1).to_bytes(32, "big"), (2).to_bytes(32, "big")
        assert session_ids(server, "ComputeLoss") == [first, second] and out.attempt == 1
        server.fail("CommitMicroBatch", LOST)
        out.commit()  # the server says what became of it
        assert [request.session_id for request in server.calls["CommitMicroBatch"]] == [second, (3).to_bytes(32, "big")]
        server.fail("DiscardMicroBatch", LOST, LOST)
        with refused("SESSION_NOT_FOUND", headwater.NotFoundError):
            out.discard()


def test_calls_that_were_begun_in_a_lost_session_meet_in_one_new_one(server):
    """Each forgot the session that the one before it had opened, and what was in that could not be committed any more."""
    with headwater.connect(server.address, transport="grpc") as client:
        head = client.head("scripted")
        submit(head)
        server.fail("ComputeLoss", *[LOST] * 3)
        # All are told that the session is gone before the first goes on; then one goes on after the other.
        client._executors.loss = concurrent.futures.ThreadPoolExecutor(1)
        told = threading.Event()
        client._executors.loss.submit(told.wait)
        futures = [head.cross_entropy_future(HIDDEN, TARGETS, micro_batch=id_, commit="explicit") for id_ in range(1, 4)]
        until(lambda: server.count("ComputeLoss") == 4)
        told.set()
        outs = [future.result(WAIT_S) for future in futures]
        first, second = (1).to_bytes(32, "big"), (2).to_bytes(32, "big")
        assert session_ids(server, "ComputeLoss") == [first] * 4 + [second] * 3 and server.count("OpenSession") == 2
        assert [out.attempt for out in outs] == [1, 1, 1]
        for out in outs:
            out.commit()
        assert [request.session_id for request in server.calls["CommitMicroBatch"]] == [second] * 3


def test_a_lease_that_ended_is_noticed_before_the_next_call(server, connect):
    with connect(server.address, session_lease=0.3) as client:
        head = client.head("scripted")
        server.fail("KeepAlive", LOST)
        submit(head, 0)
        until(lambda: client._backend._session.id == b"")
        submit(head, 1)
        assert session_ids(server, "ComputeLoss") == [(1).to_bytes(32, "big"), (2).to_bytes(32, "big")]


def test_a_server_that_grants_no_session_is_an_error(server, connect):
    with connect(server.address, retries=None) as client:
        server.fail("OpenSession", Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"))
        with refused("QUOTA_EXCEEDED", headwater.ResourceExhaustedError):
            submit(client.head("scripted"))
        assert server.count("ComputeLoss") == 0


def test_a_client_that_is_forgotten_ends_its_thread(server, connect):
    client = connect(server.address, session_lease=0.3)
    submit(client.head("scripted"))
    until(lambda: server.count("KeepAlive") >= 1)
    del client

    def is_quiet():
        renewals = server.count("KeepAlive")
        time.sleep(0.5)
        return server.count("KeepAlive") == renewals

    until(is_quiet)


def test_a_forked_process_leaves_the_session_alone(server, connect):
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


@pytest.mark.parametrize(
    "bad",
    [
        {"session_lease": 0},
        {"session_lease": 2147483.1},
        {"session": "yes"},
        {"retries": 3},
        {"replay_bytes": -1},
        {"tenant": "A/B"},
    ],
)
def test_options_are_checked(server, bad, connect):
    with pytest.raises(headwater.InvalidArgumentError):
        connect(server.address, **bad)


# ---- on a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def head(remote, make_head, rng):
    return make_head(remote.client, rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32), staging_slots=1)


def test_only_the_owner_decides(remote, head, connect):
    out = submit(head)
    for options in ({}, {"session": False}):
        with connect(remote.address, **options) as stranger:
            other = stranger.head(head.name)
            for call in (other.commit, other.discard):
                with refused("NOT_SESSION_OWNER", headwater.PermissionDeniedError):
                    call(micro_batch=0)
    assert out.commit() is False


def test_a_higher_attempt_discards_whoever_owns_the_lower_one(remote, head, connect):
    out = submit(head)
    with connect(remote.address) as successor:
        other = successor.head(head.name)
        assert other.discard(micro_batch=0, attempt=1) is True
        assert submit(other, attempt=2).commit() is False
    with pytest.raises(headwater.AbortedError):
        out.commit()


def test_closing_a_client_discards_what_it_left_undecided(remote, head, connect):
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


def test_futures_of_a_session_that_the_server_has_ended_can_be_committed(remote, make_head, rng):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    with headwater.connect(remote.address, transport="grpc") as client:
        head = make_head(client, weight, staging_slots=6)
        submit(head, 100).commit()
        request = session_service_pb2.CloseSessionRequest(session_id=client._backend.session_id)
        client._backend._sessions.CloseSession(request)
        futures = [head.cross_entropy_future(HIDDEN, TARGETS, micro_batch=id_, commit="explicit") for id_ in range(6)]
        assert [future.result(WAIT_S).commit() for future in futures] == [False] * 6


def test_a_busy_session_does_not_end(remote, head, connect):
    with connect(remote.address, session_lease=1.0) as client:
        out = submit(client.head(head.name))
        time.sleep(2.5)
        assert out.commit() is False
