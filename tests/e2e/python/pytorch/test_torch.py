"""Losses of headwater.torch against PyTorch's own head in fp64, and off the straight way: recomputed, interrupted, kept, copied."""

import copy
import functools
import gc
import itertools
import pickle
import subprocess
import sys
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from expectations import refused
from headwaterd import running_server
from torch.utils.checkpoint import checkpoint
from torch_model import HIDDEN_SIZE, VOCAB_SIZE, numbers, relative, with_ignored

import headwater
import headwater.torch
from headwater import _head


@pytest.mark.parametrize("change", ("take", "restore", "set_weight"))
def test_ids_begin_again_when_the_head_gets_another_state(head, trunk, problem, change):
    """The step that had the earlier ones is empty: to expect them would be MICRO_BATCH_MISSING for ever."""
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    with_own_source = headwater.torch.CrossEntropyLoss(head, micro_batch_source=headwater.torch.MicroBatchSource(1, 2))

    def submit():
        for either in (loss_fn, with_own_source):
            either(problem.inputs @ trunk.T, problem.targets).backward()
        assert loss_fn.micro_batches == [0] and with_own_source.micro_batches == [1]

    head.save("now")
    submit()
    {
        "take": head.take,
        "restore": lambda: head.restore("now"),
        "set_weight": lambda: head.set_weight(problem.weight, problem.bias),
    }[change]()
    assert loss_fn.micro_batches == [] == with_own_source.micro_batches
    submit()
    assert head.seal(expected_micro_batches=loss_fn.micro_batches + with_own_source.micro_batches).totals.micro_batch_count == 2


def test_objects_of_one_head_draw_from_one_source_until_one_takes_it(client, head, trunk, problem):
    source = headwater.torch.MicroBatchSource(0, 1)
    second = client.head(head.name)
    losses = [headwater.torch.CrossEntropyLoss(each, micro_batch_source=source) for each in (head, second)]

    def submit(loss_fn):
        loss_fn(problem.inputs @ trunk.T, problem.targets).backward()

    for loss_fn in (*losses, *losses):
        submit(loss_fn)
    assert losses[0].micro_batches == losses[1].micro_batches == [0, 1, 2, 3]
    head.take()
    submit(losses[0])
    with pytest.raises(headwater.EpochFencedError):
        submit(losses[1])
    submit(losses[0])  # undisturbed by the one that was fenced off
    assert head.seal(expected_micro_batches=losses[0].micro_batches).totals.micro_batch_count == 2


def test_heads_that_share_a_source_begin_again_each_for_itself(new_head, trunk, problem):
    """An id has attempts of its own in each head: one that is too low is a conflict with what a process that is gone has left."""
    source = headwater.torch.MicroBatchSource(0, 1)
    heads = [new_head() for _ in range(2)]
    losses = [headwater.torch.CrossEntropyLoss(head, micro_batch_source=source) for head in heads]
    left = losses[0](problem.inputs @ trunk.T, problem.targets)  # not decided
    losses[1](problem.inputs @ trunk.T, problem.targets).backward()
    for head, attempts in zip(heads, ({0: 1}, {0: 0}), strict=True):
        source.begin_again(0, attempts, head=head)
    losses[0](2 * problem.inputs @ trunk.T, problem.targets).backward()
    losses[1](problem.inputs @ trunk.T, problem.targets).backward()
    for head, attempt in zip(heads, (1, 0), strict=True):
        entries = head.step_state().open.micro_batches
        assert {id_: (entry.attempt, entry.state) for id_, entry in entries.items()} == {0: (attempt, "COMMITTED")}
    source.begin_again(head=heads[0])
    assert losses[0].micro_batches == [] and losses[1].micro_batches == [0]
    losses[1](problem.inputs @ trunk.T, problem.targets).backward()
    assert heads[1].seal(expected_micro_batches=losses[1].micro_batches).totals.micro_batch_count == 2
    for missing, arguments in (("head", {"step": 0}), ("step", {"head": heads[0]})):
        with refused("MISSING_FIELD", headwater.InvalidArgumentError, field=missing):
            source.begin_again(attempts={0: 1}, **arguments)
    del left


