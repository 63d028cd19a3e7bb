"""Losses and gradients by their definitions, in numpy and fp64: the reference."""

from dataclasses import dataclass, field

import numpy as np

import headwater

FP32_LOSS_TOLERANCE = 1e-6
FP32_GRADIENT_TOLERANCE = 1e-5
FP32_TOKEN_TOLERANCE = 1e-6


def round_to(values, data_type):
    """Values as the storage type holds them, in the dtype that came in."""
    values = np.asarray(values)
    if data_type == "bfloat16":
        return headwater.BFloat16.from_float32(values).to_float32().astype(values.dtype)
    return values.astype(data_type).astype(values.dtype)


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


@dataclass
class OracleHead:
    """Weight (vocab_size, hidden_size), with values that the storage type holds exactly."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    valid_vocab_size: int | None = None

    def logits(self, hidden, dtype):
        """(num_tokens, valid_vocab_size) logits and their derivative by the product."""
        valid = self.valid_vocab_size or len(self.weight)
        products = hidden.astype(dtype) @ self.weight[:valid].astype(dtype).T
        if self.bias is not None:
            products = products + self.bias[:valid].astype(dtype)
        argument = dtype(self.logit_scale) * products
        if self.softcap is None:
            return argument, np.full_like(argument, self.logit_scale)
        tanh = np.tanh(argument / dtype(self.softcap))
        return dtype(self.softcap) * tanh, dtype(self.logit_scale) * (1 - tanh * tanh)


@dataclass
class OracleResult:
    """Everything that a micro-batch yields."""

    loss_sum: float
    soft_loss_sum: float
    hard_loss_sum: float
    z_loss_sum: float
    valid_token_count: int
    token_weight_sum: float
    target_weight_sum: float
    token_loss: np.ndarray
    grad_hidden: np.ndarray
    grad_weight: np.ndarray
    grad_bias: np.ndarray
    max_logit: float
    outputs: dict = field(default_factory=dict)


def log_sum_exp(z):
    maximum = z.max(-1, keepdims=True)
    return (maximum + np.log(np.exp(z - maximum).sum(-1, keepdims=True)))[:, 0]


def _cross_entropy(z, targets, dtype, label_smoothing, z_loss, class_weights):
    """Loss without z-loss, z-loss, and gradient of both; `targets` are all valid ids."""
    rows = np.arange(len(z))
    lse = log_sum_exp(z)
    valid = z.shape[1]
    weights = np.ones(valid, dtype) if class_weights is None else np.asarray(class_weights)[:valid].astype(dtype)
    hard = dtype(1 - label_smoothing) * weights[targets]
    smooth = dtype(label_smoothing) / valid * weights
    loss = hard * (lse - z[rows, targets]) + (smooth * (lse[:, None] - z)).sum(-1)
    penalty = dtype(z_loss) * lse * lse
    probability = np.exp(z - lse[:, None])
    gradient = probability * (hard + smooth.sum() + 2 * dtype(z_loss) * lse)[:, None] - smooth
    # Not p - 1: that loses everything where the model is confident.
    others = probability.copy()
    others[rows, targets] = 0
    rest = others.sum(-1)
    gradient[rows, targets] = -hard * rest + probability[rows, targets] * (smooth.sum() + 2 * dtype(z_loss) * lse) - smooth[targets]
    top = z[rows, targets]
    shifted = z - top[:, None]
    shifted[rows, targets] = -np.inf
    maximum = np.maximum(shifted.max(-1), 0)
    # Where the target leads, lse - z_y loses its digits: log1p of the others does not.
    exact = np.where(maximum == 0, np.log1p(np.exp(np.minimum(shifted, 0)).sum(-1)), lse - top)
    loss = loss + hard * (exact - (lse - top))
    return loss, penalty, gradient


def _jsd(student, teacher, beta):
    """Divergence and its gradient by the student's scaled logits."""
    log_q = student - log_sum_exp(student)[:, None]
    log_p = teacher - log_sum_exp(teacher)[:, None]
    p, q = np.exp(log_p), np.exp(log_q)
    if beta == 0:
        return (p * (log_p - log_q)).sum(-1), q - p
    if beta == 1:
        ratio = log_q - log_p
        divergence = (q * ratio).sum(-1)
        return divergence, q * (ratio - divergence[:, None])
    dtype = student.dtype.type
    log_m = np.logaddexp(dtype(np.log(beta)) + log_p, dtype(np.log1p(-beta)) + log_q)
    ratio = log_q - log_m
    reverse = (q * ratio).sum(-1)
    divergence = dtype(beta) * (p * (log_p - log_m)).sum(-1) + dtype(1 - beta) * reverse
    return divergence, dtype(1 - beta) * q * (ratio - reverse[:, None])


