"""What micro-batches and steps go through, as the Python client shows it: forms, waiting, optimizers, heads that are shared."""

import time

import numpy as np
import pytest
from conftest import HIDDEN_SIZE, VOCAB_SIZE
from expectations import refused

import headwater

# How long a call that ought to wait is given to fail instead, in seconds.
PATIENCE_S = 0.3


@pytest.fixture
def head(backend, make_head, weight):
    return make_head(backend.client, weight, optimizer=headwater.AdamW(), staging_slots=1)


def test_add_gradient_checks_its_rows(head):
    for rows, row_start, reason in (
        (np.zeros((1, HIDDEN_SIZE + 1), np.float32), 0, "SHAPE_MISMATCH"),
        (np.zeros((VOCAB_SIZE + 1, HIDDEN_SIZE), np.float32), 0, "SHAPE_MISMATCH"),
        (np.zeros((0, HIDDEN_SIZE), np.float32), 0, "INVALID_FIELD"),
        (np.zeros((2, HIDDEN_SIZE), np.float32), VOCAB_SIZE - 1, "INVALID_FIELD"),
        (np.zeros((2, HIDDEN_SIZE), np.float32), -1, "INVALID_FIELD"),
        (np.zeros((2, HIDDEN_SIZE), np.int32), 0, "DATA_TYPE_MISMATCH"),
    ):
        with refused(reason, headwater.InvalidArgumentError):
            head.add_gradient(rows, micro_batch=0, row_start=row_start)


def test_replacing_needs_the_whole_head(backend, make_head, weight):
    head = make_head(backend.client, weight, np.zeros(VOCAB_SIZE, np.float32))
    head.seal(expected_micro_batches=0)
    with refused("MISSING_FIELD", headwater.InvalidArgumentError):
        head.replace_weight(weight)
    assert head.step_state().open.state == "SEALED" and head.info().open_step == 0


def test_optimizer_state_outlives_a_replaced_weight(backend, make_head, weight, rows):
    """Momentum of the step before is still there after a step that the trainer closed."""
    head = make_head(backend.client, weight, optimizer=headwater.SGD(momentum=0.5))
    head.cross_entropy(*rows, micro_batch=0)
    first = head.gradient()
    head.apply_optimizer_step(learning_rate=1.0, expected_micro_batches=1)
    head.seal(expected_micro_batches=0)
    head.replace_weight(weight)
    head.apply_optimizer_step(learning_rate=1.0, expected_micro_batches=0, allow_empty=True)
    np.testing.assert_allclose(head.weight(), weight - 0.5 * first, rtol=1e-6, atol=1e-6)


def test_attaching_waits_for_the_weights(backend, make_head, weight):
    empty = make_head(backend.client, weight.shape, dtype="float32")
    with refused("DEADLINE_EXCEEDED", headwater.DeadlineExceededError):
        backend.client.create_head(empty.name, weight, if_exists="attach", timeout_s=PATIENCE_S)
    future = backend.client.create_head_future(empty.name, weight, if_exists="attach")
    time.sleep(PATIENCE_S)
    assert not future.done()
    empty.set_weight(weight)
    assert not future.result(30).created
