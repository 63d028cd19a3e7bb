"""Every option of both losses against fp64, through the whole stack. tests/kernels has each one by itself."""

import numpy as np
import pytest
from loss_oracle import (
    FP32_GRADIENT_TOLERANCE,
    FP32_LOSS_TOLERANCE,
    FP32_TOKEN_TOLERANCE,
    OracleHead,
    check_number,
    check_tensor,
    compute,
)

OUTPUTS = ("token_loss", "lse", "target_log_probability", "entropy", "argmax", "mean_logits", "log_sum_sq_probs")
# Odd and prime, so that nothing is aligned and three shards are uneven.
NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 37, 61, 509


class Case:
    """A head's weights, and rows."""

    def __init__(self, rng, *, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE):
        def values(*shape, scale=1.0):
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        self.weight = values(vocab_size, hidden_size, scale=3 / np.sqrt(hidden_size))
        self.bias = values(vocab_size, scale=0.5)
        self.hidden = values(NUM_TOKENS, hidden_size)
        self.targets = rng.integers(0, vocab_size, NUM_TOKENS)
        # Half of the rows are peaked: a flat softmax hides most mistakes.
        peaked = np.arange(0, NUM_TOKENS, 2)
        self.hidden[peaked] = self.weight[self.targets[peaked]] * np.float32(1.5)


def check(out, head, expected):
    """Everything that came back, and what the step has accumulated."""
    assert out.valid_token_count == expected.valid_token_count
    check_number("token_weight_sum", out.token_weight_sum, expected.token_weight_sum, FP32_LOSS_TOLERANCE)
    check_number("target_weight_sum", out.target_weight_sum, expected.target_weight_sum, FP32_LOSS_TOLERANCE)
    for name in ("loss_sum", "soft_loss_sum", "hard_loss_sum", "z_loss_sum"):
        check_number(name, getattr(out, name), getattr(expected, name), FP32_LOSS_TOLERANCE)
    check_tensor("grad_hidden", out.grad_hidden, expected.grad_hidden, FP32_GRADIENT_TOLERANCE)
    gradient = head.gradient(bias=True) if head.spec.has_bias else (head.gradient(),)
    for name, actual in zip(("grad_weight", "grad_bias"), gradient, strict=False):
        check_tensor(name, actual, getattr(expected, name), FP32_GRADIENT_TOLERANCE)
    absolute = FP32_TOKEN_TOLERANCE * max(1, expected.max_logit)
    np.testing.assert_allclose(out.token_loss, expected.token_loss, rtol=0, atol=absolute)
    for name, values in expected.outputs.items():
        if name == "argmax":
            np.testing.assert_array_equal(out.argmax, values)
        else:
            np.testing.assert_allclose(getattr(out, name), values, rtol=1e-6, atol=absolute, err_msg=name)
    assert out.non_finite_row_count == 0


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignored": 0.2}
CROSS_ENTROPY_OPTIONS = {
    "plain": {},
    "head_without_bias": {"head": {"bias": False}, **SMOOTHED},
    "padded_vocabulary": {"head": {"valid_vocab_size": 500}, **SMOOTHED},
    "head_with_all_of_them": {"head": {"softcap": 20.0, "logit_scale": 1.5, "valid_vocab_size": 401}, **SMOOTHED},
    "class_weights_and_smoothing": {"class_weights": True, "label_smoothing": 0.2},
    "ignore_index_in_vocabulary": {"ignored": 0.3, "ignore_index": 7},
    "class_weights_of_both_signs": {"class_weights": (-0.5, 2)},
    "entropy_alone": {"token_weights": 0, "entropy_factors": True},
    "lse_alone": {"token_weights": 0, "lse_factors": True},
    "factors": {
        "entropy_factors": True,
        "lse_factors": True,
        "token_weights": True,
        "ignored": 0.3,
        "temperature": 1.5,
        "loss_scale": -0.5,
        "token_scaling": True,
        "label_smoothing": 0.1,
    },
    "all_of_them": {
        "label_smoothing": 0.05,
        "z_loss": 1e-4,
        "class_weights": True,
        "token_weights": True,
        "ignored": 0.3,
        "loss_scale": -0.5,
        "grad_hidden_scale": 2.0,
    },
}


def make(case, make_head, client, *, bias=True, **options):
    """The head on the backend, and for the oracle."""
    values = case.bias if bias else None
    head = make_head(client, case.weight, values, **options)
    options.pop("trainable", None)
    return head, OracleHead(case.weight, values, **options)


