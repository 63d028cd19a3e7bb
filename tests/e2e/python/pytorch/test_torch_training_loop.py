"""`headwater.torch.TrainingLoop`: closing steps, overflow, several heads and ranks, checkpoints and the way back to them."""

import gc
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import running_server
from expectations import refused
from torch_language_model import (
    SERVER_ADAMW,
    LanguageModel,
    Trainer,
    attach_with_loop,
    changes,
    micro_batch,
    optimizer_of,
    train_in_process,
    train_with,
)
from torch_model import Problem, relative
from torch_ranks import Ranks

import headwater
import headwater.torch

TOLERANCE = 1e-5  # as in test_torch_tied.py


# ---- closing a step -----------------------------------------------------------------------------------------------------


def test_two_heads_are_clipped_by_one_global_norm(one_shard, make_head, problem, rng):
    other = Problem(rng)
    other.inputs = problem.inputs

    def objective(trunk, weight, bias, second_weight, second_bias):
        hidden = problem.inputs.double() @ trunk.T
        first = F.cross_entropy(hidden @ weight.T + bias, problem.targets)
        return 20 * (first + 0.5 * F.cross_entropy(hidden @ second_weight.T + second_bias, other.targets))

    expected = [t.double() for t in (problem.trunk, problem.weight, problem.bias, other.weight, other.bias)]
    expected = [torch.nn.Parameter(tensor.clone()) for tensor in expected]
    before = [tensor.detach().clone() for tensor in expected]
    objective(*expected).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
    torch.optim.SGD(expected, lr=0.1).step()

    heads = [p.head(one_shard.client, make_head) for p in (problem, other)]
    trunk = problem.parameter()
    loop = headwater.torch.TrainingLoop(heads, torch.optim.SGD([trunk], lr=0.1), max_grad_norm=1.0)
    first, second = (headwater.torch.CrossEntropyLoss(head) for head in heads)
    hidden = problem.inputs @ trunk.T
    loop.backward(20 * (first(hidden, problem.targets) + 0.5 * second(hidden, other.targets)))
    outcome = loop.step()
    assert outcome.applied and outcome.step == 0 and loop.open_step == 1 and outcome.learning_rate == 0.1
    assert abs(outcome.global_grad_norm / float(norm) - 1) <= 1e-5
    assert abs(outcome.clip_factor * (float(norm) + 1e-6) - 1) <= 1e-5
    assert [totals.valid_token_count for totals in outcome.totals] == [16, 16]
    after = [trunk.detach()] + [torch.tensor(v) for head in heads for v in (head.weight(), head.bias())]
    for new, old, reference in zip(after, before, expected, strict=True):
        assert relative(new.double() - old, reference.detach() - old) <= 1e-4
    assert trunk.grad is None


def test_a_head_that_the_trainer_owns_is_clipped_whichever_parameters_are_named(one_shard, names):
    outcomes, models = [], []
    for body_alone in (False, True):
        model = LanguageModel(tied=False, bias=True)
        head = headwater.torch.attach(one_shard.client, names(one_shard.client), model.lm_head, optimizer="torch")
        loop = headwater.torch.TrainingLoop(
            head,
            torch.optim.SGD(model.parameters(), lr=0.1),
            parameters=model.body_parameters() if body_alone else None,
            max_grad_norm=1e-3,
        )
        inputs, targets = micro_batch(0, 0)
        loop.backward(headwater.torch.CrossEntropyLoss(head)(model.body(inputs), targets))
        outcomes.append(loop.step())
        models.append(model)
    assert outcomes[1].clip_factor < 1
    assert math.isclose(outcomes[0].global_grad_norm, outcomes[1].global_grad_norm, rel_tol=1e-6)
    for (name, first), (_, second) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.allclose(first, second, rtol=1e-6, atol=1e-9), name


def test_a_gradient_that_is_not_finite_waits_for_skip(head, trunk, problem):
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1))
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    inputs = problem.inputs.clone()
    inputs[3] = float("inf")
    loop.backward(loss_fn(inputs @ trunk.T, problem.targets))
    with refused("NON_FINITE_GRADIENT", headwater.FailedPreconditionError):
        loop.step()
    with refused("INVALID_COMBINATION", headwater.FailedPreconditionError) as info:
        loop.step()
    assert "skip()" in str(info.value)
    loop.skip()
    assert loop.open_step == 1 and trunk.grad is None and torch.equal(trunk.detach(), problem.trunk)
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    assert loop.step().applied