FROZEN = {"mean": {}, "declared": {"loss_scale": 1.0}, "none": {"reduction": "none"}}


@pytest.mark.parametrize("form", FROZEN)
def test_a_frozen_head_passes_the_gradient_on_as_often_as_it_is_asked(new_head, trunk, problem, rng, form):
    """Autograd adds to what it was given, and so may the caller."""
    upstream = numbers(rng, 16) if form == "none" else torch.tensor(1.0 if form == "declared" else 3.0)
    expected, _ = problem.reference(problem.cross_entropy(upstream, reduction=FROZEN[form].get("reduction", "mean")))
    loss_fn = headwater.torch.CrossEntropyLoss(new_head(trainable=False, optimizer=None), **FROZEN[form])
    with torch.no_grad():
        assert not loss_fn(problem.inputs @ trunk.T, problem.targets).requires_grad
    hidden = (problem.inputs @ trunk.T).detach().requires_grad_()
    loss = loss_fn(hidden, problem.targets)
    loss.backward(upstream, retain_graph=True)
    once = hidden.grad.clone()
    assert relative(once.T @ problem.inputs, expected[0]) <= 1e-5
    for times in (2, 3):
        loss.backward(upstream, retain_graph=True)
        assert relative(hidden.grad, times * once) <= 1e-6
    hidden.grad.zero_()
    loss.backward(upstream)
    assert torch.equal(hidden.grad, once)


TRIPLE = {"reduction": "none", "differentiable": ("loss", "entropy", "lse")}


@pytest.mark.parametrize("options", ({}, {"reduction": "none"}, TRIPLE), ids=("mean", "none", "triple"))
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_backward_runs_once_and_has_no_derivative(head, trunk, problem, options):
    out = headwater.torch.CrossEntropyLoss(head, **options)(problem.inputs @ trunk.T, problem.targets)
    first, second = (out.entropy, out.lse) if options is TRIPLE else (out, out)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
        first.sum().backward(create_graph=True)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
        torch.autograd.grad(first.sum(), trunk, create_graph=True)
    assert head.gradient_norm() == 0 and trunk.grad is None
    first.sum().backward(retain_graph=True)
    before, trunk_before = head.gradient(), trunk.grad.clone()
    assert before.any()
    with refused("MICRO_BATCH_CONFLICT", headwater.MicroBatchConflictError):
        second.sum().backward()
    np.testing.assert_array_equal(head.gradient(), before)
    assert torch.equal(trunk.grad, trunk_before)


def test_a_dropped_graph_discards(head, trunk, problem):
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    for _ in range(3):  # one staging slot: each needs the one before to be gone
        loss = loss_fn(problem.inputs @ trunk.T, problem.targets)
        del loss
        gc.collect()
    states = [entry.state for entry in head.step_state().open.micro_batches.values()]
    assert states == ["DISCARDED"] * 3 and loss_fn.micro_batches == []
    assert head.gradient_norm() == 0
    loss_fn(problem.inputs @ trunk.T, problem.targets).backward()
    assert loss_fn.micro_batches == [3]
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


def test_a_declared_scale_is_added_at_forward(new_head, trunk, problem):
    targets = with_ignored(problem.targets)
    weight = torch.linspace(0.5, 2, VOCAB_SIZE)
    head = new_head(staging_slots=0)
    loss_fn = headwater.torch.CrossEntropyLoss(head, weight=weight, loss_scale=0.25)
    loss = loss_fn(problem.inputs @ trunk.T, targets)
    (loss * 0.25).backward(retain_graph=True)
    problem.check(problem.cross_entropy(0.25, targets, weight=weight.double()), trunk, head, 0.25 * loss)
    with refused("MICRO_BATCH_CONFLICT"):
        (loss * 0.25).backward()
    other = loss_fn(problem.inputs @ trunk.T, targets)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError, "0.25", "0.5"):
        (other * 0.5).backward()


