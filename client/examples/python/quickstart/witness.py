"""Compares both heads on the same weights and the same batch, in a process beside the trainer.

The trainer holds neither head weights nor logits, and its memory is measured; so the comparison needs a process of its own.
The trainer shows it what went to the server and what came back, and waits for the verdict before the step is applied. Meanwhile
the witness takes the weights and the accumulated gradient from the server itself and computes the same step with PyTorch's own
head.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np


def relative_difference(value: np.ndarray, reference: np.ndarray) -> float:
    """The norm of the difference over the norm of the reference, over the whole tensor, in fp64; NaN stays NaN."""
    difference = np.linalg.norm(value.astype(np.float64) - reference.astype(np.float64))
    return float(difference / np.linalg.norm(reference.astype(np.float64)))


class Witness:
    """The trainer's side. A context manager; `verdicts` has one entry for each step judged."""

    def __init__(self, server: str, head_name: str) -> None:
        # Not forked: PyTorch's and gRPC's threads do not survive that.
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._head = server, head_name
        self._shown: list[tuple] = []
        self.verdicts: list[dict[str, float]] = []

    def __enter__(self) -> "Witness":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown()

    def show(self, hidden: np.ndarray, targets: np.ndarray, loss: float, grad_hidden: np.ndarray, scale: float) -> None:
        """One micro-batch: the tensors sent to the server, `scale` times its mean loss, and the gradient of that which came
        back."""
        self._shown.append((hidden, targets, loss, grad_hidden, scale))

    def judge(self, step: int) -> None:
        """Waits until the step, which is sealed and not applied, has been compared."""
        self.verdicts.append({"step": step, **self._process.submit(_compare, *self._head, step, self._shown).result()})
        self._shown = []


def _compare(server: str, head_name: str, step: int, shown: list[tuple]) -> dict[str, float]:
    """The largest relative differences of the step's losses, gradients of hidden states, and gradient of the weight."""
    import torch
    import torch.nn.functional as F

    import headwater

    with headwater.connect(server) as client:
        head = client.head(head_name)
        weight, grad_weight = head.weight(), head.gradient(step=step)
    own_weight = torch.from_numpy(np.array(weight)).requires_grad_()
    losses, grads_hidden = [], []
    for hidden, targets, loss, grad_hidden, scale in shown:
        own_hidden = torch.from_numpy(hidden).requires_grad_()
        own_loss = F.cross_entropy(F.linear(own_hidden, own_weight), torch.from_numpy(targets)) * scale
        own_loss.backward()
        losses.append(abs(loss - own_loss.item()) / abs(own_loss.item()))
        grads_hidden.append(relative_difference(grad_hidden, own_hidden.grad.numpy()))
    # np.max, unlike max, hands NaN on.
    return {
        "loss": float(np.max(losses)),
        "grad_hidden": float(np.max(grads_hidden)),
        "grad_weight": relative_difference(grad_weight, own_weight.grad.numpy()),
    }
