"""Calls of the host inside a program, as `jax.experimental.io_callback` and `jax.pure_callback` make them, but with numpy's arrays.

The callbacks of JAX bring each operand to a device first, by a thread of XLA's pool. Where all threads wait in callbacks, as with
four devices on two cores, none is left to do it, and the program hangs (jax #24255). Transformations take a call for one of
`io_callback`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax._src.callback import IOEffect, _callback_op_sharding
from jax.interpreters import batching, mlir

# The remedy for JAX's refusal of effects under jax.checkpoint.
CHECKPOINT_CURE = "put jax.checkpoint around the body alone, and compute the headwater loss of what it returns"


class _Effect(IOEffect):
    """The effect of `io_callback`, which JAX quotes where it refuses one."""

    def __repr__(self) -> str:
        return CHECKPOINT_CURE


EFFECT = _Effect()


def call(
    function: Callable[..., Sequence[Any]],
    results: Sequence[jax.ShapeDtypeStruct],
    operands: dict[str, jax.Array],
    *,
    is_pure: bool = False,
) -> tuple[jax.Array, ...]:
    """Calls `function(memory, **operands)` when the program gets there: not ordered, one call a row under vmap.

    Args:
        function: gets read-only arrays over XLA's memory, good until it returns; `memory` has None for each result. On a GPU see
            `_device`.
        results: shapes and dtypes of its results.
        is_pure: the call may be left out where its results are unused, and repeated.
    """
    types = tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results)
    return tuple(call_p.bind(*operands.values(), function=function, names=tuple(operands), results=types, is_pure=is_pure))


call_p = jax.extend.core.Primitive("headwater_call")
call_p.multiple_results = True


@call_p.def_effectful_abstract_eval
def _types(*operands: Any, results: Any, is_pure: bool, **_: Any) -> tuple[Any, Any]:
    del operands
    return results, set() if is_pure else {EFFECT}


@call_p.def_impl
def _run(*operands: Any, **parameters: Any) -> Any:
    return jax.jit(lambda *arrays: call_p.bind(*arrays, **parameters))(*operands)


def _batch(operands: Sequence[Any], axes: Sequence[int | None], **parameters: Any) -> tuple[Any, list[int]]:
    def one_row(rows: list[Any]) -> Any:
        rest = iter(rows)
        row = (value if axis is None else next(rest) for value, axis in zip(operands, axes, strict=True))
        return call_p.bind(*row, **parameters)

    batched = [jax.numpy.moveaxis(value, axis, 0) for value, axis in zip(operands, axes, strict=True) if axis is not None]
    return jax.lax.map(one_row, batched), [0] * len(parameters["results"])


def lower(context: Any, *operands: Any, function: Any, names: tuple[str, ...], results: Any, is_pure: bool) -> Any:
    """Makes it one of JAX's own callbacks of Python."""
    nowhere = (None,) * len(results)

    def on_arrays(*arrays: Any) -> tuple[np.ndarray, ...]:
        return tuple(function(nowhere, **dict(zip(names, map(np.asarray, arrays), strict=True))))

    outcome, _, _ = mlir.emit_python_callback(
        context,
        on_arrays,
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=not is_pure,
        returns_token=False,
        sharding=_callback_op_sharding(context.module_context.axis_context, None, context.avals_out),
    )
    return outcome


batching.primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, lower, cacheable=False)
