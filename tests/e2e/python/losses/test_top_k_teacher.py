"""Teachers that are known by some ids of each token, through the whole stack, against fp64."""

import numpy as np
import pytest
import torch
from expectations import refused
from loss_oracle import (
    FP32_GRADIENT_TOLERANCE,
    FP32_LOSS_TOLERANCE,
    OracleHead,
    check_number,
    check_tensor,
    compute,
)

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

        self.teacher = headwater.TopKTeacher(self.ids, self.log_probs)

    def expected(self, targets, **options):
        return compute(OracleHead(self.weight), self.hidden, targets, teacher=self.teacher, **options)


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
    expected = case.expected(targets, token_weights=1.0 if factors is None else factors, loss_scale=0.5)
    check_tensor("grad_weight", head.gradient(), expected.grad_weight, FP32_GRADIENT_TOLERANCE)


def test_options_without_a_meaning_are_refused(client, make_head, rng):
    case = Case(rng)
    head = make_head(client, case.weight, trainable=False)
    ids, log_probs = case.ids, case.log_probs
    term = "header.terms[0]"
    for field, reason, teacher, options in (
        (f"{term}.jensen_shannon.beta", "INVALID_COMBINATION", case.teacher, {"beta": 0.5}),
        (f"{term}.jensen_shannon.teacher_temperature", "INVALID_COMBINATION", case.teacher, {"teacher_temperature": 2.0}),
        (f"{term}.jensen_shannon.hard_loss_weight", "INVALID_COMBINATION", case.teacher, {"hard_loss_weight": 0.5}),
        (f"{term}.jensen_shannon.vocab_alignment", "INVALID_COMBINATION", case.teacher, {"truncate_to_common": True}),
        ("teacher_hidden", "INVALID_COMBINATION", case.teacher, {"teacher_hidden": case.hidden}),
        ("join_key", "INVALID_COMBINATION", case.teacher, {"join_key": "key"}),
        ("outputs", "INVALID_COMBINATION", case.teacher, {"outputs": ("lse",)}),
        ("ids", "SHAPE_MISMATCH", headwater.TopKTeacher(ids[1:], log_probs[1:]), {}),
        ("ids", "SHAPE_MISMATCH", headwater.TopKTeacher(ids[:, :0], log_probs[:, :0]), {}),
        ("log_probs", "SHAPE_MISMATCH", headwater.TopKTeacher(ids, log_probs[:, 1:]), {}),
        ("ids", "DATA_TYPE_MISMATCH", headwater.TopKTeacher(ids.astype(float), log_probs), {}),
        ("ids", "TARGET_OUT_OF_VOCAB", headwater.TopKTeacher(np.where(ids < 0, VOCAB_SIZE, ids), log_probs), {}),
        ("log_probs", "INVALID_FIELD", headwater.TopKTeacher(np.abs(ids), log_probs), {}),  # NaN of entries that are used now
        (
            f"{term}.top_k_teacher.ids.data",
            "INVALID_FIELD",
            headwater.TopKTeacher(np.zeros_like(ids), np.full_like(log_probs, -9)),
            {},
        ),
        (f"{term}.top_k_teacher.log_probs.data", "INVALID_FIELD", headwater.TopKTeacher(ids, np.full_like(log_probs, -1)), {}),
    ):
        with refused(reason, headwater.HeadwaterError, field=field):
            head.jsd(case.hidden, teacher, **{"beta": 0, **options})


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
    weight_sum = weights[targets != -100].sum(dtype=np.float64)
    expected = case.expected(targets, token_weights=weights, student_temperature=1.3, loss_scale=2 / weight_sum)
    check_number("loss", loss.item(), expected.loss_sum / weight_sum, FP32_LOSS_TOLERANCE)
    check_tensor("grad_hidden", hidden.grad.numpy(), expected.grad_hidden, FP32_GRADIENT_TOLERANCE)
    check_tensor("grad_weight", head.gradient(), expected.grad_weight, FP32_GRADIENT_TOLERANCE)
    with torch.no_grad():
        each = headwater.torch.jsd(
            head, torch.tensor(case.hidden), None, teacher, beta=0, temperature=1.3, reduction="none", **options
        )
    np.testing.assert_allclose(each.numpy(), weights * expected.token_loss, rtol=0, atol=6e-6)
    with refused("INVALID_COMBINATION"):
        headwater.torch.JSDLoss(head, beta=0, teacher_temperature=2.0)(hidden, teacher)
