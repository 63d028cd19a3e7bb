"""The FFI handler of headwater.jax: what XLA passes to the host and back, on a GPU and, for programs on the CPU, without one."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_figures import IS_GPU
from jax_on_device import Host, call_back_on_cpu, call_on_cpu, losses

import headwater
from headwater.jax import _callbacks, _device

ENVIRONMENTS = ("jax", "jax_gpu")

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.fixture(autouse=True)
def handled(monkeypatch):
    """Programs of this process call the handler."""
    if IS_GPU:
        assert _device.is_handled("cuda")
        yield
        return
    call_on_cpu(Host)
    monkeypatch.setattr(_device, "is_handled", lambda platform: True)
    yield
    call_back_on_cpu()


def total(memory, **arrays):
    """The sum of all elements, of rows that lie on the host."""
    del memory
    return [np.float32(sum(np.sum(array, dtype=np.float64) for array in arrays.values()))]


def sum_of(**arrays):
    return _callbacks.call(total, [NUMBER], arrays)[0]


def test_host_gets_and_gives_arrays_of_every_type():
    given = {  # in the order that JAX gives a dictionary
        "flags": np.array([True, False, True]),
        "halves": np.arange(4, dtype=jnp.bfloat16),
        "ids": np.arange(6, dtype=np.int32).reshape(1, 2, 3),
        "nothing": np.zeros((0, 5), np.int32),
        "number": np.float32(2.5),
    }
    seen = {}

    def note(memory, **arrays):
        assert memory == (None,) * len(given)
        seen.update(arrays)
        return [array + array for array in arrays.values()]

    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given.values()]
    doubled = jax.jit(lambda **arrays: _callbacks.call(note, results, arrays))(**given)
    for (name, array), double in zip(given.items(), doubled, strict=True):
        for actual, expected in ((seen[name], array), (double, array + array)):
            assert actual.dtype == expected.dtype and actual.shape == expected.shape
            assert np.array_equal(np.asarray(actual), expected)


def test_control_flow_calls_once_for_each_execution():
    calls = []

    def count(memory, x):
        calls.append(float(x))
        return [np.float32(2 * x)]

    def call(x):
        return _callbacks.call(count, [NUMBER], {"x": x})[0]

    @jax.jit
    def program(x, flag):
        carried, doubled = jax.lax.scan(lambda carry, y: (carry + call(y), call(y)), x, jnp.arange(3.0))
        return carried, doubled, jax.lax.cond(flag, call, lambda x: x, x)

    carried, doubled, chosen = program(jnp.float32(1), False)
    assert (float(carried), doubled.tolist(), float(chosen), len(calls)) == (7.0, [0.0, 2.0, 4.0], 1.0, 6)
    assert float(program(jnp.float32(1), True)[2]) == 2.0 and len(calls) == 13
    assert jax.vmap(call, in_axes=0)(jnp.arange(4.0)).tolist() == [0.0, 2.0, 4.0, 6.0] and len(calls) == 17
    jax.block_until_ready(jax.jit(lambda x: (call(x), x)[1])(jnp.float32(1)))  # its result is unused
    jax.effects_barrier()
    assert len(calls) == 18
    jax.block_until_ready(jax.jit(lambda x: (_callbacks.call(count, [NUMBER], {"x": x}, is_pure=True), x)[1])(jnp.float32(1)))
    assert len(calls) == 18


def test_errors_come_with_their_text():
    def fail(memory, x):
        raise KeyError("no such thing")

    for function, text in ((fail, "KeyError: 'no such thing'"), (lambda memory, x: [np.zeros(3)], r"expected .*\(\), got \(3,\)")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(
                jax.jit(lambda x, function=function: _callbacks.call(function, [NUMBER], {"x": x}))(jnp.float32(1))
            )


def test_a_compiled_program_keeps_what_it_calls_and_nothing_else_does():
    def compiled():
        return jax.jit(lambda x: _callbacks.call(lambda memory, x: [np.float32(x + 1)], [NUMBER], {"x": x})[0]).lower(1.0).compile()

    gc.collect()
    before = len(_device._functions)
    program = compiled()
    jax.clear_caches()
    gc.collect()
    assert float(program(1.0)) == 2.0
    del program
    jax.clear_caches()
    gc.collect()
    assert len(_device._functions) <= before


def test_jax_checkpoint_refuses_it_as_io_callback():
    with pytest.raises(NotImplementedError, match=r"put jax\.checkpoint around the body alone"):
        jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(lambda x: x * sum_of(x=jax.lax.stop_gradient(x)))(x)))(1.0)


# On a GPU rows that are ignored go along, and sums have another order.
@pytest.mark.parametrize(("dtype", "of_largest"), (("float32", 1e-5 if IS_GPU else 0), ("bfloat16", 1e-2 if IS_GPU else 0)))
def test_loss_is_that_of_a_callback_of_jax(dtype, of_largest, remote_client, monkeypatch):
    ours = losses(remote_client, "handled", dtype)
    monkeypatch.setattr(_device, "is_handled", lambda platform: False)
    theirs = losses(remote_client, "called", dtype)
    assert ours[3] == theirs[3] == 1
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        mine, other = mine.astype(np.float64), other.astype(np.float64)
        assert np.abs(mine - other).max() <= of_largest * np.abs(other).max()


def test_where_the_handler_cannot_be_used_that_is_said_once(monkeypatch):
    monkeypatch.undo()
    with pytest.warns(headwater.HeadWarning, match=r"through host memory, by a callback of JAX.*this platform is rocm"):
        assert not _device.is_handled("rocm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _device.is_handled("rocm")
