"""Restarts around `headwater.torch.TrainingLoop`: the way back to checkpoints, and where body and head might part.

With a state, without one, or with one of each rank's.
"""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from expectations import eventually, refused, run_python
from headwaterd import running_server
from torch_language_model import LanguageModel, Trainer, micro_batch, optimizer_of, train_in_process
from torch_model import Ranks, relative

import headwater
import headwater.torch

STEPS = 8
TOLERANCE = 1e-5  # as in test_torch_tied.py


@pytest.fixture
def tied():
    """Who owns the tied weight; None: it is not tied."""
    return "server"


# Body and head have no weight in common.
apart = pytest.mark.parametrize("tied", (None,), ids=("apart",))


@pytest.fixture
def undisturbed(client, names, tied):
    """What an undisturbed run of all steps trains."""
    trainer = Trainer(client, names(client), tied=tied, every=None)
    trainer.run(STEPS)
    assert trainer.steps == list(range(STEPS))
    return trainer.parameters()


@pytest.fixture
def start(client, names, tmp_path, tied):
    """Starts the trainer process of a run, a first time or again."""
    name = names(client)
    return lambda directory=tmp_path, **options: Trainer(client, name, directory, tied=tied, **options)


def assert_same(trainer, expected):
    """Bit by bit."""
    for name, value in trainer.parameters().items():
        assert torch.equal(value, expected[name]), name


# ---- with a state -------------------------------------------------------------------------------------------------------


def begun(start, until, **options):
    """A trainer that has come to a step."""
    trainer = start(**options)
    assert trainer.loop.resume() == 0
    trainer.train(until)
    return trainer


def finish(trainer, step, undisturbed):
    """Goes on from a step; nothing of what happened before shows in the weights."""
    trainer.train(step, STEPS)
    assert_same(trainer, undisturbed)


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
    trainer = begun(start, 7)
    assert trainer.loop.resume(2) == 2
    finish(trainer, 2, undisturbed)
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError, "step 5"):
        trainer.loop.resume(5)


def test_what_was_left_by_going_back_is_not_gone_to_again(start):
    trainer = begun(start, 7)
    assert trainer.state.steps() == [0, 2, 4, 6] and trainer.loop.resume(2) == 2
    steps, outcomes = [], []

    def train_step(step):
        steps.append(step)
        trainer.contribute(step, 0)
        if steps == [2, 3, 4]:
            raise headwater.StepLostError("the server was started again", reason="STEP_LOST")

    # `run` resumes, at its beginning and after the loss: from step 2, and from 4, which was saved anew; not from 6.
    trainer.loop.run(train_step, 6, learning_rate=lambda step: step * 1e-3, on_step=outcomes.append)
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
    second.train_step(3)
    entries = second.head.step_state().open.micro_batches.values()
    assert [(entry.attempt, entry.state) for entry in entries] == [(0, "COMMITTED"), (1, "COMMITTED")]
    assert second.loop.step().applied
    finish(second, 4, undisturbed)
    del undecided


@pytest.mark.parametrize("tied", ("trainer",))
@pytest.mark.parametrize("stored", (False, True), ids=("stateless", "state"))
def test_a_run_that_attaches_to_a_head_of_another_beginning_trains_its_own_weight(start, tmp_path, stored):
    every = 2 if stored else None
    first = start(tmp_path / "first" if stored else None, every=every)  # ends before its first step does
    second = start(tmp_path / "second" if stored else None, seed=1, every=every)
    model, head = second.model, second.head
    assert not head.created and not torch.equal(first.model.lm_head.weight, model.lm_head.weight)
    assert second.loop.resume() == 0
    np.testing.assert_array_equal(head.weight(), model.lm_head.weight.detach().numpy())
    if not stored:  # the trainer may load its own state afterwards: a second resume leaves the head's weight alone
        own = model.lm_head.weight.detach().clone()
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert second.loop.resume() == 0
        np.testing.assert_array_equal(head.weight(), own.numpy())
        with torch.no_grad():
            model.lm_head.weight.copy_(own)
    expected = LanguageModel(tied=True, seed=1)
    train_in_process(expected, 3)
    second.train(3)
    for (_, actual), (_, reference) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert relative(actual.detach(), reference.detach().double()) <= TOLERANCE


