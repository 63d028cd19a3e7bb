"""headwater.jax.apply_optimizer_step: body and head close a step together, or neither does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import headwater
import headwater.jax

ENVIRONMENTS = ("jax",)

HIDDEN, VOCAB = 8, 12
rng = np.random.default_rng(11)
WEIGHTS = rng.standard_normal((HIDDEN, VOCAB)).astype(np.float32)
PARAMS = {"w": jnp.asarray(rng.standard_normal((6, HIDDEN)), jnp.float32)}
BATCHES = rng.standard_normal((6, 4, 6)).astype(np.float32)
LABELS = rng.integers(0, VOCAB, (6, 4))


def body(params, batch):
    return jnp.tanh(batch @ params["w"])


@pytest.fixture
def head(client):
    made = headwater.jax.create_head(client, "optimizer", WEIGHTS, optimizer=headwater.AdamW(weight_decay=0.1))
    yield made
    made.delete(force=True)


@pytest.fixture
def loss_and_grads(head):
    return headwater.jax.value_and_grad(body, head, reduction="mean")


def plain_loss(params, batch, labels):
    logits = jnp.matmul(body(params["body"], batch), params["head"], precision="highest")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_training_with_a_schedule_is_that_of_optax_in_process(head, loss_and_grads):
    schedule = optax.cosine_decay_schedule(0.05, 10)
    adamw = {"weight_decay": 0.1, "eps": 1e-8}
    whole = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, **adamw))
    expected = {"body": PARAMS, "head": jnp.asarray(WEIGHTS)}
    expected_state = whole.init(expected)
    optimizer = optax.adamw(schedule, **adamw)
    update, update_whole = jax.jit(optimizer.update), jax.jit(whole.update)
    params, state = PARAMS, optimizer.init(PARAMS)
    for number, (batch, labels) in enumerate(zip(BATCHES, LABELS, strict=True)):
        loss, plain_grads = jax.jit(jax.value_and_grad(plain_loss))(expected, batch, labels)
        updates, expected_state = update_whole(plain_grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        found, grads = loss_and_grads(params, batch, labels)
        step = headwater.jax.apply_optimizer_step(head, learning_rate=schedule(number), grads=grads, max_grad_norm=0.5)
        updates, state = update(step.grads, state, params)
        params = optax.apply_updates(params, updates)
        norm = float(optax.tree.norm(plain_grads))
        np.testing.assert_allclose(found, loss, rtol=1e-4)
        np.testing.assert_allclose(step.grad_norm, norm, rtol=1e-3)
        np.testing.assert_allclose(step.clip_factor, min(1, 0.5 / norm), rtol=1e-3)
        assert (step.step, head.step, step.totals.micro_batch_count) == (number, number + 1, 1)
    assert norm > 0.5
    np.testing.assert_allclose(params["w"], expected["body"]["w"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(head.weight().T, expected["head"], rtol=1e-3, atol=1e-4)


def test_multi_steps_around_the_body_take_the_mean_as_the_head_does(head, loss_and_grads):
    optimizer = optax.MultiSteps(optax.adam(0.05), every_k_schedule=2)
    params, state = PARAMS, optimizer.init(PARAMS)
    expected = {"body": PARAMS, "head": jnp.asarray(WEIGHTS)}
    whole = optax.multi_transform(
        {"body": optax.adam(0.05), "head": optax.adamw(0.05, weight_decay=0.1)}, {"body": "body", "head": "head"}
    )
    expected_state = whole.init(expected)
    update, update_whole = jax.jit(optimizer.update), jax.jit(whole.update)
    for number, (batch, labels) in enumerate(zip(BATCHES, LABELS, strict=True)):
        _, grads = loss_and_grads(params, batch, labels)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if optimizer.has_updated(state):
            headwater.jax.apply_optimizer_step(head, learning_rate=0.05, gradient_factor=1 / 2)
            both = slice(number - 1, number + 1)
            grads = jax.jit(jax.grad(plain_loss))(expected, BATCHES[both].reshape(8, 6), LABELS[both].reshape(8))
            updates, expected_state = update_whole(grads, expected_state, expected)
            expected = optax.apply_updates(expected, updates)
    assert head.step == 3
    np.testing.assert_allclose(params["w"], expected["body"]["w"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(head.weight().T, expected["head"], rtol=1e-3, atol=1e-4)


def test_gradients_of_a_compiled_step_are_clipped_with_the_head(head):
    @jax.jit
    def train_step(params, batch, labels):
        def loss_fn(params):
            return headwater.jax.linear_softmax_cross_entropy_loss(head, body(params, batch), labels, reduction="mean")

        return jax.value_and_grad(loss_fn)(params)

    _, grads = train_step(PARAMS, BATCHES[0], LABELS[0])
    step = headwater.jax.apply_optimizer_step(head, learning_rate=0.1, grads=grads, max_grad_norm=0.1)
    expected = jax.grad(plain_loss)({"body": PARAMS, "head": jnp.asarray(WEIGHTS)}, BATCHES[0], LABELS[0])
    norm = float(optax.tree.norm(expected))
    np.testing.assert_allclose(step.grad_norm, norm, rtol=1e-4)
    np.testing.assert_allclose(step.grads["w"], expected["body"]["w"] * (0.1 / norm), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ("body", "head"))
def test_gradient_that_is_not_finite_leaves_both_as_they_were(side, head, loss_and_grads):
    weight = head.weight()
    batch = np.full_like(BATCHES[0], np.nan) if side == "head" else BATCHES[0]
    _, grads = loss_and_grads(PARAMS, batch, LABELS[0])
    if side == "body":
        grads = {"w": grads["w"].at[0, 0].set(jnp.inf)}
    for _ in range(2):
        with pytest.raises(headwater.FailedPreconditionError) as raised:
            headwater.jax.apply_optimizer_step(head, learning_rate=0.1, grads=grads if side == "body" else None, max_grad_norm=1.0)
        assert raised.value.reason == "NON_FINITE_GRADIENT"
        assert head.step == head.info().open_step == 0
        np.testing.assert_array_equal(head.weight(), weight)
    head.discard_gradient()
    assert head.step == 1
    _, grads = loss_and_grads(PARAMS, BATCHES[0], LABELS[0])
    assert headwater.jax.apply_optimizer_step(head, learning_rate=0.1, grads=grads).step == 1


def test_gradients_without_numbers_and_of_16_bits_keep_their_form(head, loss_and_grads):
    loss_and_grads(PARAMS, BATCHES[0], LABELS[0])
    norm = float(head.gradient_norm())
    given = {"w": jnp.full(4, 2.0, jnp.bfloat16), "count": np.zeros((), jax.dtypes.float0)}
    step = headwater.jax.apply_optimizer_step(head, learning_rate=0.1, grads=given, max_grad_norm=1.0)
    np.testing.assert_allclose(step.grad_norm, np.hypot(4.0, norm), rtol=1e-5)
    assert step.grads["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(step.grads["w"].astype(np.float32), 2.0 / step.grad_norm, rtol=1e-2)
    assert step.grads["count"].dtype == jax.dtypes.float0


def test_step_without_micro_batches_is_refused_unless_allowed(head, loss_and_grads):
    with pytest.raises(headwater.InvalidArgumentError, match="has no micro-batch: no gradient of a loss was taken"):
        headwater.jax.apply_optimizer_step(head, learning_rate=0.1)
    assert head.step_state().open.state == "OPEN"
    closed = headwater.jax.apply_optimizer_step(head, learning_rate=0.1, allow_empty=True)
    assert (closed.step, closed.grads, closed.grad_norm, head.step) == (0, None, 0.0, 1)


def test_settings_of_the_optimizer_are_passed_on_and_checked(head, loss_and_grads):
    loss_and_grads(PARAMS, BATCHES[0], LABELS[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta3'"):
        headwater.jax.apply_optimizer_step(head, learning_rate=0.1, beta3=0.5)
    with pytest.raises(headwater.InvalidArgumentError, match="beta2"):
        headwater.jax.apply_optimizer_step(head, learning_rate=0.1, beta2=2.0)
    headwater.jax.apply_optimizer_step(head, learning_rate=0.1, weight_decay=0.0)
    # Adam's first step moves each element by the rate: nothing decays.
    np.testing.assert_allclose(np.abs(head.weight().T - WEIGHTS), 0.1, rtol=1e-3)


def test_call_inside_a_program_and_a_frozen_head_are_refused(head, client):
    with pytest.raises(headwater.InvalidArgumentError, match="outside of jit, grad and scan"):
        jax.jit(lambda grads: headwater.jax.apply_optimizer_step(head, learning_rate=0.1, grads=grads).grads)(PARAMS)
    frozen = headwater.jax.create_head(client, "optimizer-frozen", WEIGHTS, trainable=False)
    with pytest.raises(headwater.InvalidArgumentError, match="is frozen: it has no steps"):
        headwater.jax.apply_optimizer_step(frozen, learning_rate=0.1)
    frozen.delete()
