"""What a client repeats, under which attempt, how soon; and what it does not repeat."""

import dataclasses
import json
import threading
import time

import grpc
import numpy as np
import pytest
from expectations import refused
from scripted_server import CUT, DRAINING, EPOCH, HIDDEN_SIZE, VOCAB_SIZE, Failure, ScriptedServer, scripted_server

import headwater
from headwater import _channel, _retry

HIDDEN = np.ones((3, HIDDEN_SIZE), np.float32)
TARGETS = [1, 2, 3]
WEIGHT = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
QUICK = headwater.RetryPolicy(max_attempts=4, initial_backoff=0.01, max_backoff=0.05)

# What may be repeated whatever became of the first try, by the RPC that it is.
REPEATABLE = {
    "ComputeLoss": lambda head: head.cross_entropy(HIDDEN, TARGETS, micro_batch=0),
    "CommitMicroBatch": lambda head: head.commit(micro_batch=0, factor=0.5),
    "DiscardMicroBatch": lambda head: head.discard(micro_batch=0),
    "SealStep": lambda head: head.seal(expected_micro_batches=1),
    "ApplyOptimizerStep": lambda head: head.apply_optimizer_step(step=0, learning_rate=0.1, expected_micro_batches=1),
    "DiscardGradient": lambda head: head.discard_gradient(step=0),
    "AddGradient": lambda head: head.add_gradient(HIDDEN, micro_batch=1),
    "DownloadGradient": lambda head: head.gradient(),
    "DownloadWeights": lambda head: head.weight(),
    "GetHead": lambda head: head.info(),
    "TakeHead": lambda head: head.take(),
}
# What a repeat would answer otherwise than the first try.
UNREPEATABLE = {
    "CreateHead": lambda head: head._client.create_head("new", (VOCAB_SIZE, HIDDEN_SIZE), dtype="float32"),
    "DeleteHead": lambda head: head.delete(),
    "TakeHead": lambda head: head.take(only_if_current=True),
    "RestoreCheckpoint": lambda head: head.restore("one"),
}


@pytest.fixture
def server():
    with scripted_server() as server:
        yield server


@pytest.fixture(params=("grpc", "python"))
def connect(request, server):
    """Heads of clients with these options, by way of the client core and of grpcio alone."""
    clients = []

    def connect(**options):
        clients.append(headwater.connect(server.address, **{"retries": QUICK, "transport": request.param, **options}))
        head = clients[-1].head("scripted")
        server.calls.clear()
        return head

    yield connect
    for client in clients:
        client.close()


def test_the_back_off_doubles_and_keeps_to_what_the_server_asks_for():
    policy = headwater.RetryPolicy(initial_backoff=0.1, max_backoff=1.0)
    for retry, full in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
        delays = [policy.backoff(retry, None) for _ in range(200)]
        assert full / 2 <= min(delays) < 0.7 * full and 0.8 * full < max(delays) <= full  # jitter
    assert policy.backoff(0, 2.5) == 2.5 and policy.backoff(10**6, None) <= 1.0
    for bad in ({"max_attempts": 0}, {"initial_backoff": 0}, {"initial_backoff": 2.0, "max_backoff": 1.0}):
        with pytest.raises(headwater.InvalidArgumentError):
            headwater.RetryPolicy(**bad)


@pytest.mark.parametrize("method", REPEATABLE)
def test_without_retries_one_call_is_one_rpc(server, connect, method):
    head = connect(retries=None)
    server.fail(method, CUT, CUT)
    with pytest.raises(headwater.UnavailableError):
        REPEATABLE[method](head)
    assert server.count(method) == 1


