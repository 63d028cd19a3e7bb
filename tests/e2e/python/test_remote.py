"""What only a server can do: be missing, die, refuse early, answer two clients."""

import concurrent.futures
import threading
import time

import grpc
import numpy as np
import pytest
from conftest import running_server
from expectations import refused
from headwater.v1 import loss_pb2, loss_service_pb2, loss_service_pb2_grpc, tensor_pb2

import headwater
from headwater import _wire


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running_server("--listen_addresses=127.0.0.1:0") as server:
        address = server.output.read_text().split("listening on ")[1].split()[0]
        with headwater.connect(address, connect_timeout_s=5) as client:
            client.create_head("h", np.ones((4, 8), np.float32), trainable=False)
            assert client.head("h").cross_entropy(np.ones((2, 8), np.float32), np.zeros(2, np.int32)).loss_sum > 0


def test_no_server_is_said_at_once(tmp_path):
    with pytest.raises(headwater.UnavailableError) as info:
        headwater.connect(f"unix:{tmp_path}/nobody.sock", connect_timeout_s=0.2)
    assert "nobody.sock" in str(info.value) and isinstance(info.value, ConnectionError)


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:https",
        ":50051",
        "host name:1",
        "::1:50051",
        "[::1]",
        "http://localhost:50051",
        "dns:///localhost",
        "a:1,b:2",
        "unix:",
        "unix-abstract:",
        "",
        None,
        50051,
        ("localhost", 50051),
    ],
    ids=repr,
)
def test_an_address_that_is_none_is_said_before_anything_is_tried(address):
    with refused("INVALID_FIELD", headwater.InvalidArgumentError) as info:
        headwater.connect(address)
    assert "address" in str(info.value) and str(address) in str(info.value) and info.value.metadata["field"] == "address"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "localhost:1",
        "head_water.example.invalid:1",
        "[::1]:1",
        "dns:localhost:1",
        "dns:///localhost:1",
        "dns:///[::1]:1",
        "ipv4:127.0.0.1:1",
        "ipv6:[::1]:1",
        "unix:/nobody/is here",
        "unix:nobody",
        "unix:///nobody",
        "unix-abstract:headwater-nobody",
    ],
)
def test_addresses_of_every_kind_are_tried(address):
    with pytest.raises(headwater.UnavailableError):
        headwater.connect(address, connect_timeout_s=0.05)


def test_a_client_says_where_it_is_connected_to(remote):
    for options in ({}, {"replay": True}):
        client = headwater.connect(remote.address, token="secret-trainer", tenant="team", **options)
        assert repr(client) == f"<headwater.Client {remote.address}, tenant team>"
        client.close()
        assert repr(client) == f"<headwater.Client {remote.address}, tenant team, closed>"


def test_a_killed_server_is_a_clean_error(rng):
    hidden = rng.standard_normal((20, 32)).astype(np.float32)
    with running_server() as server, headwater.connect(server.address) as client:
        head = client.create_head("victim", rng.standard_normal((64, 32)).astype(np.float32), optimizer=headwater.SGD())
        with server.frozen():
            futures = [head.cross_entropy_future(hidden, [1] * 20, micro_batch=0), head.weight_future(), head.info_future()]
            time.sleep(0.1)
            server.kill()
            for future in futures:
                assert isinstance(future.exception(30), headwater.UnavailableError)
        for call in (head.step_state, client.heads, lambda: head.cross_entropy(hidden, [1] * 20, micro_batch=0)):
            with pytest.raises(headwater.UnavailableError):
                call()


def test_a_closed_client_says_so(remote):
    client = headwater.connect(remote.address)
    client.close()
    client.close()
    with pytest.raises(headwater.UnavailableError):
        client.heads()


def test_an_early_refusal_does_not_wait_for_the_upload(remote, make_head, rng):
    weight = rng.standard_normal((64, 4096)).astype(np.float32)
    head = make_head(remote.client, weight)
    hidden = np.tile(rng.standard_normal((1, 4096)).astype(np.float32), (2000, 1))  # 33 MB
    began = time.monotonic()
    with refused("STEP_MISMATCH", headwater.StepMismatchError):
        head.cross_entropy(hidden, [1] * len(hidden), step=4, micro_batch=0)
    refusal_s = time.monotonic() - began
    began = time.monotonic()
    head.cross_entropy(hidden, [1] * len(hidden), micro_batch=0)
    assert refusal_s < max(2.0, time.monotonic() - began)