@pytest.mark.parametrize("items", (None, 0, torch.tensor(0)), ids=("own", "int", "tensor"))
def test_no_valid_token_gives_zero(new_head, problem, items):
    """Also where the Trainer has counted none in the whole step."""
    for options in ({}, {"loss_scale": 1.0}, *([{"reduction": "none"}] if items is None else [])):
        head, trunk = new_head(), problem.parameter()
        loss_fn = headwater.torch.CrossEntropyLoss(head, **options)
        loss = loss_fn(problem.inputs @ trunk.T, torch.full((16,), -100), num_items_in_batch=items)
        loss.sum().backward()
        assert not loss.any() and not trunk.grad.any() and head.gradient_norm() == 0


def test_no_items_beside_valid_tokens_are_refused(head, trunk, problem):
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    with refused("INVALID_FIELD", headwater.InvalidArgumentError, "num_items_in_batch is 0"):
        loss_fn(problem.inputs @ trunk.T, problem.targets, num_items_in_batch=0)
    assert loss_fn.micro_batches == []


class Trunk(torch.nn.Module):
    """A trunk that ends in the remote loss, for activation checkpointing."""

    def __init__(self, problem, loss_fn):
        super().__init__()
        self.weight = problem.parameter()
        self.loss_fn = loss_fn

    def forward(self, inputs, targets):
        out = self.loss_fn(torch.tanh(torch.tanh(inputs @ self.weight.T)), targets)
        return out * 1.5 if isinstance(out, torch.Tensor) else (out.loss * 1.5, out.entropy, out.lse)


@pytest.mark.parametrize("options", ({}, {"loss_scale": 3.0}, TRIPLE), ids=("explicit", "declared", "triple"))
@pytest.mark.parametrize("levels", ((True,), (False,), *itertools.product((True, False), repeat=2)), ids=str)
def test_activation_checkpointing_around_the_loss(new_head, problem, rng, levels, options):
    """`levels`: of recomputation, from the inside, and whether each is reentrant."""
    upstream = [numbers(rng, 16) for _ in range(3)] if options is TRIPLE else torch.tensor(2.0)
    gradients = []
    for checkpointed in (False, True):
        head = new_head()
        run = model = Trunk(problem, headwater.torch.CrossEntropyLoss(head, **options))
        for reentrant in levels if checkpointed else ():
            run = functools.partial(checkpoint, run, use_reentrant=reentrant)
        inputs = problem.inputs.clone().requires_grad_()
        for _ in range(2):
            torch.autograd.backward(run(inputs, problem.targets), upstream)
        result = head.seal(expected_micro_batches=model.loss_fn.micro_batches)
        assert result.totals.micro_batch_count == 2
        gradients.append((model.weight.grad, inputs.grad, torch.tensor(head.gradient())))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_bad_arguments_are_refused(head, problem):
    with refused("INVALID_FIELD"):
        headwater.torch.CrossEntropyLoss("head")
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    with refused("SHAPE_MISMATCH"):
        loss_fn(problem.inputs @ problem.trunk.T, problem.targets[:3])
    with refused("INVALID_FIELD"):
        loss_fn(np.zeros((16, HIDDEN_SIZE), np.float32), problem.targets)
    assert loss_fn.micro_batches == []  # refused submissions leave no id behind


