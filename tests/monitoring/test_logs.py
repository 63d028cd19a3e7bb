"""The log of a real server: its form, its level while it runs, and the ids that calls bring along."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from headwater.v1 import session_service_pb2, session_service_pb2_grpc

import headwater

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e/python"))

from certificates import make_authority, make_signed
from monitored_run import Server, eventually, running

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def server():
    with running("--log_level_file={directory}/level", "--trace_dir={directory}/traces") as server:
        yield server


def lines(server: Server) -> list[dict]:
    """The lines in the log so far; the last line may be on its way."""
    return [json.loads(line) for line in server.log_text().splitlines(keepends=True) if line.endswith("\n")]


def set_level(server: Server, level: str) -> None:

    def changes() -> int:
        return sum(line["event"] == "log_level_changed" and line["to"] == level for line in lines(server))

    before = changes()
    (server.directory / "new").write_text(level + "\n")
    (server.directory / "new").rename(server.directory / "level")
    eventually(lambda: changes() > before, level)


def ask(server: Server, request_id: str, *traceparents: str) -> dict[str, str]:
    """GetServerInfo with these ids; the initial metadata of the answer."""
    with grpc.insecure_channel(server.address) as channel:
        metadata = [("x-request-id", request_id), *(("traceparent", traceparent) for traceparent in traceparents)]
        stub = session_service_pb2_grpc.SessionServiceStub(channel)
        _, call = stub.GetServerInfo.with_call(session_service_pb2.GetServerInfoRequest(), metadata=metadata)
        return dict(call.initial_metadata())


def test_level_and_ids(server):
    ask(server, "too-early")
    set_level(server, "debug")
    assert ask(server, "with-trace", f"00-{TRACE_ID}-{PARENT_ID}-00")["x-request-id"] == "with-trace"
    ask(server, "with-nonsense", f"00-{TRACE_ID}-{PARENT_ID}-0")
    ask(server, "with-two", *[f"00-{TRACE_ID}-{PARENT_ID}-00"] * 2)
    own_id = ask(server, "no good id")["x-request-id"]
    assert own_id != "no good id"
    eventually(lambda: any(line.get("request_id") == own_id for line in lines(server)), "the last call's line")
    set_level(server, "error")
    ask(server, "too-late")
    set_level(server, "debug")

    calls = {line["request_id"]: line for line in lines(server) if line["event"] == "rpc"}
    assert {"with-trace", "with-nonsense", "with-two", own_id} <= set(calls) and not {"too-early", "too-late"} & set(calls)
    traced = calls["with-trace"]
    assert (traced["method"], traced["code"], traced["level"]) == ("GetServerInfo", "OK", "debug")
    assert (traced["trace_id"], traced["parent_span_id"]) == (TRACE_ID, PARENT_ID)
    assert len(traced["span_id"]) == 16 and traced["span_id"] != PARENT_ID
    for request_id in ("with-nonsense", "with-two", own_id):
        assert "trace_id" not in calls[request_id]


def test_a_clients_calls_belong_to_its_trace(server):
    set_level(server, "debug")
    hidden, targets = np.ones((3, 4), np.float32), np.array([1, 2, 3])
    traceparent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    with headwater.connect(server.address, transport="grpc", traceparent=traceparent) as client:
        head = client.create_head("h", np.ones((8, 4), np.float32))
        head.cross_entropy(hidden, targets, micro_batch=0)
        head.cross_entropy(hidden, targets, micro_batch=1, commit="explicit").commit(1.0)

    def traced() -> list[dict]:
        files = (server.directory / "traces").glob("*.json")
        return [json.loads(file.read_text())["otherData"] for file in files]

    eventually(lambda: len(traced()) >= 3, "three traces")
    assert sorted(trace["method"] for trace in traced()) == ["CommitMicroBatch", "ComputeLoss", "ComputeLoss"]
    eventually(lambda: sum(line.get("method") == "CommitMicroBatch" for line in lines(server)), "the commit's line")
    calls = {line["request_id"]: line for line in lines(server) if line["event"] == "rpc"}
    assert {call["trace_id"] for call in calls.values() if call["method"] == "CreateHead"} == {TRACE_ID}
    for trace in traced():
        line = calls[trace["request_id"]]
        assert (trace["trace_id"], trace["parent_span_id"], trace["code"]) == (TRACE_ID, PARENT_ID, "OK")
        assert (line["trace_id"], line["span_id"], line["method"]) == (TRACE_ID, trace["span_id"], trace["method"])


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"01-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01\n",
        7,
    ],
)
def test_what_is_no_traceparent_is_refused_before_anything_is_sent(traceparent):
    with pytest.raises(headwater.InvalidArgumentError) as error:
        headwater.connect("unix:/nonexistent/socket", traceparent=traceparent)
    assert error.value.metadata["field"] == "traceparent"


def test_no_contents_of_tensors(server):
    """A value that is nowhere else is nowhere in log, metrics or traces."""
    set_level(server, "debug")
    needle = 48879.1230
    with headwater.connect(server.address, transport="grpc") as client:
        head = client.create_head("h", np.full((8, 4), needle, np.float32))
        head.cross_entropy(np.full((3, 4), needle, np.float32), np.array([1, 2, 3]), micro_batch=0)
        with pytest.raises(headwater.InvalidArgumentError):
            head.cross_entropy(np.full((3, 4), needle, np.float32), np.array([1, 2, 7777]), micro_batch=1)
    ask(server, "the-end")
    eventually(lambda: any(line.get("request_id") == "the-end" for line in lines(server)), "the last call's line")
    assert any(line.get("method") == "ComputeLoss" for line in lines(server))
    everything = server.log_text() + server.metrics_page()
    assert "48879.1" not in everything  # the digits before the point alone may be part of a time or an id
    assert np.float32(needle).tobytes() not in everything.encode()
    assert not any((server.directory / "traces").iterdir())  # no call has asked for any


def value(server: Server, series: str) -> float:
    """The sum of all samples whose name and labels begin so."""
    found = [value for name, value in server.metrics().items() if name.startswith(series)]
    assert found, series
    return sum(found)


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_an_orderly_close_is_no_refusal(transport, session):
    with running() as server:
        with headwater.connect(server.address, transport=transport, session=session) as client:
            head = client.create_head("h", np.ones((8, 64), np.float32))
            hidden, targets = np.ones((4096, 64), np.float32), np.zeros(4096, np.int64)
            head.cross_entropy(hidden, targets, micro_batch=0)
            if session:
                head.cross_entropy(hidden, targets, micro_batch=1, commit="explicit").commit(1.0)
        assert value(server, "headwater_commits_total") == 1 + session
        time.sleep(0.2)  # no test waits for the rest that a close may send
        assert value(server, "headwater_refusals_total") == 0
        assert value(server, "headwater_regions") == 0
        assert lines(server) == []


SILENT = """
import os, sys
import numpy as np
import headwater
client = headwater.connect(sys.argv[1], session_lease=0.5)
head = client.create_head(sys.argv[2], np.ones((8, 4), np.float32))
commit = sys.argv[3]
result = head.cross_entropy(np.ones((3, 4), np.float32), np.array([1, 2, 3]), micro_batch=0, commit="explicit")
if commit == "decided":
    result.commit(1.0)
