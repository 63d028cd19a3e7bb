"""Losses by their definitions in fp64, and their gradients by PyTorch's autograd: the reference."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

import headwater

FP32_LOSS_TOLERANCE = 1e-6
FP32_GRADIENT_TOLERANCE = 1e-5
FP32_TOKEN_TOLERANCE = 1e-6


def stored(values, data_type):
    """Values in the kind of array that the API takes for the storage type."""
    if data_type == "bfloat16":
        return headwater.BFloat16.from_float32(values)
    return values.astype(data_type)


def as_float64(array):
    """Any array that the API gives back."""
    if isinstance(array, headwater.BFloat16):
        return array.to_float32().astype(np.float64)
    return np.asarray(array).astype(np.float64)


def _leaf(values):
    return torch.tensor(np.asarray(values, np.float64), requires_grad=True)


class OracleHead:
    """Weight (vocab_size, hidden_size), with values that the storage type holds exactly."""

    def __init__(self, weight, bias=None, logit_scale=1.0, softcap=None, valid_vocab_size=None):
        self.weight, self.bias = _leaf(weight), _leaf(np.zeros(len(weight)) if bias is None else bias)
        self.logit_scale, self.softcap, self.valid_vocab_size = logit_scale, softcap, valid_vocab_size

    def logits(self, hidden):
        """(num_tokens, valid_vocab_size)."""
        logits = self.logit_scale * (hidden @ self.weight.T + self.bias)[:, : self.valid_vocab_size]
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _jsd(log_q, log_p, beta):
    """Divergence of each row from its log-probabilities, student's and teacher's."""
    if beta in (0, 1):
        return (log_p.exp() * (log_p - log_q)).sum(-1) if beta == 0 else (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(np.log(beta) + log_p, np.log1p(-beta) + log_q)
    return (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)


def _top_k_divergence(log_q, teacher):
    """Forward divergence from a teacher that is known by some ids of each token; the others share what is left."""
    used = teacher.ids >= 0
    places = torch.tensor(np.stack([np.nonzero(used)[0], teacher.ids[used]]))
    p = torch.zeros_like(log_q)
    p[tuple(places)] = torch.tensor(teacher.log_probs[used]).double().exp()
    named = torch.zeros(p.shape, dtype=torch.bool)
    named[tuple(places)] = True
    rest, others = 1 - p.sum(-1), log_q.masked_fill(named, -torch.inf).logsumexp(-1)
    rest[rest < 1e-6] = 0
    return (torch.xlogy(p, p) - p * log_q).sum(-1) + torch.xlogy(rest, rest) - rest * others


def compute(
    head,
    hidden,
    targets=None,
    *,
    teacher=None,
    teacher_hidden=None,
    token_weights=1.0,
    ignore_index=-100,
    loss_scale=1.0,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weights=None,
    temperature=1.0,
    token_scaling=False,
    entropy_factors=0.0,
    lse_factors=0.0,
    beta=0.5,
    student_temperature=1.0,
    teacher_temperature=1.0,
    hard_loss_weight=0.0,
    truncate_to_common=False,
    grad_hidden_scale=1.0,
):
    """Everything that a micro-batch yields: of the cross entropy, or of the divergence from a teacher."""
    rows = _leaf(hidden)
    z = head.logits(rows) / temperature
    valid, ids = torch.ones(len(rows), dtype=torch.bool), torch.zeros(len(rows), dtype=torch.int64)
    if targets is not None:
        valid = torch.tensor(np.asarray(targets)) != ignore_index
        ids[valid] = torch.tensor(np.asarray(targets))[valid]
    weights, entropy_factors, lse_factors = (
        torch.tensor(np.broadcast_to(np.asarray(values, np.float64), len(rows))) * valid
        for values in (token_weights, entropy_factors, lse_factors)
    )
    class_weights = torch.ones(z.shape[1]).double() if class_weights is None else torch.tensor(class_weights).double()
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    entropy, target_log_p = -(log_p.exp() * log_p).sum(-1), log_p.gather(-1, ids[:, None])[:, 0]

    share = 1.0 if teacher is None else hard_loss_weight
    scale = share * (target_log_p.detach().exp() if token_scaling else 1.0)
    hard = scale * F.cross_entropy(z, ids, weight=class_weights, label_smoothing=label_smoothing, reduction="none")
    penalty, soft = scale * z_loss * lse**2, torch.zeros(len(rows))
    if isinstance(teacher, headwater.TopKTeacher):
        soft = _top_k_divergence((z / student_temperature).log_softmax(-1), teacher)
    elif teacher is not None:
        teacher_z = teacher.logits(torch.tensor(teacher_hidden).double())
        columns = min(z.shape[1], teacher_z.shape[1]) if truncate_to_common else z.shape[1]
        log_q = (z[:, :columns] / student_temperature).log_softmax(-1)
        soft = (1 - share) * _jsd(log_q, (teacher_z[:, :columns] / teacher_temperature).log_softmax(-1), beta)
    token_loss = (soft + hard + penalty) * valid
    objective = (weights * token_loss + entropy_factors * entropy + lse_factors * lse).sum() * loss_scale
    grads = torch.autograd.grad(objective, (rows, head.weight, head.bias))
    outputs = {
        "lse": lse,
        "entropy": entropy,
        "mean_logits": z.mean(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        **({"target_log_probability": target_log_p} if targets is not None else {}),
    }
    outputs = {name: (values * valid).detach().numpy() for name, values in outputs.items()}
    return SimpleNamespace(
        loss_sum=float((weights * token_loss).sum()),
        soft_loss_sum=float((weights * soft).sum()),
        hard_loss_sum=float((weights * hard).sum()),
        z_loss_sum=float((weights * penalty).sum()),
        valid_token_count=int(valid.sum()),
        token_weight_sum=float(weights.sum()),
        target_weight_sum=float((weights * class_weights[ids]).sum()),
        token_loss=token_loss.detach().numpy(),
        grad_hidden=grad_hidden_scale * grads[0].numpy(),
        grad_weight=grads[1].numpy(),
        grad_bias=grads[2].numpy(),
        max_logit=float(z.abs().max()),
        outputs={**outputs, "argmax": torch.where(valid, z.argmax(-1), -1).numpy()},
    )


def error(actual, expected):
    """Norm of the difference / norm of the reference; NaN where there is one, infinite where only the reference is 0."""
    actual, expected = as_float64(actual), as_float64(expected)
    assert actual.shape == expected.shape
    difference = np.linalg.norm(actual - expected)
    with np.errstate(divide="ignore"):
        return difference / np.linalg.norm(expected) if difference else 0.0


def worst_slice(actual, expected):
    """The same for the worst row and column, with a floor at 1e-3 of the largest one's norm."""
    difference, expected = as_float64(actual) - as_float64(expected), as_float64(expected)
    worst = 0.0
    for axis in range(expected.ndim if expected.ndim > 1 else 0):
        norms = np.linalg.norm(expected, axis=axis)
        floor = 1e-3 * norms.max(initial=0)
        if floor > 0:
            worst = np.maximum(worst, (np.linalg.norm(difference, axis=axis) / np.maximum(norms, floor)).max())
    return worst


