"""The two heads that the quickstart compares. To the training loop they look the same."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    import headwater

# One rule for both: AdamW as PyTorch defines it, clipped by the norm of body and head together.
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0


def remote_rule() -> "headwater.AdamW":
    """The optimizer of the remote head, with the constants of this file."""
    import headwater

    return headwater.AdamW(beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=WEIGHT_DECAY)


def initial_weight(vocab_size: int, hidden_size: int, seed: int) -> np.ndarray:
    """float32 [vocab_size, hidden_size]."""
    return (0.02 * np.random.default_rng(seed).standard_normal((vocab_size, hidden_size))).astype(np.float32)


class ClippedAdamW:
    """PyTorch's AdamW, whose gradients are multiplied before a step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)

    def norm_squared(self) -> float:
        """Squared norm of all gradients."""
        return sum(parameter.grad.double().square().sum().item() for parameter in self._parameters)

    def step(self, rate: float, clip_factor: float) -> None:
        """One step; the gradients are gone after it."""
        for parameter in self._parameters:
            parameter.grad.mul_(clip_factor)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class OwnHead:
    """PyTorch's head, in this process: weights, logits, gradient and optimizer state are the trainer's."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self._optimizer = ClippedAdamW([self.weight])

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, differentiable if gradients are on."""
        return F.cross_entropy(F.linear(hidden, self.weight), targets)

    def optimizer_step(self, learning_rate: float, micro_batches: int, body_norm_squared: float) -> float:
        """Closes a step of so many micro-batches; returns what the body's gradients are multiplied by."""
        norm = (body_norm_squared + self._optimizer.norm_squared()) ** 0.5
        clip_factor = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        self._optimizer.step(learning_rate, clip_factor)
        return clip_factor


class RemoteHead:
    """The same head on a Headwater server: hidden states go there, their gradient comes back, nothing else is here."""

    def __init__(self, server: str, name: str, dtype: torch.dtype = torch.float32) -> None:
        """Hidden states travel as `dtype`; the body rounds them to bfloat16 in any case."""
        # Imported here, so that the process that does without Headwater does not hold it.
        import headwater
        import headwater.torch

        self.head = headwater.connect(server).head(name)
        self._loss = headwater.torch.CrossEntropyLoss(self.head)
        self._dtype = dtype

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(hidden.to(self._dtype), targets)

    def optimizer_step(self, learning_rate: float, micro_batches: int, body_norm_squared: float) -> float:
        reply = self.head.apply_optimizer_step(
            learning_rate=learning_rate,
            expected_micro_batches=micro_batches,
            max_grad_norm=MAX_GRAD_NORM,
            other_grad_norm_squared=body_norm_squared,
        )
        return reply.clip_factor
