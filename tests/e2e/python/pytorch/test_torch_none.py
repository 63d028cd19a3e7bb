"""reduction="none": a loss for each token, and any upstream gradient, against PyTorch's own head in fp64."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expectations import refused
from torch.overrides import TorchFunctionMode
from torch_model import (
    FEATURES,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Problem,
    check_gradients,
    numbers,
    with_ignored,
)

import headwater
import headwater.torch


class DefaultDevice(TorchFunctionMode):
    """What torch.set_default_device does, for versions without it: tensors are made on a device that is not the host."""

    MAKERS = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.arange)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.MAKERS:
            kwargs = {"device": "meta", **(kwargs or {})}
        return func(*args, **(kwargs or {}))


CASES = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "class_weights": {"weight": torch.linspace(0, 2, VOCAB_SIZE)},
    "ignore_index": {"ignore_index": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_cross_entropy_is_torchs(backend, make_head, problem, rng, case):
    options = CASES[case]
    targets = with_ignored(problem.targets, options.get("ignore_index", -100))
    theirs = {**options, "weight": options["weight"].double()} if "weight" in options else options
    upstream = numbers(rng, 16)
    rows = []

    def objective(hidden, logits):
        rows.append(F.cross_entropy(logits, targets, reduction="none", **theirs))
        return (rows[0] * upstream.double()).sum()

    expected, _ = problem.reference(objective)
    head, trunk = problem.head(backend.client, make_head, staging_slots=0), problem.parameter()
    losses = headwater.torch.CrossEntropyLoss(head, reduction="none", **options)(problem.inputs @ trunk.T, targets)
    assert losses.shape == (16,) and losses.dtype == torch.float32
    # Design, section 3: 1e-6 * max(1, max|z|) for each token; the logits are below 10 here.
    assert float((losses.detach() - rows[0].detach()).abs().max()) <= 1e-5
    assert not losses[targets == options.get("ignore_index", -100)].any()
    assert head.gradient_norm() == 0  # nothing is added before backward
    losses.backward(upstream)
    check_gradients(trunk.grad, head, expected)
    assert head.step_state().open.micro_batches[0].form == "DIRECT"


def test_jsd_is_torchs(backend, make_head, problem, rng):
    teacher_problem, upstream, share = Problem(rng), numbers(rng, 2, 8), 0.3
    teacher_hidden = teacher_problem.inputs @ teacher_problem.trunk.T
    teacher_logits = teacher_hidden.double() @ teacher_problem.weight.double().T + teacher_problem.bias.double()
    weights = torch.tensor(rng.integers(-1, 4, (2, 8)) * 0.5).float()
    rows = []

    def objective(hidden, logits):
        log_p, log_q = F.log_softmax(teacher_logits, -1), F.log_softmax(logits, -1)
        soft = (log_p.exp() * (log_p - log_q)).sum(-1)
        hard = F.cross_entropy(logits, problem.targets, reduction="none")
        rows.append(weights.double().reshape(-1) * ((1 - share) * soft + share * hard))
        return (rows[0] * upstream.double().reshape(-1)).sum()

    expected, _ = problem.reference(objective)
    head, trunk = problem.head(backend.client, make_head), problem.parameter()
    teacher = teacher_problem.head(backend.client, make_head, trainable=False, optimizer=None)
    loss_fn = headwater.torch.JSDLoss(head, teacher, beta=0.0, hard_loss_weight=share, reduction="none")
    losses = loss_fn(
        (problem.inputs @ trunk.T).reshape(2, 8, HIDDEN_SIZE),
        teacher_hidden.reshape(2, 8, HIDDEN_SIZE),
        problem.targets.reshape(2, 8),
        token_weights=weights,
    )
    assert losses.shape == (2, 8)
    assert float((losses.detach().reshape(-1) - rows[0].detach()).abs().max()) <= 2e-5
    losses.backward(upstream)
    check_gradients(trunk.grad, head, expected)


def test_a_teacher_that_is_deleted_before_backward_is_missed_by_name(remote, make_head, problem, rng):
    head, trunk = problem.head(remote.client, make_head), problem.parameter()
    teacher = Problem(rng).head(remote.client, make_head, trainable=False, optimizer=None)
    hidden = problem.inputs @ trunk.T
    losses = headwater.torch.JSDLoss(head, teacher, reduction="none")(hidden, hidden.detach())
    teacher.delete()
    with refused("HEAD_NOT_FOUND", headwater.NotFoundError) as info:
        losses.backward(torch.arange(16.0))
    assert teacher.name in str(info.value)


def test_a_policy_gradient_with_masks_and_sequence_means(head, trunk, problem, rng):
    """What the vector is for: each sequence's mean over its own tokens, times its advantage, a clipped ratio, a second term."""
    mask = torch.tensor(rng.random((4, 4)) < 0.7).float()
    mask[:, 0] = 1
    advantages, old = numbers(rng, 4), -numbers(rng, 4, 4).abs()

    def policy_loss(token_losses):
        token_losses = token_losses.reshape(4, 4)
        ratio = (-token_losses - old.to(token_losses.dtype)).exp()
        gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        return -((gain * mask).sum(1) / mask.sum(1)).mean() + 0.1 * (token_losses * mask).sum() / mask.sum()

    expected, value = problem.reference(
        lambda hidden, logits: policy_loss(F.cross_entropy(logits, problem.targets, reduction="none"))
    )
    loss = policy_loss(headwater.torch.CrossEntropyLoss(head, reduction="none")(problem.inputs @ trunk.T, problem.targets))
    assert abs(loss.item() - value) <= 1e-5 * max(1, abs(value))
    loss.backward()
    check_gradients(trunk.grad, head, expected)