@pytest.mark.parametrize("method", REPEATABLE)
def test_a_cut_call_is_repeated(server, connect, method):
    head = connect()
    server.fail(method, CUT, DRAINING, Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    REPEATABLE[method](head)
    assert server.count(method) == 4
    requests = server.calls[method]
    if method == "ComputeLoss":
        assert [messages[0].header.attempt for messages in requests] == [0, 1, 2, 3]
        for messages in requests:
            messages[0].header.attempt = 0
    assert all(request == requests[0] for request in requests)


@pytest.mark.parametrize("method", REPEATABLE)
def test_a_call_that_a_server_cuts_off_while_it_shuts_down_is_repeated(server, connect, method):
    """gRPC tells that as cancelled, which nobody on this side has done."""
    head = connect()
    server.fail(method, Failure(grpc.StatusCode.CANCELLED))
    REPEATABLE[method](head)
    assert server.count(method) == 2


@pytest.mark.parametrize("method", REPEATABLE)
def test_the_number_of_tries_is_bounded(server, connect, method):
    head = connect()
    server.fail(method, *[CUT] * 10)
    with pytest.raises(headwater.UnavailableError):
        REPEATABLE[method](head)
    assert server.count(method) == QUICK.max_attempts


@pytest.mark.parametrize("method", UNREPEATABLE)
def test_what_a_repeat_would_answer_otherwise_is_repeated_only_if_nothing_was_done(server, connect, method):
    head = connect()
    server.fail(method, CUT)
    with pytest.raises(headwater.UnavailableError):
        UNREPEATABLE[method](head)
    assert server.count(method) == 1
    server.fail(method, DRAINING)
    UNREPEATABLE[method](head)
    assert server.count(method) == 3


@pytest.mark.parametrize(
    "failure",
    [
        Failure(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        Failure(grpc.StatusCode.ABORTED, "MICRO_BATCH_CONFLICT"),
        Failure(grpc.StatusCode.ABORTED, "EPOCH_FENCED"),
        Failure(grpc.StatusCode.ABORTED, "STEP_LOST"),
        Failure(grpc.StatusCode.ABORTED, "STEP_CONFLICT"),
        Failure(grpc.StatusCode.FAILED_PRECONDITION, "STEP_MISMATCH"),
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY_BUDGET_EXCEEDED"),
        Failure(grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
        Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        Failure(grpc.StatusCode.UNIMPLEMENTED, "FEATURE_NOT_BUILT"),
    ],
    ids=lambda failure: failure.reason,
)
def test_what_waiting_does_not_cure_is_not_repeated(server, connect, failure):
    head = connect()
    for method in ("ComputeLoss", "CommitMicroBatch", "ApplyOptimizerStep"):
        server.fail(method, failure)
        with refused(failure.reason):
            REPEATABLE[method](head)
        assert server.count(method) == 1


@pytest.mark.parametrize("method", REPEATABLE)
@pytest.mark.parametrize("max_attempts", (1, 4))
def test_with_replay_the_number_of_tries_is_not_bounded_while_the_server_is_away(server, connect, method, max_attempts):
    head = connect(replay=True, retries=dataclasses.replace(QUICK, max_attempts=max_attempts))
    server.fail(method, *[CUT] * 5, *[DRAINING] * 5)
    REPEATABLE[method](head)
    assert server.count(method) == 11


def test_with_replay_a_server_is_waited_for_until_the_deadline(server, connect):
    """Looked for at least once a second, however far the back-off has come."""
    head = connect(replay=True, retries=headwater.RetryPolicy(initial_backoff=0.4, max_backoff=60.0))
    server.fail("ComputeLoss", *[CUT] * 1000)
    began = time.monotonic()
    with pytest.raises(headwater.UnavailableError):
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=0, timeout_s=4.0)
    assert 2.8 <= time.monotonic() - began <= 4.5 and 4 <= server.count("ComputeLoss") <= 9


def test_with_replay_what_the_server_answers_is_repeated_as_often_as_without(server, connect):
    head = connect(replay=True)
    server.fail("SealStep", *[Failure(grpc.StatusCode.UNAVAILABLE, "SHARD_NOT_READY")] * 10)
    with refused("SHARD_NOT_READY", headwater.UnavailableError):
        head.seal(expected_micro_batches=0)
    assert server.count("SealStep") == QUICK.max_attempts


@pytest.mark.parametrize(
    "lost",
    [Failure(grpc.StatusCode.ABORTED, "STEP_LOST"), Failure(grpc.StatusCode.INTERNAL, "ENGINE_FAILED")],
    ids=lambda failure: failure.reason,
)
def test_with_replay_a_server_that_begins_anew_is_waited_for(server, connect, lost):
    """As it says; without, or where a repeat would be answered otherwise, that is final."""
    lost = dataclasses.replace(lost, metadata={"serverRestarts": "true"})
    head = connect(replay=True)
    for method, call in REPEATABLE.items():
        server.fail(method, *[lost] * 6)
        call(head)
        assert server.count(method) == 7
    for method, call in UNREPEATABLE.items():
        before = server.count(method)
        server.fail(method, lost)
        with refused(lost.reason):
            call(head)
        assert server.count(method) == before + 1
    head = connect()
    server.fail("SealStep", lost)
    with refused(lost.reason):
        head.seal(expected_micro_batches=0)


def test_with_replay_a_recovery_that_waits_keeps_no_other_call_waiting(server, connect):
    head = connect(replay=True)
    server.fail("ComputeLoss", Failure(grpc.StatusCode.ABORTED, "STEP_LOST"))
    server.fail("GetServerInfo", *[CUT] * 10000)
    errors = []

    def wait():
        with pytest.raises(headwater.UnavailableError) as info:
            head.cross_entropy(HIDDEN, TARGETS, micro_batch=0, timeout_s=4.0)
        errors.append(info.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not server.count("GetServerInfo"):
        time.sleep(0.01)
    began = time.monotonic()
    for _ in range(5):
        head.seal(expected_micro_batches=0, timeout_s=3.0)
    assert time.monotonic() - began < 2.5
    waiting.join()
    assert errors


def test_with_replay_the_server_still_says_how_long_to_wait(server, connect):
    head = connect(replay=True)
    server.fail("SealStep", Failure(grpc.StatusCode.UNAVAILABLE, "STARTING", retry_after_s=1.4))
    began = time.monotonic()
    head.seal(expected_micro_batches=0)
    assert time.monotonic() - began >= 1.4
    server.fail("SealStep", Failure(grpc.StatusCode.UNAVAILABLE, "STARTING", retry_after_s=30))
    began = time.monotonic()
    with refused("STARTING", headwater.UnavailableError):
        head.seal(expected_micro_batches=0, timeout_s=5)
    assert time.monotonic() - began < 4


def test_with_replay_a_refusal_for_want_of_room_is_tried_as_often_as_without(server, connect):
    """Not more often, and not less often, though the server was away before."""
    full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL", retry_after_s=0.001)
    head = connect(replay=True)
    server.fail("ComputeLoss", *[CUT] * 6, *[full] * 10)
    with refused("STAGING_FULL", headwater.StagingFullError):
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=0, commit="explicit")
    assert server.count("ComputeLoss") == 6 + QUICK.max_attempts


def test_a_staging_slot_of_this_session_is_not_waited_for(server, connect):
    """The server asks for a retry where another session has the slot. The own one is freed by nobody who waits."""
    head = connect()
    server.fail("ComputeLoss", Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL"))
    with refused("STAGING_FULL", headwater.StagingFullError):
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=0, commit="explicit")
    assert server.count("ComputeLoss") == 1


@pytest.mark.parametrize("method", UNREPEATABLE)
def test_with_replay_what_a_repeat_would_answer_otherwise_is_not_waited_for(server, connect, method):
    head = connect(replay=True)
    server.fail(method, CUT)
    with pytest.raises(headwater.UnavailableError):
        UNREPEATABLE[method](head)
    assert server.count(method) == 1


def test_the_server_says_how_long_to_wait(server, connect):
    head = connect()
    server.fail("ComputeLoss", Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "IN_FLIGHT_BYTES_EXCEEDED", retry_after_s=0.4))
    began = time.monotonic()
    head.cross_entropy(HIDDEN, TARGETS, micro_batch=0)
    assert time.monotonic() - began >= 0.4


def test_all_tries_together_keep_to_the_timeout(server, connect):
    head = connect(retries=headwater.RetryPolicy(max_attempts=1000, initial_backoff=0.05, max_backoff=0.05))
    server.fail("ComputeLoss", *[CUT] * 1000)
    began = time.monotonic()
    with pytest.raises((headwater.UnavailableError, headwater.DeadlineExceededError)):
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=0, timeout_s=0.5)
    assert time.monotonic() - began <= 2.0 and 2 <= server.count("ComputeLoss") <= 25
    # A wait that would outlast the call is not begun.
    server.fail("SealStep", Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=30))
    began = time.monotonic()
    with refused("QUEUE_FULL"):
        head.seal(expected_micro_batches=0, timeout_s=5)
    assert time.monotonic() - began < 4


