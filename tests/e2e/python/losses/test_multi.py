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
    oracle, scale = OracleHead(weights[0]), {"grad_hidden_scale": 2.0}

    def divergence(rows, teacher, ids=None, **options):
        options |= {"teacher": OracleHead(weights[teacher]), "teacher_hidden": teacher_hidden[rows], **scale}
        return rows, compute(oracle, hidden[rows], None if ids is None else ids[rows], **options)

    options = {"token_weights": token_weights, "loss_scale": 0.5, "label_smoothing": 0.1, **scale}
    parts = [
        divergence(slice(cut), 1, beta=0.0),
        divergence(slice(cut, end), 2, targets[0], hard_loss_weight=0.3),
        (slice(None), compute(oracle, hidden, targets[0], **options)),
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
