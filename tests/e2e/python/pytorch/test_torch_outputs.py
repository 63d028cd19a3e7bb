"""Outputs of the torch losses, and losses whose backward is a second call, against PyTorch's own head in fp64."""

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expectations import refused
from headwaterd import running_server
from torch_model import HIDDEN_SIZE, VOCAB_SIZE, Problem, check_gradients, numbers, relative, with_ignored

import headwater
import headwater.torch

SOFTCAP, LOGIT_SCALE, TEMPERATURE = 8.0, 1.5, 0.7
DIFFERENTIABLE = ("loss", "entropy", "lse")


@pytest.fixture
def requests(monkeypatch):
    """The requests of the losses that are computed."""
    made = []
    compute = headwater._remote.RemoteBackend.compute

    def note(self, request, timeout_s):
        made.append(request)
        return compute(self, request, timeout_s)

    monkeypatch.setattr(headwater._remote.RemoteBackend, "compute", note)
    return made


def ways(requests):
    """The ways in which losses add."""
    made = [request.options for request in requests]
    return ["forward" if not options.backward else "explicit" if options.explicit else "eager" for options in made]


def values_of(logits, targets):
    """Loss, entropy and log-sum-exp of each token; those of ignored ones are 0."""
    log_p, valid = logits.log_softmax(-1), targets != -100
    losses = F.cross_entropy(logits, targets, reduction="none")
    return {"loss": losses, "entropy": -(log_p.exp() * log_p).sum(-1) * valid, "lse": logits.logsumexp(-1) * valid}


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("upstream_of", [(name,) for name in DIFFERENTIABLE] + [DIFFERENTIABLE], ids="+".join)
def test_each_output_carries_its_gradient(backend, make_head, problem, trunk, rng, reduction, upstream_of):
    targets, weights = with_ignored(problem.targets), numbers(rng, 16)
    class_weights = torch.linspace(-0.5, 2, VOCAB_SIZE)
    factors = {name: numbers(rng, 16) for name in upstream_of}
    if reduction == "mean" and "loss" in factors:
        factors["loss"] = torch.tensor(1.7)
    valid = targets != -100
    divisor = float((weights.double() * class_weights.double()[targets.clamp(0)])[valid].sum()) if reduction == "mean" else 1.0

    def objective(hidden, logits):
        u = SOFTCAP * torch.tanh(LOGIT_SCALE * logits / SOFTCAP) / TEMPERATURE
        rows = F.cross_entropy(u, targets, weight=class_weights.double(), label_smoothing=0.1, reduction="none")
        rows = weights.double() * (rows + 1e-2 * valid * u.logsumexp(-1) ** 2) / divisor
        values = {**values_of(u, targets), "loss": rows.sum() if reduction == "mean" else rows}
        return sum((factor.double() * values[name]).sum() for name, factor in factors.items())

    expected, value = problem.reference(objective)
    head = problem.head(backend.client, make_head, softcap=SOFTCAP, logit_scale=LOGIT_SCALE)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "temperature": TEMPERATURE, "weight": class_weights}
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction=reduction, differentiable=DIFFERENTIABLE, **options)
    out = loss_fn(problem.inputs @ trunk.T, targets, token_weights=weights)
    assert head.step_state().open.micro_batches == {}  # forward leaves nothing
    objective = sum((factor * getattr(out, name)).sum() for name, factor in factors.items())
    assert abs(objective.item() - value) <= 2e-5 * max(1, abs(value))
    objective.backward()
    check_gradients(trunk.grad, head, expected)
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


def test_parts_of_the_loss(client, make_head, head, problem, rng):
    hidden = problem.inputs @ problem.trunk.T
    teacher = Problem(rng).head(client, make_head, trainable=False, optimizer=None)
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


