"""Outputs of the torch losses, and losses whose backward is a second call, against PyTorch's own head in fp64."""

import contextlib
import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import running_server
from expectations import refused
from torch.overrides import TorchFunctionMode
from torch_model import HIDDEN_SIZE, VOCAB_SIZE, Problem, check_gradients, numbers, relative, with_ignored

import headwater
import headwater.torch

SOFTCAP, LOGIT_SCALE, TEMPERATURE = 8.0, 1.5, 0.7
DIFFERENTIABLE = ("loss", "entropy", "lse")


@pytest.fixture
def calls(monkeypatch):
    """The loss calls that are made, by the way in which they add."""
    made = []
    compute = headwater._remote.RemoteBackend.compute

    def count(self, request, timeout_s):
        made.append("forward" if not request.options.backward else "explicit" if request.options.explicit else "eager")
        return compute(self, request, timeout_s)

    monkeypatch.setattr(headwater._remote.RemoteBackend, "compute", count)
    return made


def transformed(logits, temperature=1.0):
    """Logits as the heads of these tests make them of the product."""
    return SOFTCAP * torch.tanh(LOGIT_SCALE * logits / SOFTCAP) / temperature


def outputs_of(logits, targets, ignore_index=-100):
    """Every per-token output but the loss by its definition; ignored tokens have 0, or -1."""
    log_p, valid = logits.log_softmax(-1), targets != ignore_index
    outputs = {
        "lse": logits.logsumexp(-1),
        "target_log_probability": log_p.gather(-1, targets.clamp(0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "mean_logits": logits.mean(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
    }
    outputs = {name: values * valid for name, values in outputs.items()}
    return {**outputs, "argmax": torch.where(valid, logits.argmax(-1), -1)}


def values_of(logits, targets):
    """These outputs, and the loss of each token."""
    return {"loss": F.cross_entropy(logits, targets, reduction="none"), **outputs_of(logits, targets)}


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("upstream_of", [(name,) for name in DIFFERENTIABLE] + [DIFFERENTIABLE], ids="+".join)
def test_each_output_carries_its_gradient(backend, make_head, problem, rng, reduction, upstream_of):
    targets, weights = with_ignored(problem.targets), numbers(rng, 16)
    class_weights = torch.linspace(-0.5, 2, VOCAB_SIZE)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "temperature": TEMPERATURE}
    factors = {name: numbers(rng, 16) for name in upstream_of}
    if reduction == "mean" and "loss" in factors:
        factors["loss"] = torch.tensor(1.7)
    valid = targets != -100
    divisor = float((weights.double() * class_weights.double()[targets.clamp(0)])[valid].sum()) if reduction == "mean" else 1.0

    def objective(hidden, logits):
        u = transformed(logits, TEMPERATURE)
        rows = F.cross_entropy(u, targets, weight=class_weights.double(), label_smoothing=0.1, reduction="none")
        rows = weights.double() * (rows + 1e-2 * valid * u.logsumexp(-1) ** 2) / divisor
        values = {"loss": rows.sum() if reduction == "mean" else rows, **outputs_of(u, targets)}
        return sum((factor.double() * values[name]).sum() for name, factor in factors.items())

    expected, value = problem.reference(objective)
    head = problem.head(backend.client, make_head, softcap=SOFTCAP, logit_scale=LOGIT_SCALE)
    trunk = problem.parameter()
    loss_fn = headwater.torch.CrossEntropyLoss(
        head, reduction=reduction, weight=class_weights, differentiable=DIFFERENTIABLE, **options
    )
    out = loss_fn(problem.inputs @ trunk.T, targets, token_weights=weights)
    assert head.step_state().open.micro_batches == {}  # forward leaves nothing
    objective = sum((factor * getattr(out, name)).sum() for name, factor in factors.items())
    assert abs(objective.item() - value) <= 2e-5 * max(1, abs(value))
    objective.backward()
    check_gradients(trunk.grad, head, expected)
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


@pytest.mark.parametrize("reduction", ("sum", "none"))
def test_outputs_come_from_the_same_pass(backend, make_head, problem, calls, reduction):
    targets = with_ignored(problem.targets).reshape(2, 8)
    names = ("token_loss", "lse", "target_log_probability", "entropy", "argmax", "mean_logits", "log_sum_sq_probs")
    head = problem.head(backend.client, make_head, softcap=SOFTCAP, logit_scale=LOGIT_SCALE)
    hidden = (problem.inputs @ problem.trunk.T).reshape(2, 8, HIDDEN_SIZE)
    logits = transformed(hidden.double() @ problem.weight.double().T + problem.bias.double(), TEMPERATURE)
    rows = F.cross_entropy(logits.reshape(16, -1), targets.reshape(16), reduction="none").reshape(2, 8)
    expected = {**outputs_of(logits, targets), "token_loss": rows, "loss": rows if reduction == "none" else rows.sum()}
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction=reduction, temperature=TEMPERATURE, outputs=names)
    out = loss_fn(hidden, targets)
    assert calls == ["explicit"]
    assert set(out._fields) - set(expected) == {"soft_loss", "hard_loss", "z_loss"}
    assert out.loss.requires_grad and out.z_loss is None
    for name, values in expected.items():
        actual = getattr(out, name)
        assert actual.shape == values.shape and actual.dtype == (torch.int64 if name == "argmax" else torch.float32), name
        assert name == "loss" or not actual.requires_grad
        assert float((actual.detach() - values).abs().max()) <= 1e-5 * max(1.0, float(values.abs().max())), name
        assert not actual[targets == -100].any() or name == "argmax" if actual.dim() else True
    with torch.no_grad():
        again = loss_fn(hidden, targets)
    assert not again.loss.requires_grad and torch.equal(again.entropy, out.entropy)


def test_parts_of_the_loss(one_shard, make_head, problem, rng):
    head, hidden = problem.head(one_shard.client, make_head), problem.inputs @ problem.trunk.T
    teacher = Problem(rng).head(one_shard.client, make_head, trainable=False, optimizer=None)
    options = {"reduction": "mean", "z_loss": 1e-2, "outputs": ("soft_loss", "hard_loss", "z_loss", "argmax")}
    with torch.no_grad():
        plain = headwater.torch.CrossEntropyLoss(head, **options)(hidden, problem.targets)
        mixed = headwater.torch.JSDLoss(head, teacher, hard_loss_weight=0.3, **options)(hidden, hidden, problem.targets)
    logits = hidden.double() @ problem.weight.double().T + problem.bias.double()
    assert plain.soft_loss == 0
    assert plain.hard_loss.item() == pytest.approx(F.cross_entropy(logits, problem.targets).item(), rel=1e-6)
    assert plain.z_loss.item() == pytest.approx(1e-2 * float((logits.logsumexp(-1) ** 2).mean()), rel=1e-6)
    assert mixed.hard_loss.item() == pytest.approx(0.3 * plain.hard_loss.item(), rel=1e-6)
    assert torch.equal(mixed.argmax, logits.argmax(-1))
    for out in (plain, mixed):
        assert out.loss.item() == pytest.approx((out.soft_loss + out.hard_loss + out.z_loss).item(), rel=1e-6)


# ---- one call or two -----------------------------------------------------------------------------------------------------


def test_equal_factors_take_one_call_and_others_two(one_shard, make_head, problem, rng, calls):
    """One loss object: its first backward has equal factors, its second has others, and the third is prepared for it."""
    targets = with_ignored(problem.targets)
    head, loss_fn = problem.head(one_shard.client, make_head), None
    vector = numbers(rng, 16)
    equal = torch.where(targets == -100, vector, torch.tensor(0.3))  # those of ignored tokens mean nothing
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    for upstream, expected_calls, form, attempt in (
        (equal, ["explicit"], "STAGED", 0),
        (vector, ["explicit", "eager"], "DIRECT", 1),
        (vector, ["forward", "eager"], "DIRECT", 0),
        (equal, ["forward", "eager"], "DIRECT", 0),
    ):
        expected, _ = problem.reference(
            lambda hidden, logits, upstream=upstream: (F.cross_entropy(logits, targets, reduction="none") * upstream.double()).sum()
        )
        trunk = problem.parameter()
        calls.clear()
        loss_fn(problem.inputs @ trunk.T, targets).backward(upstream)
        assert calls == expected_calls
        check_gradients(trunk.grad, head, expected)
        assert [(entry.form, entry.attempt) for entry in head.step_state().open.micro_batches.values()] == [(form, attempt)]
        assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
        head.discard_gradient()


def test_a_process_that_is_started_again_adds_nothing_twice(one_shard, make_head, problem, rng):
    """Ids are drawn by forwards in both ways, so that a repeat finds its own; autograd runs the backwards in the other order."""
    head, vectors, gradients = problem.head(one_shard.client, make_head, staging_slots=2), numbers(rng, 2, 8), []
    parts = torch.arange(16).chunk(2)
    for restarted in (False, True):
        trunk, source = problem.parameter(), headwater.torch.MicroBatchSource()
        loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none", micro_batch_source=source)
        known = head.step_state().open.micro_batches.values()
        if restarted:
            source.begin_again(0, {entry.micro_batch: entry.attempt for entry in known}, head=head)
        else:
            loss_fn(problem.inputs @ trunk.T, problem.targets).backward(torch.arange(16.0))  # the object knows now
            head.discard_gradient()
            trunk.grad = None
            head.take()
            source.begin_again(head=head)
        losses = [loss_fn(problem.inputs[part] @ trunk.T, problem.targets[part]) for part in parts]
        sum((loss * vector).sum() for loss, vector in zip(losses, vectors, strict=True)).backward()
        gradients.append((trunk.grad, torch.tensor(head.gradient())))
        assert head.step_state().open.totals.micro_batch_count == 2
    for first, repeated in zip(*gradients, strict=True):
        assert torch.equal(first, repeated)


@pytest.mark.parametrize("count", (1, 5))
def test_forwards_before_one_backward_take_no_slot(head, trunk, problem, rng, count):
    """GRPO's kin: parts of a batch, all of them before the one backward, on a head with a single slot."""
    advantages, targets = numbers(rng, 16), problem.targets

    def objective(log_probs, entropy):
        return -(log_probs.exp() * advantages.to(log_probs.dtype)).sum() - 0.01 * entropy.mean()

    def reference(hidden, logits):
        u = logits / TEMPERATURE
        return objective(-F.cross_entropy(u, targets, reduction="none"), outputs_of(u, targets)["entropy"])

    expected, value = problem.reference(reference)
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none", temperature=TEMPERATURE, differentiable=("loss", "entropy"))
    hidden = problem.inputs @ trunk.T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = [loss_fn(hidden[part], targets[part]) for part in torch.arange(16).chunk(count)]
        log_probs, entropy = -torch.cat([part.loss for part in parts]), torch.cat([part.entropy for part in parts])
        assert head.step_state().open.micro_batches == {}
        loss = objective(log_probs, entropy)
        loss.backward()
    assert abs(loss.item() - value) <= 1e-5 * max(1, abs(value))
    check_gradients(trunk.grad, head, expected)
    assert loss_fn.micro_batches == list(range(len(parts)))
    assert head.seal(expected_micro_batches=len(parts)).totals.micro_batch_count == len(parts)


def test_forwards_beyond_the_slots_take_any_factors(head, trunk, problem, rng):
    """An object that has had no backward: its first forward has the slot, the second is held, the third leaves nothing."""
    targets, upstream = with_ignored(problem.targets), numbers(rng, 16)
    expected, _ = problem.reference(
        lambda hidden, logits: (F.cross_entropy(logits, targets, reduction="none") * upstream.double()).sum()
    )
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    parts = torch.arange(16).chunk(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [loss_fn(problem.inputs[part] @ trunk.T, targets[part]) for part in parts]
    assert [entry.form for entry in head.step_state().open.micro_batches.values()] == ["STAGED", "HELD"]
    torch.cat(losses).backward(upstream)
    check_gradients(trunk.grad, head, expected)
    assert [entry.form for entry in head.step_state().open.micro_batches.values()] == ["DIRECT"] * 3


def test_a_frozen_head_passes_every_gradient_on(each_way, make_head, problem, rng, calls):
    factors = [numbers(rng, 16) for _ in DIFFERENTIABLE]

    def objective(hidden, logits):
        outputs = values_of(logits, problem.targets)
        return sum((factor.double() * outputs[name]).sum() for name, factor in zip(DIFFERENTIABLE, factors, strict=True))

    expected, _ = problem.reference(objective)
    head, trunk = problem.head(each_way.client, make_head, trainable=False, optimizer=None), problem.parameter()
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none", differentiable=DIFFERENTIABLE)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    value = sum((factor * getattr(out, name)).sum() for name, factor in zip(DIFFERENTIABLE, factors, strict=True))
    value.backward(retain_graph=True)
    assert calls == ["forward", "eager"]
    assert relative(trunk.grad, expected[0]) <= 1e-5
    value.backward()  # nothing was added anywhere, so a second time is right
    assert relative(trunk.grad, 2 * expected[0]) <= 1e-5


def test_jsd_with_unequal_factors(backend, make_head, problem, rng):
    teacher_problem, targets, share = Problem(rng), with_ignored(problem.targets), 0.3
    upstream, weights = numbers(rng, 2, 8), torch.tensor(rng.integers(-1, 4, (2, 8)) * 0.5).float()
    teacher_hidden = teacher_problem.inputs @ teacher_problem.trunk.T
    teacher_logits = teacher_hidden.double() @ teacher_problem.weight.double().T + teacher_problem.bias.double()
    rows = []

    def objective(hidden, logits):
        log_p, log_q = F.log_softmax(teacher_logits / 2, -1), F.log_softmax(logits / 2, -1)
        soft = (targets != -100) * (log_p.exp() * (log_p - log_q)).sum(-1)
        hard = F.cross_entropy(logits, targets, reduction="none")
        rows.append(weights.double() * ((1 - share) * soft + share * hard).reshape(2, 8))
        return (upstream.double() * rows[0]).sum()

    expected, _ = problem.reference(objective)
    head = problem.head(backend.client, make_head)
    teacher = teacher_problem.head(backend.client, make_head, trainable=False, optimizer=None)
    options = {"beta": 0.0, "temperature": 2.0, "hard_loss_weight": share, "reduction": "none", "outputs": ("entropy",)}
    loss_fn = headwater.torch.JSDLoss(head, teacher, **options)
    shape = (2, 8, HIDDEN_SIZE)
    for _ in range(2):
        trunk = problem.parameter()
        hidden = (problem.inputs @ trunk.T).reshape(shape)
        out = loss_fn(hidden, teacher_hidden.reshape(shape), targets.reshape(2, 8), token_weights=weights)
        assert float((out.loss.detach() - rows[0].detach()).abs().max()) <= 2e-5
        out.loss.backward(upstream)
        check_gradients(trunk.grad, head, expected)
        head.discard_gradient()
    logits = (problem.inputs @ problem.trunk.T).double() @ problem.weight.double().T + problem.bias.double()
    assert float((out.entropy.reshape(-1) - outputs_of(logits, targets)["entropy"]).abs().max()) <= 1e-5  # without temperature


def test_a_teacher_that_is_deleted_before_backward_is_missed_by_name(remote, make_head, problem, rng):
    head, trunk = problem.head(remote.client, make_head), problem.parameter()
    teacher = Problem(rng).head(remote.client, make_head, trainable=False, optimizer=None)
    hidden = problem.inputs @ trunk.T
    losses = headwater.torch.JSDLoss(head, teacher, reduction="none")(hidden, hidden.detach())
    teacher.delete()
    with refused("HEAD_NOT_FOUND", headwater.NotFoundError) as info:
        losses.backward(torch.arange(16.0))
    assert teacher.name in str(info.value)


def test_a_joined_teachers_rows_are_held(remote, make_head, problem, rng):
    """They come once, so a second call could not have them."""
    head, trunk = problem.head(remote.client, make_head), problem.parameter()
    teacher_problem, upstream = Problem(rng), numbers(rng, 16)
    teacher = teacher_problem.head(remote.client, make_head, trainable=False, optimizer=None)
    teacher_hidden, gradients = teacher_problem.inputs @ teacher_problem.trunk.T, []
    for rows, join in ((teacher_hidden, {}), (headwater.JOIN, {"join_key": "rows", "total_rows": 16})):
        if join:
            remote.client.teacher("rows", total_rows=16).stream(teacher_hidden)
        trunk.grad = None
        headwater.torch.JSDLoss(head, teacher, reduction="none")(problem.inputs @ trunk.T, rows, **join).backward(upstream)
        gradients.append((trunk.grad, torch.tensor(head.gradient())))
        form = head.step_state().open.micro_batches[0].form
        assert form == ("HELD" if join else "DIRECT")
        head.discard_gradient()
    for sent, joined in zip(*gradients, strict=True):
        assert relative(joined, sent.double()) <= 1e-5


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


# ---- autograd ------------------------------------------------------------------------------------------------------------


def triple(head, **options):
    return headwater.torch.CrossEntropyLoss(head, reduction="none", differentiable=DIFFERENTIABLE, **options)


def test_backward_of_the_triple_runs_once(head, trunk, problem):
    out = triple(head)(problem.inputs @ trunk.T, problem.targets)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
        out.entropy.sum().backward(create_graph=True)
    assert head.gradient_norm() == 0
    out.entropy.sum().backward(retain_graph=True)
    before = head.gradient()
    with refused("MICRO_BATCH_CONFLICT", headwater.MicroBatchConflictError):
        out.lse.sum().backward()
    np.testing.assert_array_equal(head.gradient(), before)


def test_what_is_detached_or_dropped_leaves_nothing(head, trunk, problem, calls):
    loss_fn = triple(head)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    kept = out.entropy.detach()
    del out
    gc.collect()
    assert not kept.requires_grad and loss_fn.micro_batches == [] and head.step_state().open.micro_batches == {}
    with torch.no_grad():
        assert not any(value.requires_grad for value in loss_fn(problem.inputs @ trunk.T, problem.targets)[:1])
    assert calls == ["forward", "forward"]


def test_a_loss_that_is_not_differentiable_has_no_graph(head, trunk, problem, rng):
    upstream = numbers(rng, 16)
    expected, _ = problem.reference(
        lambda hidden, logits: (upstream.double() * outputs_of(logits, problem.targets)["entropy"]).sum()
    )
    out = headwater.torch.CrossEntropyLoss(head, differentiable="entropy")(problem.inputs @ trunk.T, problem.targets)
    assert not out.loss.requires_grad and out.lse is None
    out.entropy.backward(upstream)
    check_gradients(trunk.grad, head, expected)


@pytest.mark.parametrize(("name", "value"), (("loss", "inf"), ("entropy", "nan"), ("lse", "nan")))
def test_a_non_finite_upstream_gradient_is_refused(head, trunk, problem, name, value):
    loss_fn = triple(head) if name != "loss" else headwater.torch.CrossEntropyLoss(head, reduction="none")
    out, upstream = loss_fn(problem.inputs @ trunk.T, problem.targets), torch.ones(16)
    upstream[5] = float(value)
    with refused("INVALID_FIELD", headwater.InvalidArgumentError) as info:
        (out if name == "loss" else getattr(out, name)).backward(upstream)
    assert "token 5" in str(info.value) and head.gradient_norm() == 0
    assert name == "loss" or head.step_state().open.micro_batches == {}


def test_rows_that_change_before_backward_are_refused(head, trunk, problem, rng):
    for loss_fn in (triple(head), headwater.torch.CrossEntropyLoss(head, reduction="none")):
        hidden = (problem.inputs @ trunk.T).clone()
        out = loss_fn(hidden, problem.targets)
        with torch.no_grad():
            hidden.mul_(2)
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError) as info:
            (out if isinstance(out, torch.Tensor) else out.loss).backward(numbers(rng, 16))
        assert "in place" in str(info.value) and head.gradient_norm() == 0
        del out
        gc.collect()


@pytest.mark.parametrize("change", ("step", "weight", "frozen"))
def test_weights_that_change_before_backward_are_refused(one_shard, make_head, problem, change):
    options = {"trainable": False, "optimizer": None} if change == "frozen" else {}
    head, trunk = problem.head(one_shard.client, make_head, **options), problem.parameter()
    loss_fn = triple(head)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    if change == "step":
        loss_fn(problem.inputs @ trunk.T, problem.targets).loss.sum().backward()
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=[1])
    else:
        head.set_weight(problem.weight * 2)
    with refused("WEIGHT_VERSION_MISMATCH", headwater.FailedPreconditionError) as info:
        out.lse.sum().backward()
    assert head.name in str(info.value)
    if change != "frozen":
        assert head.step_state().open.micro_batches == {}


