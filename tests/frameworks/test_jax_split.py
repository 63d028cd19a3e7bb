"""headwater.jax.value_and_grad: the loss between the body's program and its pullback, on one device, several and two processes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_split_ranks import (
    BATCHES,
    HIDDEN,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    STEPS,
    VOCAB,
    batch_of,
    body,
    params_of,
    run_ranks,
    weights_of,
)

import headwater
import headwater.jax

ENVIRONMENTS = ("jax",)

rng = np.random.default_rng(7)
WEIGHTS = rng.standard_normal((HIDDEN, VOCAB)).astype(np.float32)
BIAS = rng.standard_normal(VOCAB).astype(np.float32)
PARAMS = {"w": rng.standard_normal((6, HIDDEN)).astype(np.float32), "b": rng.standard_normal(HIDDEN).astype(np.float32)}
BATCH = rng.standard_normal((2, 5, 6)).astype(np.float32)
LABELS = rng.integers(0, VOCAB, (2, 5))
LABELS[0, 3] = -100
WEIGHT = rng.uniform(0.5, 2, (2, 5)).astype(np.float32)
CLASS_WEIGHTS = rng.uniform(0.5, 2, VOCAB).astype(np.float32)
TEACHER_WEIGHTS = rng.standard_normal((4, VOCAB)).astype(np.float32)
TEACHER_ROWS = rng.standard_normal((2, 5, 4)).astype(np.float32)


@pytest.fixture
def head(client):
    made = headwater.jax.create_head(client, "split", WEIGHTS, bias=BIAS, optimizer=headwater.SGD())
    yield made
    made.delete(force=True)


def reference(loss, params=PARAMS, batch=BATCH):
    """The loss and its gradients by params, weights and bias, of plain JAX in float64."""
    with jax.enable_x64(True):
        exact = jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float64), (params, WEIGHTS, BIAS))

        def total(params, weights, bias):
            return loss(body(params, jnp.asarray(batch, jnp.float64)) @ weights + bias)

        value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*exact)
        return float(value), *jax.tree.map(np.asarray, grads)


def per_token(logits, labels=LABELS, *, z_loss=0.0, smoothing=0.0, class_weights=None):
    """Losses of tokens, 0 where they are ignored."""
    labels = jnp.asarray(labels)
    log_p = jax.nn.log_softmax(logits)
    target = -jnp.take_along_axis(log_p, jnp.where(labels < 0, 0, labels)[..., None], -1)[..., 0]
    chosen = 1.0 if class_weights is None else jnp.asarray(class_weights)[jnp.where(labels < 0, 0, labels)]
    losses = chosen * (1 - smoothing) * target - smoothing * log_p.mean(-1) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(labels < 0, 0.0, losses)


IS_VALID = LABELS >= 0
CASES = {
    "mean": ({"reduction": "mean"}, {}, lambda z: per_token(z).sum() / IS_VALID.sum()),
    "sum": ({}, {}, lambda z: per_token(z).sum()),
    "weighted mean": (
        {"reduction": "mean"},
        {"weight": WEIGHT},
        lambda z: (WEIGHT * per_token(z)).sum() / (WEIGHT * IS_VALID).sum(),
    ),
    "options": (
        {"logsumexp_weight": 1e-3, "label_smoothing": 0.1, "temperature": 2.0},
        {},
        lambda z: per_token(z / 2, z_loss=1e-3, smoothing=0.1).sum(),
    ),
    "class weights": (
        {"class_weights": CLASS_WEIGHTS, "reduction": "mean"},
        {},
        lambda z: per_token(z, class_weights=CLASS_WEIGHTS).sum() / (CLASS_WEIGHTS[LABELS.clip(0)] * IS_VALID).sum(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_plain_jax(name, head):
    options, arrays, loss = CASES[name]
    found, grads = headwater.jax.value_and_grad(body, head, **options)(PARAMS, BATCH, LABELS, **arrays)
    expected, grad_params, grad_weights, grad_bias = reference(loss)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for key, grad in grads.items():
        np.testing.assert_allclose(grad, grad_params[key], rtol=1e-5, atol=1e-5)
    weight, bias = head.gradient(bias=True)
    np.testing.assert_allclose(weight.T, grad_weights, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(bias, grad_bias, rtol=1e-5, atol=1e-5)


def test_divergence_to_a_teacher_is_that_of_plain_jax(head, client):
    teacher = headwater.jax.create_head(client, "split-teacher", TEACHER_WEIGHTS, trainable=False)

    def loss(logits):
        q = jax.nn.softmax(logits / 2)
        p = jax.nn.softmax(jnp.asarray(TEACHER_ROWS @ TEACHER_WEIGHTS) / 2)
        m = 0.3 * p + 0.7 * q
        losses = 0.3 * (p * jnp.log(p / m)).sum(-1) + 0.7 * (q * jnp.log(q / m)).sum(-1)
        return jnp.where(IS_VALID, losses, 0.0).sum() / IS_VALID.sum()

    loss_and_grads = headwater.jax.value_and_grad(body, head, teacher=teacher, reduction="mean", beta=0.3, temperature=2.0)
    found, grads = loss_and_grads(PARAMS, BATCH, LABELS, teacher_x=TEACHER_ROWS)
    expected, grad_params, grad_weights, _ = reference(loss)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], grad_params["w"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.gradient().T, grad_weights, rtol=1e-4, atol=1e-6)
    with pytest.raises(headwater.InvalidArgumentError, match="teacher_x comes with teacher="):
        loss_and_grads(PARAMS, BATCH, LABELS)
    teacher.delete()


def test_bfloat16_rows_are_sent_from_where_they_lie(head, monkeypatch):
    sent = []
    submit = headwater.Head.cross_entropy_future

    def watched(self, **keywords):
        rows = keywords["hidden"]
        sent.append((rows.dtype.name, rows.ctypes.data in [array.unsafe_buffer_pointer() for array in jax.live_arrays()]))
        return submit(self, **keywords)

    monkeypatch.setattr(headwater.Head, "cross_entropy_future", watched)
    params, batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (PARAMS, BATCH))
    loss, grads = headwater.jax.value_and_grad(body, head, reduction="mean")(params, batch, LABELS)
    assert sent == [("bfloat16", True)]
    expected, grad_params, *_ = reference(CASES["mean"][2])
    assert grads["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, expected, rtol=2e-2)
    np.testing.assert_allclose(grads["w"].astype(np.float32), grad_params["w"], rtol=5e-2, atol=5e-2)


def test_programs_are_compiled_once(head):
    compiled = []

    def count(event, _, **__):
        compiled.append(event)

    loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
    loss_and_grads(PARAMS, BATCH, LABELS)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for _ in range(2):
            loss_and_grads(PARAMS, BATCH, LABELS)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert [event for event in compiled if "compile" in event] == []


def test_aux_of_the_body_is_returned_and_frozen_head_adds_nothing(client):
    frozen = headwater.jax.create_head(client, "split-frozen", WEIGHTS, trainable=False)

    def with_aux(params, batch):
        hidden = body(params, batch)
        return hidden, {"mean": hidden.mean()}

    (loss, aux), grads = headwater.jax.value_and_grad(with_aux, frozen, reduction="mean", has_aux=True)(PARAMS, BATCH, LABELS)
    hidden = np.tanh(BATCH @ PARAMS["w"] + PARAMS["b"])
    np.testing.assert_allclose(aux["mean"], hidden.mean(), rtol=1e-5)
    expected, grad_params, *_ = reference(lambda z: per_token(z - BIAS).sum() / IS_VALID.sum())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], grad_params["w"], rtol=1e-5, atol=1e-5)
    frozen.delete()


def test_batch_without_labels_that_count_has_loss_0(head):
    loss, grads = headwater.jax.value_and_grad(body, head, reduction="mean")(PARAMS, BATCH, np.full_like(LABELS, -100))
    assert loss == 0
    assert not np.any(grads["w"])
    assert not np.any(head.gradient())


def test_call_that_failed_is_repeated_and_adds_once(head, monkeypatch):
    submit = headwater.Head.cross_entropy_future
    loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")

    def answer_lost(self, **keywords):
        submit(self, **keywords).result()
        return headwater._futures.Future.failed(headwater.UnavailableError("the answer was lost"))

    loss_and_grads(PARAMS, BATCH, LABELS)
    monkeypatch.setattr(headwater.Head, "cross_entropy_future", answer_lost)
    with pytest.raises(headwater.UnavailableError, match="the answer was lost"):
        loss_and_grads(PARAMS, BATCH, LABELS)
    with pytest.raises(headwater.FailedPreconditionError, match="MICRO_BATCH_UNEXPECTED"):
        headwater.jax.apply_optimizer_step(head, learning_rate=0.1)
    monkeypatch.undo()
    loss_and_grads(PARAMS, BATCH, LABELS)
    assert sorted(head.step_state().open.micro_batches) == [0, 1]
    grad_weights = reference(CASES["mean"][2])[2]
    np.testing.assert_allclose(head.gradient().T, 2 * grad_weights, rtol=1e-5, atol=1e-5)
    assert headwater.jax.apply_optimizer_step(head, learning_rate=0.1).totals.micro_batch_count == 2


def test_run_goes_on_over_a_restart_of_the_server(own_server):
    with headwater.connect(own_server.address, replay=True) as client:
        head = headwater.jax.create_head(client, "split", WEIGHTS, bias=BIAS, optimizer=headwater.SGD())
        head.save("beginning")
        loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
        for number in range(3):
            loss_and_grads(PARAMS, BATCH, LABELS)
            if number == 1:
                own_server.kill()
                own_server.start()
            loss_and_grads(PARAMS, BATCH, LABELS)
            step = headwater.jax.apply_optimizer_step(head, learning_rate=0.0)
            assert (step.step, step.totals.micro_batch_count) == (number, 2)


def test_arguments_are_refused_before_anything_is_sent(head):
    loss_and_grads = headwater.jax.value_and_grad(body, head, reduction="mean")
    for arguments, message in (
        ((PARAMS, BATCH), "labels is required"),
        ((PARAMS, BATCH, LABELS[:1]), r"labels must have shape \(2, 5\)"),
        (({"w": PARAMS["w"][:, :4], "b": PARAMS["b"][:4]}, BATCH, LABELS), rf"hidden must have shape \[..., {HIDDEN}\]"),
    ):
        with pytest.raises(headwater.InvalidArgumentError, match=message):
            loss_and_grads(*arguments)
    with pytest.raises(headwater.InvalidArgumentError, match="called outside of jit"):
        jax.jit(loss_and_grads)(PARAMS, BATCH, LABELS)
    with pytest.raises(headwater.InvalidArgumentError, match="reduction must be one of sum, mean"):
        headwater.jax.value_and_grad(body, head, reduction="none")
    with pytest.raises(TypeError, match="beta"):
        headwater.jax.value_and_grad(body, head, beta=0.5)
    assert not head.step_state().open.micro_batches


@pytest.fixture(scope="module")
def plain():
    """Losses, norms, parameters and weights of the run of jax_split_ranks, in plain JAX on one device in float64."""
    with jax.enable_x64(True):
        params, weights = jax.tree.map(functools.partial(jnp.asarray, dtype=jnp.float64), (params_of(), weights_of()))
        losses, norms = [], []

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1))
        def value_and_grad(params, weights, inputs, labels, weight):
            logits = body(params, inputs) @ weights
            return (weight * per_token(logits, labels)).sum() / (weight * (labels >= 0)).sum()

        for step in range(STEPS):
            sums = jax.tree.map(jnp.zeros_like, (params, weights))
            for number in range(BATCHES):
                arrays = jax.tree.map(jnp.asarray, batch_of(step, number))
                value, grads = value_and_grad(params, weights, *arrays)
                losses.append(float(value))
                sums = jax.tree.map(jnp.add, sums, grads)
            norm = float(jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(sums))))
            norms.append(norm)
            rate = LEARNING_RATE * min(1, MAX_GRAD_NORM / (norm + 1e-6))
            sums = jax.tree.map(lambda grad, rate=rate: rate * grad, sums)
            params, weights = jax.tree.map(jnp.subtract, (params, weights), sums)
        return losses, norms, jax.tree.map(np.asarray, params), np.asarray(weights)


@pytest.mark.parametrize(("processes", "devices"), ((1, 4), (2, 2)))
def test_shards_of_all_processes_make_one_step(processes, devices, server, tmp_path, plain):
    ranks = run_ranks(server.address, tmp_path / "orbax", processes, devices)
    losses, norms, params, weights = plain
    for rank, found in enumerate(ranks):
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(found["norms"], norms, rtol=1e-5)
        for key, value in params.items():
            np.testing.assert_allclose(found["params"][key], value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.transpose(found["weight"]), weights, rtol=1e-4, atol=1e-5)
        assert min(norms) > MAX_GRAD_NORM  # else nothing was clipped
        # The n-th call of a step has the ids n * 4 ... n * 4 + 3, from whatever process; all are sent before the first answer.
        assert found["ids"] == [list(range(4 * BATCHES))] * STEPS
        assert found["events"] == (["sent"] * (4 // processes) + ["waited"] * (4 // processes)) * BATCHES * STEPS
        assert found["not_finite"] == "NON_FINITE_GRADIENT"
        assert found["failed"] == ("UNAVAILABLE" if rank == processes - 1 else "MICRO_BATCH_MISSING")
        assert found["step_after_discard"] == STEPS + 1
        assert found["restored"] == [STEPS + 1, True, "STEP_MISMATCH" if rank else "CHECKPOINT_NOT_FOUND"]
        expected = ["are split along hidden_size", "several processes have the same rows", "are an array of process"][
            : 2 * processes - 1
        ]
        assert [phrase in said for phrase, said in zip(expected, found["refusals"], strict=True)] == [True] * len(expected)
    same = ("losses", "norms", "ids", "params", "weight")
    assert all(found[key] == ranks[0][key] for found in ranks for key in same)  # bit by bit