def test_a_skip_that_some_heads_have_missed_is_not_repeated(one_shard, make_head, problem, monkeypatch):
    heads = [problem.head(one_shard.client, make_head) for _ in range(2)]

    def away(**options):
        raise headwater.UnavailableError("the server is away")

    for count in (1, 2):
        loop = headwater.torch.TrainingLoop(heads[:count])
        with monkeypatch.context() as patch:
            patch.setattr(heads[count - 1], "discard_gradient", away)
            with pytest.raises(headwater.UnavailableError):
                loop.skip()
        if count == 1:  # nothing was closed yet
            loop.skip()
            heads[1].discard_gradient()
            continue
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError) as info:
            loop.skip()
        assert "resume()" in str(info.value)
    assert [head.info().open_step for head in heads] == [2, 1]


def test_an_unfinished_micro_batch_can_be_finished(one_shard, make_head, problem):
    head, trunk = problem.head(one_shard.client, make_head, staging_slots=2), problem.parameter()
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1))
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    with refused("MISSING_FIELD", ValueError):
        loop.step()
    loss = loss_fn(problem.inputs @ trunk.T, problem.targets)
    with refused("MICRO_BATCH_UNCOMMITTED", headwater.FailedPreconditionError):
        loop.step()
    loss.backward()
    assert loop.step().applied


def test_a_step_without_micro_batches_is_closed_only_if_asked_for(head, trunk, problem):
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1))
    with torch.no_grad():
        headwater.torch.CrossEntropyLoss(head)(problem.inputs @ trunk.T, problem.targets)
    for nothing in (None, 0, []):
        with refused("MISSING_FIELD", ValueError) as info:
            loop.step(expected_micro_batches=nothing)
        assert "skip()" in str(info.value)
    assert head.step_state().open.step == 0
    assert loop.step(expected_micro_batches=0, allow_empty=True).applied
    assert loop.step(allow_empty=True).applied
    loop.skip()
    assert loop.open_step == 3


def test_an_error_in_mid_step_asks_for_resume(head, trunk, problem, monkeypatch):
    optimizer = torch.optim.SGD([trunk], lr=0.1)
    loop, loss_fn = headwater.torch.TrainingLoop(head, optimizer), headwater.torch.CrossEntropyLoss(head)
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step()
    # The head has been updated, the body has not.
    for call in (loop.step, loop.skip, loop.save_checkpoint):
        with refused("INVALID_COMBINATION", headwater.FailedPreconditionError) as info:
            call()
        assert "resume()" in str(info.value)
    assert loop.resume() == 1
    loop.backward(loss_fn(problem.inputs @ trunk.T, problem.targets))
    assert loop.step().applied


def test_what_does_not_fit_together_is_refused(backends, make_head, names, problem):
    client = backends("local-1").client
    head, trunk = problem.head(client, make_head), problem.parameter()
    frozen = problem.head(client, make_head, trainable=False, optimizer=None)
    accumulating = problem.head(client, make_head, optimizer=None)
    model = LanguageModel(tied=True)
    ours = headwater.torch.attach(client, names(client), model.lm_head, model=model, tied="trainer")
    served = headwater.torch.attach(client, names(client), model.lm_head, model=model, tied="server", optimizer=SERVER_ADAMW)
    everything, nothing = torch.optim.SGD(model.parameters(), lr=1), torch.optim.SGD([trunk], lr=1)
    for arguments in (
        {"heads": frozen},
        {"heads": accumulating},
        {"heads": ours, "optimizer": nothing},
        {"heads": ours},
        {"heads": served, "optimizer": everything},
        {"heads": ours, "optimizer": everything, "rank": 0, "world_size": 2, "barrier": print, "shared_gradients": "partial"},
    ):
        with refused("INVALID_COMBINATION", ValueError):
            headwater.torch.TrainingLoop(**arguments)
    with refused("MISSING_FIELD", ValueError):
        headwater.torch.TrainingLoop(head, world_size=2, rank=0)
    with refused("INVALID_NAME", ValueError):
        headwater.torch.TrainingLoop(head, checkpoint_name="last")
    with refused("INVALID_FIELD", ValueError):
        headwater.torch.TrainingLoop(head, shared_gradients="some")
    with refused("MISSING_FIELD", ValueError):
        loop = headwater.torch.TrainingLoop(head)
        headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
        loop.step()


# ---- several trainers ---------------------------------------------------------------------------------------------------