def compute(
    head,
    hidden,
    targets=None,
    *,
    teacher=None,
    teacher_hidden=None,
    token_weights=None,
    ignore_index=-100,
    loss_scale=1.0,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weights=None,
    temperature=1.0,
    token_scaling=False,
    entropy_factors=None,
    lse_factors=None,
    beta=0.5,
    student_temperature=1.0,
    teacher_temperature=1.0,
    hard_loss_weight=0.0,
    truncate_to_common=False,
    grad_hidden_scale=1.0,
):
    """Cross entropy, or with `teacher` the divergence."""
    dtype = np.float64
    row_count = len(hidden)
    targets = None if targets is None else np.asarray(targets)
    valid = np.ones(row_count, bool) if targets is None else targets != ignore_index
    weights = np.ones(row_count) if token_weights is None else np.asarray(token_weights, np.float64)
    z, derivative = (values / dtype(temperature) for values in head.logits(hidden[valid], dtype))
    soft = hard = penalty = np.zeros(valid.sum(), dtype)
    gradient = np.zeros_like(z)
    if teacher is None:
        hard, penalty, gradient = _cross_entropy(z, targets[valid], dtype, label_smoothing, z_loss, class_weights)
        if token_scaling:
            scale = np.exp(z[np.arange(len(z)), targets[valid]] - log_sum_exp(z))
            hard, penalty, gradient = scale * hard, scale * penalty, scale[:, None] * gradient
    else:
        teacher_z, _ = teacher.logits(teacher_hidden[valid], dtype)
        columns = min(z.shape[1], teacher_z.shape[1]) if truncate_to_common else z.shape[1]
        divergence, part = _jsd(
            z[:, :columns] / dtype(student_temperature), teacher_z[:, :columns] / dtype(teacher_temperature), beta
        )
        share = dtype(1 - hard_loss_weight)
        soft = share * divergence
        gradient[:, :columns] = share * part / dtype(student_temperature)
        if hard_loss_weight:
            a = dtype(hard_loss_weight)
            hard, penalty, hard_gradient = _cross_entropy(z, targets[valid], dtype, label_smoothing, z_loss, class_weights)
            hard, penalty, gradient = a * hard, a * penalty, gradient + a * hard_gradient
    grad_logits = gradient * weights[valid].astype(dtype)[:, None]
    log_probability = z - (log_sum_exp(z) if len(z) else np.zeros(0))[:, None]
    probability, entropy = np.exp(log_probability), -(np.exp(log_probability) * log_probability).sum(-1)
    if entropy_factors is not None:
        grad_logits -= entropy_factors[valid, None] * probability * (log_probability + entropy[:, None])
    if lse_factors is not None:
        grad_logits += lse_factors[valid, None] * probability
    grad_logits = grad_logits * derivative * dtype(loss_scale)

    columns = z.shape[1]
    grad_hidden = np.zeros(hidden.shape, dtype)
    grad_hidden[valid] = dtype(grad_hidden_scale) * (grad_logits @ head.weight[:columns].astype(dtype))
    grad_weight = np.zeros(head.weight.shape, dtype)
    grad_weight[:columns] = grad_logits.T @ hidden[valid].astype(dtype)
    grad_bias = np.zeros(len(head.weight), dtype)
    grad_bias[:columns] = grad_logits.sum(0)

    token_loss = np.zeros(row_count)
    token_loss[valid] = soft + hard + penalty

    def spread(values, fill=0):
        full = np.full(row_count, fill, np.asarray(values).dtype)
        full[valid] = values
        return full

    outputs = {
        "lse": spread(log_sum_exp(z) if len(z) else np.zeros(0)),
        "entropy": spread(entropy),
        "mean_logits": spread(z.mean(-1)),
        "log_sum_sq_probs": spread(np.log((probability**2).sum(-1))),
        "argmax": spread(z.argmax(-1) if len(z) else np.zeros(0, int), -1),
    }
    if targets is not None:
        outputs["target_log_probability"] = spread(log_probability[np.arange(len(z)), targets[valid]])
    target_weights = weights[valid]
    if class_weights is not None:
        target_weights = target_weights * np.asarray(class_weights, np.float64)[targets[valid]]
    w = weights[valid]
    return OracleResult(
        loss_sum=float((w * (soft + hard + penalty)).sum()),
        soft_loss_sum=float((w * soft).sum()),
        hard_loss_sum=float((w * hard).sum()),
        z_loss_sum=float((w * penalty).sum()),
        valid_token_count=int(valid.sum()),
        token_weight_sum=float(w.sum()),
        target_weight_sum=float(target_weights.sum()),
        token_loss=token_loss,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        max_logit=float(np.abs(z).max(initial=0)),
        outputs=outputs,
    )


def error(actual, expected):
    """Norm of the difference / norm of the reference; NaN where there is one, infinite where only the reference is 0."""
    actual, expected = as_float64(actual), as_float64(expected)
    assert actual.shape == expected.shape
    difference, norm = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    if norm == 0:
        return 0.0 if difference == 0 else np.nan if np.isnan(difference) else np.inf
    return difference / norm


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
