"""Backends that the tests run on: headwaterd behind a Unix socket, with 3 vocabulary shards, and `headwater.local`, with 1.

The rows of the first go through gRPC, those of the second lie in shared memory.

HEADWATERD names the server; without it, bin/headwaterd of the build that HEADWATER_BUILD_DIR names. HEADWATER_TEST_ENGINE is their
engine, "cpu" or "cuda"; without it, "cpu".
"""

import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import headwater
import headwater.local

START_TIMEOUT_S = 60
ENGINE = os.environ.get("HEADWATER_TEST_ENGINE", "cpu")
# Place, number of shards, and transport.
BACKENDS = ("remote-3-grpc", "local-1")
# For headwater.local, too, in this process and in those that the tests start.
if "HEADWATER_BUILD_DIR" in os.environ:
    os.environ.setdefault("HEADWATERD", os.path.join(os.environ["HEADWATER_BUILD_DIR"], "bin", "headwaterd"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "gpu_group: needs two CUDA GPUs or more")


def server_binary() -> str:
    """Path of headwaterd; fails where there is none, because a suite without a server proves nothing."""
    path = os.environ.get("HEADWATERD")
    if not path or not os.access(path, os.X_OK):
        pytest.fail(
            f"set HEADWATERD to headwaterd, or HEADWATER_BUILD_DIR to a build with bin/headwaterd (have {path!r})", pytrace=False
        )
    return path


class Server:
    """A headwaterd of our own, in a temporary directory, which flags call {directory}; `process`: options of its Popen."""

    def __init__(self, directory: Path, *flags: str, **process):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.load_root = directory / "load"
        self.load_root.mkdir()
        self.log = (directory / "log").open("w+b")
        self.output = directory / "output"
        ready = directory / "ready"
        self._command = [
            server_binary(),
            f"--listen_addresses=unix:{directory}/hw.sock",
            f"--port_file={ready}",
            "--metrics_address=",
            f"--checkpoint_directory={self.checkpoints}",
            f"--load_root={self.load_root}",
            "--log_level=warning",
            f"--engine={ENGINE}",
            *(flag.replace("{directory}", str(directory)) for flag in flags),
        ]
        self._ready = ready
        self._process_options = process
        self.start()

    def start(self) -> None:
        """Starts it, for the first time or again: at the same address, on the same checkpoints."""
        self._ready.unlink(missing_ok=True)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(self._command, **{"stdout": output, "stderr": self.log, **self._process_options})
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self.log_text()
                self.stop()
                pytest.fail(f"headwaterd did not get ready: {log}", pytrace=False)
            time.sleep(0.02)
        self.address = self._ready.read_text().split()[0]

    def metrics_port(self) -> str:
        """The port of its metrics; start it with --metrics_address=127.0.0.1:0."""
        return self.output.read_text().split("metrics on port ")[1].split()[0]

    def metrics_page(self, host: str = "127.0.0.1") -> str:
        with urllib.request.urlopen(f"http://{host}:{self.metrics_port()}/metrics", timeout=10) as page:
            return page.read().decode()

    def metrics(self) -> dict[str, float]:
        """Its metrics by name with labels."""
        lines = self.metrics_page().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def log_text(self) -> str:
        """What it has logged."""
        self.log.flush()
        return (self.directory / "log").read_text(errors="replace")

    @contextlib.contextmanager
    def frozen(self):
        """Stops it for a while: calls hang without depending on how fast the machine is."""
        self.process.send_signal(signal.SIGSTOP)
        # One thread takes the signal and stops the others; on a busy machine they go on until it has its turn.
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it without warning."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """As a server that has crashed, and that something starts again."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Ends it in an orderly way; by force if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()


@contextlib.contextmanager
def running_server(*flags: str, **process):
    """A server for a `with` statement. Its socket's path must be short, so it does not live under pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="hw-") as directory:
        server = Server(Path(directory), *flags, **process)
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session", autouse=True)
def frozen_modules():
    """Takes the objects of imports from the garbage collector: attach() looks through those that it knows."""
    gc.freeze()


@dataclass
class Backend:
    """A client, where its loadable files lie, and its server's address; None: the server is the client's own."""

    client: headwater.Client
    load_root: Path
    address: str | None = None


@pytest.fixture(scope="session")
def backends():
    """Backends by kind, each started when it is first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def server(shards: str) -> Server:
            return stack.enter_context(running_server(f"--shards={shards}"))

        @functools.cache
        def get(kind: str) -> Backend:
            place, shards, *transport = kind.split("-")
            if place == "remote":
                address = server(shards).address
                client = stack.enter_context(headwater.connect(address, transport=transport[0] if transport else "auto"))
                return Backend(client, server(shards).load_root, address)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-")))
            (directory / "load").mkdir()
            folders = {"checkpoint_dir": directory / "checkpoints", "load_root": directory / "load"}
            client = stack.enter_context(headwater.local.connect(shards=int(shards), engine=ENGINE, **folders))
            return Backend(client, directory / "load")

        yield get


@pytest.fixture(params=BACKENDS)
def backend(request, backends):
    return backends(request.param)


@pytest.fixture
def one_shard(backends):
    """For tests in which neither the number of shards nor the way of the rows plays a part."""
    return backends("local-1")


@pytest.fixture
def client(one_shard):
    return one_shard.client


@pytest.fixture(params=("remote-1", "local-1"))
def each_place(request, backends):
    """For programs that connect by themselves."""
    return backends(request.param)


@pytest.fixture(params=("remote-1-grpc", "local-1"))
def each_way(request, backends):
    """For what depends on how rows travel, but not on the number of shards."""
    return backends(request.param)


@pytest.fixture
def remote(backends):
    return backends("remote-1")


@pytest.fixture(scope="module")
def sharing():
    """A server of this host that shares memory, and its socket."""
    with running_server("--descriptor_socket={directory}/memory.sock") as server:
        yield server


@pytest.fixture(params=("shared_memory", "grpc"))
def slow(request, weight):
    """A server that can be frozen, a head on it, and the way that rows take: each that there is."""
    with running_server("--descriptor_socket={directory}/memory.sock") as server:
        with headwater.connect(server.address, transport=request.param) as client:
            yield server, client.create_head("slow", weight), request.param


@pytest.fixture
def scripted():
    """A server that answers by a script."""
    from scripted_server import ScriptedServer

    server = ScriptedServer()
    yield server
    server.stop()


_numbers = itertools.count()


@pytest.fixture
def names():
    """Makes names of a client's heads, and deletes the heads afterwards."""
    made = []

    def name(client):
        made.append((client, f"test-{next(_numbers)}"))
        return made[-1][1]

    yield name
    for client, head in made:
        with contextlib.suppress(headwater.NotFoundError, headwater.UnavailableError):
            client.head(head).delete(force=True)


@pytest.fixture
def make_head(names):
    """Creates heads with names of their own."""
    return lambda client, weight, bias=None, **options: client.create_head(names(client), weight, bias, **options)


@pytest.fixture
def rng(request):
    """A generator whose seed is the test's name, so that no test depends on which others ran."""
    return np.random.default_rng(list(request.node.name.encode()))


# ---- a head and a micro-batch of any kind --------------------------------------------------------------------------------

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 12, 16, 40


@pytest.fixture
def rows(rng):
    """Hidden states and targets."""
    return rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32), rng.integers(0, VOCAB_SIZE, NUM_TOKENS)


@pytest.fixture
def weight(rng):
    return rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)


# ---- of the tests in pytorch/ --------------------------------------------------------------------------------------------


@pytest.fixture
def problem(rng):
    """A trunk, a head's tensors and a batch."""
    from torch_model import Problem

    return Problem(rng)


@pytest.fixture
def new_head(client, make_head, problem):
    """Creates heads with the problem's weight and bias."""
    return lambda **options: problem.head(client, make_head, **options)


@pytest.fixture
def head(new_head):
    """The problem's head, with SGD."""
    return new_head()


@pytest.fixture
def trunk(problem):
    """The problem's trunk, as a parameter."""
    return problem.parameter()
