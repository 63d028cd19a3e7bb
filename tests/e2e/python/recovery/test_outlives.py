"""headwaterd outlives its surroundings: readers of its output that go, stop or are full, and signals that are meant for others.

In each of them it goes on training with right values, and drains when it is asked to.
"""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import time

import pytest
from expectations import refused
from headwaterd import START_TIMEOUT_S, running_server
from loss_oracle import check_training

import headwater

PIPE_BYTES = 8192
LINES = 200  # more than fit there


def running(*flags, **output):
    """A server with output of the test's choice."""
    flags = "--threads=1", "--log_level=debug", "--metrics_address=127.0.0.1:0", *flags
    return running_server("--descriptor_socket={directory}/descriptors", *flags, **output)


def make_log(server):
    with headwater.connect(server.address) as client:
        for _ in range(LINES):
            with refused("HEAD_NOT_FOUND"):
                client.head("missing")


def train(server):
    with headwater.connect(server.address) as client:
        check_training(client)


def drain(server):
    server.process.terminate()
    assert server.process.wait(START_TIMEOUT_S) == 0


def check_goes_on(server):
    make_log(server)
    train(server)
    drain(server)


@contextlib.contextmanager
def small_pipe():
    """A pipe's two ends, as files."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with open(reader, "rb", buffering=0) as reading, open(writer, "wb", buffering=0) as writing:
        yield reading, writing


@pytest.mark.parametrize("stream", ("stderr", "stdout"))
def test_a_reader_that_goes(stream):
    with small_pipe() as (reader, writer), running(**{stream: writer}) as server:
        writer.close()
        reader.close()
        check_goes_on(server)


@pytest.mark.parametrize("before", (True, False), ids=("gone before the start", "stops for good"))
def test_readers_of_both(before):
    with small_pipe() as (reader, writer):
        if before:
            reader.close()
        with running(stdout=writer, stderr=writer) as server:
            check_goes_on(server)


def test_a_reader_that_stops_and_comes_back():
    with small_pipe() as (reader, writer), running("--log_format=json", stderr=writer) as server:
        writer.close()
        make_log(server)
        start = time.monotonic()
        train(server)
        assert time.monotonic() - start < 5
        assert len(reader.read(PIPE_BYTES)) > PIPE_BYTES // 2  # the reader is back, and finds what there was room for
        train(server)
        drain(server)
        lines = reader.read(1 << 20).decode().splitlines()
    # Whole lines, the first of which says how many are lost.
    assert '"event":"log_lines_lost","lines":' in lines[0]
    assert int(lines[0].rsplit(":", 1)[1].rstrip("}")) > LINES // 4
    assert all(line.startswith("{") and line.endswith("}") for line in lines)


@pytest.mark.parametrize("stream", ("stderr", "stdout"))
def test_a_full_disk(stream):
    with open("/dev/full", "wb") as full, running(**{stream: full}) as server:
        check_goes_on(server)


def test_a_log_at_the_limit_of_a_file(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    with (tmp_path / "log").open("wb") as log, running(stderr=log, preexec_fn=limit) as server:
        check_goes_on(server)
    assert (tmp_path / "log").stat().st_size == 1024


def test_closed_output():
    def close():
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    with running(preexec_fn=close) as server:
        # No file or connection has their numbers, so that no line of the log gets into one.
        for descriptor in (0, 1, 2):
            assert os.readlink(f"/proc/{server.process.pid}/fd/{descriptor}") == "/dev/null"
        check_goes_on(server)


def test_signals_that_mean_nothing():
    with running() as server:
        for _ in range(3):
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ):
                server.process.send_signal(number)
                time.sleep(0.05)
        train(server)
        server.process.send_signal(signal.SIGUSR1)
        drain(server)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            assert f"event=signal_ignored signal={int(number)}\n" in server.log_text()


def test_readers_of_metrics_and_descriptors_that_go():
    with running() as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", int(server.metrics_port()))) as scrape:
                scrape.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at the end
                scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n" * 4)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as descriptors:
                descriptors.connect(f"{server.directory}/descriptors")
                with contextlib.suppress(BrokenPipeError):
                    descriptors.send(b"nonsense")
        assert server.metrics()
        train(server)
        drain(server)
