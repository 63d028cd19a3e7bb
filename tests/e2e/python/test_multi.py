"""Several loss terms over one set of rows: heads side by side, teachers for different rows."""

import numpy as np
import pytest
from expectations import refused
from loss_oracle import FP32_GRADIENT_TOLERANCE, FP32_LOSS_TOLERANCE, OracleHead, check_number, check_tensor, compute

import headwater
import headwater.local
from headwater import JSD, CrossEntropy

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 24, 16, 53
HEADS = 5


@pytest.fixture
def hidden(rng):
    return rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)


@pytest.fixture
def weights(rng):
    return [rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32) for _ in range(HEADS)]


@pytest.fixture
def heads(backend, make_head, weights):
    return [make_head(backend.client, weight, optimizer=headwater.SGD(), staging_slots=1) for weight in weights]


@pytest.fixture
def targets(rng):
    """One row of targets for each head, with some tokens ignored."""
    ids = rng.integers(0, VOCAB_SIZE, (HEADS, NUM_TOKENS))
    ids[rng.random(ids.shape) < 0.2] = -100
    return ids


def test_five_heads_in_one_call_are_five_calls(heads, hidden, rng):
    # No ignored ones: the client leaves those out of a call for one head, and products over other rows round otherwise.
    targets = rng.integers(0, VOCAB_SIZE, (HEADS, NUM_TOKENS))
    scales = [0.5, 1.0, 0.25, -1.0, 2.0]
    each = list(zip(heads, targets, scales, strict=True))
    outputs = ("token_loss", "argmax")
    singles = [head.cross_entropy(hidden, ids, micro_batch=0, loss_scale=scale, outputs=outputs) for head, ids, scale in each]
    gradients = [head.gradient() for head in heads]
    for head in heads:
        head.discard_gradient()
    terms = [CrossEntropy(ids, head=head, loss_scale=scale) for head, ids, scale in each]
    out = heads[0].multi(hidden, terms, micro_batch=0, outputs=outputs)
    assert out.state == "COMMITTED" and out.form == "DIRECT" and len(out.terms) == HEADS
    for head, term, single, gradient in zip(heads, out.terms, singles, gradients, strict=True):
        assert term.loss_sum == single.loss_sum and term.valid_token_count == single.valid_token_count
        assert term.token_loss.shape == (NUM_TOKENS,)
        np.testing.assert_array_equal(head.gradient(), gradient)
    assert out.loss_sum == sum(term.loss_sum for term in out.terms) and out.token_loss is None
    total = sum(single.grad_hidden.astype(np.float64) for single in singles)
    check_tensor("grad_hidden", out.grad_hidden, total, FP32_GRADIENT_TOLERANCE)
    for head in heads:
        assert head.step_state().open.totals.micro_batch_count == 1


def test_terms_over_row_ranges_match_the_reference(backend, make_head, heads, hidden, targets, weights, rng):
    """Two teachers for different rows, and a cross entropy over all: ranges overlap, gradients add up."""
    student = heads[0]
    teachers = [make_head(backend.client, weight, trainable=False) for weight in weights[1:3]]
    teacher_hidden = rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    token_weights = rng.standard_normal(NUM_TOKENS).astype(np.float32)
    cut, end = 10, 20
    out = student.multi(
        hidden,
        [
            JSD(teachers[0], teacher_hidden[:cut], rows=slice(cut), beta=0.0),
            JSD(teachers[1], teacher_hidden[cut:end], rows=(cut, end), targets=targets[0][cut:end], hard_loss_weight=0.3),
            CrossEntropy(targets[0], token_weights=token_weights, loss_scale=0.5, label_smoothing=0.1),
        ],
        micro_batch=0,
        grad_hidden_scale=2.0,
    )
    oracle, others = OracleHead(weights[0]), [OracleHead(weight) for weight in weights[1:3]]
    scale = {"grad_hidden_scale": 2.0}
    parts = [
        (slice(cut), compute(oracle, hidden[:cut], teacher=others[0], teacher_hidden=teacher_hidden[:cut], beta=0.0, **scale)),
        (
            slice(cut, end),
            compute(
                oracle,
                hidden[cut:end],
                targets[0][cut:end],
                teacher=others[1],
                teacher_hidden=teacher_hidden[cut:end],
                hard_loss_weight=0.3,
                **scale,
            ),
        ),
        (
            slice(None),
            compute(oracle, hidden, targets[0], token_weights=token_weights, loss_scale=0.5, label_smoothing=0.1, **scale),
        ),
    ]
    grad_hidden = np.zeros(hidden.shape)
    for (rows, expected), term in zip(parts, out.terms, strict=True):
        grad_hidden[rows] += expected.grad_hidden
        check_number("loss_sum", term.loss_sum, expected.loss_sum, FP32_LOSS_TOLERANCE)
        assert term.valid_token_count == expected.valid_token_count
        assert (term.teacher_weight_version > 0) == (rows != slice(None))
    check_tensor("grad_hidden", out.grad_hidden, grad_hidden, FP32_GRADIENT_TOLERANCE)
    check_tensor("grad_weight", student.gradient(), sum(part.grad_weight for _, part in parts), FP32_GRADIENT_TOLERANCE)
    assert student.step_state().open.totals.valid_token_count == out.valid_token_count