@pytest.mark.parametrize("name", ("loss", "lse"))
def test_the_scale_of_grad_hidden_is_its_own(head, trunk, problem, rng, name):
    upstream = numbers(rng, 16)
    expected, _ = problem.reference(lambda hidden, logits: (upstream.double() * values_of(logits, problem.targets)[name]).sum())
    differentiable = ("loss",) if name == "loss" else DIFFERENTIABLE
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none", grad_hidden_scale=4.0, differentiable=differentiable)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    (out if name == "loss" else out.lse).backward(upstream)
    assert relative(trunk.grad, 4 * expected[0]) <= 1e-5 and relative(head.gradient(), expected[1]) <= 1e-5


@pytest.mark.parametrize(("reduction", "names"), (("mean", ("loss",)), ("none", ("loss",)), ("none", DIFFERENTIABLE)))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_hidden_states(head, problem, rng, dtype, reduction, names):
    """The upstream gradient carries a GradScaler's scale; the gradient of a row is within the storage type's rounding."""
    hidden = (problem.inputs @ problem.trunk.T).to(dtype)
    factors = [torch.tensor(1024.0)] if reduction == "mean" else [1024 * numbers(rng, 16) for _ in names]
    reference, weight = hidden.detach().double().requires_grad_(), problem.weight.double().requires_grad_()
    outputs = values_of(reference @ weight.T + problem.bias.double(), problem.targets)
    if reduction == "mean":
        outputs["loss"] = outputs["loss"].mean()
    sum((f.double() * outputs[name]).sum() for name, f in zip(names, factors, strict=True)).backward()
    hidden.requires_grad_()
    out = headwater.torch.CrossEntropyLoss(head, reduction=reduction, differentiable=names)(hidden, problem.targets)
    values = [out] if names == ("loss",) else [getattr(out, name) for name in names]
    assert float((values[0].detach() - outputs["loss"].detach()).abs().max()) <= (2e-6 if reduction == "mean" else 1e-5)
    torch.autograd.backward(values, factors)
    assert hidden.grad.dtype == dtype
    errors = (hidden.grad.double() - reference.grad).norm(dim=-1) / reference.grad.norm(dim=-1)
    assert float(errors.max()) <= 2 * torch.finfo(dtype).eps
    assert relative(head.gradient(), weight.grad) <= 1e-5