def test_interpreter_exit_with_a_graph_alive_is_quiet(each_place):
    program = f"""
import headwater, headwater.local, headwater.torch, torch
client = {f"headwater.connect({each_place.address!r})" if each_place.address else "headwater.local.connect()"}
head = client.create_head("exit", torch.ones(8, 4))
loss = headwater.torch.CrossEntropyLoss(head)(torch.ones(3, 4, requires_grad=True), torch.tensor([1, 2, 3]))
kept = [loss, client, head]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    if each_place.address:
        each_place.client.head("exit").delete(force=True)


# ---- off the straight way ------------------------------------------------------------------------------------------------


def interrupting(monkeypatch, owner, name, error):
    """`owner.name` runs to its end, and then `error` comes instead of the result, as a Ctrl-C does; once."""
    whole = getattr(owner, name)

    def run(*args, **keywords):
        whole(*args, **keywords)
        monkeypatch.setattr(owner, name, whole)
        raise error

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize(
    "error",
    (KeyboardInterrupt(), RuntimeError("CUDA out of memory"), headwater.DeadlineExceededError("late", reason="DEADLINE_EXCEEDED")),
    ids=("interrupt", "out_of_memory", "late"),
)
def test_a_forward_that_is_interrupted_behind_the_server_is_discarded(head, trunk, problem, monkeypatch, error):
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    interrupting(monkeypatch, _head.Head, "_finish", error)  # the micro-batch is staged, and has the only slot
    with pytest.raises(type(error)):
        loss_fn(problem.inputs @ trunk.T, problem.targets)
    assert loss_fn.micro_batches == []
    loss_fn(problem.inputs @ trunk.T, problem.targets).backward()
    assert [entry.state for entry in head.step_state().open.micro_batches.values()] == ["DISCARDED", "COMMITTED"]
    problem.check(problem.cross_entropy(), trunk, head)
    assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1


def test_what_is_abandoned_while_the_server_stands_still_is_discarded_before_a_later_loss(make_head, problem):
    with running_server() as server, headwater.connect(server.address) as client:
        head, trunk = problem.head(client, make_head, staging_slots=2), problem.parameter()
        loss_fn = headwater.torch.CrossEntropyLoss(head)
        losses = [loss_fn(problem.inputs @ trunk.T, problem.targets) for _ in range(2)]
        with server.frozen():
            began = time.monotonic()
            losses.clear()
            gc.collect()
            assert time.monotonic() - began < 5  # a finalizer waits for nothing
        loss_fn(problem.inputs @ trunk.T, problem.targets).backward()
        assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 1
        states = [entry.state for entry in head.step_state().open.micro_batches.values()]
        assert states == ["DISCARDED", "DISCARDED", "COMMITTED"]


def test_a_loss_bounds_its_commit_as_its_other_calls(head, trunk, client, problem, monkeypatch):
    backend, bounds = client._backend, []
    call = backend.call

    def noting(method, timeout_s, **fields):
        if method == "CommitMicroBatch":
            bounds.append(timeout_s)
        return call(method, timeout_s, **fields)

    monkeypatch.setattr(backend, "call", noting)
    for options in ({}, {"timeout_s": 77.0}):
        headwater.torch.CrossEntropyLoss(head, **options)(problem.inputs @ trunk.T, problem.targets).backward()
    assert bounds[0] > 77 >= bounds[1] > 70


def test_token_weights_that_require_a_gradient_are_refused(head, trunk, problem):
    weights = torch.ones(16, requires_grad=True)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    with refused("INVALID_COMBINATION", headwater.InvalidArgumentError, 'reduction="none"'):
        loss_fn(problem.inputs @ trunk.T, problem.targets, token_weights=weights)
    assert loss_fn.micro_batches == []
    loss_fn(problem.inputs @ trunk.T, problem.targets, token_weights=weights.detach()).backward()
    with torch.no_grad():
        loss_fn(problem.inputs @ trunk.T, problem.targets, token_weights=weights)
    # The way that the message names.
    losses = headwater.torch.CrossEntropyLoss(head, reduction="none")(problem.inputs @ trunk.T, problem.targets)
    (losses * weights).sum().backward()
    assert torch.equal(weights.grad, losses.detach())


def test_a_rank_that_comes_back_submits_what_it_had_committed_without_a_slot(client, head, trunk, problem):
    """Ignored rows travelled with the calls that had found no slot, and were other content to the server."""
    targets = with_ignored(problem.targets)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    sum(loss_fn(problem.inputs @ trunk.T, targets) for _ in range(3)).backward()
    gradient, before = head.gradient(), head.step_state().open
    assert [entry.form for entry in before.micro_batches.values()] == ["STAGED", "HELD", "HELD"]
    again = client.head(head.name)
    loop = headwater.torch.TrainingLoop(again, torch.optim.SGD([trunk], lr=0.1))
    assert loop.resume(take=False) == 0
    loss_fn = headwater.torch.CrossEntropyLoss(again)
    for _ in range(3):  # there is a slot for each of them now
        loss_fn(problem.inputs @ trunk.T, targets).backward()
    assert again.step_state().open == before
    np.testing.assert_array_equal(again.gradient(), gradient)


@pytest.mark.parametrize("count", (2, 3))
def test_losses_before_one_backward_equal_one_loss_and_wait_for_nothing(head, trunk, problem, count):
    """With the default of one slot: the slot is this process's own, and only its backward frees it."""
    loss_fn = headwater.torch.CrossEntropyLoss(head, reduction="sum")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = zip(torch.tensor_split(problem.inputs, count), torch.tensor_split(problem.targets, count), strict=True)
        loss = sum(loss_fn(inputs @ trunk.T, targets) for inputs, targets in parts) / len(problem.targets)
        loss.backward()
    micro_batches = head.step_state().open.micro_batches.values()
    assert [entry.form for entry in micro_batches] == ["STAGED", *["HELD"] * (count - 1)]
    assert [entry.attempt for entry in micro_batches] == [0] * count  # none was refused, and tried again
    problem.check(problem.cross_entropy(), trunk, head, loss)
    (warning,) = (entry for entry in caught if issubclass(entry.category, RuntimeWarning))
    assert "staging_slots=2" in str(warning.message) and warning.filename == __file__


