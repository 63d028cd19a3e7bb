"""Steps and contributions as the Python client shows them. transaction_rows_test.cc has the rules."""

import numpy as np
import pytest
import torch
from expectations import refused

import headwater

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 12, 16, 40


@pytest.fixture
def rows(rng):
    """Hidden states and targets."""
    return (
        rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32),
        rng.integers(0, VOCAB_SIZE, NUM_TOKENS),
    )


@pytest.fixture
def head(one_shard, make_head, rng):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    return make_head(one_shard.client, weight, np.zeros(VOCAB_SIZE, np.float32), optimizer=headwater.AdamW(), staging_slots=2)


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
    with refused("STEP_MISMATCH", headwater.StepMismatchError) as info:
        head.commit(step=0, micro_batch=0)
    assert info.value.metadata["openStep"] == "1"
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


def test_a_repeat_with_other_content_is_a_conflict(head, rows):
    hidden, targets = rows
    head.cross_entropy(hidden, targets, micro_batch=0)
    before = head.gradient()
    changes = ({"loss_scale": 2.0}, {"z_loss": 1e-4}, {"label_smoothing": 0.1})
    for change in changes:
        with refused("MICRO_BATCH_CONFLICT", headwater.MicroBatchConflictError):
            head.cross_entropy(hidden, targets, micro_batch=0, **change)
    other = hidden.copy()
    other[3, 5] += 1
    with refused("MICRO_BATCH_CONFLICT"):
        head.cross_entropy(other, targets, micro_batch=0)
    out = head.cross_entropy(other, targets, micro_batch=0, on_mismatch="first_wins")
    assert out.payload_differs and not out.replayed
    np.testing.assert_array_equal(head.gradient(), before)


def test_seal_checks_what_is_expected(head, rows):
    head.cross_entropy(*rows, micro_batch=0)
    head.cross_entropy(*rows, micro_batch=1, commit="explicit")
    before = head.gradient()
    with refused("MICRO_BATCH_MISSING", headwater.FailedPreconditionError) as info:
        head.seal(expected_micro_batches=[0, 1, 5])
    assert info.value.metadata["missing"] == "5"
    with refused("MICRO_BATCH_UNCOMMITTED"):
        head.seal(expected_micro_batches=2)
    head.commit(micro_batch=1)
    with refused("MICRO_BATCH_UNEXPECTED"):
        head.seal(expected_micro_batches=1)
    sealed = head.seal(expected_micro_batches=2)
    assert sealed.totals.micro_batch_count == 2 and sealed.totals.valid_token_count == 2 * NUM_TOKENS
    assert not sealed.replayed and head.seal(expected_micro_batches=[1, 0]).replayed
    np.testing.assert_allclose(sealed.gradient_norm_squared, head.gradient_norm() ** 2, rtol=1e-12)
    with refused("STEP_SEALED"):
        head.cross_entropy(*rows, micro_batch=2)
    np.testing.assert_allclose(head.gradient(), 2 * before, rtol=1e-6)
    assert head.step_state().open.state == "SEALED"


def test_a_step_without_micro_batches_is_applied_only_if_asked_for(backend, make_head, rng):
    """Weight decay alone would move the weights, where PyTorch's optimizers pass a missing gradient by."""
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    head = make_head(backend.client, weight, optimizer=headwater.AdamW(weight_decay=0.5))
    for nothing in (0, [], np.arange(0)):
        with refused("MISSING_FIELD", headwater.InvalidArgumentError) as info:
            head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=nothing)
        assert "allow_empty=True" in str(info.value) and "discard_gradient()" in str(info.value)
    assert head.step_state().open.state == "OPEN"
    head.seal(expected_micro_batches=0)
    with refused("MISSING_FIELD", headwater.InvalidArgumentError):
        head.apply_optimizer_step(learning_rate=0.1)
    np.testing.assert_array_equal(head.weight(), weight)
    assert head.apply_optimizer_step(learning_rate=0.1, allow_empty=True).open_step == 1
    assert head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=0, allow_empty=True).open_step == 2
    np.testing.assert_allclose(head.weight(), weight * 0.95**2, rtol=1e-6)