def _ddp_rank(rank, address, name, flow, directory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    try:
        model = LanguageModel(tied=True)
        options = {"attach": {"staging_slots": 2}, "loss": {"grad_hidden_scale": 2.0}, "max_grad_norm": 0.5}
        with headwater.connect(address) as client:
            _, loop, loss_fn = attach_with_loop(client, name, model, flow, **options)
            assert (loop.rank, loop.world_size) == (rank, 2) and loop.resume() == 0
            body = torch.nn.parallel.DistributedDataParallel(model)
            for step in range(4):
                inputs, targets = micro_batch(step, rank)
                loop.backward(loss_fn(body(inputs), targets) / 2)
                loop.step()
        torch.save(model.state_dict(), f"{directory}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("flow", ("trainer", "server"))
def test_a_tied_model_under_real_ddp(remote, names, tmp_path, flow):
    """Rank, world size, barrier and how the embedding's gradient is shared come from torch.distributed."""
    expected = LanguageModel(tied=True)
    train_in_process(expected, 4, 2, optimizer_of(expected.parameters()), max_grad_norm=0.5)
    name = names(remote.client)
    torch.multiprocessing.spawn(_ddp_rank, (remote.address, name, flow, str(tmp_path)), nprocs=2)
    states = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    model = LanguageModel(tied=True)
    model.load_state_dict(states[0])
    for parameter, change in changes(expected, model).items():
        assert change <= 2e-4, f"{parameter}: {change:.2g}"
    np.testing.assert_array_equal(remote.client.head(name).weight(), states[0]["embedding.weight"])


@pytest.mark.parametrize("dropped", (0, 1), ids=("the first", "the last"))
def test_a_rank_that_has_dropped_losses_needs_to_be_told_which_there_are(one_shard, make_head, problem, dropped):
    """Without, the ranks would expect different ids, and wait for what does not come."""
    head, trunk = problem.head(one_shard.client, make_head, staging_slots=2), problem.parameter()
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), rank=0, world_size=2, barrier=lambda: None)
    loss_fn = headwater.torch.CrossEntropyLoss(head)
    for index in range(2):
        loss = loss_fn(problem.inputs @ trunk.T, problem.targets)
        if index != dropped:
            loop.backward(loss)
        del loss
    gc.collect()
    with refused("MISSING_FIELD", ValueError) as info:
        loop.step()
    assert "say which there are" in str(info.value)
    assert loop.open_step == 0