# ---- options -------------------------------------------------------------------------------------------------------------


def test_token_scaling_is_ligers(one_shard, make_head, problem, rng):
    """The loss of each token, z-loss included, times the detached probability of its target; the divisor stays."""
    targets = with_ignored(problem.targets)
    valid, upstream = targets != -100, numbers(rng, 16)
    values = {}

    def rows(logits):
        losses = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="none") + 1e-2 * valid * logits.logsumexp(-1) ** 2
        return losses * logits.softmax(-1).gather(-1, targets.clamp(0)[:, None])[:, 0].detach()

    for reduction, factors in (("mean", torch.tensor(1.0)), ("none", upstream)):

        def objective(hidden, logits, reduction=reduction, factors=factors):
            values[reduction] = rows(logits).sum() / valid.sum() if reduction == "mean" else rows(logits)
            return (values[reduction] * factors.double()).sum()

        expected, _ = problem.reference(objective)
        head, trunk = problem.head(one_shard.client, make_head), problem.parameter()
        loss_fn = headwater.torch.CrossEntropyLoss(
            head, reduction=reduction, token_scaling=True, label_smoothing=0.1, z_loss=1e-2, outputs=("token_loss",)
        )
        out = loss_fn(problem.inputs @ trunk.T, targets)
        assert float((out.loss - values[reduction]).abs().max()) <= 1e-5
        assert float((out.token_loss - values.get("none", out.token_loss)).abs().max()) <= 1e-5
        out.loss.backward(factors)
        check_gradients(trunk.grad, head, expected)


