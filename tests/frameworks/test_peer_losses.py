"""The questions of Liger's fused cross entropy suite and of CCE's, asked of the loss objects directly, against fp64.

Options, shapes and types are those of their suites; each case is written here. A sample runs by default, all of them with --long.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwater
import headwater.torch

# Relative errors, by the type of rows and weight. A 16-bit head rounds the gradient of the logits to its type once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2 * 2**-8, torch.float16: 2 * 2**-11}


def sweep(*axes, stride):
    """All combinations of the axes; all but every `stride`-th one are for --long, and with None all of them."""
    cases = list(itertools.product(*axes))
    sample = set(cases[::stride]) if stride is not None else set()
    for index, axis in enumerate(axes):
        assert stride is None or {case[index] for case in sample} == set(axis), f"the sample has not every value of {axis}"
    return [pytest.param(*case, marks=() if case in sample else pytest.mark.long, id="-".join(map(str, case))) for case in cases]


@pytest.fixture
def rng(request):
    """Seeded by the case, so that no case depends on which others ran."""
    return torch.Generator().manual_seed(sum(request.node.name.encode()))


class Problem:
    """Rows, a head, and targets of a case; the head in fp64 beside it."""

    def __init__(self, client, rng, rows, hidden_size, vocab_size, dtype, *, bias=False, frozen=(), **spec):
        def numbers(*shape, size=1.0):
            return (torch.randn(*shape, generator=rng) * size).to(dtype)

        self.hidden = numbers(*rows, hidden_size)
        self.weight = numbers(vocab_size, hidden_size, size=2.0 / hidden_size**0.5)
        self.bias = numbers(vocab_size) if bias else None
        self.targets = torch.randint(vocab_size, rows, generator=rng)
        self.dtype, self.spec, self.frozen = dtype, spec, frozen
        optimizer = None if "head" in frozen else headwater.SGD()
        self.head = client.create_head("peer", self.weight, self.bias, trainable="head" not in frozen, optimizer=optimizer, **spec)

    def logits(self, parameters):
        """In fp64, as the head's transform makes them."""
        hidden, weight, *bias = parameters
        logits = hidden @ weight.T + (bias[0] if bias else 0)
        cap = self.spec.get("softcap")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def parameters(self):
        tensors = (self.hidden, self.weight) if self.bias is None else (self.hidden, self.weight, self.bias)
        return [tensor.double().requires_grad_() for tensor in tensors]

    def leaf(self):
        """The rows as a loss takes them."""
        return self.hidden.clone().requires_grad_("hidden" not in self.frozen)

    def check(self, hidden, parameters):
        """Gradients of rows, weight and bias."""
        tolerance = TOLERANCES[self.dtype]
        actual = {}
        if hidden.requires_grad:
            actual["hidden"] = (hidden.grad, parameters[0].grad)
        if "head" not in self.frozen:
            weight, bias = self.head.gradient(bias=True) if self.bias is not None else (self.head.gradient(), None)
            actual["weight"] = (torch.tensor(weight), parameters[1].grad)
            if bias is not None:
                actual["bias"] = (torch.tensor(bias), parameters[2].grad)
        for name, (gradient, reference) in actual.items():
            assert relative(gradient, reference) <= tolerance, f"{name}: {relative(gradient, reference):.3g}"


@pytest.fixture
def make_problem(client, rng):
    """Makes the problem of a case, and deletes its head afterwards."""
    made = []

    def make(*arguments, **options):
        made.append(Problem(client, rng, *arguments, **options))
        return made[-1]

    yield make
    for problem in made:
        problem.head.delete(force=True)


def relative(actual, expected):
    """Norm of the difference by the norm of the reference; NaN stays NaN, and 0 is equal to 0."""
    difference = float((actual.double() - expected).norm())
    return difference / float(expected.norm()) if difference != 0 else 0.0


