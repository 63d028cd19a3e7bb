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


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """PyTorch's optimizer, with the constants of this file."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)


class OwnHead:
    """PyTorch's head, in this process: weights, logits, gradient and optimizer state are the trainer's."""

    def __init__(self, weight: np.ndarray, body: torch.nn.Module) -> None:
        self.weight = torch.nn.Parameter(torch.from_numpy(weight))
        self._parameters = [*body.parameters(), self.weight]
        self._optimizer = adamw(self._parameters)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, differentiable if gradients are on."""
        return F.cross_entropy(F.linear(hidden, self.weight), targets)

    def step(self, learning_rate: float) -> None:
        """Updates body and head, and forgets their gradients."""
        torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()


class RemoteHead:
    """The same head on a Headwater server: hidden states go there, their gradient comes back, nothing else is here."""

    def __init__(self, server: str, name: str, body: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """Hidden states travel as `dtype`; the body rounds them to bfloat16 in any case."""
        # Imported here, so that the process that does without Headwater does not hold it.
        import headwater
        import headwater.torch

        self.head = headwater.connect(server).head(name)
        self._loss = headwater.torch.CrossEntropyLoss(self.head)
        self._optimizer = adamw(body.parameters())
        self._loop = headwater.torch.TrainingLoop(self.head, self._optimizer, max_grad_norm=MAX_GRAD_NORM)
        self._dtype = dtype

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._loss(hidden.to(self._dtype), targets)

    def step(self, learning_rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._loop.step()