def test_a_gradient_resolution_goes_with_every_gradient(one_shard, make_head, problem, monkeypatch):
    """In one call and in two; losses are the exact ones."""
    sent = []
    compute = headwater._remote.RemoteBackend.compute

    def count(self, request, timeout_s):
        if request.options.backward:
            sent.append(request.terms[0].gradient_resolution)
        return compute(self, request, timeout_s)

    monkeypatch.setattr(headwater._remote.RemoteBackend, "compute", count)
    factors = torch.linspace(1, 2, 16)
    values = {}
    for resolution in (0.0, 2.0**-3):
        head, trunk = problem.head(one_shard.client, make_head), problem.parameter()
        for reduction in ("sum", "none"):
            loss_fn = headwater.torch.CrossEntropyLoss(head, reduction=reduction, gradient_resolution=resolution)
            losses = loss_fn(problem.inputs @ trunk.T, problem.targets)
            (losses if reduction == "sum" else losses * factors).sum().backward()
            values.setdefault(reduction, []).append(losses.detach())
        values.setdefault("trunk", []).append(trunk.grad)
        values.setdefault("weight", []).append(torch.as_tensor(head.gradient()))
        assert sent == [resolution] * 3  # of the vector two: the first call could not know
        sent.clear()
    for name in ("sum", "none"):
        assert torch.equal(*values[name])
    for name in ("trunk", "weight"):
        assert 1e-3 < relative(values[name][1], values[name][0].double()) < 0.5
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
        headwater.torch.CrossEntropyLoss(head, gradient_resolution=2.0**-3, differentiable=("loss", "lse"))
    frozen = problem.head(one_shard.client, make_head, trainable=False, optimizer=None)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
        headwater.torch.CrossEntropyLoss(frozen, gradient_resolution=2.0**-3)