def test_the_decision_names_the_attempt_that_was_submitted(server, connect):
    head = connect()
    server.fail("ComputeLoss", CUT, CUT)
    out = head.cross_entropy(HIDDEN, TARGETS, micro_batch=7, commit="explicit")
    assert out.attempt == 2
    out.commit()
    head.discard(micro_batch=7)
    head.cross_entropy(HIDDEN, TARGETS, micro_batch=8, commit="explicit").commit()
    assert [request.attempt for request in server.calls["CommitMicroBatch"]] == [2, 0]
    assert server.calls["DiscardMicroBatch"][0].attempt == 2
    # Whoever calls again after an outcome that nobody knows supersedes what may still be computing.
    server.fail("ComputeLoss", *[CUT] * QUICK.max_attempts)
    with pytest.raises(headwater.UnavailableError):
        head.cross_entropy(HIDDEN, TARGETS, micro_batch=9)
    assert head.cross_entropy(HIDDEN, TARGETS, micro_batch=9).attempt == QUICK.max_attempts
    assert head.cross_entropy(HIDDEN, TARGETS, micro_batch=9, attempt=11).attempt == 11


@pytest.mark.parametrize("future", (False, True), ids=("call", "future"))
def test_an_attempt_that_is_given_is_not_below_those_of_this_clients_retries(server, connect, future):
    """Whoever gives it knows what another process has left, and not how often this one has tried since."""
    head = connect()

    def submit(**options):
        arguments = {"micro_batch": 5, "attempt": 2, "commit": "explicit", **options}
        if future:
            return head.cross_entropy_future(HIDDEN, TARGETS, **arguments).result(30)
        return head.cross_entropy(HIDDEN, TARGETS, **arguments)

    full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL", retry_after_s=0.001)
    server.fail("ComputeLoss", *[full] * QUICK.max_attempts)
    with refused("STAGING_FULL", headwater.StagingFullError):
        submit()
    last = 2 + QUICK.max_attempts - 1
    assert submit(allow_held=True).attempt == last
    assert [messages[0].header.attempt for messages in server.calls["ComputeLoss"]] == [*range(2, last + 1), last]
    # What the caller itself has gone beyond is sent as it is, for the server to refuse.
    assert [submit(attempt=attempt).attempt for attempt in (last + 3, last, 1, last + 3)] == [last + 3, last, 1, last + 3]


