"""`headwater.torch.TrainingLoop.run` and `resume` where body and head might part: without a state, or with one of each rank's."""

import copy
import time

import numpy as np
import pytest
import torch
from expectations import refused
from torch_model import FEATURES, HIDDEN_SIZE
from torch_ranks import Ranks

import headwater
import headwater.torch

STEPS = 6


class Run:
    """One trainer: a body and its optimizer with a memory, and a head."""

    def __init__(self, problem, head, *, state=None, with_body=True, **options):
        self.problem, self.head = problem, head
        self.body = torch.nn.Linear(FEATURES, HIDDEN_SIZE, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(problem.trunk)
        self.optimizer = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9) if with_body else None
        self.state = state and headwater.torch.TrainerState(state, body=self.body, optimizer=self.optimizer)
        self.loop = headwater.torch.TrainingLoop(head, self.optimizer, state=self.state, **options)
        self.loss_fn = headwater.torch.CrossEntropyLoss(head)
        self.steps = []
        self.kept = {}  # by step: what the body was when it began

    def train_step(self, step):
        """What differs from step to step is how much the loss weighs."""
        self.steps.append(step)
        if self.optimizer is not None:
            self.kept[step] = copy.deepcopy((self.body.state_dict(), self.optimizer.state_dict()))
        hidden = self.body(self.problem.inputs)
        self.loop.backward((1 + step) * self.loss_fn(hidden, self.problem.targets))

    def run(self, train_step=None):
        self.loop.run(train_step or self.train_step, STEPS, learning_rate=0.1)

    def weights(self):
        return self.body.weight.detach().numpy().copy(), self.head.weight()


@pytest.fixture
def undisturbed(one_shard, make_head, problem):
    run = Run(problem, problem.head(one_shard.client, make_head))
    run.run()
    assert run.steps == list(range(STEPS))
    return run.weights()


def assert_same(run, expected):
    for value, other in zip(run.weights(), expected, strict=True):
        np.testing.assert_array_equal(value, other)


def losing(run, client, at, checkpoint):
    """`run.train_step` for a server that is lost in a step, once, and that brings the head back from a checkpoint."""
    lost = []

    def train_step(step):
        run.train_step(step)
        if step == at and not lost:
            lost.append(step)
            client.head(run.head.name).restore(checkpoint)
            raise headwater.StepLostError("the server was started again", reason="STEP_LOST")

    return train_step


def test_without_a_state_a_lost_server_ends_the_run(one_shard, make_head, problem, undisturbed):
    """The head came back at step 4, and the run went on from there with the body of step 5."""
    run = Run(problem, problem.head(one_shard.client, make_head), checkpoint_every=2)
    with refused("STEP_LOST", headwater.StepLostError):
        run.run(losing(run, one_shard.client, 5, "step-4"))
    assert run.steps == [0, 1, 2, 3, 4, 5]
    body = run.body.weight.detach().clone()
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError) as info:
        run.run()
    assert "it is at step 5" in str(info.value) and f"{run.head.name} at step 4" in str(info.value)
    assert info.value.metadata == {"openStep": "4", "trainerSteps": "5"} and torch.equal(run.body.weight, body)
    # Who has kept the body's state goes on, and nothing shows.
    assert run.loop.resume() == 4
    for owner, state in zip((run.body, run.optimizer), run.kept[4], strict=True):
        owner.load_state_dict(state)
    run.run()
    assert run.steps[-2:] == [4, 5]
    assert_same(run, undisturbed)


def test_without_a_state_a_lost_answer_ends_the_run(one_shard, make_head, problem, monkeypatch):
    """The head had been updated, the body had not, and the run went on with the step after."""
    run = Run(problem, problem.head(one_shard.client, make_head))
    apply = run.head.apply_optimizer_step

    def cut(**arguments):
        result = apply(**arguments)
        if result.open_step == 3:
            raise headwater.UnavailableError("the connection was cut")
        return result

    monkeypatch.setattr(run.head, "apply_optimizer_step", cut)
    with pytest.raises(headwater.UnavailableError):
        run.run()
    assert run.steps == [0, 1, 2]
    with refused("STEP_MISMATCH", headwater.FailedPreconditionError) as info:
        run.run()
    assert "half-way (UNAVAILABLE: the connection was cut)" in str(info.value) and run.steps == [0, 1, 2]


