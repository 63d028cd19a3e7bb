"""Losses of headwater.torch off the straight way: interrupted, never backed through, differentiated twice, kept, copied."""

import copy
import gc
import pickle
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from conftest import running_server
from expectations import refused
from torch_model import VOCAB_SIZE, with_ignored

import headwater
import headwater.torch
from headwater import _head


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
