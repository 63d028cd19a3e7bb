"""A server that is killed under `headwater.torch.TrainingLoop`, and a trainer, too: the final weights do not show it.

The run goes back to the checkpoints of both. test_replay.py has a client with a log.
"""

import pytest
import torch
from conftest import running_server
from expectations import refused
from torch_language_model import LanguageModel, Trainer, optimizer_of

import headwater
import headwater.torch

STEPS = 6


@pytest.fixture
def server():
    with running_server("--shards=3") as server:
        yield server


def undisturbed(client, directory, tied):
    """The weights after all steps."""
    trainer = Trainer(client, "undisturbed", directory / "undisturbed", tied=tied)
    assert trainer.loop.resume() == 0
    trainer.train(STEPS)
    return trainer.parameters()


def assert_same(trainer, expected):
    """Bit by bit: one trainer commits in order."""
    for name, value in trainer.parameters().items():
        assert torch.equal(value, expected[name]), name


def killing(trainer, server, step, moment):
    """Makes the server die in a step of this trainer, once: before its second micro-batch or before it is applied."""
    killed = []
    backward, seal = trainer.loop.backward, trainer.head.seal

    def kill(here):
        if trainer.loop.open_step == step and not killed and moment == here:
            killed.append(step)
            server.restart()

    def dying_backward(loss):
        backward(loss)
        kill("micro-batch")

    def dying_seal(**arguments):
        result = seal(**arguments)
        kill("sealed")
        return result

    trainer.loop.backward, trainer.head.seal = dying_backward, dying_seal
    return killed


@pytest.mark.parametrize("tied", (None, "trainer", "server"))
def test_a_lost_server_costs_the_steps_since_the_last_checkpoint(server, tmp_path, tied):
    """And so it does when the trainer ends with it."""
    with headwater.connect(server.address) as client:
        expected = undisturbed(client, tmp_path, tied)
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied=tied)
        killed = killing(trainer, server, 3, "sealed" if tied else "micro-batch")
        assert trainer.loop.resume() == 0
        with refused("STEP_LOST", headwater.StepLostError) as info:
            trainer.train(STEPS)
        assert killed and info.value.restored_step == 2 and info.value.checkpoint == "step-2"
        assert trainer.loop.resume() == 2
        trainer.train(2, 5)
    server.restart()
    with headwater.connect(server.address) as client:
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied=tied, seed=5)
        assert trainer.head.info().state == "RESTORED" and trainer.loop.resume() == 4
        trainer.train(4, STEPS)
        assert_same(trainer, expected)


def test_run_goes_back_by_itself(server, tmp_path):
    """To a checkpoint when the server was lost, and on with the rest."""
    with headwater.connect(server.address) as client:
        expected = undisturbed(client, tmp_path, "trainer")
        trainer = Trainer(client, "disturbed", tmp_path / "disturbed", tied="trainer")
        killed = killing(trainer, server, 3, "sealed")
        steps, outcomes = [], []

        def train_step(step):
            steps.append(step)
            for index in range(2):
                trainer.contribute(step, index)

        trainer.loop.run(train_step, STEPS, learning_rate=lambda step: 3e-3, on_step=outcomes.append)
        assert killed and steps == [0, 1, 2, 3, 2, 3, 4, 5]
        assert [outcome.checkpoint for outcome in outcomes] == [None, "step-2", None, None, "step-4", None, "step-6"]
        assert_same(trainer, expected)
        trainer.loop.run(train_step, STEPS)  # there is nothing left to do
        assert len(steps) == 8


def test_a_frozen_teacher_comes_back_with_the_loop_that_keeps_it(server):
    with headwater.connect(server.address) as client:
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