def test_the_book_of_attempts_tells_retries_from_what_the_caller_names():
    book, key = _retry.AttemptBook(), _retry.StepKey("head", EPOCH, 0)
    assert [book.first(key, 0, named) for named in (None, 0, 3)] == [0, 0, 3]
    for attempt in (3, 4, 5):
        book.note(key, 0, attempt, 3)
    assert [book.first(key, 0, named) for named in (None, 2, 3, 4, 5, 6)] == [5, 2, 5, 5, 5, 6]
    book.note(key, 0, 6)  # the same micro-batch again, by who leaves the counting to the client
    book.note(key, 0, 2, 2)
    assert [book.first(key, 0, named) for named in (None, 2, 3, 6, 7)] == [6, 2, 6, 6, 7]
    book.note(key, 0, 8, 8)
    assert [book.first(key, 0, named) for named in (None, 6, 8)] == [8, 6, 8]


def test_calls_that_add_nothing_have_no_attempt(server, connect):
    head = connect()
    server.fail("ComputeLoss", CUT)
    assert head.cross_entropy(HIDDEN, TARGETS, backward=False).attempt == 0
    assert [messages[0].header.attempt for messages in server.calls["ComputeLoss"]] == [0, 0]


def test_a_cancelled_future_does_not_wait_for_its_retry(server, connect):
    head = connect(retries=headwater.RetryPolicy(initial_backoff=60, max_backoff=60))
    server.fail("ComputeLoss", CUT)
    future = head.cross_entropy_future(HIDDEN, TARGETS, micro_batch=0)
    deadline = time.monotonic() + 10
    while server.count("ComputeLoss") == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    future.cancel()
    with refused("CANCELLED", headwater.CancelledError):
        future.result(10)
    assert server.count("ComputeLoss") == 1