@pytest.mark.parametrize("shared_gradients", ("reduced", "partial"))
@pytest.mark.parametrize("dropped", ((5,), (3, 4, 5)), ids=str)
def test_ranks_whose_last_losses_were_dropped_add_the_embeddings_gradient_beside_them(one_shard, names, shared_gradients, dropped):
    """Rank 0 does not know which ids rank 1 has drawn and dropped; none of them may be taken for the embedding's part."""
    kept = [index for index in range(6) if index not in dropped]
    expected = LanguageModel(tied=True)
    optimizer = optimizer_of(expected.parameters())
    for step in range(2):
        for index in kept:
            inputs, targets = micro_batch(step, index)
            logits = F.linear(expected.body(inputs), expected.lm_head.weight, expected.lm_head.bias)
            (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(kept)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    client, ranks = one_shard.client, Ranks(2)
    name, models = names(client), [LanguageModel(tied=True) for _ in range(2)]
    states = []

    def trainer(rank):
        model = models[rank]
        options = {"attach": {"staging_slots": 2}, "loss": {"grad_hidden_scale": 2.0}, "shared_gradients": shared_gradients}
        options |= {"rank": rank, "world_size": 2, "barrier": ranks.barrier.wait}
        head, loop, loss_fn = attach_with_loop(client, name, model, "server", **options)
        for step in range(2):
            for index in range(rank, 6, 2):
                inputs, targets = micro_batch(step, index)
                loss = loss_fn(model.body(inputs), targets)
                if index in kept:
                    loop.backward(loss / len(kept))
                del loss
            gc.collect()
            if shared_gradients == "partial":
                model.lm_head.weight.grad /= 2
                ranks.average(rank, model.body_parameters())
            else:
                ranks.average(rank, [*model.body_parameters(), model.lm_head.weight])
            assert loop.step(expected_micro_batches=kept).applied
            if rank == 0:
                states.append({id_: entry.state for id_, entry in head.step_state().last_closed.micro_batches.items()})

    ranks.run(trainer)
    own = range(6, 7 if shared_gradients == "reduced" else 8)
    committed = dict.fromkeys((*kept, *own), "COMMITTED")
    assert states == [{**committed, **dict.fromkeys(dropped, "DISCARDED")}] * 2
    for parameter, change in changes(expected, models[0]).items():
        assert change <= 2e-4, f"{parameter}: {change:.2g}"


# ---- checkpoints --------------------------------------------------------------------------------------------------------


STEPS = 8


@pytest.fixture
def tied():
    """Who owns the tied weight; None: it is not tied."""
    return "server"


@pytest.fixture
def undisturbed(one_shard, names, tmp_path, tied):
    run = Trainer(one_shard.client, names(one_shard.client), tmp_path / "undisturbed", tied=tied)
    assert run.loop.resume() == 0
    run.train(STEPS)
    return run.parameters()


@pytest.fixture
def start(one_shard, names, tmp_path, tied):
    """Starts the trainer process of a run, a first time or again."""
    name = names(one_shard.client)
    return lambda **options: Trainer(one_shard.client, name, tmp_path / "state", tied=tied, **options)


def begun(start, until, **options):
    """A run that has come to a step."""
    run = start(**options)
    assert run.loop.resume() == 0
    run.train(until)
    return run


def finish(run, step, undisturbed):
    """Goes on from a step; nothing of what happened before shows in the weights, bit by bit."""
    run.train(step, STEPS)
    for name, value in run.parameters().items():
        assert torch.equal(value, undisturbed[name]), name


@pytest.mark.parametrize("tied", (None, "trainer", "server"))
def test_a_trainer_that_is_started_again_goes_on_where_the_last_checkpoint_is(start, undisturbed, tied):
    first = begun(start, 5)
    inputs, targets = micro_batch(5, 0)
    lost = first.loss_fn(first.model.body(inputs), targets)  # dies between forward and backward
    assert first.state.steps() == [0, 2, 4]
    second = start(seed=1)
    # The head is at step 5, the trainer's state at 4.
    assert second.head.step == 5 and second.loop.resume() == 4 and second.head.step == 4
    with refused("EPOCH_FENCED", headwater.EpochFencedError):
        lost.backward()
    finish(second, 4, undisturbed)


def test_a_trainer_that_dies_at_a_checkpoint_takes_the_head_as_it_is(start, undisturbed):
    first = begun(start, 4)
    first.contribute(4, 0)  # committed, and lost
    second = start(seed=1)
    epoch = second.head.epoch
    assert second.loop.resume() == 4 and second.head.epoch != epoch
    assert not second.head.step_state().open.micro_batches
    finish(second, 4, undisturbed)


def test_going_back_to_a_given_step_in_mid_run(start, undisturbed):
    run = begun(start, 7)
    assert run.loop.resume(2) == 2
    finish(run, 2, undisturbed)
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError) as info:
        run.loop.resume(5)
    assert "step 5" in str(info.value)


def test_what_was_left_by_going_back_is_not_gone_to_again(start):
    run = begun(start, 7)
    assert run.state.steps() == [0, 2, 4, 6] and run.loop.resume(2) == 2
    steps, outcomes = [], []

    def train_step(step):
        steps.append(step)
        run.contribute(step, 0)
        if steps == [2, 3, 4]:
            raise headwater.StepLostError("the server was started again", reason="STEP_LOST")

    # `run` resumes, at its beginning and after the loss: from step 2, and from 4, which was saved anew; not from 6.
    run.loop.run(train_step, 6, learning_rate=lambda step: step * 1e-3, on_step=outcomes.append)
    assert steps == [2, 3, 4, 4, 5]
    assert [(o.learning_rate, o.checkpoint) for o in outcomes] == [(2e-3, None), (3e-3, "step-4"), (4e-3, None), (5e-3, "step-6")]


def test_a_frozen_teacher_comes_back_with_the_loop_that_keeps_it():
    with running_server() as server, headwater.connect(server.address) as client:
        teacher = client.create_head("teacher", torch.randn(67, 20), trainable=False)
        model = LanguageModel(tied=False)
        student = headwater.torch.attach(client, "student", model.lm_head, model=model, optimizer=headwater.AdamW())
        loop = headwater.torch.TrainingLoop([student, teacher], optimizer_of(model.body_parameters()), checkpoint_every=1)
        loss_fn = headwater.torch.JSDLoss(student, teacher)
        hidden, teacher_hidden = torch.randn(9, 24), torch.randn(9, 20)
        assert loop.resume() == 0
        loop.backward(loss_fn(hidden, teacher_hidden))
        server.restart()
        with refused("STEP_LOST", headwater.StepLostError):
            loop.step()
        assert loop.resume() == 0
        loop.backward(loss_fn(hidden, teacher_hidden))
        assert loop.step().applied


