"""A small trunk, the same training step with the head in process (fp64) and away, and data-parallel trainers as threads."""

import concurrent.futures
import threading

import numpy as np
import torch
import torch.nn.functional as F

import headwater

HIDDEN_SIZE, VOCAB_SIZE, FEATURES = 24, 61, 10


def numbers(rng, *shape):
    """fp32 values as a tensor."""
    return torch.tensor(rng.standard_normal(shape).astype(np.float32))


def with_ignored(targets, index=-100):
    """The targets, every third one ignored."""
    targets = targets.clone()
    targets[::3] = index
    return targets


class Problem:
    """A linear trunk, a head, and a batch."""

    def __init__(self, rng, num_tokens=16):
        self.weight = numbers(rng, VOCAB_SIZE, HIDDEN_SIZE) * 0.6
        self.bias = numbers(rng, VOCAB_SIZE) * 0.3
        self.trunk = numbers(rng, HIDDEN_SIZE, FEATURES) * 0.4
        self.inputs = numbers(rng, num_tokens, FEATURES)
        self.targets = torch.tensor(rng.integers(0, VOCAB_SIZE, num_tokens))

    def head(self, client, make_head, **options):
        """The head on a backend."""
        return make_head(client, self.weight, self.bias, **{"optimizer": headwater.SGD(), **options})

    def parameter(self):
        """A fresh trunk."""
        return torch.nn.Parameter(self.trunk.clone())

    def reference(self, objective):
        """fp64 gradients of `objective(hidden, logits)` by trunk, weight and bias; (trunk, weight, bias) and the value."""
        parameters = [tensor.double().requires_grad_() for tensor in (self.trunk, self.weight, self.bias)]
        hidden = self.inputs.double() @ parameters[0].T
        value = objective(hidden, hidden @ parameters[1].T + parameters[2])
        value.backward()
        return [parameter.grad for parameter in parameters], value.item()

    def cross_entropy(self, upstream=1.0, targets=None, **options):
        """The objective that is PyTorch's cross entropy, times `upstream`."""
        targets = self.targets if targets is None else targets
        return lambda _, logits: (F.cross_entropy(logits, targets, **options) * torch.as_tensor(upstream).double()).sum()

    def check(self, objective, trunk, head, value=None):
        """The gradients of trunk and head, and a value, are those of the objective."""
        expected, reference = self.reference(objective)
        assert value is None or abs(float(value) / reference - 1) <= 1e-6
        check_gradients(trunk.grad, head, expected)


def relative(actual, expected):
    """Norm of the difference / norm of the reference; NaN stays NaN."""
    actual = torch.as_tensor(np.asarray(actual)).double()
    return float((actual - expected).norm() / expected.norm())


def check_gradients(trunk_grad, head, expected, *, factor=1.0, tolerance=1e-5):
    """Trunk on this side, weight and bias on the server's."""
    weight, bias = head.gradient(bias=True, gradient_factor=factor)
    for name, actual, reference in zip(
        ("trunk", "weight", "bias"), (trunk_grad.detach().numpy(), weight, bias), expected, strict=True
    ):
        assert relative(actual, reference) <= tolerance, f"{name}: {relative(actual, reference):.3g}"


def check_step(problem, head, trunk, tolerance=1e-5):
    """Both sides have gone one step of SGD, at a rate of 0.1, with the mean cross entropy."""
    expected, _ = problem.reference(problem.cross_entropy())
    assert relative(problem.weight - torch.tensor(head.weight()), 0.1 * expected[1]) <= tolerance
    assert relative(problem.trunk - trunk.detach().cpu(), 0.1 * expected[0]) <= tolerance


class Ranks:
    """Threads that behave as data-parallel processes: a barrier, and an all-reduce of the body's gradients."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.gradients = [None] * world_size

    def average(self, rank, parameters):
        self.gradients[rank] = [p.grad for p in parameters]
        self.barrier.wait()
        mean = [sum(group) / self.world_size if group[0] is not None else None for group in zip(*self.gradients, strict=True)]
        self.barrier.wait()
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def run(self, work):
        """Runs `work(rank)` of all; raises an error that came before the others' broken barrier."""

        def one(rank):
            try:
                work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(self.world_size) as threads:
            errors = [future.exception() for future in [threads.submit(one, rank) for rank in range(self.world_size)]]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
