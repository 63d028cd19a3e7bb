"""The gradients of the body: their norm, and the effect of clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def norm_squared(parameters: Iterable[torch.Tensor]) -> float:
    """Squared norm of all gradients, in fp32 for each tensor and fp64 over them; NaN or infinite if one of them is."""
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(_values(parameter.grad), dtype=torch.float32)
            norms.setdefault(norm.device, []).append(norm)
    # One synchronisation for each device.
    return math.fsum(float(torch.stack(group).double().square().sum()) for group in norms.values())


def multiply(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies all gradients."""
    if factor != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Drops all gradients."""
    for parameter in parameters:
        parameter.grad = None
