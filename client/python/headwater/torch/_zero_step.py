"""Steps of heads that close inside of the step of DeepSpeed's ZeRO optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from headwater._errors import option_refused
from headwater.torch._joint_step import Wrapped, WrappedStep
from headwater.torch._remote_head import RemoteHead

# The method that computes the gradients' norm in a ZeRO optimizer of stages 1 and 2, and of stage 3.
_NORMS = ("scaled_global_norm", "_get_norm_groups")


class ZeroStep(WrappedStep):
    """Closes heads' steps with those of DeepSpeed's engine, which clips, steps and clears the gradients in one call.

    The ZeRO optimizer looks for an overflow, computes the norm over all ranks, clips by it and updates its part. The heads are
    sealed before, and updated where it computes the norm. It gets the norm of body and heads, and clips the body by that. A step
    that it skips (an overflow in fp16) is discarded by the heads, and an overflow of a head makes it skip the step.

    Args:
        heads: of this trainer. None has its weight in the optimizer.
        zero: the engine's `optimizer`.
        gradient_factor: as of `JointStep`.
    """

    def __init__(self, heads: Sequence[RemoteHead], zero: Any, *, gradient_factor: float):
        self._zero = zero
        self._norm = next((name for name in _NORMS if hasattr(zero, name)), "")
        if not self._norm:
            raise option_refused(
                "deepspeed",
                f"{type(zero).__name__} is no ZeRO optimizer whose norm can contain a head's: set zero_optimization.stage "
                "to 1, 2 or 3, and leave data_types out",
            )
        if not getattr(zero, "compute_grad_norm", True):
            raise option_refused(
                "deepspeed.zero_optimization.compute_grad_norm", "a head's step closes with the norm: set it to true"
            )
        if getattr(zero, "torch_autocast_gradscaler", None) is not None:
            raise option_refused("deepspeed.torch_autocast", "its GradScaler steps each part alone: use bfloat16, or fp16.enabled")
        scaler = SimpleNamespace(get_scale=lambda: zero.loss_scale) if zero.dtype == torch.float16 else None
        super().__init__(heads, zero.optimizer, parameters=[], scaler=scaler, gradient_factor=gradient_factor)

    def _register_hooks(self) -> list[Any]:
        # Not of the torch optimizer, which steps once for each group.
        return [Wrapped(self._zero, "step", self._around_step), Wrapped(self._zero, self._norm, self._around_norm)]

    def _around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.prepare()
        result = step(*args, **kwargs)
        if self._zero.overflow:
            self.settle()
        else:
            self._after_step()
        return result

    def _around_norm(self, norm_of_body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = norm_of_body(*args, **kwargs)
        if self._loop is None:
            return norm
        if isinstance(norm, list):  # of groups
            return [self._close_heads(norm)]
        return self._close_heads([norm])

    def _close_heads(self, norms: list[Any]) -> torch.Tensor:
        """Updates the heads, and returns the norm of body and heads, with the loss scale on it; inf where one is not finite."""
        values = [float(norm) for norm in norms]
        finite = all(math.isfinite(value) and value >= 0 for value in values)  # DeepSpeed says -1 of a norm that is not
        body = math.sqrt(math.fsum(value**2 for value in values)) / self._scale if finite else math.inf
        norm = self.clip(self._zero.clip_grad, lambda: body)
        if math.isfinite(norm) and self._seals_are_finite():
            self._before_step()
        else:
            norm = math.inf
        return torch.as_tensor(norms[0]).new_tensor(norm * self._scale)
