"""Backends that the tests run on: headwaterd behind a Unix socket, with 3 vocabulary shards, and `headwater.local`, with 1.

The rows of the first go through gRPC, those of the second lie in shared memory.
"""

import contextlib
import functools
import gc
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import headwater
import headwater.local

sys.path.append(str(Path(__file__).parent))  # where another conftest has loaded this one by its path

from headwaterd import ENGINE, Server, running_server


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "gpu_group: needs two CUDA GPUs or more")


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


def backend_of(*kinds):
    """A fixture that is a backend of each of these kinds."""

    @pytest.fixture(params=kinds)
    def backend(request, backends):
        return backends(request.param)

    return backend


# Place, number of shards, and transport.
backend = backend_of("remote-3-grpc", "local-1")
# For programs that connect by themselves.
each_place = backend_of("remote-1", "local-1")
# For what depends on how rows travel, but not on the number of shards.
each_way = backend_of("remote-1-grpc", "local-1")


@pytest.fixture
def one_shard(backends):
    """For tests in which neither the number of shards nor the way of the rows plays a part."""
    return backends("local-1")


@pytest.fixture
def client(one_shard):
    return one_shard.client


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
def fake_module(monkeypatch):
    """A stand-in for the CUDA engine's module that needs no GPU, as HEADWATER_CUDA_MODULE. A bundle has none."""
    module = Path(os.environ.get("HEADWATER_BUILD_DIR", "")) / "tests" / "libheadwater_fake_cuda.so"
    if not module.exists():
        pytest.skip(f"{module} is not built")
    monkeypatch.setenv("HEADWATER_CUDA_MODULE", str(module))


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
def sizes(request):
    """These sizes, or those that the test's file has under their names."""
    return [getattr(request.module, name, globals()[name]) for name in ("NUM_TOKENS", "HIDDEN_SIZE", "VOCAB_SIZE")]


@pytest.fixture
def rows(rng, sizes):
    """Hidden states and targets."""
    num_tokens, hidden_size, vocab_size = sizes
    return rng.standard_normal((num_tokens, hidden_size)).astype(np.float32), rng.integers(0, vocab_size, num_tokens)


@pytest.fixture
def weight(rng, sizes):
    _, hidden_size, vocab_size = sizes
    return rng.standard_normal((vocab_size, hidden_size)).astype(np.float32)


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