def test_equal_factors_take_one_call_and_others_two(head, problem, rng, requests):
    """One loss object: its first backward has equal factors, its second has others, and the third is prepared for it."""
    targets = with_ignored(problem.targets)
    vector = numbers(rng, 16)
    equal = torch.where(targets == -100, vector, torch.tensor(0.3))  # those of ignored tokens mean nothing
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    for upstream, calls, form, attempt in (
        (equal, ["explicit"], "STAGED", 0),
        (vector, ["explicit", "eager"], "DIRECT", 1),
        (vector, ["forward", "eager"], "DIRECT", 0),
        (equal, ["forward", "eager"], "DIRECT", 0),
    ):
        trunk = problem.parameter()
        requests.clear()
        loss_fn(problem.inputs @ trunk.T, targets).backward(upstream)
        assert ways(requests) == calls
        problem.check(problem.cross_entropy(upstream, targets, reduction="none"), trunk, head)
        assert [(entry.form, entry.attempt) for entry in head.step_state().open.micro_batches.values()] == [(form, attempt)]
        assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
        head.discard_gradient()


def test_a_process_that_is_started_again_adds_nothing_twice(new_head, problem, rng):
    """Ids are drawn by forwards in both ways, so that a repeat finds its own; autograd runs the backwards in the other order."""
    head, vectors, gradients = new_head(staging_slots=2), numbers(rng, 2, 8), []
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


def test_forwards_beyond_the_slots_take_any_factors(head, trunk, problem, rng):
    """An object that has had no backward: its first forward has the slot, the second is held, the third leaves nothing."""
    targets, upstream = with_ignored(problem.targets), numbers(rng, 16)
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    parts = torch.arange(16).chunk(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [loss_fn(problem.inputs[part] @ trunk.T, targets[part]) for part in parts]
    assert [entry.form for entry in head.step_state().open.micro_batches.values()] == ["STAGED", "HELD"]
    torch.cat(losses).backward(upstream)
    problem.check(problem.cross_entropy(upstream, targets, reduction="none"), trunk, head)
    assert [entry.form for entry in head.step_state().open.micro_batches.values()] == ["DIRECT"] * 3


def test_jsd_with_unequal_factors(backend, make_head, problem, rng, tmp_path):
    teacher_problem, targets, share = Problem(rng), with_ignored(problem.targets), 0.3
    upstream, weights = numbers(rng, 2, 8), torch.tensor(rng.integers(-1, 4, (2, 8)) * 0.5).float()
    teacher_hidden = teacher_problem.inputs @ teacher_problem.trunk.T
    teacher_logits = teacher_hidden.double() @ teacher_problem.weight.double().T + teacher_problem.bias.double()
    rows = []

    def objective(hidden, logits):
        log_p, log_q = F.log_softmax(teacher_logits / 1.25, -1), F.log_softmax(logits / 2, -1)
        soft = (targets != -100) * (log_p.exp() * (log_p - log_q)).sum(-1)
        hard = F.cross_entropy(logits, targets, reduction="none")
        rows.append(weights.double() * ((1 - share) * soft + share * hard).reshape(2, 8))
        return (upstream.double() * rows[0]).sum()

    expected, _ = problem.reference(objective)
    head = problem.head(backend.client, make_head)
    teacher = teacher_problem.head(backend.client, make_head, trainable=False, optimizer=None)
    options = {"beta": 0.0, "temperature": 2.0, "teacher_temperature": 1.25, "hard_loss_weight": share}
    loss_fn = headwater.torch.JSDLoss(head, teacher, reduction="none", outputs=("entropy",), **options)
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
    assert float((out.entropy.reshape(-1) - values_of(logits, targets)["entropy"]).abs().max()) <= 1e-5  # without temperature
    with refused("INVALID_COMBINATION"):
        loss_fn(hidden, teacher_hidden.reshape(shape).requires_grad_())
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=shape[:2] + teacher_hidden.shape[1:])
    mapped[:] = teacher_hidden.detach().reshape(shape).numpy()
    mapped.flags.writeable = False
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(loss_fn(hidden, mapped, targets.reshape(2, 8), token_weights=weights).loss, out.loss.detach())


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
    losses = headwater.torch.CrossEntropyLoss(head, reduction="none")(problem.inputs @ trunk.T, targets)
    losses.backward(torch.where(targets == -100, torch.tensor(float("nan")), torch.tensor(1.0)))
    problem.check(problem.cross_entropy(targets=targets, reduction="sum"), trunk, head)


