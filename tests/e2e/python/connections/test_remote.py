"""What only a server can do: be missing, be reached past proxies."""

import numpy as np
import pytest
from conftest import running_server
from expectations import refused
from scripted_server import CUT

import headwater


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running_server("--listen_addresses=127.0.0.1:0") as server:
        with headwater.connect(server.address, connect_timeout_s=5) as client:
            client.create_head("h", np.ones((4, 8), np.float32), trainable=False)
            assert client.head("h").cross_entropy(np.ones((2, 8), np.float32), np.zeros(2, np.int32)).loss_sum > 0


def test_no_server_is_said_at_once(tmp_path):
    with pytest.raises(headwater.UnavailableError) as info:
        headwater.connect(f"unix:{tmp_path}/nobody.sock", connect_timeout_s=0.2)
    assert "nobody.sock" in str(info.value) and isinstance(info.value, ConnectionError)


def test_what_the_core_refuses_is_called_by_its_argument():
    for arguments, field, told in (
        ({"address": "localhost"}, "address", "address must be"),
        ({"address": "localhost:1", "token": "secret with spaces"}, "token", "printable ASCII"),
    ):
        with refused("INVALID_FIELD", headwater.InvalidArgumentError, told, field=field) as info:
            headwater.connect(**arguments)
        assert "secret" not in str(info.value)


def test_a_client_says_where_it_is_connected_to(remote):
    for options in ({}, {"replay": True}):
        client = headwater.connect(remote.address, token="secret-trainer", tenant="team", **options)
        assert repr(client) == f"<headwater.Client {remote.address}, tenant team>"
        client.close()
        assert repr(client) == f"<headwater.Client {remote.address}, tenant team, closed>"


def test_a_decision_names_the_attempt_that_the_core_has_come_to(scripted):
    """tests/e2e/protocol has what is tried again, and when."""
    policy = headwater.RetryPolicy(max_attempts=3, initial_backoff=0.001, max_backoff=0.001)
    with headwater.connect(scripted.address, retries=policy, transport="grpc") as client:
        scripted.fail("ComputeLoss", CUT, CUT)
        out = client.head("scripted").cross_entropy(np.zeros((1, 4), np.float32), [1], micro_batch=0, commit="explicit")
        out.commit()
        assert out.attempt == 2 == scripted.calls["CommitMicroBatch"][0].attempt
