"""headwaterd outlives its surroundings: readers of its output that go, stop or are full, and signals that are meant for others.

In each of them it goes on training with right values, and drains when it is asked to.
"""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from conftest import START_TIMEOUT_S, server_binary
from expectations import refused

import headwater

VOCAB_SIZE, HIDDEN_SIZE, ROWS = 50, 8, 6
PIPE_BYTES = 8192
LINES = 200  # more than fit there


class Program:
    """headwaterd with output of the test's choice."""

    def __init__(self, directory: Path, *flags: str, **output):
        self.directory = directory
        self.address = f"unix:{directory}/socket"
        ready = directory / "ready"
        self.process = subprocess.Popen(
            [
                server_binary(),
                "--engine=cpu",
                "--threads=1",
                "--log_level=debug",
                "--metrics_address=127.0.0.1:0",
                f"--listen_addresses={self.address}",
                f"--descriptor_socket={directory}/descriptors",
                f"--port_file={ready}",
                *flags,
            ],
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **output},
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert self.process.poll() is None, f"headwaterd ended with status {self.process.returncode}"
            assert time.monotonic() < deadline, "headwaterd did not get ready"
            time.sleep(0.02)

    def makes_log(self) -> None:
        """Has it log LINES lines."""
        with headwater.connect(self.address) as client:
            for _ in range(LINES):
                with refused("HEAD_NOT_FOUND"):
                    client.head("missing")

    def trains(self) -> None:
        """Computes a step, and compares it with NumPy's."""
        rng = np.random.default_rng(0)
        weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        hidden = rng.standard_normal((ROWS, HIDDEN_SIZE)).astype(np.float32)
        targets = rng.integers(0, VOCAB_SIZE, ROWS)
        logits = hidden.astype(np.float64) @ weight.T
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = shifted / shifted.sum(1, keepdims=True)
        rate = 0.5
        with headwater.connect(self.address) as client:
            head = client.create_head("h", weight, dtype="float32", optimizer=headwater.SGD())
            out = head.cross_entropy(hidden, targets, micro_batch=0)
            assert out.loss_sum == pytest.approx(-np.log(probabilities[np.arange(ROWS), targets]).sum(), rel=1e-5)
            head.apply_optimizer_step(learning_rate=rate, expected_micro_batches=1)
            probabilities[np.arange(ROWS), targets] -= 1
            np.testing.assert_allclose(head.weight(), weight - rate * (probabilities.T @ hidden), rtol=1e-4, atol=1e-5)
            head.delete()

    def drains(self) -> None:
        """Ends it as an operator does."""
        self.process.terminate()
        assert self.process.wait(START_TIMEOUT_S) == 0

    def goes_on(self) -> None:
        self.makes_log()
        self.trains()
        self.drains()


@contextlib.contextmanager
def running(*flags: str, **output):
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        program = Program(Path(directory), *flags, **output)
        try:
            yield program
        finally:
            program.process.kill()
            program.process.wait()


@contextlib.contextmanager
def small_pipe():
    """A pipe's two ends, as files."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with open(reader, "rb", buffering=0) as reading, open(writer, "wb", buffering=0) as writing:
        yield reading, writing


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_reader_that_goes(stream):
    with small_pipe() as (reader, writer), running(**{stream: writer}) as program:
        writer.close()
        reader.close()
        program.goes_on()


def test_both_readers_gone_before_the_start():
    with small_pipe() as (reader, writer):
        reader.close()
        with running(stdout=writer, stderr=writer) as program:
            program.goes_on()


def test_a_reader_that_stops_and_comes_back():
    with small_pipe() as (reader, writer), running("--log_format=json", stderr=writer) as program:
        writer.close()
        program.makes_log()
        start = time.monotonic()
        program.trains()
        assert time.monotonic() - start < 5
        assert len(reader.read(PIPE_BYTES)) > PIPE_BYTES // 2  # the reader is back, and finds what there was room for
        program.trains()
        program.drains()
        lines = reader.read(1 << 20).decode().splitlines()
    # Whole lines, the first of which says how many are lost.
    assert '"event":"log_lines_lost","lines":' in lines[0]
    assert int(lines[0].rsplit(":", 1)[1].rstrip("}")) > LINES // 4
    assert all(line.startswith("{") and line.endswith("}") for line in lines)


def test_a_reader_that_stops_for_good():
    with small_pipe() as (_, writer), running(stdout=writer, stderr=writer) as program:
        program.goes_on()


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_full_disk(stream):
    with open("/dev/full", "wb") as full, running(**{stream: full}) as program:
        program.goes_on()


def test_a_log_at_the_limit_of_a_file(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    with (tmp_path / "log").open("wb") as log, running(stderr=log, preexec_fn=limit) as program:
        program.goes_on()
    assert (tmp_path / "log").stat().st_size == 1024


def test_closed_output():
    def close():
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    with running(preexec_fn=close) as program:
        # No file or connection has their numbers, so that no line of the log gets into one.
        for descriptor in (0, 1, 2):
            assert os.readlink(f"/proc/{program.process.pid}/fd/{descriptor}") == "/dev/null"
        program.goes_on()


def test_signals_that_mean_nothing(tmp_path):
    with (tmp_path / "log").open("wb") as log, running(stderr=log) as program:
        for _ in range(3):
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ):
                program.process.send_signal(number)
                time.sleep(0.05)
        program.trains()
        program.process.send_signal(signal.SIGUSR1)
        program.drains()
    text = (tmp_path / "log").read_text()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert f"event=signal_ignored signal={int(number)}\n" in text


def test_a_hangup_drains():
    with running() as program:
        program.trains()
        program.process.send_signal(signal.SIGHUP)
        assert program.process.wait(START_TIMEOUT_S) == 0


def test_readers_of_metrics_and_descriptors_that_go(tmp_path):
    with (tmp_path / "out").open("wb") as out, running(stdout=out) as program:
        port = int((tmp_path / "out").read_text().split("metrics on port ")[1])
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as scrape:
                scrape.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at the end
                scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n" * 4)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as descriptors:
                descriptors.connect(f"{program.directory}/descriptors")
                with contextlib.suppress(BrokenPipeError):
                    descriptors.send(b"nonsense")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"headwater_" in page.read()
        program.trains()
        program.drains()