def test_a_head_that_was_deleted_comes_back_from_its_checkpoint(start, undisturbed):
    begun(start, 5).head.delete(force=True)
    second = start(seed=1)
    assert second.head.created and second.loop.resume() == 4
    finish(second, 4, undisturbed)


def test_a_rank_joins_the_open_step_again(start, undisturbed):
    """One trainer of several is started again: what it had added is not added twice, and what it had not decided is done again."""
    first = begun(start, 3, every=1)
    first.contribute(3, 0)
    inputs, targets = micro_batch(3, 1)
    undecided = first.loss_fn(first.model.body(inputs), targets)
    second = start(seed=1, every=1)
    epoch = second.head.epoch
    assert second.loop.resume(take=False) == 3 and second.head.epoch == epoch == first.head.epoch
    for index in range(2):
        second.contribute(3, index)
    entries = second.head.step_state().open.micro_batches.values()
    assert [(entry.attempt, entry.state) for entry in entries] == [(0, "COMMITTED"), (1, "COMMITTED")]
    assert second.loop.step().applied
    finish(second, 4, undisturbed)
    del undecided


def test_without_state_the_trainer_is_told_its_step(one_shard, make_head, problem):
    head, trunk = problem.head(one_shard.client, make_head, initial_step=7), problem.parameter()
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), checkpoint_every=1)
    assert loop.resume() == 7
    headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
    assert loop.step().checkpoint == "step-8"
    headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
    mine = one_shard.client.head(head.name)
    again = headwater.torch.TrainingLoop(mine, checkpoint_every=1)
    assert again.resume() == 8
    with refused("EPOCH_FENCED"):
        head.step_state()
    before = mine.weight()
    headwater.torch.cross_entropy(mine, problem.inputs @ problem.trunk.T, problem.targets).backward()
    again.step(0.1)
    assert again.resume(8) == 8
    np.testing.assert_array_equal(mine.weight(), before)


@pytest.mark.parametrize("stored", (False, True), ids=("stateless", "state"))
def test_a_run_that_attaches_to_a_head_of_another_beginning_trains_its_own_weight(one_shard, names, tmp_path, stored):
    client, name = one_shard.client, names(one_shard.client)

    def begin(seed, directory):
        model = LanguageModel(tied=True, seed=seed)
        head = headwater.torch.attach(client, name, model.lm_head, model=model, tied="trainer")
        optimizer = optimizer_of(model.parameters())
        state = headwater.torch.TrainerState(directory, model=model, optimizer=optimizer) if stored else None
        return model, head, headwater.torch.TrainingLoop(head, optimizer, state=state, checkpoint_every=2 if stored else None)

    first, _, _ = begin(0, tmp_path / "first")  # ends before its first step does
    model, head, loop = begin(1, tmp_path / "second")
    assert not head.created and not torch.equal(first.lm_head.weight, model.lm_head.weight)
    assert loop.resume() == 0
    np.testing.assert_array_equal(head.weight(), model.lm_head.weight.detach().numpy())
    if not stored:  # the trainer may load its own state afterwards: a second resume leaves the head's weight alone
        own = model.lm_head.weight.detach().clone()
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert loop.resume() == 0
        np.testing.assert_array_equal(head.weight(), own.numpy())
        with torch.no_grad():
            model.lm_head.weight.copy_(own)
    expected = LanguageModel(tied=True, seed=1)
    train_in_process(expected, 3, 2, optimizer_of(expected.parameters()))
    train_with(loop, headwater.torch.CrossEntropyLoss(head), model, range(3), 2)
    for (_, actual), (_, reference) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert relative(actual.detach(), reference.detach().double()) <= TOLERANCE


def test_the_example_goes_on_where_it_was_stopped(each_place, tmp_path):
    program = Path(__file__).resolve().parents[4] / "client" / "examples" / "python" / "train.py"
    place = each_place.address if each_place.remote else "local"
    output = []
    for steps in (15, 25):
        command = [sys.executable, str(program), str(tmp_path), place, str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        output.append(done.stdout)
    if each_place.remote:
        each_place.client.head("example-tied").delete(force=True)
    assert output[0].startswith("step 0:") and output[1].startswith("step 10:")
    losses = [dict(re.findall(r"step (\d+): loss ([0-9.]+)", text)) for text in output]
    assert losses[0]["10"] == losses[1]["10"] and float(losses[1]["24"]) < float(losses[0]["0"])
