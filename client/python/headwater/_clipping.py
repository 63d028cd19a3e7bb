"""Clipping by the norm of body and heads together, as torch.nn.utils.clip_grad_norm_ and the server do it."""

from __future__ import annotations

from headwater._errors import FailedPreconditionError, HeadwaterError

CLIP_EPSILON = 1e-6


def clip_factor(norm: float, max_grad_norm: float | None) -> float:
    """The factor of all gradients, in (0, 1]; `max_grad_norm` as `check_max_grad_norm` returns it."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + CLIP_EPSILON))


def not_finite(step: int | None, advice: str) -> HeadwaterError:
    """The error of a step whose gradient is not finite. Neither the body nor a head has changed."""
    return FailedPreconditionError(
        f"the gradient of step {step} is not finite; neither the body nor a head was updated{advice}",
        reason="NON_FINITE_GRADIENT",
        metadata={"step": str(step)},
    )
