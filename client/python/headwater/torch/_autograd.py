"""How a remote loss sits in autograd's graph.

One call: with gradients on, forward submits an EXPLICIT micro-batch. The server computes everything, and holds the head's gradient
back. Backward commits it with the upstream gradient as factor, and multiplies grad_hidden by it in fp32. A graph that is dropped
discards it.

Two calls, where the upstream gradient is no single number: forward computes the losses and outputs alone, and leaves nothing on the
server. Backward sends the rows again, with a factor for each row and output, as an EAGER micro-batch.
"""

from __future__ import annotations

import abc
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headwater._errors import FailedPreconditionError, MicroBatchConflictError, invalid_argument, refused
from headwater._head import Head
from headwater._loss._contributions import Contribution
from headwater._types import LossResult

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
    tensor: that repetition must add nothing. The nearest frame of the checkpoint module shows which form it is.
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


class Outcome(abc.ABC):
    """The state that backward needs of a forward."""

    _decided = False

    @abc.abstractmethod
    def backward(self, upstream: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Adds the head's gradient, and returns that of the hidden states, (num_tokens, hidden_size)."""

    def _check_first(self, what: str, when: str) -> None:
        if self._decided:
            raise MicroBatchConflictError(f"backward ran twice through {what}; {when}", reason="MICRO_BATCH_CONFLICT")


class RecomputedOutcome(Outcome):
    """A forward that activation checkpointing has made again: the first one takes the gradient."""

    def backward(self, upstream: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        raise FailedPreconditionError(
            "backward reached a headwater loss that activation checkpointing had recomputed; the original takes the gradient",
            reason="INVALID_COMBINATION",
        )


_ADDED_BEFORE = "the first one has added its gradient to the head. Compute the loss again to add it again"


@dataclass(eq=False)
class OneCallOutcome(Outcome):
    """A loss whose gradients forward has computed, except for a factor."""

    _grad_hidden: torch.Tensor | None
    _contribution: Contribution | None
    _grad_hidden_scale: float

    def _check_first(self, what: str, when: str) -> None:
        if self._contribution is not None:
            super()._check_first(what, when)

    def _take_grad_hidden(self) -> torch.Tensor | None:
        """grad_hidden, which a loss that lives on does not keep where a second backward is refused."""
        grad_hidden = self._grad_hidden
        if self._contribution is not None:
            self._grad_hidden = None
        return grad_hidden

    def _scaled_grad_hidden(self, factor: float | torch.Tensor) -> torch.Tensor | None:
        """grad_hidden times a number or a column of numbers, multiplied in fp32."""
        grad_hidden = self._take_grad_hidden()
        if grad_hidden is None:
            return None
        if isinstance(factor, torch.Tensor):
            factor = factor.to(grad_hidden.device)
        return (grad_hidden.float() * (factor * self._grad_hidden_scale)).to(grad_hidden.dtype)


@dataclass(eq=False)
class ScalarOutcome(OneCallOutcome):
    """A sum or a mean; the upstream gradient may have been declared at forward."""

    _factor: float  # the loss is the server's sum times it
    _declared_scale: float | None

    def backward(self, upstream: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        number = float(upstream[0])
        if self._declared_scale is not None:
            self._check_declared(number)
            self._decided = True
            # The server has applied everything already.
            grad_hidden = self._take_grad_hidden()
            if grad_hidden is None:
                return None
            # A gradient that is kept for another backward is cloned, because autograd may add to it.
            return grad_hidden if self._grad_hidden is None else grad_hidden.clone()
        factor = number * self._factor
        if self._contribution is not None:
            self._check_first("one headwater loss", _ADDED_BEFORE)
            if not math.isfinite(factor):
                raise invalid_argument(
                    "INVALID_FIELD", f"the upstream gradient of a headwater loss must be finite, got {number}", field="factor"
                )
            self._contribution.commit(factor)
        self._decided = True
        return self._scaled_grad_hidden(factor)

    def _check_declared(self, upstream: float) -> None:
        declared = self._declared_scale or 0.0
        self._check_first("one headwater loss with loss_scale=", "its contribution was added once, at forward")
        if not abs(upstream - declared) <= _SCALE_TOLERANCE * abs(declared):
            raise refused(
                f"loss_scale={declared:g} was declared as the upstream gradient, but {upstream:g} came; the head's gradient of "
                "this step was made for the declared one: discard it (Head.discard_gradient), and leave loss_scale= out if the "
                "scale varies",
                "loss_scale",
                expected=declared,
                actual=upstream,
            )


@dataclass(eq=False)
class TokenOutcome(OneCallOutcome):
    """A loss for each token, whose gradient forward has computed for an upstream gradient of 1 at each of them."""

    _ignored: torch.Tensor | None  # (num_tokens,) bool: tokens whose upstream gradient means nothing, whatever it is
    _second_call: SecondCall | None  # brings a gradient that is no single number; None: the server holds the rows, takes a vector
    _on_vector: Callable[[], None]  # called before the second call is made

    def backward(self, upstream: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        if self._contribution is None:
            factors = upstream[0].detach().reshape(-1).float()
            if self._ignored is not None:
                factors = factors.masked_fill(self._ignored.to(factors.device), 0.0)
            return self._scaled_grad_hidden(factors.unsqueeze(-1))
        self._check_first('one headwater loss with reduction="none"', _ADDED_BEFORE)
        factors = _row_factors(upstream[0], self._ignored)
        number = _single(factors, self._ignored)
        if number is not None:
            self._contribution.commit(number)
            grad_hidden = self._scaled_grad_hidden(number)
        elif self._second_call is None:
            self._contribution.commit(1.0, factors)
            grad_hidden = self._scaled_grad_hidden(factors.unsqueeze(-1))
        else:
            self._on_vector()
            grad_hidden = self._second_call(factors, None, None)
            self._grad_hidden = None
        self._decided = True
        self._second_call = None  # which keeps the rows alive
        return grad_hidden


@dataclass(eq=False)
class TwoCallOutcome(Outcome):
    """A loss and outputs of which forward has left nothing on the server."""

    _second_call: SecondCall | None
    _names: tuple[str, ...]  # "loss", "entropy" or "lse", for each upstream gradient
    _factor: float | None  # of a scalar loss, the server's sum times it; None: there is a loss for each token
    _ignored: torch.Tensor | None

    def backward(self, upstream: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        self._check_first("one headwater loss", _ADDED_BEFORE)
        call = self._second_call
        assert call is not None  # dropped by the first backward alone
        gradients = dict(zip(self._names, upstream, strict=True))
        if self._factor is not None and "loss" in gradients:
            gradients["loss"] = (gradients["loss"].float() * self._factor).expand(call.row_count)
        vectors = {name: _row_factors(gradient, self._ignored) for name, gradient in gradients.items()}
        loss = vectors.get("loss")
        if loss is None:
            loss = torch.zeros(call.row_count, device="cpu")
        # A vector of zeros is left out, so that the server does not compute for it.
        entropy, lse = (
            vector if vector is not None and bool(vector.any()) else None for vector in map(vectors.get, ("entropy", "lse"))
        )
        grad_hidden = call(loss, entropy, lse)
        if call.contribution is not None:
            self._decided, self._second_call = True, None
        return grad_hidden


@dataclass(eq=False)
class SecondCall:
    """Computes the gradients of a forward's loss and outputs, and adds the head's, by a call that brings the rows again."""

    contribution: Contribution | None  # the micro-batch; None: the head is frozen
    run: Callable[..., LossResult]  # `run(rows, token_weights=..., **keywords)` is the same loss call as in forward
    rows: torch.Tensor  # (num_tokens, hidden_size)
    token_weights: torch.Tensor | None  # (num_tokens,); None: 1
    others: Sequence[torch.Tensor]  # that, like `rows`, must be as they were in forward
    heads: Sequence[Head]  # whose weights must be as they were in forward
    keywords: dict[str, Any]  # of the call

    def __post_init__(self) -> None:
        self.rows = self.rows.detach()
        self.token_weights = None if self.token_weights is None else self.token_weights.detach().float().cpu()
        self._versions = [(tensor, tensor._version) for tensor in (self.rows, *self.others) if not tensor.is_inference()]
        # A head's epoch and step name its weights, over restarts too, after which `weight_version` is another one.
        self._heads = [(head, head.epoch, head.step) for head in self.heads]

    @property
    def row_count(self) -> int:
        """Number of tokens."""
        return self.rows.shape[0]

    def _check_unchanged(self) -> None:
        """Raises if rows or weights are not those that forward has seen."""
        for head, epoch, step in self._heads:
            if head._backend.current_epoch(head.name, epoch) != head.epoch or head.step != step:
                raise FailedPreconditionError(
                    f"the weights of {head.name} were changed between a headwater loss and its backward, which needs those of "
                    "forward; run backward before the optimizer's step",
                    reason="WEIGHT_VERSION_MISMATCH",
                )
        if any(tensor._version != version for tensor, version in self._versions):
            raise FailedPreconditionError(
                "the hidden states of a headwater loss were changed in place before its backward, which sends them again",
                reason="INVALID_COMBINATION",
            )

    def __call__(self, loss: torch.Tensor, entropy: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor | None:
        """grad_hidden for these upstream gradients, each (num_tokens,) float32 on the CPU; None stands for 0."""
        self._check_unchanged()
        weights = loss if self.token_weights is None else loss * self.token_weights
        keywords = dict(self.keywords)
        for name, factors in (("entropy_factors", entropy), ("lse_factors", lse)):
            if factors is not None:
                keywords[name] = factors
        run = functools.partial(self.run, self.rows, token_weights=weights, **keywords)
        if self.contribution is None:
            return run().grad_hidden
        grad_hidden = self.contribution.submit(run).grad_hidden
        self.contribution.added()
        return grad_hidden


def _row_factors(upstream: torch.Tensor, ignored: torch.Tensor | None) -> torch.Tensor:
    """(num_tokens,) finite float32 on the CPU, 0 for ignored tokens."""
    factors = upstream.detach().reshape(-1).float().cpu()
    if ignored is not None:
        factors = factors.masked_fill(ignored.cpu(), 0.0)
    finite = torch.isfinite(factors)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise invalid_argument(
            "INVALID_FIELD",
            f"the upstream gradient of a headwater loss must be finite, got {float(factors[row])} for token {row}",
            field="token_factors",
            row=row,
        )
    return factors


def _single(factors: torch.Tensor, ignored: torch.Tensor | None) -> float | None:
    """The number that all tokens have that take part; None if they have several."""
    valid = factors if ignored is None else factors[~ignored.cpu()]
    if valid.numel() == 0:
        return 0.0
    return float(valid[0]) if bool((valid == valid[0]).all()) else None


class RemoteLoss(torch.autograd.Function):
    """Values that were computed elsewhere. `anchor` makes them require a gradient even where the hidden states do not."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor | None, outcome: Outcome, values: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        # Kept as an attribute, not by save_for_backward: hooks that pack saved tensors would make activation checkpointing run the
        # whole forward again just for this.
        ctx.outcome = outcome
        ctx.shape = hidden.shape
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        # Not once_differentiable: that stays silent where `upstream` requires no gradient, and the second derivative would be lost.
        if torch.is_grad_enabled():
            raise refused("a headwater loss has no second derivative: leave create_graph=True out", "create_graph")
        grad_hidden = ctx.outcome.backward(upstream)
        if grad_hidden is None or not ctx.needs_input_grad[0]:
            return None, None, None, None
        return grad_hidden.reshape(ctx.shape), None, None, None
