"""Loss and gradients of rows, weight and bias against plain JAX: the matrix of Liger's port to JAX, in which 4 of 20 cases failed.

Shapes are (batch, sequence, vocabulary, hidden size). There the cure was a function add_trivial_operations around the
kernel; there is no counterpart here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_figures import IS_GPU, write_figures

import headwater.jax

ENVIRONMENTS = ("jax", "jax_gpu")

LARGE = pytest.param((4, 2048, 50304, 1024), marks=() if IS_GPU else pytest.mark.long, id="large")
SMALL = pytest.param((1, 4, 32, 16), id="small")
# Both relative and absolute, of each element.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-3}
# Tolerances relative to the largest element, because the mean's gradients are small. Rounded to bfloat16, one may be off by half of
# the first.
OF_LARGEST = {"float32": 1e-5, "bfloat16": 2**-8}


class Problem:
    """Numbers of a case, and what plain JAX makes of them in float64."""

    def __init__(self, shape, dtype, bias):
        batch, sequence, self.vocab_size, self.hidden_size = shape
        keys = jax.random.split(jax.random.key(0), 4)
        self.x = jax.random.normal(keys[0], (batch, sequence, self.hidden_size)).astype(dtype)
        self.weight = (jax.random.normal(keys[1], (self.hidden_size, self.vocab_size)) / self.hidden_size**0.5).astype(dtype)
        self.bias = jax.random.normal(keys[2], (self.vocab_size,)).astype(dtype) if bias else None
        self.labels = jax.random.randint(keys[3], (batch, sequence), 0, self.vocab_size)

    def reference(self):
        """The value, and gradients of x, weight and bias: of the given numbers, in float64."""
        with jax.enable_x64(True):
            inputs = [array.astype(jnp.float64) for array in (self.x, self.weight, self.bias) if array is not None]
            value, gradients = jax.jit(jax.value_and_grad(self.plain_loss, argnums=tuple(range(len(inputs)))))(*inputs)
            return [np.asarray(value), *map(np.asarray, gradients)]

    def plain_loss(self, x, weight, bias=0.0):
        logits = jnp.matmul(x, weight, precision="highest") + bias
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, self.labels[..., None], -1)[..., 0]).mean()


@functools.lru_cache(maxsize=1)
def problem(shape, dtype, bias):
    made = Problem(shape, dtype, bias)
    return made, made.reference()


def errors_of(actual, expected) -> tuple[float, float]:
    """The least tolerance, relative and absolute, at which they are equal, and the error of the largest element; or NaN."""
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected)
    return float(np.max(error / (1 + np.abs(expected)))), float(np.max(error) / np.max(np.abs(expected)))


# The case's own order, so that one reference serves both of `jit`.
@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", (SMALL, LARGE))
def test_equals_plain_jax(shape, dtype, bias, jit, remote_client):
    case, expected = problem(shape, dtype, bias)
    head = headwater.jax.create_head(remote_client, "matrix", case.weight, bias=case.bias)
    handle = remote_client.head("matrix")
    try:
        loss = functools.partial(headwater.jax.linear_softmax_cross_entropy_loss, head, labels=case.labels, reduction="mean")
        step = jax.value_and_grad(loss)
        value, grad_x = jax.block_until_ready((jax.jit(step) if jit else step)(case.x))
        assert value.dtype == jnp.float32 and grad_x.dtype == case.x.dtype
        assert handle.step_state().open.totals.micro_batch_count == 1
        grad_weight, *grad_bias = handle.gradient(bias=True) if bias else [handle.gradient()]
    finally:
        handle.delete(force=True)
    names = ("loss", "grad_x", "grad_weight", "grad_bias")[: 3 + bias]
    errors = dict(zip(names, map(errors_of, (value, grad_x, grad_weight.T, *grad_bias), expected), strict=True))
    size = "large" if case.vocab_size > 32 else "small"
    prefix = f"{'cuda' if IS_GPU else 'cpu'}_matrix_{size}_{dtype}_{'bias' if bias else 'no_bias'}_{'jit' if jit else 'eager'}"
    bounds = TOLERANCES[dtype], OF_LARGEST[dtype]
    for kind, values, bound in zip(("tolerance", "of_largest"), zip(*errors.values(), strict=True), bounds, strict=True):
        write_figures((f"{prefix}_{kind}", max(values), "error", bound))
    for name, of_kinds in errors.items():
        assert all(error <= bound for error, bound in zip(of_kinds, bounds, strict=True)), f"{name}: {of_kinds}"
