"""A server that is killed in mid-step and started again: with replay=True the client goes on as if nothing had happened.

The cases of tests/e2e/protocol say what is repeated when; these train on a real server.
"""

import numpy as np
import pytest
import torch
from expectations import PATIENT, refused
from headwaterd import running_server

import headwater
import headwater.local
import headwater.torch

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 12, 16, 40
STEPS, MICRO_BATCHES = 3, 4


def connect(server, **options):
    return headwater.connect(server.address, **{"retries": PATIENT, "replay": True, **options})


@pytest.fixture
def server():
    with running_server("--shards=3") as server:
        yield server


@pytest.fixture
def data(rng):
    """Weights of student and teacher, and for each step and micro-batch: hidden states, targets, teacher's hidden states."""

    class Data:
        weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        teacher = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
        hidden = rng.standard_normal((STEPS, MICRO_BATCHES, NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
        targets = rng.integers(0, VOCAB_SIZE, (STEPS, MICRO_BATCHES, NUM_TOKENS))
        part = rng.standard_normal((STEPS, 5, HIDDEN_SIZE)).astype(np.float32)
        factors = rng.standard_normal((STEPS, NUM_TOKENS)).astype(np.float32)

    return Data


def train(client, data, name, interrupt):
    """Three steps with every kind of contribution; `interrupt(step, place)` is called in between. The final weights."""
    head = client.create_head(f"student-{name}", data.weight, optimizer=headwater.AdamW(), staging_slots=2)
    teacher = client.create_head(f"teacher-{name}", data.teacher, trainable=False)
    teacher.save("given")
    for step in range(STEPS):
        head.save(f"step-{step}")
        buffer = data.hidden[step, 0].copy()
        head.cross_entropy(buffer, data.targets[step, 0], micro_batch=0, loss_scale=0.1)
        buffer[:] = np.nan  # what was passed is the caller's again
        interrupt(step, "after an eager one")
        staged = head.cross_entropy(data.hidden[step, 1], data.targets[step, 1], micro_batch=1, commit="explicit")
        dropped = head.cross_entropy(data.hidden[step, 2], data.targets[step, 2], micro_batch=9, commit="explicit")
        interrupt(step, "with two staged")
        dropped.discard()
        rows = data.hidden[step, 2], teacher, data.hidden[step, 3]
        out = head.jsd(*rows, micro_batch=2, commit="explicit", late_token_factors=True)
        interrupt(step, "with one held")
        staged.commit(0.25)
        out.commit(0.5, data.factors[step])
        interrupt(step, "after commits")
        head.add_gradient(data.part[step], micro_batch=3, row_start=7, factor=0.1)
        interrupt(step, "before sealing")
        head.seal(expected_micro_batches=4)
        interrupt(step, "sealed")
        result = head.apply_optimizer_step(learning_rate=0.05)
        assert result.open_step == step + 1 == head.step
    return head.weight()


def test_a_killed_server_does_not_change_the_run(server, data):
    """Bitwise: one trainer, the same order."""
    places = ["after an eager one", "with two staged", "with one held", "after commits", "before sealing", "sealed"]
    with connect(server) as client:
        undisturbed = train(client, data, "undisturbed", lambda step, place: None)
        for step, place in ((1, place) for place in places):
            killed = []

            def interrupt(at, where, step=step, place=place, killed=killed):
                if (at, where) == (step, place):
                    server.restart()
                    killed.append(place)

            weight = train(client, data, f"{places.index(place)}", interrupt)
            assert killed == [place]
            np.testing.assert_array_equal(weight, undisturbed, err_msg=place)


def test_ids_of_torchs_losses_stay_behind_a_restart_that_was_followed(server, data):
    """What they stand for is in the step again. A head that is taken after that begins with the first id."""
    with connect(server) as client:
        head = client.create_head("student", data.weight, optimizer=headwater.SGD())
        head.save("first")
        loss_fn = headwater.torch.CrossEntropyLoss(head)

        def submit(index):
            loss_fn(torch.tensor(data.hidden[0, index], requires_grad=True), data.targets[0, index]).backward()

        submit(0)
        server.restart()
        submit(1)
        assert loss_fn.micro_batches == [0, 1]
        assert head.seal(expected_micro_batches=loss_fn.micro_batches).totals.micro_batch_count == 2
        head.take()
        submit(2)
        assert loss_fn.micro_batches == [0] == sorted(head.step_state().open.micro_batches)


def test_an_older_checkpoint_is_told(server, data):
    """The log reaches back to the open step, no further."""
    with connect(server, replay_steps=0) as client:
        head = client.create_head("student", data.weight, optimizer=headwater.SGD())
        head.save("first")
        for _ in range(2):
            head.discard_gradient()
        server.restart()
        with refused("STEP_LOST", headwater.StepLostError) as info:
            head.cross_entropy(data.hidden[0, 1], data.targets[0, 1], micro_batch=1)
        error = info.value
        assert (error.restored_step, error.checkpoint, error.open_step, error.trainer_step) == (0, "first", 0, 2)
        assert error.head_epoch == head.info().epoch != head.epoch and "replay_steps 0" in str(error)
