"""Servers and clients for the tests against real frameworks, which tests/frameworks/run runs in an environment of its own."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import headwater
import headwater.local

# The server's start and end are those of the end-to-end tests. By path, because both files are called conftest.
_spec = importlib.util.spec_from_file_location("e2e_conftest", Path(__file__).parents[1] / "e2e/python/conftest.py")
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)


@pytest.fixture(scope="session", autouse=True)
def small_and_quiet():
    torch.set_num_threads(1)  # tiny models gain nothing from more, and wait for them where builds run beside the tests
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def server():
    """A headwaterd; its `load_root` and `checkpoints` are folders, its `address` a Unix socket."""
    with _e2e.running_server() as running:
        yield running


@pytest.fixture(scope="session")
def remote_client(server):
    with headwater.connect(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A local server, one for each file, with folders for files to load and for checkpoints."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "load").mkdir()
    with headwater.local.connect(checkpoint_dir=folder / "checkpoints", load_root=folder / "load") as client:
        yield client