def test_without_a_state_a_run_goes_on_where_both_are(one_shard, make_head, problem, undisturbed):
    """An error in the trainer's own code leaves body and head where the step began."""
    run = Run(problem, problem.head(one_shard.client, make_head))

    def train_step(step):
        run.train_step(step)
        if run.steps == [0, 1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(train_step)
    run.optimizer.zero_grad()
    run.run()
    assert run.steps == [0, 1, 2, 3, 3, 4, 5]
    assert_same(run, undisturbed)


def test_heads_alone_need_no_state_to_go_back(one_shard, make_head, problem):
    expected = Run(problem, problem.head(one_shard.client, make_head), with_body=False)
    expected.run()
    run = Run(problem, problem.head(one_shard.client, make_head), with_body=False, checkpoint_every=2)
    run.run(losing(run, one_shard.client, 5, "step-4"))
    assert run.steps == [0, 1, 2, 3, 4, 5, 4, 5]
    assert_same(run, expected.weights())


def test_a_state_that_was_never_saved_takes_nobody_to_the_beginning(one_shard, make_head, problem, tmp_path):
    """The head came back from a checkpoint of its first step, and the run began anew there with the body of step 3."""
    run = Run(problem, problem.head(one_shard.client, make_head), state=tmp_path)
    run.head.save("init")
    for resume in (run.run, run.loop.resume, lambda: run.loop.resume(0)):
        with refused("STEP_MISMATCH", headwater.FailedPreconditionError) as info:
            run.run(losing(run, one_shard.client, 3, "init")) if resume == run.run else resume()
        assert info.value.metadata["openStep"] == "0" and info.value.metadata["trainerSteps"] == ""
    assert run.steps == [0, 1, 2, 3]


def test_a_beginning_that_nothing_has_changed_needs_no_state(one_shard, make_head, problem, tmp_path, undisturbed):
    run = Run(problem, problem.head(one_shard.client, make_head), state=tmp_path)
    run.head.save("init")
    assert run.loop.resume() == 0
    run.run(losing(run, one_shard.client, 0, "init"))
    assert run.steps == [0, 0, 1, 2, 3, 4, 5]
    assert_same(run, undisturbed)


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


@pytest.fixture
def start(one_shard, make_head, problem):
    """Starts two trainers, a first time or again: `start(folders, dies_at)`; what they have begun at, and the weights."""
    name = problem.head(one_shard.client, make_head, staging_slots=2).name

    def start(folders, dies_at=None):
        ranks, begun, weights = Ranks(2), [None, None], [None, None]

        def trainer(rank):
            head, body = one_shard.client.head(name), torch.nn.Linear(FEATURES, HIDDEN_SIZE, bias=False)
            with torch.no_grad():
                body.weight.copy_(problem.trunk)
            optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
            state = headwater.torch.TrainerState(folders[rank], rank=rank, body=body, optimizer=optimizer)
            options = {"state": state, "checkpoint_every": 2, "rank": rank, "world_size": 2, "barrier": ranks.barrier.wait}
            loop = headwater.torch.TrainingLoop(head, optimizer, **options)
            save = state.save

            def saving(step):
                if (rank, step) == (1, dies_at):
                    deadline = time.monotonic() + 20
                    while not (folders[0] / f"step-{step}.rank-0.pt").exists():
                        assert time.monotonic() < deadline
                        time.sleep(0.005)
                    raise KeyboardInterrupt
                save(step)

            state.save = saving
            begun[rank] = loop.resume()
            loss_fn = headwater.torch.CrossEntropyLoss(head)
            for step in range(begun[rank], STEPS):
                rows = slice(rank, None, 2)
                loop.backward((1 + step) * loss_fn(body(problem.inputs[rows]), problem.targets[rows]) / 2)
                ranks.average(rank, list(body.parameters()))
                assert loop.step(0.1).applied
            weights[rank] = body.weight.detach().numpy().copy(), head.weight()

        ranks.run(trainer)
        return begun, weights

    return start


@pytest.mark.parametrize("folders", ("one folder", "a folder each"))
@pytest.mark.parametrize("dies_at", (0, 4))
def test_ranks_that_died_between_their_parts_of_a_state_go_on(start, tmp_path, folders, dies_at):
    """The head is alive at that step, and rank 0's part is there: no later start got past it."""
    places = [tmp_path / ("state" if folders == "one folder" else f"node-{rank}") for rank in range(2)]
    with pytest.raises(KeyboardInterrupt):
        start(places, dies_at)
    begun, weights = start(places)
    assert begun == [max(dies_at - 2, 0)] * 2
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    for rank, place in enumerate(places):
        assert {f"step-{step}.rank-{rank}.pt" for step in (0, 2, 4, 6)} <= {path.name for path in place.iterdir()}
    # Whole now: the newest step is gone on from, as it is.
    again, same = start(places)
    assert again == [STEPS] * 2
    np.testing.assert_array_equal(same[0][1], weights[0][1])
