"""What micro-batches and steps go through, as the Python client shows it: forms, waiting, optimizers, heads that are shared."""

import time

import numpy as np
import pytest
import torch
from conftest import HIDDEN_SIZE, NUM_TOKENS, VOCAB_SIZE
from expectations import refused

import headwater

# How long a call that ought to wait is given to fail instead, in seconds.
PATIENCE_S = 0.3


@pytest.fixture
def head(backend, make_head, weight):
    return make_head(backend.client, weight, optimizer=headwater.AdamW(), staging_slots=1)


def gradient_of(head, rows, **options):
    """What one eager micro-batch adds to an empty step."""
    head.cross_entropy(*rows, micro_batch=0, **options)
    gradient = head.gradient()
    head.discard_gradient()
    return gradient


def test_late_token_factors_are_token_weights(head, rows, rng):
    factors = rng.standard_normal(NUM_TOKENS).astype(np.float32)
    factors[2] = 0
    weights = rng.random(NUM_TOKENS).astype(np.float32)
    targets = rows[1].copy()
    targets[4:8] = -100  # more than enough for the client to leave them out, if it might
    rows = (rows[0], targets)
    expected = gradient_of(head, rows, token_weights=weights * factors, loss_scale=0.5)
    out = head.cross_entropy(*rows, micro_batch=0, token_weights=weights, commit="explicit", late_token_factors=True)
    assert out.form == "HELD"
    with refused("SHAPE_MISMATCH", headwater.InvalidArgumentError):
        head.commit(micro_batch=0, token_factors=factors[1:])
    with refused("INVALID_FIELD", headwater.InvalidArgumentError):
        head.commit(micro_batch=0, token_factors=np.full(NUM_TOKENS, np.nan))
    assert not head.gradient().any()
    assert head.commit(micro_batch=0, factor=0.5, token_factors=factors) is False
    np.testing.assert_allclose(head.gradient(), expected, rtol=1e-5, atol=1e-7)
    assert head.commit(micro_batch=0, factor=0.5, token_factors=factors) is True
    for other in (-factors, None):
        with refused("MICRO_BATCH_CONFLICT", headwater.MicroBatchConflictError):
            head.commit(micro_batch=0, factor=0.5, token_factors=other)


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


@pytest.mark.parametrize("data_type", ["float32", "bfloat16"])
def test_the_trainer_may_own_the_optimizer(backend, make_head, rng, rows, data_type):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    bias = rng.standard_normal(VOCAB_SIZE).astype(np.float32)
    head = make_head(backend.client, weight, bias, dtype=data_type)
    parameters = [torch.nn.Parameter(torch.tensor(values)) for values in (weight, bias)]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    epoch = head.epoch
    for step in range(3):
        assert head.step == step
        version = head.cross_entropy(*rows, micro_batch=0, loss_scale=1 / NUM_TOKENS).weight_version
        new = [parameter.detach().numpy() for parameter in parameters]
        with refused("STEP_NOT_SEALED", headwater.FailedPreconditionError):
            head.replace_weight(*new)
        head.seal(expected_micro_batches=1)
        for parameter, gradient in zip(parameters, head.gradient(bias=True), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
        info = head.replace_weight(*new)
        assert (info.open_step, info.epoch, info.weight_version) == (step + 1, epoch, version + 1)
        assert not head.gradient().any()
        assert head.replace_weight(*new, step=step).open_step == step + 1  # answered alike
        with refused("STEP_CONFLICT", headwater.StepConflictError):
            head.replace_weight(-new[0], new[1], step=step)
        assert head.step_state().last_closed.state == "REPLACED"
    stored = headwater.BFloat16.from_float32(new[0]).to_float32() if data_type == "bfloat16" else new[0]
    actual = head.weight()
    np.testing.assert_array_equal(actual.to_float32() if data_type == "bfloat16" else actual, stored)


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


def test_attach_returns_the_same_head(backend, make_head, weight):
    options = {"optimizer": headwater.SGD(momentum=0.5), "softcap": 3.0}
    head = make_head(backend.client, weight, **options)
    assert head.created
    other = backend.client.create_head(head.name, weight.copy(), if_exists="attach", initial_step=7, **options)
    assert not other.created and other.epoch == head.epoch and other.step == 0
    np.testing.assert_array_equal(other.weight(), weight)
    for change in (
        {"softcap": 4.0},
        {"optimizer": headwater.SGD()},
        {"staging_slots": 2},
        {"parallelism": "rows"},
        {"trainable": False, "optimizer": None},
    ):
        with refused("HEAD_SPEC_MISMATCH", headwater.AlreadyExistsError):
            backend.client.create_head(head.name, weight, if_exists="attach", **{**options, **change})
    with refused("INVALID_FIELD", headwater.InvalidArgumentError):
        backend.client.create_head(head.name, weight, if_exists="overwrite")


def test_all_that_differs_in_a_specification_is_named(backends, make_head, weight):
    client = backends("local-1").client
    head = make_head(client, weight, softcap=3.0)
    with refused("HEAD_SPEC_MISMATCH") as info:
        client.create_head(head.name, weight, if_exists="attach", staging_slots=2, logit_scale=0.5)
    error = info.value
    assert error.metadata["field"] == "logit_scale, softcap, staging_slots"
    assert error.metadata["expected"] == "logit_scale 1.0, softcap 3.0, staging_slots 1"
    assert error.metadata["actual"] == "logit_scale 0.5, softcap null, staging_slots 2"
    assert error.metadata["expected"] in str(error) and error.metadata["actual"] in str(error)


def test_attaching_waits_for_the_weights(backend, make_head, weight):
    empty = make_head(backend.client, weight.shape, dtype="float32")
    with refused("DEADLINE_EXCEEDED", headwater.DeadlineExceededError):
        backend.client.create_head(empty.name, weight, if_exists="attach", timeout_s=PATIENCE_S)
    future = backend.client.create_head_future(empty.name, weight, if_exists="attach")
    time.sleep(PATIENCE_S)
    assert not future.done()
    empty.set_weight(weight)
    assert not future.result(30).created