def test_a_slot_for_each_loss_brings_no_warning(new_head, trunk, problem):
    head = new_head(staging_slots=2)
    loss_fn, none_fn = (headwater.torch.CrossEntropyLoss(head, reduction=reduction) for reduction in ("mean", "none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden = problem.inputs @ trunk.T
        sum((loss_fn(hidden, problem.targets), loss_fn(hidden, problem.targets), none_fn(hidden, problem.targets).sum())).backward()
    assert [entry.form for entry in head.step_state().open.micro_batches.values()] == ["STAGED", "STAGED", "HELD"]


@pytest.mark.parametrize("options", ({}, {"loss_scale": 1.0}, {"reduction": "none"}), ids=("mean", "declared", "none"))
def test_a_loss_that_is_kept_after_backward_keeps_no_gradient(head, problem, options):
    hidden = (problem.inputs @ problem.trunk.T).requires_grad_()
    loss = headwater.torch.CrossEntropyLoss(head, **options)(hidden, problem.targets)
    grad_hidden = weakref.ref(loss.grad_fn.outcome._grad_hidden)
    loss.sum().backward()
    hidden.grad = None
    gc.collect()
    assert grad_hidden() is None and loss.grad_fn is not None


def test_class_weights_and_an_ignored_index_beyond_the_vocabulary(head, trunk, problem):
    weight = torch.linspace(0.5, 2, VOCAB_SIZE)
    index = VOCAB_SIZE + 3
    targets = with_ignored(problem.targets, index)
    loss_fn = headwater.torch.CrossEntropyLoss(head, weight=weight, ignore_index=index, loss_scale=1.0)
    loss = loss_fn(problem.inputs @ trunk.T, targets)
    loss.backward()
    problem.check(problem.cross_entropy(targets=targets, weight=weight.double(), ignore_index=index), trunk, head, loss)
    with refused("TARGET_OUT_OF_VOCAB"):
        loss_fn(problem.inputs @ trunk.T, torch.full((16,), VOCAB_SIZE))


def test_a_copied_module_means_the_same_head(head, client):
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "loss": headwater.torch.CrossEntropyLoss(head)})
    copied = copy.deepcopy(model)
    assert copied["loss"].head is head and copied["body"].weight is not model["body"].weight
    assert copied["loss"].micro_batch_source is model["loss"].micro_batch_source
    own = headwater.torch.CrossEntropyLoss(head, micro_batch_source=headwater.torch.MicroBatchSource(0, 1))
    assert copy.deepcopy(own).micro_batch_source is own.micro_batch_source  # ids stay unique
    assert copy.copy(head) is head
    with pytest.raises(TypeError, match="name"):
        pickle.dumps(head)
    assert copy.copy(client) is client and copy.deepcopy({"client": client})["client"] is client
    with pytest.raises(TypeError, match="connect again"):
        pickle.dumps(client)
