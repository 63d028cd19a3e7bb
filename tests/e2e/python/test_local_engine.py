"""Which engine `headwater.local` starts. A stand-in for the CUDA engine's module makes it possible to test this without a GPU."""

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

import headwater
import headwater.local
from headwater._engine_library import Engine, EngineHead, Staged


@pytest.fixture
def fake_module(monkeypatch):
    """The stand-in, as HEADWATER_CUDA_MODULE. A bundle has none."""
    module = Path(os.environ["HEADWATER_BUILD_DIR"]) / "tests" / "libheadwater_fake_cuda.so"
    if not module.exists():
        pytest.skip("this build has no stand-in for the CUDA engine's module")
    monkeypatch.setenv("HEADWATER_CUDA_MODULE", str(module))


def test_the_cpu_is_the_default():
    with headwater.local.connect() as client:
        assert client.server_info().engine == "cpu"


def test_a_cuda_engine_that_cannot_be_had_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("HEADWATER_CUDA_MODULE", "/nonexistent-folder/module.so")
    with pytest.raises(headwater.FeatureNotBuiltError, match="there is no file where HEADWATER_CUDA_MODULE says"):
        headwater.local.connect(engine="cuda")


def test_the_module_is_loaded_and_computes(fake_module):
    weight = np.random.default_rng(1).standard_normal((7, 3)).astype(np.float32)
    hidden = np.random.default_rng(2).standard_normal((5, 3)).astype(np.float32)
    losses = {}
    for engine in ("cpu", "cuda"):
        with headwater.local.connect(engine=engine, algorithm_cache=None) as client:
            assert client.server_info().engine == engine
            head = client.create_head("h", weight, trainable=False)
            losses[engine] = head.cross_entropy(hidden, np.arange(5)).loss_sum
    assert losses["cpu"] == losses["cuda"]  # behind the stand-in is the same engine


def test_the_device_reaches_the_engine(fake_module):
    with pytest.raises(headwater.FeatureNotBuiltError, match="no fake GPU is visible"):
        headwater.local.connect(engine="cuda", device=7)


def test_a_client_that_is_forgotten_frees_its_engine(monkeypatch):
    """Also one whose head has a contribution that waits for its decision, and refers to all of it."""
    freed = []
    for kind in (Engine, EngineHead, Staged):
        name = "discard" if kind is Staged else "destroy"
        free = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, free=free, kind=kind: (freed.append(kind), free(self)))
    client = headwater.local.connect()
    head = client.create_head("h", np.ones((7, 3), np.float32))
    out = head.cross_entropy(np.ones((5, 3), np.float32), np.arange(5), micro_batch=0, commit="explicit")
    backend = weakref.ref(client._backend)
    del client, head
    gc.collect()
    assert backend() is not None and not freed  # the answer can still be committed
    del out
    gc.collect()
    assert backend() is None and freed == [Staged, EngineHead, Engine]


@pytest.mark.parametrize(("name", "value"), [("engine", "tpu"), ("engine", None), ("device", -1), ("device", 1.5)])
def test_arguments_are_checked(name, value):
    with pytest.raises(headwater.InvalidArgumentError, match=name):
        headwater.local.connect(**{name: value})


def test_the_algorithms_are_kept_where_caches_are(monkeypatch):
    from headwater.local import _algorithm_cache

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert _algorithm_cache("auto") == "/caches/headwater/cublaslt.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _algorithm_cache("auto") == "/home/somebody/.cache/headwater/cublaslt.json"
    monkeypatch.delenv("HOME")
    assert _algorithm_cache("auto") == ""
    assert _algorithm_cache(None) == ""
    assert _algorithm_cache(Path("/a/file")) == "/a/file"