def test_apply_updates_and_opens_the_next_step(head, rows):
    before = head.weight()
    head.cross_entropy(*rows, micro_batch=0, loss_scale=1 / NUM_TOKENS)
    norm = head.gradient_norm()
    with refused("MISSING_FIELD"):
        head.apply_optimizer_step(learning_rate=1e-3)
    arguments = {"learning_rate": 1e-3, "expected_micro_batches": 1, "max_grad_norm": norm / 2, "other_grad_norm_squared": norm**2}
    result = head.apply_optimizer_step(**arguments)
    assert result.open_step == 1 == head.step and not result.replayed
    np.testing.assert_allclose(result.global_grad_norm, np.sqrt(2) * norm, rtol=1e-6)
    np.testing.assert_allclose(result.clip_factor, (norm / 2) / (result.global_grad_norm + 1e-6), rtol=1e-6)
    # AdamW's first step moves every weight with a gradient by about the learning rate, after the decay.
    moved = head.weight() - before * (1 - 1e-3 * 0.01)
    assert 0.9e-3 <= np.abs(moved).max() <= 1.01e-3
    assert not head.gradient().any()
    again = head.apply_optimizer_step(step=0, **arguments)
    assert again.replayed and again.weight_version == result.weight_version
    with refused("STEP_CONFLICT", headwater.StepConflictError):
        head.apply_optimizer_step(step=0, **{**arguments, "learning_rate": 2e-3})
    with refused("STEP_CONFLICT"):
        head.discard_gradient(step=0)
    status = head.step_state()
    assert status.open.step == 1 and status.last_closed.state == "APPLIED"