os._exit(0)
"""


@pytest.mark.parametrize(("what", "level", "dropped"), [("decided", "info", 0), ("undecided", "warning", 1)])
def test_a_session_that_expires_is_a_warning_only_if_contributions_are_dropped(what, level, dropped):
    with running("--log_level=info") as server:
        subprocess.run([sys.executable, "-c", SILENT, server.address, "h", what], check=True, timeout=120)
        eventually(lambda: value(server, 'headwater_sessions_ended_total{how="expired"') == 1, "the end of the lease")
        (line,) = eventually(lambda: [line for line in lines(server) if line["event"] == "session_expired"], "its line")
        assert (line["level"], line["dropped_contributions"]) == (level, dropped)
        assert line["client"]
        assert value(server, 'headwater_session_discards_total{how="expired"') == dropped
        assert value(server, 'headwater_session_discards_total{how="closed"') == 0
        if not dropped:
            assert not [line for line in lines(server) if line["level"] != "info"]


def test_the_oldest_unsaved_change_has_an_age():
    with running() as server, headwater.connect(server.address) as client:

        def age() -> float:
            return value(server, "headwater_unsaved_change_age_seconds")

        assert age() == 0
        teacher = np.ones((8, 4), np.float32)
        client.create_head("teacher", teacher, trainable=False)
        assert age() == 0  # a frozen head is loaded again
        heads = [client.create_head(name, np.ones((8, 4), np.float32), optimizer=headwater.SGD()) for name in ("a", "b")]
        assert 0 < age() < 60
        for head in heads:
            head.save("first")
        assert age() == 0
        hidden, targets = np.ones((3, 4), np.float32), np.array([1, 2, 3])
        heads[0].cross_entropy(hidden, targets, micro_batch=0)
        assert age() == 0  # a step that is open is no checkpoint's
        heads[0].apply_optimizer_step(learning_rate=0.1, expected_micro_batches=[0])
        before = age()
        assert 0 < before < 60
        heads[1].save("second")
        assert age() > before
        heads[0].restore("first")  # the steps since then would come back instead, if there were any checkpoint of them
        assert age() > 0
        heads[0].save("second")
        assert age() == 0


def swap(folder: Path, name: str) -> None:
    """Puts the pair into the place of the server's own."""
    for kind in ("key", "crt"):
        shutil.copy(folder / f"{name}.{kind}", folder / "new")
        (folder / "new").rename(folder / f"server.{kind}")