def test_the_example_goes_on_where_it_was_stopped(each_place, tmp_path):
    program = Path(__file__).resolve().parents[4] / "client" / "examples" / "python" / "train.py"
    place = each_place.address or "local"
    output = [run_python(program, tmp_path, place, str(steps)) for steps in (15, 25)]
    if each_place.address:
        each_place.client.head("example-tied").delete(force=True)
    assert output[0].startswith("step 0:") and output[1].startswith("step 10:")
    losses = [dict(re.findall(r"step (\d+): loss ([0-9.]+)", text)) for text in output]
    assert losses[0]["10"] == losses[1]["10"] and float(losses[1]["24"]) < float(losses[0]["0"])


# ---- where body and head might part -------------------------------------------------------------------------------------


def losing(trainer, client, at, checkpoint):
    """`trainer.train_step` for a server that is lost in a step, once, and that brings the head back from a checkpoint."""
    lost = []

    def train_step(step):
        trainer.train_step(step)
        if step == at and not lost:
            lost.append(step)
            client.head(trainer.head.name).restore(checkpoint)
            raise headwater.StepLostError("the server was started again", reason="STEP_LOST")

    return train_step


@apart
def test_without_a_state_a_lost_server_ends_the_run(client, start, undisturbed):
    """The head came back at step 4, and the run went on from there with the body of step 5."""
    trainer, kept = start(None), {}
    owners = trainer.model, trainer.loop._optimizer
    lose = losing(trainer, client, 5, "step-4")

    def train_step(step):
        kept[step] = copy.deepcopy([owner.state_dict() for owner in owners])
        lose(step)

    with refused("STEP_LOST", headwater.StepLostError):
        trainer.run(STEPS, train_step)
    assert trainer.steps == [0, 1, 2, 3, 4, 5]
    body = trainer.model.block.up.weight.detach().clone()
    told = "it is at step 5", f"{trainer.head.name} at step 4"
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError, *told) as info:
        trainer.run(STEPS)
    assert info.value.metadata == {"openStep": "4", "trainerSteps": "5"}
    assert torch.equal(trainer.model.block.up.weight, body)
    # Who has kept the body's state goes on, and nothing shows.
    assert trainer.loop.resume() == 4
    for owner, state in zip(owners, kept[4], strict=True):
        owner.load_state_dict(state)
    trainer.run(STEPS)
    assert trainer.steps[6:] == [4, 5, 6, 7]
    assert_same(trainer, undisturbed)


@apart
def test_without_a_state_a_lost_answer_ends_the_run(start, monkeypatch):
    """The head had been updated, the body had not, and the run went on with the step after."""
    trainer = start(None, every=None)
    apply = trainer.head.apply_optimizer_step

    def cut(**arguments):
        result = apply(**arguments)
        if result.open_step == 3:
            raise headwater.UnavailableError("the connection was cut")
        return result

    monkeypatch.setattr(trainer.head, "apply_optimizer_step", cut)
    with pytest.raises(headwater.UnavailableError):
        trainer.run(STEPS)
    assert trainer.steps == [0, 1, 2]
    told = "half-way (UNAVAILABLE: the connection was cut)"
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError, told):
        trainer.run(STEPS)
    assert trainer.steps == [0, 1, 2]