@pytest.mark.parametrize("lowest, items", ((0.0, None), (-3.0, None), (0.0, 20)))
def test_a_z_loss_has_a_divisor_of_its_own(head, trunk, problem, lowest, items):
    targets, weight = with_ignored(problem.targets), torch.linspace(lowest, 1, VOCAB_SIZE)
    valid = targets != -100

    def objective(hidden, logits):
        loss = F.cross_entropy(logits, targets, weight=weight.double(), label_smoothing=0.2, reduction="sum")
        z_loss = 1e-2 * ((logits.logsumexp(-1) ** 2) * valid).sum()
        return loss / (items or weight.double()[targets[valid]].sum()) + z_loss / (items or valid.sum())

    expected, value = problem.reference(objective)
    loss_fn = headwater.torch.CrossEntropyLoss(
        head, weight=weight, label_smoothing=0.2, z_loss=1e-2, z_loss_divisor="tokens", outputs=("z_loss",)
    )
    out = loss_fn(problem.inputs @ trunk.T, targets, num_items_in_batch=items)
    assert out.loss.item() == pytest.approx(value, rel=1e-5)
    logits = (problem.inputs @ problem.trunk.T).double() @ problem.weight.double().T + problem.bias.double()
    z_loss = 1e-2 * (logits.logsumexp(-1)[valid] ** 2).sum() / (items or valid.sum())
    assert out.z_loss.item() == pytest.approx(float(z_loss), rel=1e-5)
    out.loss.backward()
    check_gradients(trunk.grad, head, expected)


