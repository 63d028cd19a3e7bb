"""torch.compile around a loss of headwater.torch: what is before and behind it is compiled, the loss itself is not."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch_model import FEATURES, HIDDEN_SIZE, Problem, check_gradients, relative

import headwater
import headwater.torch

pytestmark = pytest.mark.skipif(not hasattr(torch, "compile"), reason="this PyTorch has no compiler")


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
def test_a_model_with_its_loss_inside(one_shard, make_head, problem, compiled, form):
    head = problem.head(one_shard.client, make_head, staging_slots=2)
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


def test_a_divergence_and_a_loss_that_is_compiled_itself(one_shard, make_head, problem, compiled, rng):
    head = problem.head(one_shard.client, make_head)
    teacher = Problem(rng).head(one_shard.client, make_head, trainable=False, optimizer=None)
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
