"""How a remote loss sits in a JAX program.

The forward of a gradient submits an EXPLICIT micro-batch. The server computes everything, and holds the head's gradient back.
Backward commits it with the upstream gradient as factor. The commit returns the factor, and grad_hidden is multiplied by that
result: no gradient exists before its commit, whatever order XLA chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headwater._errors import refused
from headwater._head import Head
from headwater._types import LossResult
from headwater.jax import _callbacks, _device, _program
from headwater.jax._program import SITE_IDS
from headwater.jax._submissions import submissions_of

Place = tuple[jax.Array, jax.Array]  # site and device of `_program.Place`
Arrays = dict[str, jax.Array | None]  # by the argument's name in the loss call

# The options' names in the functions of headwater.jax.
ARGUMENTS = {
    "hidden": "x",
    "student_hidden": "x",
    "teacher_hidden": "teacher_x",
    "targets": "labels",
    "token_weights": "weight",
    "class_weights": "class_weights",
}


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss call in a program: everything but its arrays. A constant of the program."""

    head: Head
    run: Callable[..., LossResult]  # `Head.cross_entropy` or `Head.jsd` with its options
    rows: str  # name of the array of hidden states
    arrays: tuple[str, ...]  # names of all arrays
    per_token: bool  # whether there is a loss for each token
    train: bool | None
    in_gradient: bool  # whether a gradient may be taken around it, perhaps by something else than its rows
    ignore_index: int
    timeout_s: float | None
    devices: int  # of `Place`

    def values(self, result: LossResult, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The loss, () or (num_tokens,), and the divisor of a mean."""
        loss = np.float32(result.loss_sum)
        if self.per_token:
            loss = np.asarray(result.token_loss) * (np.float32(1) if weights is None else weights)
        return np.asarray(loss, np.float32), np.asarray(result.target_weight_sum, np.float32)

    def ids(self, site: Any, device: Any) -> tuple[int, int]:
        """First and stride of the ids of a place on a device."""
        return int(site) * SITE_IDS + int(device), self.devices


# ---- the calls that leave a program: arrays are their operands and results, and a function of the host makes each ----------------


def evaluate(loss: Loss, arrays: Arrays, with_gradient: bool) -> tuple[jax.Array, ...]:
    """Computes loss, divisor and, `with_gradient`, grad_hidden; adds nothing."""
    lacks_gradient = loss.in_gradient and loss.train is None and loss.head.spec.trainable

    def on_host(**given: np.ndarray) -> tuple[np.ndarray, ...]:
        exact = {} if with_gradient else {"gradient_resolution": 0.0}  # which is of a gradient alone
        result = loss.run(**given, backward=with_gradient, **exact, **_outputs(loss))
        if lacks_gradient:
            submissions_of(loss.head).note_without_gradient()
        values = loss.values(result, given.get("token_weights"))
        return (*values, result.grad_hidden) if with_gradient else values

    return _leave(loss, on_host, _results(loss, arrays)[: 3 if with_gradient else 2], arrays, is_pure=not lacks_gradient)


def add(loss: Loss, arrays: Arrays, place: Place) -> tuple[jax.Array, ...]:
    """Computes loss and divisor, and adds the head's gradient for an upstream gradient of 1."""

    def on_host(site: np.ndarray, device: np.ndarray, **given: np.ndarray) -> tuple[np.ndarray, ...]:
        run = functools.partial(loss.run, **given, return_grad_hidden=False, **_outputs(loss))
        result = submissions_of(loss.head).add(run, *loss.ids(site, device), loss.timeout_s)
        return loss.values(result, given.get("token_weights"))

    return _leave(loss, on_host, _results(loss, arrays)[:2], {**arrays, "site": place[0], "device": place[1]})


def submit(loss: Loss, arrays: Arrays, place: Place) -> tuple[jax.Array, ...]:
    """Computes loss, divisor and grad_hidden, and submits the head's gradient; the last result is the token for `commit`."""

    def on_host(site: np.ndarray, device: np.ndarray, **given: np.ndarray) -> tuple[np.ndarray, ...]:
        run = functools.partial(loss.run, **given, **_outputs(loss))
        result, token = submissions_of(loss.head).submit(run, *loss.ids(site, device), loss.per_token, loss.timeout_s)
        return (*loss.values(result, given.get("token_weights")), result.grad_hidden, np.int32(token))

    return _leave(loss, on_host, _results(loss, arrays), {**arrays, "site": place[0], "device": place[1]})


def commit(loss: Loss, token: jax.Array, factor: jax.Array) -> jax.Array:
    """Adds the submission, times `factor`, () or (num_tokens,) float32, and returns the factor."""

    def on_host(token: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray]:
        submissions_of(loss.head).commit(int(token), factor)
        return (factor,)

    shape = jax.ShapeDtypeStruct(factor.shape, jnp.float32)
    return _leave(loss, on_host, (shape,), {"token": token, "factor": factor})[0]


def _outputs(loss: Loss) -> dict[str, Any]:
    return {"outputs": ["token_loss"]} if loss.per_token else {}


def _results(loss: Loss, arrays: Arrays) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results of `submit`: loss, divisor, grad_hidden, token."""
    rows = arrays[loss.rows]
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return (
        jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32) if loss.per_token else number,
        number,
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def _leave(
    loss: Loss, on_host: Callable[..., tuple[Any, ...]], results: Any, operands: Arrays, *, is_pure: bool = False
) -> tuple[jax.Array, ...]:
    """Calls a function of the host with arrays by name; None arrays are left out."""
    operands = {name: _program.on_one_device(value) for name, value in operands.items() if value is not None}

    def run(memory: tuple[Any, ...], **given: Any) -> tuple[Any, ...]:
        place = next((place for place in memory if place is not None), None)
        return on_host(**given) if place is None else on_host(**given, grad_hidden_out=place)

    if _program.is_eager():
        return _device.call_now(run, results, operands)

    def callback(memory: tuple[Any, ...], **given: Any) -> tuple[Any, ...]:
        try:
            return run(memory, **given)
        except BaseException as error:
            submissions_of(loss.head).keep_error(error)
            raise

    # Losses and gradients differ along the rows' axes; the commit's factor has the axes with which it came.
    axes = _program.varying_axes(operands[loss.rows if loss.rows in operands else "factor"])
    values = _callbacks.call(callback, results, operands, is_pure=is_pure)
    return tuple(_program.vary(value, axes) for value in values)


# ---- the derivative -------------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call(loss: Loss, arrays: Arrays, place: Place) -> tuple[jax.Array, ...]:
    """The loss, () or (num_tokens,) float32, and the divisor of a mean, which has no gradient."""
    if loss.train:
        return add(loss, arrays, place)
    return evaluate(loss, arrays, False)


def _forward(loss: Loss, arrays: Any, place: Any) -> tuple[Any, Any]:
    for name, array in arrays.items():
        if name != loss.rows and array is not None and array.perturbed:
            argument = ARGUMENTS[name]
            raise refused(f"{argument} gets no gradient: pass jax.lax.stop_gradient({argument})", argument)
    values = {name: None if array is None else array.value for name, array in arrays.items()}
    token = None
    if not loss.head.spec.trainable:
        total, divisor, grad_hidden = evaluate(loss, values, True)
    elif loss.train is False:
        raise refused(
            f"x has a gradient, which a loss of {loss.head.name} takes only if it adds the head's: pass jax.lax.stop_gradient(x), "
            "or leave train=False out",
            "train",
        )
    else:
        total, divisor, grad_hidden, token = submit(loss, values, (place[0].value, place[1].value))
    return (total, divisor), (grad_hidden, token, values["targets"] if loss.per_token else None)


def _backward(loss: Loss, residuals: Any, upstream: Any) -> tuple[Any, None]:
    grad_hidden, token, targets = residuals
    factor = upstream[0]
    if isinstance(factor, jax.custom_derivatives.SymbolicZero):
        factor = jnp.zeros(factor.shape, jnp.float32)
    factor = factor.astype(jnp.float32)
    if targets is not None:
        factor = jnp.where(targets == loss.ignore_index, 0.0, factor)
    if token is not None:
        factor = commit(loss, token, factor)
    scaled = grad_hidden.astype(jnp.float32) * (factor[:, None] if loss.per_token else factor)
    return {**dict.fromkeys(loss.arrays), loss.rows: scaled.astype(grad_hidden.dtype)}, None


call.defvjp(_forward, _backward, symbolic_zeros=True)