@pytest.mark.parametrize("shift", (True, 2))
def test_targets_are_shifted(head, trunk, problem, rng, shift):
    targets, weights = with_ignored(problem.targets).reshape(2, 8), numbers(rng, 2, 8).abs() + 0.1
    n = int(shift)

    def objective(hidden, logits):
        rows = F.cross_entropy(logits.reshape(2, 8, -1)[:, :-n].transpose(1, 2), targets[:, n:], reduction="none")
        counted = weights.double()[:, n:] * (targets[:, n:] != -100)
        return (rows * counted).sum() / counted.sum()

    expected, value = problem.reference(objective)
    loss_fn = headwater.torch.CrossEntropyLoss(head, shift=shift, outputs=("argmax",))
    out = loss_fn((problem.inputs @ trunk.T).reshape(2, 8, -1), targets, token_weights=weights)
    assert out.loss.item() == pytest.approx(value, rel=1e-5)
    assert (out.argmax[:, -n:] == -1).all() and torch.equal(out.argmax[:, :-n] == -1, targets[:, n:] == -100)
    out.loss.backward()
    check_gradients(trunk.grad, head, expected)


def test_backward_has_the_options_of_its_forward(head, trunk, problem, rng):
    upstream = numbers(rng, 16)
    expected, _ = problem.reference(
        lambda hidden, logits: (F.cross_entropy(logits / 0.5, problem.targets, reduction="none") * upstream.double()).sum()
    )
    loss_fn = triple(head)
    loss_fn.temperature = 0.5
    losses = loss_fn(problem.inputs @ trunk.T, problem.targets).loss
    loss_fn.temperature = 3.0
    losses.backward(upstream)
    check_gradients(trunk.grad, head, expected)