def test_errors_carry_reason_and_metadata(remote, make_head):
    head = make_head(remote.client, np.ones((8, 4), np.float32))
    with refused("STEP_MISMATCH") as info:
        head.seal(step=3, expected_micro_batches=0)
    error = info.value
    assert error.code == "FAILED_PRECONDITION" and error.metadata["openStep"] == "0" and error.retry_after_s is None
    assert str(error).startswith("FAILED_PRECONDITION/STEP_MISMATCH: ")


def test_features_that_are_not_built_are_refused(remote):
    spec = _wire.HeadSpec(vocab_size=8, hidden_size=4, data_type=_wire.DATA_TYPE_FLOAT32, low_rank=2)
    request = _wire.CreateHeadRequest(name="tenants/default/heads/low-rank", spec=spec)
    with refused("FEATURE_NOT_BUILT", headwater.FeatureNotBuiltError):
        remote.client._backend.connection.call(b"/headwater.v1.HeadService/CreateHead", request.SerializeToString(), 10)


def test_a_client_that_goes_away_in_its_upload_leaves_nothing(remote, make_head, rng):
    head = make_head(remote.client, rng.standard_normal((64, 32)).astype(np.float32))
    head.cross_entropy(np.ones((4, 32), np.float32), [1, 2, 3, 4], micro_batch=0)
    before = head.gradient()

    targets = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_INT32, shape=[100], data=np.ones(100, np.int32).tobytes())
    term = loss_pb2.LossTerm(
        head=loss_pb2.HeadStep(head=head.name, head_epoch=head.epoch, step=0),
        targets=targets,
        cross_entropy=loss_pb2.CrossEntropyLoss(),
    )
    header = loss_service_pb2.MicroBatchHeader(
        micro_batch=1,
        compute_mode=loss_service_pb2.COMPUTE_MODE_FORWARD_BACKWARD,
        row_count=100,
        hidden_size=32,
        data_type=tensor_pb2.DATA_TYPE_FLOAT32,
        terms=[term],
    )
    rows = np.ones((50, 32), np.float32).tobytes()
    chunk = loss_service_pb2.RowChunk(role=loss_service_pb2.CHUNK_ROLE_HIDDEN, row_count=50, data=rows)
    went_away = threading.Event()

    def half():
        yield loss_service_pb2.ComputeLossRequest(header=header)
        yield loss_service_pb2.ComputeLossRequest(chunk=chunk)
        went_away.wait(30)

    with grpc.insecure_channel(remote.address) as channel:
        call = loss_service_pb2_grpc.LossServiceStub(channel).ComputeLoss(half())
        time.sleep(0.1)
        call.cancel()
        went_away.set()
        with pytest.raises(grpc.RpcError):
            list(call)
    np.testing.assert_array_equal(head.gradient(), before)
    out = head.cross_entropy(np.ones((4, 32), np.float32), [1, 2, 3, 4], micro_batch=1)
    assert not out.replayed
    assert head.seal(expected_micro_batches=2).totals.micro_batch_count == 2


def test_two_clients_share_a_head(remote, make_head, rng):
    head = make_head(remote.client, rng.standard_normal((64, 32)).astype(np.float32), optimizer=headwater.SGD())
    hidden = rng.standard_normal((8, 32)).astype(np.float32)
    with headwater.connect(remote.address) as other_client:
        other = other_client.head(head.name)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            futures = [
                threads.submit(handle.cross_entropy, hidden, [1] * 8, micro_batch=2 * k + rank)
                for k in range(4)
                for rank, handle in enumerate((head, other))
            ]
            assert len({future.result().loss_sum for future in futures}) == 1
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=8)
        other.step += 1  # one rank applies, the others go on
        assert other.cross_entropy(hidden, [1] * 8, micro_batch=0).weight_version == 2
