"""How a remote loss sits in autograd's graph.

With gradients on, forward submits an EXPLICIT micro-batch: the server computes everything and holds its own gradient back. Backward
commits it with the upstream gradient as factor (a number for a scalar loss, one for each token with reduction="none"), and
multiplies grad_hidden by it in fp32. A graph that is dropped discards it.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from headwater._errors import (
    AMBIGUOUS_CODES,
    FailedPreconditionError,
    HeadwaterError,
    MicroBatchConflictError,
    invalid_argument,
)
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


# Heads that have staged a micro-batch of this process, by whether the user was warned that they have held one instead.
_warned: weakref.WeakKeyDictionary[Head, bool] = weakref.WeakKeyDictionary()


def _note_form(head: Head, form: str, *, unasked: bool) -> None:
    """Warns once for each head that a micro-batch had to be HELD for want of a slot.

    Where nothing is ever STAGED, no slot is missing: deterministic mode holds everything.
    """
    if form == "STAGED":
        _warned.setdefault(head, False)
    elif form == "HELD" and unasked and _warned.get(head) is False:
        _warned[head] = True
        warnings.warn(
            f"a loss of {head.name} found all {head.spec.staging_slots} staging slots taken by losses that wait for backward; "
            "the server keeps its rows and computes the head's gradient again in backward, a third more work. "
            f"Create the head with staging_slots={head.spec.staging_slots + 1} or more, one for each loss before one backward",
            RuntimeWarning,
            stacklevel=_frames_in_libraries(),
        )


def _frames_in_libraries() -> int:
    """The `stacklevel` by which the caller of this function's caller warns about the first line outside headwater and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("headwater", "torch"):
        level, frame = level + 1, frame.f_back
    return level


class Contribution:
    """What one forward has left on the server, until it is decided."""

    def __init__(self, head: Head, source: MicroBatchSource, timeout_s: float | None):
        self.head = head
        self._timeout_s = timeout_s  # of its commit
        self.key = head._key(None)
        self.micro_batch, self._ids = source.draw(head, self.key.step)
        self.attempt = source.attempt(head, self.key.step, self.micro_batch)
        self._source = source
        self._commit: Callable[..., Any] | None = None
        self._abandon: Callable[[], Any] | None = None

    def staged(self, result: LossResult, *, late: bool) -> None:
        """It waits for its decision now; if nobody is left to decide, it is discarded."""
        _note_form(self.head, result.form, unasked=not late)
        self._commit = result.commit
        discard = self.head._backend.abandon(self.key, self.micro_batch)
        finalizer = weakref.finalize(self, _abandon, discard, self._source, self._ids, self.micro_batch)
        finalizer.atexit = False
        self._abandon = finalizer.detach

    def failed(self, error: BaseException) -> None:
        """The submission ended with `error`: its id is dropped, and what may be in the step is discarded."""
        self._source.forget(self._ids, self.micro_batch)
        # An answer with a reason is a refusal: nothing was left there.
        if not (isinstance(error, HeadwaterError) and error.reason and error.code not in AMBIGUOUS_CODES):
            self.head._backend.abandon(self.key, self.micro_batch)()

    def commit(self, factor: float, token_factors: torch.Tensor | None = None) -> None:
        """Adds it, times `factor` and, row by row, times `token_factors`."""
        if self._commit is not None:
            self._commit(factor, token_factors, timeout_s=self._timeout_s)
            self._commit = None  # it keeps the LossResult alive, and so grad_hidden
        if self._abandon is not None:
            self._abandon()


def _abandon(discard: Callable[[], None], source: MicroBatchSource, ids: set[int], micro_batch: int) -> None:
    source.forget(ids, micro_batch)
    discard()