@pytest.mark.parametrize(
    "field, options",
    (
        ("outputs", {"outputs": ("logits",)}),
        ("outputs", {"outputs": ("z_loss",), "reduction": "none"}),
        ("differentiable", {"differentiable": ("argmax",)}),
        ("differentiable", {"differentiable": ()}),
        ("loss_scale", {"differentiable": ("loss", "lse"), "loss_scale": 1.0}),
        ("loss_scale", {"reduction": "none", "loss_scale": 1.0}),
        ("reduction", {"reduction": "average"}),
        ("z_loss_divisor", {"z_loss_divisor": "rows"}),
        ("z_loss_divisor", {"z_loss_divisor": "tokens", "reduction": "sum"}),
        ("shift", {"shift": -1}),
    ),
    ids=str,
)
def test_options_that_mean_nothing_are_refused(head, field, options):
    with pytest.raises(headwater.InvalidArgumentError) as info:
        headwater.torch.CrossEntropyLoss(head, **options)
    assert info.value.metadata["field"] == field and field.split("_")[0] in str(info.value)


@pytest.mark.parametrize("reduction", ("none", "sum"))
def test_a_divisor_is_refused_where_there_is_no_mean(head, problem, reduction):
    with refused("INVALID_COMBINATION", ValueError) as info:
        headwater.torch.CrossEntropyLoss(head, reduction=reduction)(
            problem.inputs @ problem.trunk.T, problem.targets, num_items_in_batch=4
        )
    assert "num_items_in_batch" in str(info.value)


