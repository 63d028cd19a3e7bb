"""A traced loss's view of the program around it: its place there, and combinations that cannot work."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.interpreters import ad, batching, mlir

from headwater._errors import refused
from headwater._head import Head
from headwater.jax._callbacks import CHECKPOINT_CURE

# Losses of one program have ids SITE_IDS apart, so that each has a range for its repetitions.
SITE_IDS = 1 << 40

_SHARD_MAP_CURE = (
    "wrap the loss in jax.shard_map over all axes of the mesh, with the rows split over all of them, and add up what it returns "
    "(jax.lax.psum); the rest of the program may stay outside"
)


class Place(NamedTuple):
    """Where a loss stands in its program.

    The ids of its executions n = 0, 1, ... in a step are site * SITE_IDS + n * devices + device.
    """

    site: jax.Array  # () int32: how many losses of the head the program has before it
    device: jax.Array  # () integer: index of the device that executes it
    devices: int  # number of devices that execute it; 0: `device` is the id itself


def _traces() -> list[Any]:
    """The transformations that the caller is under, outermost first."""
    traces: list[Any] = []
    trace = core.trace_ctx.trace
    while trace is not None:
        traces.insert(0, trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def is_eager() -> bool:
    """Whether the caller's arrays have values now."""
    return isinstance(core.trace_ctx.trace, core.EvalTrace)


def _traced_for(trace: Any) -> str:
    """The transformation that a program is traced for: "jit", "scan", "checkpoint / remat", ...; empty: it is executed."""
    frame = getattr(trace, "frame", None)
    return frame.debug_info.traced_for if frame is not None else ""


_DIFFERENTIATING = ("JVPTrace", "LinearizeTrace")


def may_be_in_gradient() -> bool:
    """Whether the caller may be differentiated, perhaps by something else than its own arrays: a traced function does not know."""
    return any(type(trace).__name__ in _DIFFERENTIATING or _traced_for(trace) for trace in _traces())


def place_of(head: Head, micro_batch: Any) -> Place:
    """The place of the loss that is being traced."""
    if micro_batch is not None:
        device = jnp.asarray(micro_batch)
        if device.ndim or not jnp.issubdtype(device.dtype, jnp.integer):
            raise refused(f"micro_batch must be one integer, got {device.dtype}{list(device.shape)}", "micro_batch")
        return Place(jnp.int32(0), device, 0)
    axes = _mesh_axes()
    site = _site.bind(head=head)
    return Place(site, jax.lax.axis_index(axes), jax.lax.axis_size(axes)) if axes else Place(site, jnp.int32(0), 1)


def _mesh_axes() -> tuple[str, ...]:
    """Axes of the mesh along which a shard_map around the caller runs it on several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)


def varying_axes(value: Any) -> tuple[str, ...]:
    """Axes of the mesh along which a value differs, as far as shard_map knows."""
    return tuple(jax.typeof(value).manual_axis_type.varying)


def vary(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value, which differs on devices along these axes."""
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def check(head: Head, x: Any, train: bool | None) -> None:
    """Raises InvalidArgumentError where the program would add nothing, or the wrong thing, to the head's gradient."""
    traces = _traces()
    names = [type(trace).__name__ for trace in traces]
    if "ShardMapTrace" in names:
        raise refused("a headwater loss inside jax.shard_map needs jax.jit around the shard_map", "shard_map")
    same = [axis for axis in _mesh_axes() if axis not in varying_axes(x)]
    if same:
        raise refused(
            f"x is the same on all devices along the mesh axis {same[0]!r}, as far as jax.shard_map knows, and each of them would "
            "add it: split its rows over this axis too, as in in_specs=P(('data', 'model')), and leave check_vma at its default",
            "x",
        )
    if not head.spec.trainable or train is False:
        return
    if any(_traced_for(trace).startswith("checkpoint") for trace in traces):
        raise refused(
            f"a headwater loss inside jax.checkpoint (jax.remat, nn.remat, nnx.remat) would be computed twice: {CHECKPOINT_CURE}",
            "checkpoint",
        )
    if train is None and names[-1] in _DIFFERENTIATING and not _is_differentiated(x):
        raise refused(
            f"{head.name} is trained, and x has no gradient here (a frozen body, or stop_gradient), so that no backward would add "
            "the head's: pass train=True to add it at forward, for an upstream gradient of 1, or train=False to add nothing",
            "train",
        )


def _is_differentiated(x: Any) -> bool:
    return isinstance(x, core.Tracer) and type(x).__name__ in ("JVPTracer", "LinearizeTracer")


def _check_one_device(count: int) -> None:
    if count > 1:
        raise refused(
            f"a headwater loss in a program over {count} devices, outside of jax.shard_map, would gather the whole batch on one of "
            f"them: {_SHARD_MAP_CURE}",
            "shard_map",
        )


class _Sites(collections.Counter[Head]):
    """The number of a program's losses so far, for each head."""


def _lower_site(ctx: Any, *, head: Head) -> list[Any]:
    # A program is lowered once, in the order in which it is written, whatever functions it is made of.
    kept = ctx.module_context.keepalives
    sites = next((value for value in kept if isinstance(value, _Sites)), None)
    if sites is None:
        ctx.module_context.add_keepalive(sites := _Sites())
    sites[head] += 1
    return [mlir.ir_constant(np.int32(sites[head] - 1))]


# Outside of a program it is 0: the order of executions is that of the calls.
_site = jax.extend.core.Primitive("headwater_site")
_site.def_impl(lambda *, head: jnp.int32(0))
_site.def_abstract_eval(lambda *, head: jax.core.ShapedArray((), jnp.int32))
mlir.register_lowering(_site, _lower_site, cacheable=False)


def _lower(ctx: Any, value: Any) -> list[Any]:
    axes = ctx.module_context.axis_context
    manual = getattr(axes, "manual_axes", frozenset())
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:
        count = 1
        for axis in mesh.axis_names:
            count *= 1 if axis in manual else mesh.shape[axis]
        _check_one_device(count)
    else:
        _check_one_device(getattr(axes, "num_devices", 1))
    return [value]


def _evaluate(value: Any) -> Any:
    _check_one_device(len(value.sharding.device_set))
    return value


def _differentiate(*_: Any) -> Any:
    raise refused("a headwater loss has no second derivative", "x")


_on_one_device = jax.extend.core.Primitive("headwater_on_one_device")
_on_one_device.def_impl(_evaluate)
_on_one_device.def_abstract_eval(lambda value: value)
mlir.register_lowering(_on_one_device, _lower)
batching.defvectorized(_on_one_device)
ad.primitive_jvps[_on_one_device] = _differentiate


def on_one_device(value: jax.Array) -> jax.Array:
    """The value. Arrays over several devices are refused here when the program is compiled, derivatives when it is traced."""
    return _on_one_device.bind(value)
