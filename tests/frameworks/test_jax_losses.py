"""Losses of headwater.jax inside and outside of jit: options, ids of micro-batches, and what becomes of errors."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import headwater
import headwater.jax
from headwater.jax._submissions import settle

ENVIRONMENTS = ("jax", "jax_gpu")

NUM_TOKENS, FEATURES, HIDDEN_SIZE, VOCAB_SIZE = 12, 6, 16, 40
IGNORED = -7

random = np.random.default_rng(0)
BODY = random.standard_normal((FEATURES, HIDDEN_SIZE)).astype(np.float32)
BATCH = random.standard_normal((3, 4, FEATURES)).astype(np.float32)
LABELS = random.integers(0, VOCAB_SIZE, (3, 4), dtype=np.int32)
LABELS[0, 1] = LABELS[2, 3] = IGNORED
WEIGHTS = (random.standard_normal((HIDDEN_SIZE, VOCAB_SIZE)) / 4).astype(np.float32)
BIAS = random.standard_normal(VOCAB_SIZE).astype(np.float32)
TOKEN_WEIGHTS = random.uniform(0.5, 2, (3, 4)).astype(np.float32)
CLASS_WEIGHTS = random.uniform(0.5, 2, VOCAB_SIZE).astype(np.float32)
UPSTREAM = random.standard_normal((3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def head(client):
    return headwater.jax.create_head(client, "losses", WEIGHTS, bias=BIAS, optimizer=headwater.SGD())


@pytest.fixture(autouse=True)
def end_of_step(head):
    yield
    settle(head)
    head.discard_gradient()


def loss(head, body=BODY, batch=BATCH, labels=LABELS, **options):
    return headwater.jax.linear_softmax_cross_entropy_loss(head, batch @ body, labels, ignore_index=IGNORED, **options)


def plain(body, weights, bias, *, reduction, weight=None, temperature=1.0, label_smoothing=0.0, z_loss=0.0, class_weights=None):
    """The loss of `loss` by its definition."""
    logits = (BATCH @ body @ weights + bias) / temperature
    lse = jax.nn.logsumexp(logits, -1)
    valid = LABELS != IGNORED
    labels = jnp.where(valid, LABELS, 0)
    costs = jnp.ones(VOCAB_SIZE) if class_weights is None else jnp.asarray(class_weights)
    nll = lse[..., None] - logits
    target = jnp.take_along_axis(nll * costs, labels[..., None], -1)[..., 0]
    losses = (1 - label_smoothing) * target + label_smoothing * (nll * costs).mean(-1) + z_loss * lse**2
    scale = valid * (1.0 if weight is None else weight)
    if reduction == "mean":
        return (losses * scale).sum() / (scale * costs[labels]).sum()
    return (losses * scale).sum() if reduction == "sum" else losses * scale


OPTIONS = {
    "plain": {},
    "weight": {"weight": TOKEN_WEIGHTS},
    "mask": {"weight": TOKEN_WEIGHTS > 1},
    "smoothed": {"label_smoothing": 0.2, "temperature": 1.7},
    "z_loss": {"logsumexp_weight": 0.03, "weight": TOKEN_WEIGHTS},
    "class_weights": {"class_weights": CLASS_WEIGHTS, "weight": TOKEN_WEIGHTS},
}


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_value_and_gradients_are_those_of_the_definition(head, options, reduction, jitted):
    def scalar(losses):
        return (losses * UPSTREAM).sum() if reduction == "none" else 3 * losses

    def remote(body):
        return scalar(loss(head, body, reduction=reduction, **options))

    value_and_grad = jax.value_and_grad(remote)
    value, gradient = (jax.jit(value_and_grad) if jitted else value_and_grad)(BODY)
    assert settle(head) == [0]

    named = {"z_loss" if name == "logsumexp_weight" else name: value for name, value in options.items()}
    with jax.enable_x64(True):
        arguments = [jnp.asarray(array, jnp.float64) for array in (BODY, WEIGHTS, BIAS)]
        expected, gradients = jax.value_and_grad(lambda *rest: scalar(plain(*rest, reduction=reduction, **named)), (0, 1, 2))(
            *arguments
        )
    weight_gradient, bias_gradient = head.gradient(bias=True)
    found = (value, gradient, weight_gradient.T, bias_gradient)
    for actual, wanted in zip(found, (expected, *gradients), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def test_a_gradient_resolution_changes_gradients_alone(client, head):
    def step(**options):
        value, gradient = jax.jit(jax.value_and_grad(lambda body: loss(head, body, **options)))(BODY)
        settle(head)
        found = value, gradient, head.gradient()
        head.discard_gradient()
        return found

    exact, dithered = step(), step(gradient_resolution=2**-3)
    assert dithered[0] == exact[0] == loss(head, gradient_resolution=2**-3)  # the last without a gradient
    for actual, wanted in zip(dithered[1:], exact[1:], strict=True):
        assert 1e-3 < np.linalg.norm(actual - wanted) / np.linalg.norm(wanted) < 0.5
    with pytest.raises(headwater.InvalidArgumentError, match="gradient_resolution"):
        step(gradient_resolution=1.5)
    frozen = headwater.jax.create_head(client, "frozen_resolution", WEIGHTS, trainable=False)
    with pytest.raises(headwater.InvalidArgumentError, match="gradient_resolution"):
        loss(frozen, gradient_resolution=2**-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_of_16_bit_rows_has_their_dtype(head, dtype):
    x = jnp.asarray(BATCH @ BODY, dtype)

    def remote(x):
        return headwater.jax.linear_softmax_cross_entropy_loss(head, x, LABELS, ignore_index=IGNORED)

    value, gradient = jax.jit(jax.value_and_grad(remote))(x)
    assert gradient.dtype == dtype
    rows = np.asarray(x, np.float32)
    p = jax.nn.softmax(rows @ WEIGHTS + BIAS)
    one_hot = np.eye(VOCAB_SIZE)[np.where(LABELS == IGNORED, 0, LABELS)]
    expected = np.where((LABELS == IGNORED)[..., None], 0, (p - one_hot) @ WEIGHTS.T)
    np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, rtol=2e-2, atol=2e-2)
    assert np.isfinite(value)


def test_all_labels_ignored_is_zero(head):
    value, gradient = jax.jit(
        jax.value_and_grad(lambda body: loss(head, body, labels=np.full_like(LABELS, IGNORED), reduction="mean"))
    )(BODY)
    assert value == 0 and not np.asarray(gradient).any()


def test_upstream_gradient_of_ignored_labels_means_nothing(head):
    def remote(body):
        return (loss(head, body, reduction="none") * jnp.where(LABELS == IGNORED, jnp.nan, 1.0)).sum()

    gradient = jax.jit(jax.grad(remote))(BODY)
    expected = jax.grad(lambda body: plain(body, WEIGHTS, BIAS, reduction="sum"))(BODY)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


# ---- ids ------------------------------------------------------------------------------------------------------------------


def test_ids_are_of_place_and_repetition_and_begin_again_with_each_step(head):
    gradient = jax.jit(jax.grad(lambda body: loss(head, body) + 2 * loss(head, body, reduction="mean")))
    second = 1 << 40
    for _ in range(2):
        for _ in range(3):
            gradient(BODY)
        assert settle(head) == [0, 1, 2, second, second + 1, second + 2]
        head.discard_gradient()


def test_program_that_is_traced_again_has_the_same_ids(head):
    gradient = jax.jit(jax.grad(lambda body, batch, labels: loss(head, body, batch, labels)))
    gradient(BODY, BATCH, LABELS)
    gradient(BODY, BATCH[:2], LABELS[:2])  # of another shape
    assert settle(head) == [0, 1]


def test_dispatched_programs_draw_ids_in_their_order(head):
    gradient = jax.jit(jax.grad(lambda body, labels: loss(head, body, labels=labels)))
    flat = np.where(LABELS == IGNORED, 0, LABELS).reshape(-1)
    for count in range(NUM_TOKENS):
        gradient(BODY, np.where(np.arange(NUM_TOKENS) < count, IGNORED, flat).reshape(LABELS.shape))
    settle(head)
    known = head.step_state().open.micro_batches
    assert [known[id_].valid_token_count for id_ in range(NUM_TOKENS)] == list(range(NUM_TOKENS, 0, -1))


def test_micro_batch_names_the_id(head):
    gradient = jax.jit(jax.grad(lambda body, id_: loss(head, body, micro_batch=id_)))
    gradient(BODY, 7), gradient(BODY, 3)
    assert settle(head) == [3, 7]


def test_id_that_comes_twice_fails_and_is_raised_as_it_was(head):
    gradient = jax.jit(jax.grad(lambda body, id_: loss(head, body, micro_batch=id_)))
    gradient(BODY, 7)
    with pytest.raises(jax.errors.JaxRuntimeError, match="submitted twice"):
        jax.block_until_ready(gradient(BODY, 7))
    with pytest.raises(headwater.MicroBatchConflictError, match="submitted twice"):
        settle(head)
    assert settle(head) == [7]


# ---- what adds nothing, and what is refused -------------------------------------------------------------------------------


def test_evaluation_and_a_frozen_head_add_nothing(client, head):
    frozen = headwater.jax.create_head(client, "frozen", WEIGHTS, bias=BIAS, trainable=False)
    gradient = jax.jit(jax.grad(lambda body: loss(frozen, body)))(BODY)
    expected = jax.grad(lambda body: plain(body, WEIGHTS, BIAS, reduction="sum"))(BODY)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
    assert loss(head) == pytest.approx(float(jax.jit(lambda: loss(head, train=False))()), rel=1e-6)
    assert settle(head) == [] and not head.step_state().open.micro_batches


def test_compiled_loss_without_a_gradient_is_told_of_unless_that_is_said(head):
    frozen_body = jax.jit(lambda: loss(head, BODY))
    jax.grad(lambda scale: scale * frozen_body())(1.0)  # inside of jit the gradient is not visible
    with pytest.warns(headwater.HeadWarning, match="ran forward alone and added nothing"):
        assert settle(head) == []


def test_error_of_a_callback_is_raised_by_the_next_call(head):
    value = jax.jit(lambda labels: loss(head, labels=labels))
    with pytest.raises(jax.errors.JaxRuntimeError, match="TARGET_OUT_OF_VOCAB"):
        jax.block_until_ready(value(np.full_like(LABELS, VOCAB_SIZE)))
    with pytest.raises(headwater.InvalidArgumentError) as caught:
        loss(head)
    assert caught.value.reason == "TARGET_OUT_OF_VOCAB"
    assert np.isfinite(loss(head))


def test_upstream_gradient_that_is_not_finite_adds_nothing(head):
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be finite"):
        jax.block_until_ready(jax.jit(jax.grad(lambda body: jnp.inf * loss(head, body)))(BODY))
    with pytest.raises(headwater.InvalidArgumentError, match="must be finite"):
        settle(head)
    assert settle(head) == []


def test_discarded_losses_are_said_and_leave_the_slot(head):
    jax.block_until_ready(jax.jit(lambda body: jax.vjp(lambda body: loss(head, body), body)[0])(BODY))
    with pytest.warns(headwater.HeadWarning, match="unused pullback"):
        assert settle(head) == []
    jax.jit(jax.grad(lambda body: loss(head, body)))(BODY)
    (id_,) = settle(head)
    assert head.step_state().open.micro_batches[id_].form == "STAGED"


def test_loss_of_a_frozen_body_inside_scan_is_said(head):
    def total(body):
        def add(carry, batch):
            return carry + loss(head, jax.lax.stop_gradient(body), batch[None], LABELS[:1]) + body.sum(), None

        return jax.lax.scan(add, 0.0, BATCH)[0]

    jax.block_until_ready(jax.jit(jax.grad(total))(BODY))
    with pytest.warns(headwater.HeadWarning, match="train=True"):
        assert settle(head) == []


REFUSED = {
    "reduction": ("one of", lambda head: loss(head, reduction="average")),
    "labels": ("must have shape", lambda head: loss(head, labels=LABELS[:2])),
    "labels_dtype": ("integers", lambda head: loss(head, labels=LABELS.astype(np.float32))),
    "x": ("must have shape", lambda head: loss(head, BODY[:, :-1])),
    "x_dtype": ("float32, float16 or bfloat16", lambda head: loss(head, BODY.astype(np.int32), BATCH.astype(np.int32))),
    "micro_batch": ("one integer", lambda head: loss(head, micro_batch=0.5)),
    "train": ("train=True", lambda head: jax.grad(lambda body: loss(head, jax.lax.stop_gradient(body)))(BODY)),
    "no_train": ("stop_gradient", lambda head: jax.grad(lambda body: loss(head, body, train=False))(BODY)),
    "weight": ("weight gets no", lambda head: jax.grad(lambda b, w: loss(head, b, weight=w), (0, 1))(BODY, TOKEN_WEIGHTS)),
    "top_k_teacher": (
        "TopKTeacher",
        lambda head: headwater.jax.linear_jsd_loss(head, headwater.TopKTeacher(LABELS, LABELS), BODY, BODY),
    ),
    "second": ("second derivative", lambda head: jax.hessian(lambda body: loss(head, body))(BODY)),
}


@pytest.mark.parametrize(("match", "call"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_when_it_is_traced(head, match, call):
    with pytest.raises(headwater.InvalidArgumentError, match=match):
        jax.jit(lambda: call(head)).trace()


MANY_DEVICES = """
import sys, jax, jax.numpy as jnp, numpy as np, headwater, headwater.jax
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
with headwater.connect(sys.argv[1]) as client:
    head = headwater.jax.create_head(client, "many-devices", np.ones((512, 8), np.float32), optimizer=headwater.SGD())
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    x, labels = np.ones((4 * 1024, 512), np.float32), np.zeros(4 * 1024, np.int32)
    def loss(scale, x, labels):
        return jax.lax.psum(headwater.jax.linear_softmax_cross_entropy_loss(head, scale * x, labels), "data")
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    value, _ = jax.jit(jax.value_and_grad(loss))(jnp.float32(1), x, labels)
    print(float(value))
"""


def test_large_rows_of_more_devices_than_threads_arrive(server):
    """JAX's own callbacks stand still here: each waits for a copy that a thread of the pool should make."""
    process = subprocess.run([sys.executable, "-c", MANY_DEVICES, server.address], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) == pytest.approx(4096 * np.log(8), rel=1e-6)