class DefaultDevice(TorchFunctionMode):
    """What torch.set_default_device does, for versions without it: tensors are made on a device that is not the host."""

    MAKERS = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.arange)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.MAKERS:
            kwargs = {"device": "meta", **(kwargs or {})}
        return func(*args, **(kwargs or {}))


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


# ---- a server that is started again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("equal", (True, False), ids=("staged first", "two calls"))
def test_a_restart_between_forward_and_backward_changes_nothing(make_head, problem, rng, equal):
    """Both before the second call, whose weights must count as the same, and after it, which is then repeated."""
    upstream = numbers(rng, 16)
    gradients = []
    with running_server() as server, headwater.connect(server.address, replay=True) as client:
        for restarts in (False, True):
            head, trunk = problem.head(client, make_head, optimizer=headwater.SGD()), problem.parameter()
            loss_fn = headwater.torch.CrossEntropyLoss(
                head, reduction="none", differentiable=("loss",) if equal else DIFFERENTIABLE
            )
            head.save("0")
            for step in range(2):  # the version of the weights that a restart brings back is not the one before it
                out = loss_fn(problem.inputs @ trunk.T, problem.targets)
                losses = out if equal else out.loss + out.lse
                if restarts and step == 1:
                    server.restart()
                losses.backward(upstream)
                if restarts and step == 1:
                    server.restart()
                if step == 0:
                    head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=loss_fn.micro_batches)
            assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
            gradients.append((trunk.grad, torch.tensor(head.gradient())))
    for undisturbed, restarted in zip(*gradients, strict=True):
        assert torch.equal(undisturbed, restarted)