class Outcome(abc.ABC):
    """What backward needs of a forward."""

    def __init__(self, result: LossResult, *, contribution: Contribution | None, grad_hidden_scale: float, recomputed: bool):
        self._grad_hidden = result.grad_hidden
        self._contribution = contribution
        self._grad_hidden_scale = grad_hidden_scale
        self._recomputed = recomputed
        self._decided = False

    @abc.abstractmethod
    def value(self, device: torch.device) -> torch.Tensor:
        """The loss, float32."""

    @abc.abstractmethod
    def backward(self, upstream: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Decides the contribution, and returns the gradient of the hidden states, of this shape."""

    def _check_original(self) -> None:
        if self._recomputed:
            raise FailedPreconditionError(
                "backward reached a headwater loss that activation checkpointing had recomputed; the original takes the gradient",
                reason="INVALID_COMBINATION",
            )

    def _check_first(self, what: str, when: str) -> None:
        if self._contribution is not None and self._decided:
            raise MicroBatchConflictError(f"backward ran twice through {what}; {when}", reason="MICRO_BATCH_CONFLICT")

    def _take_grad_hidden(self) -> torch.Tensor | None:
        """grad_hidden, which a loss that lives on does not keep where a second backward is refused."""
        grad_hidden = self._grad_hidden
        if self._contribution is not None:
            self._grad_hidden = None
        return grad_hidden

    def _scaled_grad_hidden(self, factor: float | torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """grad_hidden times a number or a column of numbers, multiplied in fp32."""
        grad_hidden = self._take_grad_hidden()
        if grad_hidden is None:
            return None
        if isinstance(factor, torch.Tensor):
            factor = factor.to(grad_hidden.device)
        return (grad_hidden.float() * (factor * self._grad_hidden_scale)).to(grad_hidden.dtype).reshape(shape)


_ADDED_BEFORE = "the first one has added its gradient to the head. Compute the loss again to add it again"


class ScalarOutcome(Outcome):
    """A sum or a mean, `loss_sum / divisor`, whose factor may have been declared at forward."""

    def __init__(self, result: LossResult, divisor: float, *, declared_scale: float | None, **rest: Any):
        super().__init__(result, **rest)
        # No valid token: loss and gradients are 0, not 0 / 0.
        self._factor = 1.0 / divisor if divisor else 0.0
        self._loss = result.loss_sum / divisor if divisor else 0.0
        self._declared_scale = declared_scale

    def value(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self._loss, dtype=torch.float32, device=device)

    def backward(self, upstream: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        self._check_original()
        number = float(upstream)
        if self._declared_scale is not None:
            self._check_declared(number)
            self._decided = True
            # The server has applied everything already.
            grad_hidden = self._take_grad_hidden()
            if grad_hidden is None:
                return None
            # What is kept for another backward is not given away: autograd may add to it.
            return (grad_hidden if self._grad_hidden is None else grad_hidden.clone()).reshape(shape)
        factor = number * self._factor
        if self._contribution is not None:
            self._check_first("one headwater loss", _ADDED_BEFORE)
            if not math.isfinite(factor):
                raise invalid_argument(
                    "INVALID_FIELD", f"the upstream gradient of a headwater loss must be finite, got {number}", field="factor"
                )
            self._contribution.commit(factor)
        self._decided = True
        return self._scaled_grad_hidden(factor, shape)

    def _check_declared(self, upstream: float) -> None:
        declared = self._declared_scale or 0.0
        self._check_first("one headwater loss with loss_scale=", "its contribution was added once, at forward")
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


class TokenOutcome(Outcome):
    """A loss for each token. The upstream gradient is a vector, known at backward only: the server holds the rows until then.

    Args:
        losses: (num_tokens,) float32, token weights included.
        shape: of the loss.
        ignored: (num_tokens,) bool, or None: tokens whose upstream gradient means nothing, whatever it is.
    """

    def __init__(self, result: LossResult, losses: torch.Tensor, shape: torch.Size, ignored: torch.Tensor | None, **rest: Any):
        super().__init__(result, **rest)
        self._losses: torch.Tensor | None = losses
        self._shape = shape
        self._ignored = ignored

    def value(self, device: torch.device) -> torch.Tensor:
        losses, self._losses = self._losses, None
        assert losses is not None  # taken once, by the graph's node
        return losses.reshape(self._shape).to(device)

    def backward(self, upstream: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        self._check_original()
        factors = upstream.detach().reshape(-1).float()
        if self._ignored is not None:
            factors = factors.masked_fill(self._ignored.to(factors.device), 0.0)
        if self._contribution is not None:
            self._check_first('one headwater loss with reduction="none"', _ADDED_BEFORE)
            finite = torch.isfinite(factors)
            if not bool(finite.all()):
                row = int((~finite).nonzero()[0])
                raise invalid_argument(
                    "INVALID_FIELD",
                    f"the upstream gradient of a headwater loss must be finite, got {float(factors[row])} for token {row}",
                    field="token_factors",
                    row=row,
                )
            self._contribution.commit(1.0, factors.cpu())
        self._decided = True
        return self._scaled_grad_hidden(factors.unsqueeze(-1), shape)


class RemoteLoss(torch.autograd.Function):
    """A loss that was computed elsewhere. `anchor` makes it require a gradient even where the hidden states do not."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor | None, outcome: Outcome) -> torch.Tensor:
        # Kept as an attribute, not by save_for_backward: hooks that pack saved tensors would make activation checkpointing run the
        # whole forward again just for this.
        ctx.outcome = outcome
        ctx.shape = hidden.shape
        return outcome.value(hidden.device)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        # Not once_differentiable: that stays silent where `upstream` requires no gradient, and the second derivative would be lost.
        if torch.is_grad_enabled():
            raise invalid_argument(
                "INVALID_COMBINATION",
                "a headwater loss has no second derivative: leave create_graph=True out",
                field="create_graph",
            )
        grad_hidden = ctx.outcome.backward(upstream, ctx.shape)
        return grad_hidden if ctx.needs_input_grad[0] else None, None, None
