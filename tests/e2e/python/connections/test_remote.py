"""What only a server can do: be missing, be reached past proxies, ask for TLS and tokens, have addresses.

access_test.cc has what the client core refuses.
"""

import itertools

import numpy as np
import pytest
from certificates import make_access
from expectations import refused
from headwaterd import running_server
from scripted_server import CUT

import headwater

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 3000, 512, 32  # 6 MB of float32 rows: more than one stream


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


# ---- TLS and tokens ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def access(tmp_path_factory):
    """The folder with certificates of a server and a client, and a server's flags."""
    folder = tmp_path_factory.mktemp("access")
    return folder, make_access(folder, "secret-trainer", tenant="team", admin=["*"])


def test_a_client_trains_with_tls_and_a_token(access, weight, rows):
    files, flags = access
    tls = headwater.TLS(
        ca_certificate=f"{files}/ca.crt", client_certificate=f"{files}/client.crt", client_key=f"{files}/client.key"
    )
    with running_server("--listen_addresses=127.0.0.1:0", *itertools.chain(*flags.values())) as server:
        with headwater.connect(server.address, tls=tls, token="secret-trainer", tenant="team") as client:
            assert client.health() == "SERVING"
            head = client.create_head("trained", weight, optimizer=headwater.SGD())
            assert np.isfinite(head.cross_entropy(*rows, micro_batch=0).loss_sum)
            head.cross_entropy(*rows, micro_batch=1, commit="explicit").commit()  # which opens a session
            head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=2)
        assert "secret-" not in server.log_text()


@pytest.mark.parametrize(
    ("address", "protection", "warnings"),
    [
        ("0.0.0.0:0", (), 1),
        ("0.0.0.0:0", ("tokens",), 1),
        ("0.0.0.0:0", ("tls",), 1),
        ("0.0.0.0:0", ("tls", "tokens"), 0),
        ("127.0.0.1:0", (), 0),
        ("localhost:0", ("tokens",), 0),
    ],
)
def test_a_server_that_is_open_to_the_network_says_so(access, address, protection, warnings):
    flags = (flag for name in protection for flag in access[1][name])
    with running_server(f"--listen_addresses={address}", *flags) as server:
        assert server.log_text().count("unprotected") == warnings


def test_admin_has_addresses_of_its_own(access):
    flags = (*access[1]["tokens"], "--admin_listen_addresses=unix:{directory}/admin.sock", "--unix_socket_mode=0600")
    with running_server(*flags) as server:
        options = {"token": "secret-trainer", "tenant": "team"}
        weight = np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
        with headwater.connect(server.address, **options) as data:
            with pytest.raises(headwater.PermissionDeniedError):
                data.create_head("h", weight)
            with headwater.connect(f"unix:{server.directory}/admin.sock", **options) as admin:
                admin.create_head("h", weight)
            head = data.head("h")
            head.cross_entropy(np.ones((4, HIDDEN_SIZE), np.float32), np.zeros(4, np.int32), micro_batch=0)
