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


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C in a call of the engine is raised when that returns: `interrupted(Class, method)` does so once."""

    def arm(kind, name):
        work = getattr(kind, name)

        def once(*args, **kwargs):
            monkeypatch.setattr(kind, name, work)
            work(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(kind, name, once)

    return arm


@pytest.fixture
def trained():
    """A head in process, rows for it, and the gradient of one micro-batch of them."""
    rng = np.random.default_rng(3)
    with headwater.local.connect() as client:
        weight = rng.standard_normal((7, 3)).astype(np.float32)
        head = client.create_head("h", weight, optimizer=headwater.AdamW(), staging_slots=1)
        rows = rng.standard_normal((5, 3)).astype(np.float32), np.arange(5)
        head.cross_entropy(*rows, micro_batch=0)
        gradient = head.gradient()
        head.discard_gradient()
        yield head, rows, gradient


@pytest.mark.parametrize("form", ("STAGED", "HELD"))
def test_an_interrupted_commit_is_neither_repeated_nor_dropped(trained, interrupted, form):
    head, rows, gradient = trained
    out = head.cross_entropy(*rows, micro_batch=0, commit="explicit", late_token_factors=form == "HELD")
    assert out.form == form
    interrupted(*((Staged, "commit") if form == "STAGED" else (Engine, "compute")))
    with pytest.raises(KeyboardInterrupt):
        out.commit()
    for again in (out.commit, out.discard, lambda: head.cross_entropy(*rows, micro_batch=0, attempt=1)):
        with pytest.raises(headwater.MicroBatchConflictError, match="interrupted"):
            again()
    with pytest.raises(headwater.FailedPreconditionError, match="uncommitted"):
        head.seal(expected_micro_batches=1)
    head.discard_gradient()
    head.cross_entropy(*rows, micro_batch=0, commit="explicit").commit()  # the slot is free
    np.testing.assert_array_equal(head.gradient(), gradient)


def test_a_refused_commit_leaves_the_contribution_undecided(trained):
    head, rows, gradient = trained
    out = head.cross_entropy(*rows, micro_batch=0, commit="explicit", late_token_factors=True)
    with pytest.raises(headwater.InvalidArgumentError, match="token_factors"):
        out.commit(token_factors=np.ones(4, np.float32))
    out.commit()
    np.testing.assert_allclose(head.gradient(), gradient, rtol=1e-6)


def test_an_interrupted_gradient_is_not_added_again(trained, interrupted):
    head, _, gradient = trained
    interrupted(EngineHead, "add_to_gradient")
    with pytest.raises(KeyboardInterrupt):
        head.add_gradient(gradient, micro_batch=0)
    with pytest.raises(headwater.MicroBatchConflictError, match="interrupted"):
        head.add_gradient(gradient, micro_batch=0)
    head.discard_gradient()
    assert head.add_gradient(gradient, micro_batch=0) is False
    np.testing.assert_array_equal(head.gradient(), gradient)


def test_an_interrupted_update_is_not_made_again(trained, interrupted):
    head, rows, _ = trained
    head.cross_entropy(*rows, micro_batch=0)
    interrupted(EngineHead, "apply_optimizer")
    arguments = {"step": 1, "learning_rate": 0.1, "expected_micro_batches": 1}
    with pytest.raises(KeyboardInterrupt):
        head.apply_optimizer_step(**arguments)
    updated = head.weight()
    assert head.apply_optimizer_step(**arguments).replayed and head.step == 2
    np.testing.assert_array_equal(head.weight(), updated)


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
