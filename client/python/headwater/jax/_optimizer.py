"""`apply_optimizer_step`: the end of a step, for the head and the gradients of the body together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from headwater._clipping import clip_factor, not_finite
from headwater._errors import FailedPreconditionError, invalid_argument, refused
from headwater._head import Head
from headwater._loss._requests import check_bool
from headwater._types import OPTIMIZER_SETTINGS, StepTotals, check_factor, check_max_grad_norm, check_not_negative
from headwater.jax._submissions import settle


@dataclass(frozen=True)
class StepResult:
    """The outcome of an optimizer step; the same on all processes."""

    step: int  # the one that was closed
    learning_rate: float
    grads: Any  # as they were given, times clip_factor; None if none were given
    grad_norm: float  # of `grads` and the head's gradient together, before clipping, with gradient_factor
    clip_factor: float  # in (0, 1]
    totals: StepTotals


def apply_optimizer_step(
    head: Head,
    *,
    learning_rate: Any,
    grads: Any = None,
    max_grad_norm: float | None = None,
    gradient_factor: float = 1.0,
    allow_empty: bool = False,
    timeout_s: float | None = None,
    **settings: Any,
) -> StepResult:
    """Updates the head from its open step's gradient, clips it and the body's gradients by their joint norm, opens the next step.

        loss, grads = train_step(params, batch, labels)                  # under jit, or a function of `value_and_grad`
        step = headwater.jax.apply_optimizer_step(head, learning_rate=schedule(n), grads=grads, max_grad_norm=1.0)
        updates, state = optimizer.update(step.grads, state, params)     # optax, without a clip of its own
        params = optax.apply_updates(params, updates)

    Call it on the host, outside of `jit`, on every process. It waits for `grads`, and with them for all losses whose gradients they
    are. Losses whose gradient was computed but never used are discarded, with a warning. When all processes have come as far, the
    first one closes the step; `head.step` follows on all of them.

    The head's gradient is the sum over the micro-batches of the step. Where the body's is their mean, as with `optax.MultiSteps`
    around the body's transformation, call it after each k-th micro-batch (`MultiSteps.has_updated`) with gradient_factor=1 / k.
    MultiSteps keeps that mean to itself, so there is no joint norm: leave grads and max_grad_norm out. To clip, add up the
    gradients yourself, and pass the sum.

    Args:
        learning_rate: >= 0, a number or a scalar array: the value of an optax schedule, say.
        grads: pytree of arrays, the body's gradients, reduced over all processes. None: the body has none, or is not clipped with
            the head.
        max_grad_norm: >= 0; clips by the joint norm, as torch.nn.utils.clip_grad_norm_ does. None, 0, inf: no clipping.
        gradient_factor: finite in float32; multiplies the head's gradient, before norm and clipping.
        allow_empty: as of `Head.apply_optimizer_step`: close a step without any micro-batch, too.
        timeout_s: bound of each call to the server, in seconds. None: the client's.
        settings: weight_decay, beta1, beta2, epsilon, momentum, as of `Head.apply_optimizer_step`.
    Returns:
        StepResult, with the clipped gradients.
    Raises:
        FailedPreconditionError: `NON_FINITE_GRADIENT`: a gradient of the body or the head is not finite. Body and head are as they
            were, on all processes; `head.discard_gradient()` on each of them closes the step. `MICRO_BATCH_UNEXPECTED`: a call of a
            function of `value_and_grad` has failed, and was not repeated.
        InvalidArgumentError: `MISSING_FIELD`: the step has no micro-batch. The original error of a loss inside of `jit`.
    """
    if not head.spec.trainable:
        raise refused(f"{head.name} is frozen: it has no steps", "head")
    rate = check_not_negative(_number(learning_rate), "learning_rate")
    max_grad_norm = check_max_grad_norm(max_grad_norm)
    gradient_factor = check_factor(gradient_factor, "gradient_factor")
    allow_empty = check_bool(allow_empty, "allow_empty")
    unknown = [name for name in settings if name not in OPTIMIZER_SETTINGS]
    if unknown:
        raise TypeError(f"apply_optimizer_step() got an unexpected keyword argument {unknown[0]!r}")
    settings = {name: OPTIMIZER_SETTINGS[name](value, name) for name, value in settings.items()}
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(grads)):
        raise refused("apply_optimizer_step is called on the host: outside of jit, grad and scan", "grads")
    step = head._key(None).step
    ids = _settle_all(head, grads, timeout_s)
    if not ids and not allow_empty:
        raise invalid_argument(
            "MISSING_FIELD",
            f"step {step} of {head.name} has no micro-batch: no gradient of a loss was taken. allow_empty=True applies it, "
            "discard_gradient() closes the step unchanged",
            field="grads",
        )
    # Every process asks, and all get the same answer.
    sealed = head.seal(expected_micro_batches=ids, timeout_s=timeout_s)
    leaves, form = jax.tree.flatten(grads)
    # Integer parameters have gradients without numbers, of type float0.
    numbers = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    body_norm = float(_norm([leaves[place] for place in numbers])) if numbers else 0.0
    norm = math.hypot(body_norm, math.sqrt(sealed.gradient_norm_squared) * gradient_factor)
    if sealed.non_finite_count or not math.isfinite(norm):
        raise not_finite(step, "; head.discard_gradient() closes the step, on every process")
    if jax.process_count() > 1:  # the first one must not close the step before all have their answer
        multihost_utils.sync_global_devices(f"headwater {head.name} {step}")
    if jax.process_index() == 0:
        head.apply_optimizer_step(
            learning_rate=rate,
            gradient_factor=gradient_factor,
            max_grad_norm=max_grad_norm,
            other_grad_norm_squared=body_norm**2,
            allow_empty=True,  # it is refused above
            timeout_s=timeout_s,
            **settings,
        )
    head.step = step + 1
    factor = clip_factor(norm, max_grad_norm)
    if factor != 1 and numbers:
        clipped = _multiply([leaves[place] for place in numbers], np.float32(factor))
        for place, leaf in zip(numbers, clipped, strict=True):
            leaves[place] = leaf
    return StepResult(step, rate, jax.tree.unflatten(form, leaves), norm, factor, sealed.totals)


def _number(value: Any) -> Any:
    """A scalar array as its value, anything else as it is."""
    return value.item() if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0 else value


def _settle_all(head: Head, grads: Any, timeout_s: float | None) -> list[int]:
    """Ids of the micro-batches of all processes, ascending, once the losses of all are done."""
    failure: Exception | None = None
    own: list[int] = []
    try:
        jax.block_until_ready(grads)
        own = settle(head)
    except Exception as error:
        failure = error
    if jax.process_count() == 1:
        if failure is not None:
            raise failure
        return own
    # One that has failed comes here, too: the others would wait for it.
    counts = multihost_utils.process_allgather(np.int32(len(own) if failure is None else -1))
    if failure is not None:
        raise failure
    if counts.min() < 0:
        raise FailedPreconditionError(
            f"a loss of process {int(counts.argmin())} has failed, and step {head.step} of {head.name} is not applied; the error "
            "is raised there. head.discard_gradient() on every process closes the step",
            reason="MICRO_BATCH_MISSING",
            metadata={"head": head.name, "step": str(head.step)},
        )
    known = head.step_state(timeout_s=timeout_s).open.micro_batches.values()
    ids = sorted(entry.micro_batch for entry in known if entry.state == "COMMITTED")
    if len(ids) != counts.sum():
        raise FailedPreconditionError(
            f"the processes have added {int(counts.sum())} micro-batches to step {head.step} of {head.name}, which has {len(ids)}: "
            "a call has failed and was not repeated, or another trainer adds to the head. head.discard_gradient() on every process "
            "closes the step",
            reason="MICRO_BATCH_MISSING" if len(ids) < counts.sum() else "MICRO_BATCH_UNEXPECTED",
            metadata={"head": head.name, "step": str(head.step)},
        )
    return ids


@jax.jit
def _norm(leaves: list[jax.Array]) -> jax.Array:
    """L2 norm of all leaves together, in float32."""
    return jnp.linalg.norm(jnp.stack([jnp.linalg.norm(leaf.astype(jnp.float32).ravel()) for leaf in leaves]))


@jax.jit
def _multiply(leaves: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    return [(leaf * factor).astype(leaf.dtype) for leaf in leaves]
