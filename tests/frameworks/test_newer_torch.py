"""PyTorch since 2.0: torch.compile around a loss of headwater.torch, a GradScaler of the CPU around a TrainingLoop, other defaults.

The code before and behind a loss is compiled, the loss itself is not.
"""

import contextlib
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwater
import headwater.torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "e2e/python/pytorch"))

from torch_language_model import LanguageModel, attach_with_loop, changes, micro_batch
from torch_model import FEATURES, HIDDEN_SIZE, VOCAB_SIZE, Problem, check_gradients, check_step, relative, with_ignored

TOLERANCE = 1e-5  # as in test_torch_tied.py


@pytest.fixture
def problem():
    return Problem(np.random.default_rng(3))


@pytest.fixture
def make_head(client):
    """Creates heads, and deletes them afterwards."""
    made = []

    def make(problem, **options):
        made.append(
            problem.head(client, lambda client, *args, **kw: client.create_head(f"head-{len(made)}", *args, **kw), **options)
        )
        return made[-1]

    yield make
    for head in made:
        head.delete(force=True)


# ---- torch.compile -------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """`torch.compile` without code of a C++ compiler's, for functions that it has not seen before."""
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend="aot_eager")
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Trunk and loss in one module."""

    def __init__(self, problem, loss):
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, HIDDEN_SIZE, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(problem.trunk)
        self.loss = loss

    def forward(self, inputs, *rest):
        return (3 * self.loss(torch.tanh(self.body(inputs)), *rest)).sum()


@pytest.mark.parametrize("form", ("mean", "none", "declared", "functional"))
def test_a_model_with_its_loss_inside(make_head, problem, compiled, form):
    head = make_head(problem, staging_slots=2)
    options = {"mean": {}, "none": {"reduction": "none"}, "declared": {"loss_scale": 3.0}, "functional": {}}[form]
    loss_fn = headwater.torch.CrossEntropyLoss(head, **options)

    def functional(hidden, targets):
        return headwater.torch.cross_entropy(head, hidden, targets)

    model = Model(problem, functional if form == "functional" else loss_fn)

    def objective(hidden, _):
        logits = torch.tanh(hidden) @ problem.weight.double().T + problem.bias.double()
        return 3 * F.cross_entropy(logits, problem.targets, reduction=options.get("reduction", "mean")).sum()

    expected, value = problem.reference(objective)
    step = compiled(model)
    for count in range(1, 4):
        model.body.weight.grad = None
        loss = step(problem.inputs, problem.targets)
        loss.backward()
        assert abs(loss.item() - value) <= 1e-5 * abs(value)
        assert relative(model.body.weight.grad, expected[0]) <= 1e-5
        assert loss_fn.micro_batches == list(range(count))
    states = {entry.state for entry in head.step_state().open.micro_batches.values()}
    assert states == {"COMMITTED"} and head.seal(expected_micro_batches=3).totals.micro_batch_count == 3
    with torch.no_grad():
        assert abs(step(problem.inputs, problem.targets).item() - value) <= 1e-5 * abs(value)


def test_a_divergence_and_a_loss_that_is_compiled_itself(make_head, problem, compiled):
    head = make_head(problem)
    teacher = make_head(Problem(np.random.default_rng(4)), trainable=False, optimizer=None)
    teacher_hidden = problem.inputs @ problem.trunk.T * 0.5
    gradients = []
    for wrap in (lambda loss: Model(problem, loss), lambda loss: compiled(Model(problem, loss))):
        model = wrap(headwater.torch.JSDLoss(head, teacher))
        model(problem.inputs, teacher_hidden).backward()
        gradients.append((next(model.parameters()).grad, torch.tensor(head.gradient())))
        head.discard_gradient()
    for plain, other in zip(*gradients, strict=True):
        assert relative(other, plain.double()) <= 1e-6
    trunk = problem.parameter()
    expected, _ = problem.reference(lambda hidden, logits: F.cross_entropy(logits, problem.targets))
    compiled(headwater.torch.CrossEntropyLoss(head))(problem.inputs @ trunk.T, problem.targets).backward()
    check_gradients(trunk.grad, head, expected)


# ---- a GradScaler of the CPU ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ("body", "head"))
def test_an_overflow_is_skipped_on_all_sides(make_head, problem, where):
    head, trunk = make_head(problem), problem.parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), scaler=scaler, max_grad_norm=100.0)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    if where == "body":
        trunk.grad[0, 0] = float("inf")
    else:
        bad = torch.full((1, head.spec.hidden_size), float("nan"))
        head.add_gradient(bad.numpy(), micro_batch=1)
    outcome = loop.step(expected_micro_batches=1 if where == "body" else 2)
    assert not outcome.applied and scaler.get_scale() == 2.0**3 and math.isnan(outcome.global_grad_norm)
    assert torch.equal(trunk.detach(), problem.trunk) and relative(head.weight(), problem.weight.double()) == 0
    assert head.step_state().last_closed.state == "DISCARDED" and trunk.grad is None
    # The next one is right, and the scale has left no trace.
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    assert loop.step().applied
    check_step(problem, head, trunk)


@pytest.mark.parametrize("owner", ("server", "trainer", "nobody"))
def test_a_scaler_that_sees_no_gradient_of_the_body(client, owner):
    """The body is frozen, so backward leaves nothing to unscale; what comes from the head has no scale on it."""
    problem, scaler = Problem(np.random.default_rng(5)), torch.amp.GradScaler("cpu", init_scale=64.0)
    layer = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
    layer.load_state_dict({"weight": problem.weight, "bias": problem.bias})
    frozen = problem.parameter()
    if owner == "trainer":
        options, optimizer = {"optimizer": "torch"}, torch.optim.SGD(layer.parameters(), lr=0.1)
    else:
        options, optimizer = {"optimizer": headwater.SGD()}, torch.optim.SGD([frozen], lr=0.1) if owner == "server" else None
    head = headwater.torch.attach(client, f"frozen-body-{owner}", layer, **options)
    loop = headwater.torch.TrainingLoop(head, optimizer, scaler=scaler)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    expected, _ = problem.reference(lambda hidden, logits: F.cross_entropy(logits, problem.targets))
    for step in range(2):  # a scaler unscales once between two updates
        loop.backward(loss_fn(problem.inputs @ frozen.detach().T, problem.targets))
        assert loop.step(0.1).applied and scaler.get_scale() == 64.0
        if step == 0:
            assert relative(problem.weight - torch.tensor(head.weight()), 0.1 * expected[1]) <= 1e-5
            assert relative(problem.bias - torch.tensor(head.bias()), 0.1 * expected[2]) <= 1e-5
    assert torch.equal(frozen.detach(), problem.trunk)


def test_a_step_that_was_lost_once_it_was_unscaled(make_head, problem, monkeypatch):
    """A scaler unscales once between two updates: what has failed in between must not stand in the way of the next step."""
    head, trunk = make_head(problem), problem.parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), scaler=scaler)
    loss_fn = headwater.torch.CrossEntropyLoss(head)

    def lost(**_):
        raise headwater.StepLostError("the server was started again", reason="STEP_LOST")

    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    with monkeypatch.context() as patch:
        patch.setattr(head, "apply_optimizer_step", lost)
        with pytest.raises(headwater.StepLostError):
            loop.step()
    assert loop.resume() == 0 and scaler.get_scale() == 64.0
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    assert loop.step().applied
    check_step(problem, head, trunk)


@pytest.mark.parametrize("tied", ("trainer", "server"))
def test_tied_weights_under_a_scaler_and_a_gradient_factor(client, tied):
    """Whatever scales the head's gradient until it is applied, the embedding's part of the same weight is not scaled twice."""
    results = []
    for scale, factor in ((None, 1.0), (64.0, 1.0), (64.0, 0.25)):
        model = LanguageModel(tied=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        # grad_hidden_scale takes back on the body what gradient_factor would leave on the head alone.
        loss, options = {"grad_hidden_scale": factor}, {"scaler": scaler, "gradient_factor": factor, "max_grad_norm": 1.0}
        head, loop, loss_fn = attach_with_loop(client, f"tied-{tied}", model, tied, loss=loss, **options)
        for step in range(4):
            for index in range(2):
                inputs, targets = micro_batch(step, index)
                loop.backward(loss_fn(model.body(inputs), targets) / (2 * factor))
            loop.step()
        results.append(model)
        head.delete()
    for other in results[1:]:
        for name, change in changes(results[0], other).items():
            assert change <= TOLERANCE, f"{name}: {change:.2g}"


def test_the_scale_grows_again_as_late_after_an_overflow_as_it_does_in_pytorch(make_head, problem):
    """Three good steps in a row, those before the overflow not among them."""
    scales = []
    for head in (make_head(problem), None):
        trunk = problem.parameter()
        optimizer = torch.optim.SGD([trunk], lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        loop = head and headwater.torch.TrainingLoop(head, optimizer, scaler=scaler)
        scales.append([])
        for step in range(8):
            hidden = problem.inputs @ trunk.T
            if loop:
                loop.backward(headwater.torch.cross_entropy(head, hidden, problem.targets))
            else:
                scaler.scale(F.cross_entropy(hidden @ problem.weight.T, problem.targets)).backward()
            if step == 2:
                trunk.grad[0, 0] = float("inf")
            if loop:
                loop.step()
            else:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1] == [16, 16, 8, 8, 8, 16, 16, 16]


# ---- other defaults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ({"reduction": "none"}, {"loss_scale": 1.0}, {}), ids=str)
def test_the_default_device_changes_nothing(make_head, problem, options):
    targets, token_weights = with_ignored(problem.targets), None if "loss_scale" in options else torch.linspace(0.5, 2, 16)
    results = []
    for mode in (contextlib.nullcontext(), torch.device("meta")):
        head, trunk = make_head(problem), problem.parameter()
        loss_fn = headwater.torch.CrossEntropyLoss(head, **options)
        upstream = torch.linspace(0.5, 1, 16) if options.get("reduction") == "none" else None
        with mode:
            loss = loss_fn(problem.inputs @ trunk.T, targets, token_weights=token_weights)
            loss.backward(upstream)
        results.append((loss.detach().numpy(), trunk.grad.numpy(), head.gradient()))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_state_may_hold_any_object(tmp_path):
    class Kept:
        """Its state has more than weights, which torch.load refuses by default."""

        def state_dict(self):
            return {"numpy": np.random.RandomState(7).get_state()}

        def load_state_dict(self, state):
            self.loaded = state

    kept = Kept()
    state = headwater.torch.TrainerState(tmp_path, random=kept)
    state.save(1)
    state.load(1)
    assert kept.loaded["numpy"][0] == "MT19937"
