"""Teachers that are known by some ids of each token, through the whole stack, against fp64."""

import numpy as np
import pytest
import torch
from expectations import refused

import headwater
import headwater.torch

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE, K = 29, 19, 211, 9


class Case:
    """A student, and a teacher near it: some rows name all of its mass, some leave entries unused."""

    def __init__(self, rng):
        self.weight = (rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)) * 3 / np.sqrt(HIDDEN_SIZE)).astype(np.float32)
        self.hidden = rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
        logits = self.hidden.astype(np.float64) @ self.weight.T + rng.standard_normal((NUM_TOKENS, VOCAB_SIZE))
        self.log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.ids = rng.permuted(np.argsort(-self.log_p)[:, :K], axis=1)
        log_probs = np.take_along_axis(self.log_p, self.ids, 1)
        log_probs[1::4] -= np.log(np.exp(log_probs[1::4]).sum(-1, keepdims=True))
        self.log_probs = log_probs.astype(np.float32)
        self.ids[2::4, :3] = -1
        self.log_probs[2::4, :3] = np.nan

    @property
    def teacher(self):
        return headwater.TopKTeacher(self.ids, self.log_probs)

    def expected(self, temperature=1.0, weights=None):
        """(num_tokens,) losses, grad_hidden and grad_weight of their weighted sum."""
        z = self.hidden.astype(np.float64) @ self.weight.astype(np.float64).T / temperature
        q = np.exp(z - z.max(-1, keepdims=True))
        q /= q.sum(-1, keepdims=True)
        p = np.zeros_like(q)
        used = self.ids >= 0
        rows = np.nonzero(used)[0]
        p[rows, self.ids[used]] = np.exp(self.log_probs[used].astype(np.float64))
        named = np.zeros(q.shape, bool)
        named[rows, self.ids[used]] = True
        rest = 1 - p.sum(-1)
        rest[rest < 1e-6] = 0
        others = np.where(named, 0, q).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.where(named, p * np.log(p / q), 0).sum(-1) + np.where(rest > 0, rest * np.log(rest / others), 0)
        gradient = (p.sum(-1) + rest)[:, None] * q - p - np.where(named, 0, q / others[:, None]) * rest[:, None]
        gradient *= (np.ones(NUM_TOKENS) if weights is None else weights)[:, None] / temperature
        return losses, gradient @ self.weight, gradient.T @ self.hidden


def check(actual, expected):
    assert np.linalg.norm(np.asarray(actual, np.float64) - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("staging_slots", (0, 1))  # the rows are held, or their gradient
def test_a_commit_multiplies_the_contribution(each_way, make_head, rng, staging_slots):
    case = Case(rng)
    head = make_head(each_way.client, case.weight, staging_slots=staging_slots)
    late = staging_slots == 0
    targets = np.where(np.arange(NUM_TOKENS) % 3, 0, -100)  # rows that are left out, unless their factors come later
    options = {"targets": targets, "commit": "explicit", "late_token_factors": late, "allow_held": late}
    out = head.jsd(case.hidden, case.teacher, beta=0, micro_batch=0, **options)
    assert out.form == ("HELD" if late else "STAGED")
    factors = rng.uniform(-1, 2, NUM_TOKENS).astype(np.float32) if late else None
    out.commit(factor=0.5, token_factors=factors)
    weights = 0.5 * (np.ones(NUM_TOKENS) if factors is None else factors) * (targets != -100)
    check(head.gradient(), case.expected(weights=weights)[2])


def test_options_without_a_meaning_are_refused(one_shard, make_head, rng):
    case = Case(rng)
    head = make_head(one_shard.client, case.weight, trainable=False)

    def expect(reason, field, teacher=case.teacher, **options):
        with refused(reason) as error:
            head.jsd(case.hidden, teacher, **{"beta": 0, **options})
        assert error.value.metadata["field"] == field

    for name, value, field in (
        ("beta", 0.5, "header.terms[0].jensen_shannon.beta"),
        ("teacher_temperature", 2.0, "header.terms[0].jensen_shannon.teacher_temperature"),
        ("hard_loss_weight", 0.5, "header.terms[0].jensen_shannon.hard_loss_weight"),
        ("truncate_to_common", True, "header.terms[0].jensen_shannon.vocab_alignment"),
        ("teacher_hidden", case.hidden, "teacher_hidden"),
        ("join_key", "key", "join_key"),
        ("outputs", ("lse",), "outputs"),
    ):
        expect("INVALID_COMBINATION", field, **{name: value})
    ids, log_probs = case.ids, case.log_probs
    for field, reason, teacher in (
        ("ids", "SHAPE_MISMATCH", headwater.TopKTeacher(ids[1:], log_probs[1:])),
        ("ids", "SHAPE_MISMATCH", headwater.TopKTeacher(ids[:, :0], log_probs[:, :0])),
        ("log_probs", "SHAPE_MISMATCH", headwater.TopKTeacher(ids, log_probs[:, 1:])),
        ("ids", "DATA_TYPE_MISMATCH", headwater.TopKTeacher(ids.astype(float), log_probs)),
        ("ids", "TARGET_OUT_OF_VOCAB", headwater.TopKTeacher(np.where(ids < 0, VOCAB_SIZE, ids), log_probs)),
        ("log_probs", "INVALID_FIELD", headwater.TopKTeacher(np.abs(ids), log_probs)),  # NaN of entries that are used now
        (
            "header.terms[0].top_k_teacher.ids.data",
            "INVALID_FIELD",
            headwater.TopKTeacher(np.zeros_like(ids), np.full_like(log_probs, -9)),
        ),
        ("header.terms[0].top_k_teacher.log_probs.data", "INVALID_FIELD", headwater.TopKTeacher(ids, np.full_like(log_probs, -1))),
    ):
        expect(reason, field, teacher)


def test_a_torch_loss_is_the_mean_over_valid_tokens(backend, make_head, rng):
    case = Case(rng)
    head = make_head(backend.client, case.weight)
    targets = torch.tensor(rng.integers(0, VOCAB_SIZE, NUM_TOKENS))
    targets[::3] = -100
    weights = rng.uniform(0.2, 3, NUM_TOKENS).astype(np.float32)
    options = {"targets": targets, "token_weights": torch.from_numpy(weights)}
    hidden = torch.tensor(case.hidden, requires_grad=True)
    teacher = headwater.TopKTeacher(torch.from_numpy(case.ids), torch.from_numpy(case.log_probs))
    loss = headwater.torch.JSDLoss(head, beta=0, temperature=1.3)(hidden, teacher, **options)
    (2 * loss).backward()
    counted = np.where(targets == -100, 0, weights.astype(np.float64))
    losses, grad_hidden, grad_weight = case.expected(1.3, 2 * counted / counted.sum())
    mean = (counted * losses).sum() / counted.sum()
    assert abs(loss.item() - mean) <= 1e-6 * mean
    check(hidden.grad.numpy(), grad_hidden)
    check(head.gradient(), grad_weight)
    with torch.no_grad():
        each = headwater.torch.jsd(
            head, torch.tensor(case.hidden), None, teacher, beta=0, temperature=1.3, reduction="none", **options
        )
    np.testing.assert_allclose(each.numpy(), counted * losses, rtol=0, atol=6e-6)
    with refused("INVALID_COMBINATION"):
        headwater.torch.JSDLoss(head, beta=0, teacher_temperature=2.0)(hidden, teacher)