def test_zero_upstream_everywhere_decides_the_contribution(head, trunk, problem):
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="none")
    (loss_fn(problem.inputs @ trunk.T, problem.targets) * 0).sum().backward()
    assert not trunk.grad.any() and head.gradient_norm() == 0
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


# ---- autograd ------------------------------------------------------------------------------------------------------------


def triple(head, **options):
    return headwater.torch.CrossEntropyLoss(head, reduction="none", differentiable=DIFFERENTIABLE, **options)


def test_what_is_detached_or_dropped_leaves_nothing(head, trunk, problem, requests):
    loss_fn = triple(head)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    kept = out.entropy.detach()
    del out
    gc.collect()
    assert not kept.requires_grad and loss_fn.micro_batches == [] and head.step_state().open.micro_batches == {}
    with torch.no_grad():
        assert not any(value.requires_grad for value in loss_fn(problem.inputs @ trunk.T, problem.targets)[:1])
    assert ways(requests) == ["forward", "forward"]


def test_a_loss_that_is_not_differentiable_has_no_graph(head, trunk, problem, rng):
    upstream = numbers(rng, 16)
    out = headwater.torch.CrossEntropyLoss(head, differentiable="entropy")(problem.inputs @ trunk.T, problem.targets)
    assert not out.loss.requires_grad and out.lse is None
    out.entropy.backward(upstream)
    problem.check(lambda _, logits: (upstream.double() * values_of(logits, problem.targets)["entropy"]).sum(), trunk, head)


@pytest.mark.parametrize(("name", "value"), (("loss", "inf"), ("entropy", "nan"), ("lse", "nan")))
def test_a_non_finite_upstream_gradient_is_refused(head, trunk, problem, name, value):
    loss_fn = triple(head) if name != "loss" else headwater.torch.CrossEntropyLoss(head, reduction="none")
    out, upstream = loss_fn(problem.inputs @ trunk.T, problem.targets), torch.ones(16)
    upstream[5] = float(value)
    with refused("INVALID_FIELD", headwater.InvalidArgumentError, "token 5"):
        (out if name == "loss" else getattr(out, name)).backward(upstream)
    assert head.gradient_norm() == 0
    assert name == "loss" or head.step_state().open.micro_batches == {}


def test_rows_that_change_before_backward_are_refused(head, trunk, problem, rng):
    for loss_fn in (triple(head), headwater.torch.CrossEntropyLoss(head, reduction="none")):
        hidden = (problem.inputs @ trunk.T).clone()
        out = loss_fn(hidden, problem.targets)
        with torch.no_grad():
            hidden.mul_(2)
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError, "in place"):
            (out if isinstance(out, torch.Tensor) else out.loss).backward(numbers(rng, 16))
        assert head.gradient_norm() == 0
        del out
        gc.collect()


@pytest.mark.parametrize("change", ("step", "weight", "frozen"))
def test_weights_that_change_before_backward_are_refused(new_head, problem, trunk, change):
    head = new_head(**{"trainable": False, "optimizer": None} if change == "frozen" else {})
    loss_fn = triple(head)
    out = loss_fn(problem.inputs @ trunk.T, problem.targets)
    if change == "step":
        loss_fn(problem.inputs @ trunk.T, problem.targets).loss.sum().backward()
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=[1])
    else:
        head.set_weight(problem.weight * 2)
    with refused("WEIGHT_VERSION_MISMATCH", headwater.FailedPreconditionError, head.name):
        out.lse.sum().backward()
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


# ---- options -------------------------------------------------------------------------------------------------------------