def test_a_cut_upload_goes_on_where_it_stopped(server, connect, monkeypatch):
    monkeypatch.setattr(_channel, "CHUNK_BYTES", 32)
    head = connect()
    weight = np.arange(VOCAB_SIZE * HIDDEN_SIZE, dtype=np.float32).reshape(WEIGHT.shape)
    server.fail("UploadWeights", 32)
    first_try = iter([True])

    def wait_for_the_cut(sent, total):
        # Otherwise all might be on its way before the cut is noticed: too late for a second try.
        deadline = time.monotonic() + 30
        if sent == 32 and next(first_try, False):
            while server.count("UploadWeights") < 2 and time.monotonic() < deadline:
                time.sleep(0.01)

    head.set_weight(weight, upload_id="mine", on_progress=wait_for_the_cut)
    assert bytes(server.uploads["mine-w"]) == weight.tobytes() and server.count("UploadWeights") == 2


def test_weights_set_outside_of_a_step_are_not_sent_twice(server, connect):
    """The first try may have changed the epoch already: a repeat would only be fenced."""
    head = connect()
    server.fail("UploadWeights", WEIGHT.nbytes)
    with pytest.raises(headwater.UnavailableError):
        head.set_weight(WEIGHT)
    assert server.count("UploadWeights") == 1
    server.fail("UploadWeights", WEIGHT.nbytes)
    assert head.replace_weight(WEIGHT).open_step == 1
    assert server.count("UploadWeights") == 3 and head.step == 1


def test_grpc_itself_repeats_nothing(server, connect, monkeypatch):
    """Not even where a service config tells it to; and without our options it would."""
    config = {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.01s",
                    "maxBackoff": "0.02s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
    ours = (*_channel.CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(config)))
    others = tuple(option for option in ours if option[0] not in ("grpc.enable_retries", "grpc.service_config_disable_resolution"))
    for options, expected in ((ours, 1), (others, 4)):
        monkeypatch.setattr(_channel, "CHANNEL_OPTIONS", options)
        head = connect(retries=None)
        server.fail("GetHead", *[CUT] * 4)
        with pytest.raises(headwater.UnavailableError):
            head.info()
        assert server.count("GetHead") == expected
        server._failures["GetHead"].clear()


def test_a_server_that_comes_back_is_found(connect):
    first = ScriptedServer()
    retries = headwater.RetryPolicy(max_attempts=100, initial_backoff=0.05, max_backoff=0.2)
    with headwater.connect(first.address, retries=retries) as client:
        head = client.head("scripted")
        first.stop()
        future = head.cross_entropy_future(HIDDEN, TARGETS, micro_batch=0, timeout_s=30)
        time.sleep(0.3)
        assert not future.done()
        second = ScriptedServer(first.address)
        try:
            assert future.result(30).attempt > 0
        finally:
            second.stop()


def test_the_book_of_attempts_stays_small():
    book = _retry.AttemptBook()
    keys = [_retry.StepKey("head", EPOCH, step) for step in range(100)]
    for key in keys:
        book.note(key, 0, 3)
        book.note(key, 0, 2)
        book.note(key, 1, 0)
    assert [book.get(key, 0) for key in keys[-3:]] == [3, 3, 3] and book.get(keys[0], 0) == 0 == book.get(keys[-1], 1)
    assert len(book._attempts[("head", EPOCH)]) == 3
    book.forget_head("head", EPOCH)
    assert book.get(keys[-1], 0) == 0
    assert book.get(dataclasses.replace(keys[-1], epoch=bytes(16)), 0) == 0


def test_a_slot_of_another_session_is_waited_for(remote, make_head, rng):
    head = make_head(remote.client, rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32), staging_slots=1)
    with headwater.connect(remote.address) as other:
        first = other.head(head.name).cross_entropy(HIDDEN, TARGETS, micro_batch=0, commit="explicit")
        threading.Timer(0.3, first.commit).start()
        second = head.cross_entropy(HIDDEN, TARGETS, micro_batch=1, commit="explicit")
        assert second.state == "STAGED" and second.attempt > 0
        assert second.commit() is False
    assert head.seal(expected_micro_batches=2).totals.micro_batch_count == 2
