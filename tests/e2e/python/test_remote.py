"""What only a server can do: be missing, die, refuse early, answer two clients."""

import time

import numpy as np
import pytest
from conftest import running_server
from expectations import refused

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


@pytest.mark.parametrize("address", ["localhost", "", None, 50051, ("localhost", 50051)], ids=repr)
def test_an_address_that_is_none_is_said_before_anything_is_tried(address):
    with refused("INVALID_FIELD", headwater.InvalidArgumentError) as info:
        headwater.connect(address)
    assert "address" in str(info.value) and str(address) in str(info.value) and info.value.metadata["field"] == "address"


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