@apart
def test_without_a_state_a_run_goes_on_where_both_are(start, undisturbed):
    """An error in the trainer's own code leaves body and head where the step began."""
    trainer = start(None, every=None)

    def train_step(step):
        trainer.train_step(step)
        if trainer.steps == [0, 1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(STEPS, train_step)
    trainer.loop._optimizer.zero_grad()
    trainer.run(STEPS)
    assert trainer.steps == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert_same(trainer, undisturbed)


@apart
def test_heads_alone_need_no_state_to_go_back(client, names, start):
    expected = Trainer(client, names(client), tied=None, body=False)
    expected.run(STEPS)
    trainer = start(None, body=False)
    trainer.run(STEPS, losing(trainer, client, 5, "step-4"))
    assert trainer.steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert_same(trainer, expected.parameters())


@apart
def test_a_state_that_was_never_saved_takes_nobody_to_the_beginning(client, start):
    """The head came back from a checkpoint of its first step, and the run began anew there with the body of step 3."""
    trainer = start(every=None)
    trainer.head.save("init")
    lose = losing(trainer, client, 3, "init")
    for resume in (lambda: trainer.run(STEPS, lose), trainer.loop.resume, lambda: trainer.loop.resume(0)):
        with refused("STEP_MISMATCH", headwater.FailedPreconditionError, openStep="0", trainerSteps=""):
            resume()
    assert trainer.steps == [0, 1, 2, 3]


@apart
def test_a_beginning_that_nothing_has_changed_needs_no_state(client, start, undisturbed):
    trainer = start(every=None)
    trainer.head.save("init")
    assert trainer.loop.resume() == 0
    trainer.run(STEPS, losing(trainer, client, 0, "init"))
    assert trainer.steps == [0, *range(STEPS)]
    assert_same(trainer, undisturbed)


def test_without_state_the_trainer_is_told_its_step(client, new_head, trunk, problem):
    head = new_head(initial_step=7)
    loop = headwater.torch.TrainingLoop(head, torch.optim.SGD([trunk], lr=0.1), checkpoint_every=1)
    assert loop.resume() == 7
    headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
    assert loop.step().checkpoint == "step-8"
    headwater.torch.cross_entropy(head, problem.inputs @ trunk.T, problem.targets).backward()
    mine = client.head(head.name)
    again = headwater.torch.TrainingLoop(mine, checkpoint_every=1)
    assert again.resume() == 8
    with refused("EPOCH_FENCED"):
        head.step_state()
    before = mine.weight()
    headwater.torch.cross_entropy(mine, problem.inputs @ problem.trunk.T, problem.targets).backward()
    again.step(0.1)
    assert again.resume(8) == 8
    np.testing.assert_array_equal(mine.weight(), before)


# ---- a state of each rank's own -----------------------------------------------------------------------------------------


def test_ranks_may_have_states_of_their_own(tmp_path):
    model = torch.nn.Linear(2, 2)
    state, ranked = (headwater.torch.TrainerState(tmp_path, rank=rank, keep=2, model=model) for rank in (None, 1))
    for step in (1, 2, 10):
        state.save(step)
    ranked.save(2)
    assert not state.every_rank and ranked.every_rank and state.steps() == [2, 10] and ranked.steps() == [2]
    with refused("MISSING_FIELD", ValueError):
        headwater.torch.TrainerState(tmp_path)
    with refused("INVALID_FIELD", ValueError):
        headwater.torch.TrainerState(tmp_path, model=3)


@apart
@pytest.mark.parametrize("folders", ("one folder", "a folder each"))
@pytest.mark.parametrize("dies_at", (0, 4))
def test_ranks_that_died_between_their_parts_of_a_state_go_on(start, tmp_path, folders, dies_at):
    """The head is alive at that step, and rank 0's part is there: no later start got past it."""
    places = [tmp_path / ("state" if folders == "one folder" else f"node-{rank}") for rank in range(2)]

    def train(dies_at=None):
        """Two trainers, started a first time or again: the steps at which they begin, and what they train."""
        ranks, begun = Ranks(2), [None, None]
        options = {"attach": {"staging_slots": 2}, "world_size": 2, "barrier": ranks.barrier.wait}
        trainers = [start(place, rank=rank, **options) for rank, place in enumerate(places)]

        def save(step):
            if step == dies_at:
                eventually((places[0] / f"step-{step}.rank-0.pt").exists)
                raise KeyboardInterrupt
            headwater.torch.TrainerState.save(trainers[1].state, step)

        def run(rank):
            begun[rank] = trainers[rank].loop.resume()
            for step in range(begun[rank], STEPS):
                trainers[rank].contribute(step, rank)
                ranks.average(rank, trainers[rank].model.body_parameters())
                assert trainers[rank].loop.step().applied

        trainers[1].state.save = save
        ranks.run(run)
        return begun, [trainer.parameters() for trainer in trainers]

    with pytest.raises(KeyboardInterrupt):
        train(dies_at)
    begun, trained = train()
    assert begun == [max(dies_at - 2, 0)] * 2
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
    for rank, place in enumerate(places):
        assert {f"step-{step}.rank-{rank}.pt" for step in (0, 2, 4, 6, 8)} <= {path.name for path in place.iterdir()}
    # Whole now: the newest step is gone on from, as it is.
    again, same = train()
    assert again == [STEPS] * 2
    assert torch.equal(same[0]["head"], trained[0]["head"])