def test_upstream_of_ignored_tokens_means_nothing(head, trunk, problem):
    targets = with_ignored(problem.targets)
    expected, _ = problem.reference(lambda hidden, logits: F.cross_entropy(logits, targets, reduction="sum"))
    losses = headwater.torch.CrossEntropyLoss(head, reduction="none")(problem.inputs @ trunk.T, targets)
    losses.backward(torch.where(targets == -100, torch.tensor(float("nan")), torch.tensor(1.0)))
    check_gradients(trunk.grad, head, expected)


def test_zero_upstream_everywhere_decides_the_contribution(head, trunk, problem):
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    (loss_fn(problem.inputs @ trunk.T, problem.targets) * 0).sum().backward()
    assert not trunk.grad.any() and head.gradient_norm() == 0
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


def test_an_empty_batch(head, trunk):
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    losses = loss_fn(torch.zeros(16, FEATURES) @ trunk.T, torch.full((16,), -100))
    losses.sum().backward()
    assert not losses.any() and not trunk.grad.any() and head.gradient_norm() == 0


def test_options_that_belong_to_a_scalar_are_refused(head):
    with refused("INVALID_COMBINATION", ValueError) as info:
        headwater.torch.CrossEntropyLoss(head, reduction="none", loss_scale=1.0)
    assert "loss_scale" in str(info.value)


@pytest.mark.parametrize("reduction", ("none", "sum"))
def test_a_divisor_is_refused_where_there_is_no_mean(head, problem, reduction):
    with refused("INVALID_COMBINATION", ValueError) as info:
        headwater.torch.CrossEntropyLoss(head, reduction=reduction)(
            problem.inputs @ problem.trunk.T, problem.targets, num_items_in_batch=4
        )
    assert "num_items_in_batch" in str(info.value)


@pytest.mark.parametrize("options", ({"reduction": "none"}, {"loss_scale": 1.0}, {}), ids=str)
def test_the_default_device_changes_nothing(one_shard, make_head, problem, rng, options):
    targets, token_weights = with_ignored(problem.targets), None if "loss_scale" in options else numbers(rng, 16).abs() + 0.5
    results = []
    for mode in (contextlib.nullcontext(), DefaultDevice()):
        head, trunk = problem.head(one_shard.client, make_head), problem.parameter()
        loss_fn = headwater.torch.CrossEntropyLoss(head, **options)
        upstream = torch.linspace(0.5, 1, 16) if options.get("reduction") == "none" else None
        with mode:
            loss = loss_fn(problem.inputs @ trunk.T, targets, token_weights=token_weights)
            loss.backward(upstream)
        results.append((loss.detach().numpy(), trunk.grad.numpy(), head.gradient()))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)
