"""The log of a real server: its form, its level while it runs, and the ids that calls bring along."""

import json
import os
import sys
import tempfile
from pathlib import Path

import grpc
import numpy as np
import pytest
from headwater.v1 import session_service_pb2, session_service_pb2_grpc

import headwater

sys.path.insert(0, str(Path(__file__).resolve().parent))  # whatever the working directory is

from monitored_run import Server, await_condition

BUILD = os.environ.get("HEADWATER_BUILD_DIR", "")
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def server():
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        flags = ("--log_format=json", f"--log_level_file={directory}/level", f"--trace_dir={directory}/traces")
        server = Server(f"{BUILD}/bin/headwaterd", Path(directory), *flags)
        server.directory = Path(directory)
        yield server
        server.stop()


def lines(server: Server) -> list[dict]:
    """What is in the log so far; the last line may be on its way."""
    return [json.loads(line) for line in server.log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def set_level(server: Server, level: str) -> None:

    def changes() -> int:
        return sum(line["event"] == "log_level_changed" and line["to"] == level for line in lines(server))

    before = changes()
    (server.directory / "new").write_text(level + "\n")
    (server.directory / "new").rename(server.directory / "level")
    await_condition(lambda: changes() > before, level)


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
    await_condition(lambda: any(line.get("request_id") == own_id for line in lines(server)), "the last call's line")
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


@pytest.mark.parametrize("transport", ["grpc", "python"])
def test_a_clients_calls_belong_to_its_trace(server, transport):
    set_level(server, "debug")
    hidden, targets = np.ones((3, 4), np.float32), np.array([1, 2, 3])
    traceparent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    with headwater.connect(server.address, transport=transport, traceparent=traceparent) as client:
        head = client.create_head("h", np.ones((8, 4), np.float32))
        head.cross_entropy(hidden, targets, micro_batch=0)
        head.cross_entropy(hidden, targets, micro_batch=1, commit="explicit").commit(1.0)

    def traced() -> list[dict]:
        files = (server.directory / "traces").glob("*.json")
        return [json.loads(file.read_text())["otherData"] for file in files]

    await_condition(lambda: len(traced()) >= 3, "three traces")
    assert sorted(trace["method"] for trace in traced()) == ["CommitMicroBatch", "ComputeLoss", "ComputeLoss"]
    await_condition(lambda: sum(line.get("method") == "CommitMicroBatch" for line in lines(server)), "the commit's line")
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
@pytest.mark.parametrize("transport", ["grpc", "python"])
def test_what_is_no_traceparent_is_refused_before_anything_is_sent(transport, traceparent):
    with pytest.raises(headwater.InvalidArgumentError) as error:
        headwater.connect("unix:/nonexistent/socket", transport=transport, traceparent=traceparent)
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
    await_condition(lambda: any(line.get("request_id") == "the-end" for line in lines(server)), "the last call's line")
    assert any(line.get("method") == "ComputeLoss" for line in lines(server))
    everything = server.log.read_text() + server.scrape()
    assert "48879.1" not in everything  # the digits before the point alone may be part of a time or an id
    assert np.float32(needle).tobytes() not in everything.encode()
    assert not any((server.directory / "traces").iterdir())  # nobody has asked for any