def test_a_gradient_resolution_goes_with_every_gradient(new_head, problem, requests):
    """In one call and in two; losses are the exact ones."""
    factors = torch.linspace(1, 2, 16)
    values = {}
    for resolution in (0.0, 2.0**-3):
        head, trunk = new_head(), problem.parameter()
        for reduction in ("sum", "none"):
            loss_fn = headwater.torch.CrossEntropyLoss(head, reduction=reduction, gradient_resolution=resolution)
            losses = loss_fn(problem.inputs @ trunk.T, problem.targets)
            (losses if reduction == "sum" else losses * factors).sum().backward()
            values.setdefault(reduction, []).append(losses.detach())
        values.setdefault("trunk", []).append(trunk.grad)
        values.setdefault("weight", []).append(torch.as_tensor(head.gradient()))
        sent = [request.terms[0].gradient_resolution for request in requests if request.options.backward]
        assert sent == [resolution] * 3  # of the vector two: the first call could not know
        requests.clear()
    for name in ("sum", "none"):
        assert torch.equal(*values[name])
    for name in ("trunk", "weight"):
        assert 1e-3 < relative(values[name][1], values[name][0].double()) < 0.5
    frozen = new_head(trainable=False, optimizer=None)
    for refusing, options in ((head, {"differentiable": ("loss", "lse")}), (frozen, {})):
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            headwater.torch.CrossEntropyLoss(refusing, gradient_resolution=2.0**-3, **options)


def test_items_divide_a_z_loss_as_the_rest(head, trunk, problem):
    """Whatever z_loss_divisor says."""
    weight = torch.linspace(0.5, 1, VOCAB_SIZE)

    def objective(hidden, logits):
        loss = F.cross_entropy(logits, problem.targets, weight=weight.double(), reduction="sum")
        return (loss + 1e-2 * (logits.logsumexp(-1) ** 2).sum()) / 20

    loss_fn = headwater.torch.CrossEntropyLoss(head, weight=weight, z_loss=1e-2, z_loss_divisor="tokens")
    loss = loss_fn(problem.inputs @ trunk.T, problem.targets, num_items_in_batch=20)
    loss.backward()
    problem.check(objective, trunk, head, loss)


def test_backward_has_the_options_of_its_forward(head, trunk, problem, rng):
    upstream = numbers(rng, 16)
    loss_fn = triple(head)
    loss_fn.temperature = 0.5
    losses = loss_fn(problem.inputs @ trunk.T, problem.targets).loss
    loss_fn.temperature = 3.0
    losses.backward(upstream)
    objective = problem.cross_entropy(upstream, reduction="none")
    problem.check(lambda hidden, logits: objective(hidden, logits / 0.5), trunk, head)


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
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction=reduction)
    with refused("INVALID_COMBINATION", ValueError, "num_items_in_batch"):
        loss_fn(problem.inputs @ problem.trunk.T, problem.targets, num_items_in_batch=4)


# ---- a server that is started again --------------------------------------------------------------------------------------


def test_a_restart_between_forward_and_backward_changes_nothing(make_head, problem, rng):
    """Both before the second call, whose weights must count as the same, and after it, which is then repeated."""
    upstream = numbers(rng, 16)
    gradients = []
    with running_server() as server, headwater.connect(server.address, replay=True) as client:
        for restarts in (False, True):
            head, trunk = problem.head(client, make_head, optimizer=headwater.SGD()), problem.parameter()
            loss_fn = triple(head)
            head.save("0")
            for step in range(2):  # the version of the weights that a restart brings back is not the one before it
                out = loss_fn(problem.inputs @ trunk.T, problem.targets)
                if restarts and step == 1:
                    server.restart()
                (out.loss + out.lse).backward(upstream)
                if restarts and step == 1:
                    server.restart()
                if step == 0:
                    head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=loss_fn.micro_batches)
            assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
            gradients.append((trunk.grad, torch.tensor(head.gradient())))
    for undisturbed, restarted in zip(*gradients, strict=True):
        assert torch.equal(undisturbed, restarted)