@contextlib.contextmanager
def running_with_tls(folder: Path, *flags: str):
    """A server with TLS, which shows server.crt; and the port."""
    tls = [f"--tls_certificate={folder}/server.crt", f"--tls_key={folder}/server.key"]
    with running("--log_level=info", "--admin_listen_addresses=localhost:0", *tls, *flags) as server:
        address = server.output.read_text().split("admin on ")[1].split()[0]
        yield server, int(address.rsplit(":", 1)[1])


def test_certificates_are_reported_at_the_start_and_when_they_change(tmp_path):
    day = 86400
    make_authority(tmp_path, "ca", days=100)
    for name, days in (("old", 10), ("new-one", 20), ("ended", -1)):
        make_signed(tmp_path, name, days=days)
    swap(tmp_path, "old")

    def certificate_lines() -> list[dict]:
        return [line for line in lines(server) if line["event"].startswith("tls")]

    with running_with_tls(tmp_path, f"--tls_client_ca={tmp_path}/ca.crt") as (server, _):

        def days_left(certificate: str) -> float:
            series = f'headwater_tls_certificate_expiry_timestamp_seconds{{certificate="{certificate}"'
            return (value(server, series) - time.time()) / day

        assert days_left("server") == pytest.approx(10, abs=0.1)
        assert days_left("client_ca") == pytest.approx(100, abs=0.1)
        (line,) = certificate_lines()
        assert (line["level"], line["client_certificates"]) == ("info", "required")
        swap(tmp_path, "new-one")
        eventually(lambda: days_left("server") > 19, "the new certificate")
        line = certificate_lines()[-1]
        assert line["event"] == "tls" and line["level"] == "info"
        stamp = time.strftime("%Y-%m-%d", time.gmtime(time.time() + days_left("server") * day))
        assert line["certificate_ends"].startswith(stamp)
        swap(tmp_path, "ended")
        eventually(lambda: days_left("server") < 0, "the certificate that has ended")
        line = certificate_lines()[-1]
        assert (line["level"], line["message"]) == ("warning", "the certificate has ended: clients refuse it")
        (tmp_path / "server.key").write_text("no key")
        eventually(lambda: certificate_lines()[-1]["event"] == "tls_files_not_usable", "the key that is none")
        assert certificate_lines()[-1]["level"] == "warning"
        assert f"tls_key: {tmp_path}/server.key" in certificate_lines()[-1]["message"]
        assert days_left("server") < 0


def test_strangers_handshakes_are_counted_and_fill_no_log(tmp_path):
    make_authority(tmp_path, "ca")
    make_signed(tmp_path, "own")
    swap(tmp_path, "own")
    strangers, at_once, a_second = 1500, 100, 10
    with running_with_tls(tmp_path) as (server, port):
        start = time.monotonic()
        for _ in range(strangers):
            with socket.create_connection(("localhost", port)) as stranger:
                stranger.settimeout(10)
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    stranger.recv(100)
        failures = "headwater_tls_handshake_failures_total"
        eventually(lambda: value(server, failures) >= strangers, "the last failure")
        seconds = time.monotonic() - start
        time.sleep(0.3)  # there is room for one more line, which says what is missing
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            eventually(lambda: value(server, failures) == strangers + 1, "the stranger")
        handshakes = [line for line in lines(server) if line["event"] == "tls_handshake_failed"]  # every line is JSON
        assert at_once <= len(handshakes) <= at_once + a_second * (seconds + 2)
        assert len(handshakes) + sum(line.get("lines_left_out", 0) for line in handshakes) == strangers + 1
        assert {line["level"] for line in handshakes} == {"warning"}
        assert all("http request" in line["message"] and line["source"].startswith("ssl_transport") for line in handshakes)