def check_tensor(name, actual, expected, tolerance):
    """Whole tensor within `tolerance`, worst row and column within ten times that."""
    assert error(actual, expected) <= tolerance, f"{name}: {error(actual, expected):.3g} > {tolerance:.3g}"
    assert worst_slice(actual, expected) <= 10 * tolerance, f"{name}, worst row or column: {worst_slice(actual, expected):.3g}"


def check_number(name, actual, expected, tolerance):
    """Relative; exact where the reference is 0."""
    assert abs(actual - expected) <= tolerance * abs(expected), f"{name}: {actual!r}, expected {expected!r}"


def check_training(client):
    """A step of a new head is that of the reference; what the server said of the head, which is gone then."""
    rng = np.random.default_rng(0)
    weight, hidden = (rng.standard_normal((rows, 8)).astype(np.float32) for rows in (50, 6))
    targets = rng.integers(0, len(weight), len(hidden))
    expected, rate = compute(OracleHead(weight), hidden, targets), 0.5
    head = client.create_head("h", weight, dtype="float32", optimizer=headwater.SGD())
    info = head.info()
    out = head.cross_entropy(hidden, targets, micro_batch=0)
    check_number("loss_sum", out.loss_sum, expected.loss_sum, 1e-5)
    head.apply_optimizer_step(learning_rate=rate, expected_micro_batches=1)
    np.testing.assert_allclose(head.weight(), weight - rate * expected.grad_weight, rtol=1e-4, atol=1e-5)
    head.delete()
    return info