def arguments(case, rng, valid, options):
    """Turns the marks of the tables into arrays."""
    options = dict(options)
    targets = case.targets % valid
    ignored = options.pop("ignored", 0)
    if ignored:
        targets[rng.random(len(targets)) < ignored] = options.get("ignore_index", -100)
    if options.get("class_weights"):
        low, high = (0, 2) if options["class_weights"] is True else options["class_weights"]
        options["class_weights"] = rng.uniform(low, high, valid).astype(np.float32)
    for name in [name for name in ("entropy_factors", "lse_factors") if name in options]:
        options[name] = rng.standard_normal(len(targets)).astype(np.float32)
    if options.get("token_weights") == 0:
        options["token_weights"] = np.zeros(len(targets), np.float32)
    elif options.get("token_weights"):
        # Zero and negative ones too.
        options["token_weights"] = (rng.integers(-2, 4, len(targets)) * 0.5).astype(np.float32)
    return targets, options


@pytest.mark.parametrize("option", CROSS_ENTROPY_OPTIONS)
def test_cross_entropy_option_matches_fp64(backend, make_head, rng, option):
    case, options = Case(rng), dict(CROSS_ENTROPY_OPTIONS[option])
    head, oracle = make(case, make_head, backend.client, **options.pop("head", {}))
    targets, options = arguments(case, rng, oracle.valid_vocab_size or VOCAB_SIZE, options)
    out = head.cross_entropy(case.hidden, targets, micro_batch=0, outputs=OUTPUTS, **options)
    check(out, head, compute(oracle, case.hidden, targets, **options))
    assert out.state == "COMMITTED" and out.form == "DIRECT" and not out.replayed


def test_a_gradient_resolution_is_told_with_its_error(backend, make_head, rng):
    """test_torch_outputs.py has its effect on losses and gradients."""
    case = Case(rng)
    head, _ = make(case, make_head, backend.client)
    exact, dithered = (
        head.jsd(case.hidden, head, case.hidden[::-1].copy(), micro_batch=index, gradient_resolution=resolution)
        for index, resolution in enumerate((0.0, 2.0**-4))
    )
    assert exact.dither is None and 0 < dithered.dither.entry_count <= case.hidden.shape[0] * VOCAB_SIZE
    difference = np.linalg.norm(dithered.grad_hidden - exact.grad_hidden) / np.linalg.norm(exact.grad_hidden)
    # One draw of the gradient of the logits, times a weight whose rows are not alike.
    assert dithered.dither.relative_error / 5 < difference < 5 * dithered.dither.relative_error


JSD_OPTIONS = {
    "default": {},
    "beta_0": {"beta": 0.0},
    "beta_1": {"beta": 1.0},
    "temperatures": {"student_temperature": 2.0, "teacher_temperature": 0.5},
    "hard_loss_with_everything": {
        "hard_loss_weight": 0.6,
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
        "class_weights": True,
        "token_weights": True,
        "student_temperature": 1.7,
        "loss_scale": 0.25,
    },
    "hard_loss_alone": {"hard_loss_weight": 1.0},
    "common_part_of_unequal_vocabularies": {"truncate_to_common": True},
}


@pytest.mark.parametrize("option", JSD_OPTIONS)
def test_jsd_option_matches_fp64(backend, make_head, rng, option):
    case = Case(rng)
    # A teacher with another hidden size.
    teacher_case = Case(rng, hidden_size=29, vocab_size=300 if "truncate_to_common" in JSD_OPTIONS[option] else VOCAB_SIZE)
    head, oracle = make(case, make_head, backend.client)
    teacher, teacher_oracle = make(teacher_case, make_head, backend.client, bias=False, trainable=False)
    targets, options = arguments(case, rng, VOCAB_SIZE, JSD_OPTIONS[option])
    out = head.jsd(case.hidden, teacher, teacher_case.hidden, targets=targets, micro_batch=0, outputs=OUTPUTS, **options)
    expected = compute(oracle, case.hidden, targets, teacher=teacher_oracle, teacher_hidden=teacher_case.hidden, **options)
    check(out, head, expected)


def test_no_valid_token_adds_nothing(backend, make_head, rng):
    case = Case(rng)
    head, _ = make(case, make_head, backend.client)
    out = head.cross_entropy(case.hidden, [-100] * NUM_TOKENS, micro_batch=0, outputs=("token_loss", "argmax"))
    empty = head.cross_entropy(case.hidden[:0], [], micro_batch=1)
    assert out.loss_sum == 0 and out.valid_token_count == 0 and empty.valid_token_count == 0
    assert not out.grad_hidden.any() and out.grad_hidden.shape == case.hidden.shape and empty.grad_hidden.shape == (0, HIDDEN_SIZE)
    assert not out.token_loss.any() and (out.argmax == -1).all()
    assert not head.gradient().any()
    assert head.seal(expected_micro_batches=2).totals.micro_batch_count == 2
