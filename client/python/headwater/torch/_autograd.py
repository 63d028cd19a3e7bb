"""How a remote loss sits in autograd's graph.

With gradients on, forward submits an EXPLICIT micro-batch: the server computes everything and holds its own gradient back. Backward
commits it with the upstream gradient as factor, and multiplies grad_hidden by it in fp32. A graph that is dropped discards it.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from headwater._errors import FailedPreconditionError, MicroBatchConflictError, invalid_argument
from headwater._head import Head
from headwater._types import LossResult
from headwater.torch._micro_batches import MicroBatchSource

# A declared scale and the upstream gradient that comes are fp32 numbers that took different ways.
_SCALE_TOLERANCE = 1e-6


@functools.cache
def _checkpoint_file() -> str:
    import torch.utils.checkpoint as checkpoint

    return checkpoint.__file__


def in_checkpoint_recompute() -> bool:
    """Whether this forward repeats one that was made with gradients on.

    torch.utils.checkpoint has two forms. The reentrant one runs forward without gradients first, and the repetition inside its
    `backward` is the one that counts. The other one runs forward with gradients, and repeats it inside a hook that unpacks a saved
    tensor: that repetition must add nothing. The nearest frame of the checkpoint module tells which of them it is.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _checkpoint_file():
            if code.co_name in ("unpack", "unpack_hook"):
                return True
            if code.co_name == "backward":
                return False
        frame = frame.f_back
    return False


class Contribution:
    """What one forward has left on the server, until it is decided."""

    def __init__(self, head: Head, source: MicroBatchSource):
        self.head = head
        self.key = head._key(None)
        self.micro_batch = source.draw(self.key.step)
        self._ids = source.current_ids()
        self._source = source
        self._abandon: Callable[[], Any] | None = None

    def staged(self) -> None:
        """It waits for its decision now; if nobody is left to decide, it is discarded."""
        abandoned = self.head._abandoned
        abandoned.watch()
        finalizer = weakref.finalize(self, _abandon, abandoned, self._source, self._ids, self.key, self.micro_batch)
        finalizer.atexit = False
        self._abandon = finalizer.detach

    def failed(self) -> None:
        """The submission was refused: the id is not in the step."""
        self._source.forget(self._ids, self.micro_batch)

    def commit(self, factor: float) -> None:
        """Adds it, times `factor`."""
        self.head._backend.commit(self.key, self.micro_batch, factor, self.head._client.timeout_s)
        if self._abandon is not None:
            self._abandon()


def _abandon(abandoned: Any, source: MicroBatchSource, ids: set[int], key: Any, micro_batch: int) -> None:
    source.forget(ids, micro_batch)
    abandoned.add(key, micro_batch)


class Outcome:
    """What backward needs of a forward."""

    def __init__(
        self,
        result: LossResult,
        divisor: float,
        *,
        contribution: Contribution | None,
        declared_scale: float | None,
        grad_hidden_scale: float,
        recomputed: bool,
    ):
        self.loss = result.loss_sum / divisor if divisor else 0.0
        self._grad_hidden = result.grad_hidden
        # No valid token: loss and gradients are 0, not 0 / 0.
        self._factor = 1.0 / divisor if divisor else 0.0
        self._contribution = contribution
        self._declared_scale = declared_scale
        self._grad_hidden_scale = grad_hidden_scale
        self._recomputed = recomputed
        self._decided = False

    def backward(self, upstream: float, shape: torch.Size) -> torch.Tensor | None:
        """Commits, and returns the gradient of the hidden states."""
        if self._recomputed:
            raise FailedPreconditionError(
                "backward reached a headwater loss that activation checkpointing had recomputed; the original takes the gradient",
                reason="INVALID_COMBINATION",
            )
        factor = upstream * self._factor
        if self._declared_scale is not None:
            self._check_declared(upstream)
            factor = 1.0  # the server has applied everything already
        elif self._contribution is not None:
            self._commit(upstream, factor)
        self._decided = True
        if self._grad_hidden is None:
            return None
        if self._declared_scale is not None:
            return self._grad_hidden.reshape(shape)
        return (self._grad_hidden.float() * (factor * self._grad_hidden_scale)).to(self._grad_hidden.dtype).reshape(shape)

    def _check_declared(self, upstream: float) -> None:
        declared = self._declared_scale or 0.0
        if self._contribution is not None and self._decided:
            raise MicroBatchConflictError(
                "backward ran twice through one headwater loss with loss_scale=; its contribution was added once, at forward",
                reason="MICRO_BATCH_CONFLICT",
            )
        if not abs(upstream - declared) <= _SCALE_TOLERANCE * abs(declared):
            raise invalid_argument(
                "INVALID_COMBINATION",
                f"loss_scale={declared:g} was declared as the upstream gradient, but {upstream:g} came; the head's gradient of "
                "this step was made for the declared one: discard it (Head.discard_gradient), and leave loss_scale= out if the "
                "scale varies",
                field="loss_scale",
                expected=declared,
                actual=upstream,
            )

    def _commit(self, upstream: float, factor: float) -> None:
        if self._decided:
            raise MicroBatchConflictError(
                "backward ran twice through one headwater loss; the first one has added its gradient to the head. "
                "Compute the loss again to add it again",
                reason="MICRO_BATCH_CONFLICT",
            )
        if not math.isfinite(factor):
            raise invalid_argument(
                "INVALID_FIELD", f"the upstream gradient of a headwater loss must be finite, got {upstream}", field="factor"
            )
        if self._contribution is not None:
            self._contribution.commit(factor)


class RemoteLoss(torch.autograd.Function):
    """A scalar that was computed elsewhere. `anchor` makes it require a gradient even where the hidden states do not."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor | None, outcome: Outcome) -> torch.Tensor:
        # Kept as an attribute, not by save_for_backward: hooks that pack saved tensors would make activation checkpointing run the
        # whole forward again just for this.
        ctx.outcome = outcome
        ctx.shape = hidden.shape
        return torch.tensor(outcome.loss, dtype=torch.float32, device=hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        grad_hidden = ctx.outcome.backward(float(upstream), ctx.shape)
        return grad_hidden if ctx.needs_input_grad[0] else None, None, None