def close(actual, expected, tolerance=1e-5):
    """Values, each within `tolerance` of the largest."""
    bound = tolerance * max(1.0, float(expected.detach().abs().max())) if expected.numel() else 0
    return bool(((actual.detach().double() - expected.detach()).abs() <= bound).all())


# ---- Liger's fused linear cross entropy -----------------------------------------------------------------------------------

SMALL, LARGE = (3, 47, 31, 123), (8, 128, 1024, 4096)  # batch, length, hidden size, vocabulary
LIGER_OPTIONS = {
    "plain": {},
    "weighted": {"ce_weight": "randn"},
    "all options": {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
    "all options, weighted": {"ce_weight": "rand", "label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
    "token scaling": {"token_scaling": True, "label_smoothing": 0.1, "z_loss": 1e-2},
    "all smoothed": {"label_smoothing": 1.0, "ce_weight": "randn", "z_loss": 1e-3},
    "capped": {"softcap": 5.0, "ignore_index": 7},
}


def ligers_loss(
    logits, targets, reduction, ce_weight=None, label_smoothing=0.0, ignore_index=-100, z_loss=0.0, token_scaling=False
):
    """Loss and z-loss as Liger defines them: a mean divides the z-loss by the number of tokens, whatever weights they have."""
    valid = targets != ignore_index
    rows = F.cross_entropy(
        logits, targets, weight=ce_weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    z_rows = z_loss * logits.logsumexp(-1) ** 2 * valid
    scale = logits.softmax(-1).gather(-1, targets.where(valid, 0)[:, None])[:, 0].detach() if token_scaling else 1.0
    rows, z_rows = rows * scale, z_rows * scale
    if reduction == "none":
        return rows + z_rows, z_rows
    if reduction == "sum":
        return rows.sum() + z_rows.sum(), z_rows.sum()
    weights = valid if ce_weight is None else ce_weight[targets.where(valid, 0)] * valid
    return rows.sum() / weights.sum() + z_rows.sum() / valid.sum(), z_rows.sum() / valid.sum()


LIGER_CASES = [
    *sweep((SMALL,), LIGER_OPTIONS, ("mean", "sum", "none"), (torch.float32, torch.bfloat16), (False, True), stride=1),
    *sweep((LARGE,), LIGER_OPTIONS, ("mean", "sum"), (torch.float32, torch.bfloat16), (True,), stride=None),
]


@pytest.mark.parametrize("shape, case, reduction, dtype, bias", LIGER_CASES)
def test_ligers_options(make_problem, rng, shape, case, reduction, dtype, bias):
    batch, length, hidden_size, vocab_size = shape
    options = dict(LIGER_OPTIONS[case])
    spec = {"softcap": options.pop("softcap")} if "softcap" in options else {}
    problem = make_problem((batch * length,), hidden_size, vocab_size, dtype, bias=bias, **spec)
    ignored = torch.randperm(batch * length, generator=rng)[: batch * length // 3]
    problem.targets[ignored] = options.get("ignore_index", -100)
    draw = {"randn": torch.randn, "rand": torch.rand, None: None}[options.pop("ce_weight", None)]
    ce_weight = None if draw is None else draw(vocab_size, generator=rng)
    parameters = problem.parameters()
    logits = problem.logits(parameters)
    exact = None if ce_weight is None else ce_weight.double()
    loss, z_loss = ligers_loss(logits, problem.targets, reduction, ce_weight=exact, **options)
    upstream = torch.randn(loss.shape, generator=rng)
    loss.backward(upstream.double())

    names = ("argmax", "lse") if reduction == "none" else ("argmax", "z_loss")
    loss_fn = headwater.torch.CrossEntropyLoss(
        problem.head,
        weight=ce_weight,
        reduction=reduction,
        outputs=names,
        z_loss_divisor="tokens" if reduction == "mean" else "weights",
        **options,
    )
    hidden = problem.leaf()
    out = loss_fn(hidden, problem.targets)
    out.loss.backward(upstream)
    # A mean by weights of both signs may have a divisor near 0, which magnifies the sums' errors.
    assert close(out.loss, loss, 1e-5 if ce_weight is None else 1e-4)
    if out.z_loss is not None:
        assert close(out.z_loss, z_loss, 1e-6)
    valid = problem.targets != loss_fn.ignore_index
    top, second = logits.detach().topk(2).values.unbind(-1)
    clear = valid & (top - second > 1e-5 * top.abs())  # elsewhere rounding decides
    assert torch.equal(out.argmax[clear], logits.argmax(-1)[clear]) and (out.argmax[~valid] == -1).all()
    accuracy = (out.argmax == problem.targets)[valid].float().mean()
    assert (
        abs(accuracy - (logits.argmax(-1) == problem.targets)[valid].float().mean()) <= float((valid & ~clear).sum()) / valid.sum()
    )
    problem.check(hidden, parameters)


@pytest.mark.parametrize("reduction, all_ignored, autocast", sweep(("mean", "sum", "none"), (False, True), (False, True), stride=1))
def test_ligers_rows_without_targets_and_autocast(make_problem, rng, reduction, all_ignored, autocast):
    problem = make_problem((60,), 32, 100, torch.float32)
    problem.targets[: 60 if all_ignored else 20] = -100
    parameters, hidden = problem.parameters(), problem.leaf()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses = headwater.torch.CrossEntropyLoss(problem.head, reduction=reduction)(hidden, problem.targets)
    reference = F.cross_entropy(problem.logits(parameters), problem.targets, reduction="none")
    reference = reference.sum() / max(1, int((problem.targets != -100).sum())) if reduction == "mean" else reference
    reference = reference.sum() if reduction == "sum" else reference
    assert losses.dtype == torch.float32 and close(losses, reference)
    losses.sum().backward()
    reference.sum().backward()
    problem.check(hidden, parameters)


@pytest.mark.parametrize("frozen", ((), ("hidden",), ("head",), ("hidden", "head")), ids=str)
@pytest.mark.parametrize("grad", (True, False))
def test_ligers_frozen_sides(make_problem, rng, frozen, grad):
    problem = make_problem((60,), 32, 100, torch.float32, frozen=frozen)
    parameters, hidden = problem.parameters(), problem.leaf()
    with torch.set_grad_enabled(grad):
        loss = headwater.torch.CrossEntropyLoss(problem.head)(hidden, problem.targets)
    reference = F.cross_entropy(problem.logits(parameters), problem.targets)
    assert close(loss, reference)
    assert loss.requires_grad == (grad and len(frozen) < 2)
    if loss.requires_grad:
        loss.backward()
        reference.backward()
        problem.check(hidden, parameters)
    elif "head" not in frozen:
        assert problem.head.step_state().open.micro_batches == {}


@pytest.mark.parametrize(
    "temperature, entropy_weight, dtype, bias",
    sweep((1.0, 0.7, 2.0), (0.0, 0.1, -0.3), (torch.float32, torch.bfloat16), (False, True), stride=5),
)
def test_ligers_scaled_cross_entropy_with_entropy(make_problem, rng, temperature, entropy_weight, dtype, bias):
    """Negative log-likelihood and entropy at a temperature, both with gradients: what verl's policy head asks for."""
    problem = make_problem((96,), 48, 300, dtype, bias=bias)
    parameters, hidden = problem.parameters(), problem.leaf()
    advantages = torch.randn(96, generator=rng)
    log_p = (problem.logits(parameters) / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    nll = -log_p.gather(-1, problem.targets[:, None])[:, 0]
    ((nll * advantages).sum() - entropy_weight * entropy.sum()).backward()
    loss_fn = headwater.torch.CrossEntropyLoss(
        problem.head, reduction="none", temperature=temperature, differentiable=("loss", "entropy")
    )
    out = loss_fn(hidden, problem.targets)
    ((out.loss * advantages).sum() - entropy_weight * out.entropy.sum()).backward()
    assert close(out.loss, nll) and close(out.entropy, entropy, 2e-6)
    problem.check(hidden, parameters)


# ---- CCE's linear cross entropy -------------------------------------------------------------------------------------------

CCE_SHAPES = ((256, 512, 128), (252, 507, 128), (252, 507, 123))  # tokens, vocabulary, hidden size
CCE_CASES = sweep(
    CCE_SHAPES,
    (torch.float32, torch.float16, torch.bfloat16),
    (None, 20.0),  # softcap
    (False, True),  # bias
    (0, 2),  # shift
    (False, True),  # ignored tokens
    (False, True),  # a z-loss of the caller's own, through lse
    ((), ("hidden",), ("head",)),
    stride=11,
)


@pytest.mark.parametrize("shape, dtype, softcap, bias, shift, has_ignored, z_loss, frozen", CCE_CASES)
def test_cces_backward(make_problem, rng, shape, dtype, softcap, bias, shift, has_ignored, z_loss, frozen):
    tokens, vocab_size, hidden_size = shape
    spec = {} if softcap is None else {"softcap": softcap}
    problem = make_problem((4, tokens // 4), hidden_size, vocab_size, dtype, bias=bias, frozen=frozen, **spec)
    if has_ignored:
        problem.targets[torch.rand(problem.targets.shape, generator=rng) < 0.3] = -100
    parameters, hidden = problem.parameters(), problem.leaf()
    logits = problem.logits(parameters)
    length = logits.shape[1] - shift
    targets = problem.targets[:, shift:]
    valid = targets != -100
    rows = F.cross_entropy(logits[:, :length].transpose(1, 2), targets, reduction="none")
    lse = logits[:, :length].logsumexp(-1) * valid
    reference = rows.sum() / valid.sum() + (0.1 * (lse**2).sum() / valid.sum() if z_loss else 0)
    reference.backward()

    loss_fn = headwater.torch.CrossEntropyLoss(
        problem.head,
        shift=shift,
        differentiable=("loss", "lse") if z_loss else ("loss",),
        outputs=("lse", "target_log_probability"),
    )
    out = loss_fn(hidden, problem.targets)
    loss = out.loss + (0.1 * (out.lse**2).sum() / valid.sum() if z_loss else 0)
    loss.backward()
    assert close(loss, reference)
    padding = torch.zeros(4, shift)
    for name, values in (("lse", lse), ("target_log_probability", -rows)):
        assert close(getattr(out, name), torch.cat([values.detach(), padding], 1), 2e-6), name
    problem.check(hidden, parameters)


@pytest.mark.parametrize(
    "dtype, softcap, bias, shift", sweep((torch.float32, torch.bfloat16), (None, 20.0), (False, True), (0, 1), stride=3)
)
def test_cces_loss_for_each_token(make_problem, rng, dtype, softcap, bias, shift):
    """reduction="none" with an upstream gradient for each token; the last ones of a shifted sequence have none."""
    spec = {} if softcap is None else {"softcap": softcap}
    problem = make_problem((4, 32), 64, 257, dtype, bias=bias, **spec)
    parameters, hidden = problem.parameters(), problem.leaf()
    upstream = torch.randn(4, 32, generator=rng)
    losses = headwater.torch.CrossEntropyLoss(problem.head, reduction="none", shift=shift)(hidden, problem.targets)
    losses.backward(upstream)
    logits = problem.logits(parameters)[:, : 32 - shift]
    rows = F.cross_entropy(logits.transpose(1, 2), problem.targets[:, shift:], reduction="none")
    (rows * upstream[:, : 32 - shift].double()).sum().backward()
    assert close(losses[:, : 32 - shift], rows) and not np.any(losses.detach()[:, 32 - shift :].numpy())
    problem.check(hidden, parameters)