def test_all_heads_are_decided_together(heads, hidden, targets):
    def submit(micro_batch, **options):
        terms = [CrossEntropy(ids, head=head) for head, ids in zip(heads[:3], targets[:3], strict=True)]
        return heads[0].multi(hidden, terms, micro_batch=micro_batch, commit="explicit", **options)

    out = submit(0)
    assert (out.state, out.form) == ("STAGED", "STAGED")
    for call in (lambda: heads[1].commit(micro_batch=0), lambda: heads[1].discard(micro_batch=0)):
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            call()
    assert not any(head.gradient().any() for head in heads[:3])
    with refused("STAGING_FULL", headwater.StagingFullError):
        submit(1)
    assert submit(1, allow_held=True).form == "HELD"
    assert out.commit(0.5) is False and out.commit(0.5) is True
    committed = [head.gradient() for head in heads[:3]]
    assert all(gradient.any() for gradient in committed)
    dropped = submit(2)
    assert dropped.discard() is True and dropped.discard() is False
    for head, gradient in zip(heads[:3], committed, strict=True):
        np.testing.assert_array_equal(head.gradient(), gradient)
        head.discard_gradient()
    for head, ids, gradient in zip(heads[:3], targets[:3], committed, strict=True):
        head.cross_entropy(hidden, ids, micro_batch=0, loss_scale=0.5)
        np.testing.assert_allclose(head.gradient(), gradient, rtol=1e-5, atol=1e-6)


def test_late_token_factors_reach_every_term(heads, hidden, targets, rng):
    factors = rng.standard_normal(NUM_TOKENS).astype(np.float32)
    cut = 7
    terms = [CrossEntropy(targets[0], head=heads[0]), CrossEntropy(targets[1][cut:], head=heads[1], rows=(cut, NUM_TOKENS))]
    out = heads[0].multi(hidden, terms, micro_batch=0, commit="explicit", late_token_factors=True)
    assert out.form == "HELD" and out.commit(2.0, factors) is False
    for head, ids, start in ((heads[0], targets[0], 0), (heads[1], targets[1], cut)):
        actual = head.gradient()
        head.discard_gradient()
        head.cross_entropy(hidden[start:], ids[start:], micro_batch=0, token_weights=factors[start:], loss_scale=2.0)
        np.testing.assert_allclose(actual, head.gradient(), rtol=1e-5, atol=1e-6)


def test_a_repeat_is_answered_for_all(heads, hidden, targets):
    terms = [CrossEntropy(ids, head=head) for head, ids in zip(heads, targets, strict=True)]
    first = heads[0].multi(hidden, terms, micro_batch=0)
    before = [head.gradient() for head in heads]
    again = heads[0].multi(hidden, terms, micro_batch=0)
    assert again.replayed and again.digest == first.digest and again.loss_sum == first.loss_sum
    with refused("MICRO_BATCH_CONFLICT", headwater.MicroBatchConflictError):
        heads[0].multi(hidden, terms[::-1], micro_batch=0)
    for head, gradient in zip(heads, before, strict=True):
        np.testing.assert_array_equal(head.gradient(), gradient)


def test_frozen_and_trainable_heads_mix(backend, make_head, heads, hidden, targets, weights):
    frozen = make_head(backend.client, weights[1], trainable=False)
    terms = [CrossEntropy(targets[0]), CrossEntropy(targets[1], head=frozen)]
    expected = heads[1].cross_entropy(hidden, targets[1], backward=False).loss_sum
    out = heads[0].multi(hidden, terms, micro_batch=0)
    assert out.terms[1].loss_sum == expected and out.step == 0
    only_looks = heads[0].multi(hidden, terms, backward=False)
    assert only_looks.loss_sum == out.loss_sum and only_looks.grad_hidden is None and only_looks.state == "UNSPECIFIED"
    without_step = frozen.multi(hidden, [terms[1], CrossEntropy(targets[2], head=frozen)])
    assert without_step.grad_hidden.any() and without_step.state == "UNSPECIFIED"


def test_terms_are_checked_before_anything_is_sent(backend, make_head, heads, hidden, targets, weights, rng):
    narrow = make_head(backend.client, rng.standard_normal((VOCAB_SIZE, 8)).astype(np.float32))
    good = CrossEntropy(targets[0])
    for terms, reason in (
        ([], "MISSING_FIELD"),
        (["cross_entropy"], "INVALID_FIELD"),
        ([good, CrossEntropy(targets[1], head=narrow)], "SHAPE_MISMATCH"),
        ([good, CrossEntropy(targets[1][:4], rows=(4, 4))], "INVALID_FIELD"),
        ([good, CrossEntropy(targets[1], rows=(0, NUM_TOKENS + 1))], "INVALID_FIELD"),
        ([good, CrossEntropy(targets[1], rows=slice(0, 4, 2))], "INVALID_FIELD"),
        ([good, CrossEntropy(targets[1][:4], rows=(0, 5))], "SHAPE_MISMATCH"),
        ([good, CrossEntropy(targets[1], step=1)], "INVALID_COMBINATION"),
        ([good, JSD(heads[1], hidden[:3], rows=(0, 4))], "SHAPE_MISMATCH"),
        ([good, CrossEntropy(targets[1], head=heads[1].name)], "INVALID_FIELD"),
    ):
        with refused(reason, headwater.InvalidArgumentError):
            heads[0].multi(hidden, terms, micro_batch=0)
    with refused("MISSING_FIELD", headwater.InvalidArgumentError):
        heads[0].multi(hidden, [good])
    with headwater.local.connect() as elsewhere:
        other = elsewhere.create_head("other", weights[0])
        with refused("INVALID_COMBINATION", headwater.InvalidArgumentError):
            heads[0].multi(hidden, [good, CrossEntropy(targets[1], head=other)], micro_batch=0)