def test_optimizers_match_torch(one_shard, make_head, rng, rows):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    pairs = (
        (headwater.AdamW(beta1=0.8, weight_decay=0.1), torch.optim.AdamW, {"betas": (0.8, 0.999), "weight_decay": 0.1}),
        (headwater.SGD(), torch.optim.SGD, {}),
        (
            headwater.SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
    )
    for ours, theirs, options in pairs:
        head = make_head(one_shard.client, weight, optimizer=ours)
        parameter = torch.nn.Parameter(torch.tensor(weight))
        optimizer = theirs([parameter], lr=0.05, **options)
        for step in range(3):
            head.cross_entropy(*rows, micro_batch=0, loss_scale=1 / NUM_TOKENS)
            parameter.grad = torch.tensor(head.gradient(gradient_factor=0.5))
            optimizer.step()
            head.apply_optimizer_step(learning_rate=0.05, step=step, expected_micro_batches=1, gradient_factor=0.5)
        np.testing.assert_allclose(head.weight(), parameter.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_overrides_that_the_optimizer_does_not_have_are_refused(one_shard, make_head, rng, rows):
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    head = make_head(one_shard.client, weight, optimizer=headwater.SGD())
    with refused("INVALID_COMBINATION"):
        head.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=0, allow_empty=True, beta1=0.5)
    bare = make_head(one_shard.client, weight)
    with refused("OPTIMIZER_NOT_CONFIGURED"):
        bare.apply_optimizer_step(learning_rate=0.1, expected_micro_batches=0, allow_empty=True)
    assert bare.discard_gradient().open_step == 1


def test_a_non_finite_gradient_changes_nothing(head, rows):
    hidden, targets = rows
    weight = head.weight()
    poisoned = hidden.copy()
    poisoned[2, 3] = np.nan
    with refused("NON_FINITE_VALUES"):
        head.cross_entropy(poisoned, targets, micro_batch=0, non_finite="refuse")
    assert not head.gradient().any()
    out = head.cross_entropy(poisoned, targets, micro_batch=0)
    assert out.non_finite_row_count == 1 and np.isnan(out.loss_sum)
    with refused("NON_FINITE_GRADIENT", headwater.FailedPreconditionError):
        head.apply_optimizer_step(learning_rate=1e-3, expected_micro_batches=1)
    np.testing.assert_array_equal(head.weight(), weight)
    assert head.discard_gradient().open_step == 1
    assert not head.gradient().any()
    assert head.step_state().last_closed.state == "DISCARDED"
    assert head.discard_gradient(step=0).replayed


@pytest.mark.parametrize("none", (0, 0.0, float("inf")))
def test_zero_and_infinity_clip_nothing(one_shard, make_head, rng, rows, none):
    """As trainers' options have it."""
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    weights = []
    for max_grad_norm in (None, none):
        head = make_head(one_shard.client, weight, optimizer=headwater.AdamW())
        head.cross_entropy(*rows, micro_batch=0)
        applied = head.apply_optimizer_step(learning_rate=1e-2, expected_micro_batches=1, max_grad_norm=max_grad_norm)
        assert applied.clip_factor == 1 and applied.global_grad_norm > 0
        weights.append(head.weight())
    np.testing.assert_array_equal(*weights)


def test_staging_slots_are_counted(head, rows):
    for micro_batch in range(2):
        head.cross_entropy(*rows, micro_batch=micro_batch, commit="explicit")
    with refused("STAGING_FULL", headwater.StagingFullError):
        head.cross_entropy(*rows, micro_batch=2, commit="explicit")
    head.discard(micro_batch=0)
    assert head.cross_entropy(*rows, micro_batch=3, commit="explicit").state == "STAGED"


def test_a_stale_epoch_is_fenced(head, one_shard, rows):
    stale = one_shard.client.head(head.name)
    head.cross_entropy(*rows, micro_batch=0)
    head.set_weight(head.weight())
    assert head.step == 0 and not head.gradient().any()
    calls = (
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
    )
    for call in calls:
        with refused("EPOCH_FENCED", headwater.EpochFencedError) as info:
            call()
        assert "another run owns" in str(info.value) and "open the head again" in str(info.value)
        assert info.value.metadata["actual"] == stale.epoch.hex() and info.value.metadata["expected"] == head.epoch.hex()
    assert stale.info().epoch == head.epoch != stale.epoch  # looking does not refresh
    head.cross_entropy(*rows, micro_batch=0)


def test_heads_are_created_listed_and_deleted(one_shard, make_head, rng, rows):
    client = one_shard.client
    weight = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
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


def test_a_head_that_does_not_fit_is_refused_at_once(one_shard):
    with refused("MEMORY_BUDGET_EXCEEDED", headwater.ResourceExhaustedError) as info:
        one_shard.client.create_head("ten-terabytes", (1 << 24, 1 << 16), dtype="float32")
    assert "grad_weight" in str(info.value)
    assert "tenants/default/heads/ten-terabytes" not in [entry.name for entry in one_shard.client.heads()]


def test_a_head_without_weights_is_loading(one_shard, make_head, rows):
    head = make_head(one_shard.client, (VOCAB_SIZE, HIDDEN_SIZE), bias=True, dtype="float32")
    assert head.info().state == "LOADING"
    with refused("WEIGHTS_NOT_LOADED", headwater.FailedPreconditionError):
        head.cross_entropy(*rows, micro_batch=0)
    head.set_weight(np.ones((VOCAB_SIZE, HIDDEN_SIZE), np.float32), np.ones(VOCAB_SIZE, np.float32))
    out = head.cross_entropy(*rows, micro_batch=0)
    np.testing.assert_allclose(out.loss_sum, NUM_TOKENS * np.log(VOCAB_SIZE), rtol=1e-6)


def test_health_and_server_info(one_shard):
    assert one_shard.client.health() == "SERVING"
    info = one_shard.client.server_info()
    assert info.engine == "cpu" and len(info.incarnation) == 16 and {"cross_entropy", "jensen_shannon"} <= set(info.features)
