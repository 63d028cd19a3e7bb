"""Steps and contributions as the Python client shows them. transaction_rows_test.cc has the rules."""

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
def head(client, make_head, weight):
    return make_head(client, weight, np.zeros(VOCAB_SIZE, np.float32), optimizer=headwater.AdamW(), staging_slots=2)


def test_explicit_commit_adds_factor_times_the_contribution(head, rows):
    out = head.cross_entropy(*rows, micro_batch=0, commit="explicit")
    assert out.state == "STAGED" and out.form == "STAGED"
    assert not head.gradient().any()
    assert head.commit(micro_batch=0, factor=-0.5) is False
    committed = head.gradient()
    assert head.commit(micro_batch=0, factor=-0.5) is True
    np.testing.assert_array_equal(head.gradient(), committed)
    head.discard_gradient()
    head.cross_entropy(*rows, micro_batch=0)
    np.testing.assert_allclose(committed, -0.5 * head.gradient(), rtol=1e-6)
    with refused("STEP_MISMATCH", headwater.StepMismatchError, openStep="1"):
        head.commit(step=0, micro_batch=0)
    with refused("INVALID_COMBINATION"):
        head.cross_entropy(*rows, micro_batch=1).commit()


def test_losses_and_decisions_name_an_attempt(head, rows):
    assert head.cross_entropy(*rows, micro_batch=0, commit="explicit", attempt=3).attempt == 3
    with refused("ATTEMPT_SUPERSEDED", headwater.AbortedError):
        head.commit(micro_batch=0, attempt=2)
    assert head.commit(micro_batch=0, attempt=3) is False
    assert head.step_state().open.micro_batches[0].attempt == 3
    head.cross_entropy(*rows, micro_batch=1, commit="explicit")
    assert head.discard(micro_batch=1, attempt=1) is True and head.discard(micro_batch=1, attempt=1) is False
    with refused("MICRO_BATCH_DISCARDED", headwater.AbortedError):
        head.cross_entropy(*rows, micro_batch=1, attempt=1)
    assert head.cross_entropy(*rows, micro_batch=1, attempt=2).state == "COMMITTED"


def test_a_step_without_micro_batches_is_applied_only_if_asked_for(head):
    """Weight decay alone would move the weights, where PyTorch's optimizers pass a missing gradient by."""
    for nothing in (0, [], np.arange(0)):
        with refused("MISSING_FIELD", headwater.InvalidArgumentError, "allow_empty=True", "discard_gradient()"):
            head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=nothing)
    head.seal(expected_micro_batches=0)
    with refused("MISSING_FIELD", headwater.InvalidArgumentError):
        head.apply_optimizer_step(learning_rate=0.1)
    assert head.apply_optimizer_step(learning_rate=0.1, allow_empty=True).open_step == 1


def test_optimizers_match_torch(client, make_head, weight, rows):
    nesterov = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(torch.tensor(weight))
    for ours, optimizer in (
        (headwater.AdamW(beta1=0.8, weight_decay=0.1), torch.optim.AdamW([parameter], 0.05, (0.8, 0.999), weight_decay=0.1)),
        (headwater.SGD(), torch.optim.SGD([parameter], 0.05)),
        (headwater.SGD(**nesterov), torch.optim.SGD([parameter], 0.05, **nesterov)),
    ):
        head = make_head(client, weight, optimizer=ours)
        parameter.data = torch.tensor(weight)
        for step in range(3):
            head.cross_entropy(*rows, micro_batch=0, loss_scale=1 / NUM_TOKENS)
            parameter.grad = torch.tensor(head.gradient(gradient_factor=0.5))
            optimizer.step()
            head.apply_optimizer_step(learning_rate=0.05, step=step, expected_micro_batches=1, gradient_factor=0.5)
        np.testing.assert_allclose(head.weight(), parameter.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_a_stale_epoch_is_fenced(head, client, rows):
    stale = client.head(head.name)
    head.cross_entropy(*rows, micro_batch=0)
    head.set_weight(head.weight())
    assert head.step == 0 and not head.gradient().any()
    epochs = {"actual": stale.epoch.hex(), "expected": head.epoch.hex()}
    for call in (
        lambda: stale.cross_entropy(*rows, micro_batch=1),
        lambda: stale.commit(micro_batch=0),
        lambda: stale.discard(micro_batch=0),
        lambda: stale.seal(expected_micro_batches=0),
        lambda: stale.apply_optimizer_step(learning_rate=1e-3, expected_micro_batches=0, allow_empty=True),
        lambda: stale.discard_gradient(),
        lambda: stale.gradient(),
        lambda: stale.step_state(),
        lambda: stale.set_weight(np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)),
        lambda: stale.delete(),
    ):
        with refused("EPOCH_FENCED", headwater.EpochFencedError, "another run owns", "open the head again", **epochs):
            call()
    assert stale.info().epoch == head.epoch != stale.epoch  # looking does not refresh
    head.cross_entropy(*rows, micro_batch=0)


def test_heads_are_created_listed_and_deleted(client, make_head, weight, rows):
    head = make_head(client, weight, softcap=3.0, logit_scale=0.5, valid_vocab_size=33, initial_step=5)
    with refused("HEAD_ALREADY_EXISTS", headwater.AlreadyExistsError):
        client.create_head(head.name, weight)
    info = client.head(head.name.split("/")[-1]).info()
    assert info.spec.softcap == 3.0 and info.spec.valid_vocab_size == 33 and info.open_step == 5 and info.state == "READY"
    assert info.memory_plan.total_bytes >= 2 * weight.nbytes
    assert head.name in [entry.name for entry in client.heads()]
    head.cross_entropy(rows[0], rows[1] % 33, micro_batch=0)
    with refused("HEAD_IN_USE"):
        head.delete()
    head.delete(force=True)
    with refused("HEAD_NOT_FOUND", headwater.NotFoundError):
        client.head(head.name)


def test_health_and_server_info(client):
    assert client.health() == "SERVING"
    info = client.server_info()
    assert info.engine == "cpu" and len(info.incarnation) == 16 and {"cross_entropy", "jensen_shannon"} <= set(info.features)
    assert not info.deterministic


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
