"""Every option of both losses against fp64, through the whole stack."""

import numpy as np
import pytest
from loss_oracle import (
    FP32_GRADIENT_TOLERANCE,
    FP32_LOSS_TOLERANCE,
    FP32_TOKEN_TOLERANCE,
    PLAIN_FACTOR,
    OracleHead,
    check_number,
    check_tensor,
    compute,
    error,
    round_to,
    stored,
)

OUTPUTS = ("token_loss", "lse", "target_log_probability", "entropy", "argmax", "mean_logits", "log_sum_sq_probs")
# Odd and prime, so that nothing is aligned and three shards are uneven.
NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 37, 61, 509


class Case:
    """A head, rows, and the same in a form that the API takes."""

    def __init__(
        self, rng, *, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_tokens=NUM_TOKENS, data_type="float32", spread=1.0
    ):
        self.data_type = data_type

        def values(*shape, scale=1.0):
            return round_to((rng.standard_normal(shape) * scale).astype(np.float32), data_type)

        self.weight = values(vocab_size, hidden_size, scale=spread * 3 / np.sqrt(hidden_size))
        self.bias = values(vocab_size, scale=0.5)
        self.hidden = values(num_tokens, hidden_size)
        self.targets = rng.integers(0, vocab_size, num_tokens)
        # Half of the rows are peaked: a flat softmax hides most mistakes.
        peaked = np.arange(0, num_tokens, 2)
        self.hidden[peaked] = round_to(self.weight[self.targets[peaked]] * 1.5 / spread**2, data_type)

    def stored(self, name):
        return stored(getattr(self, name), self.data_type)


def check(out, head, expected, plain=None, *, has_bias):
    """Everything that came back, and what the step has accumulated."""

    def tolerance(name, floor):
        if plain is None:
            return floor
        return PLAIN_FACTOR * error(getattr(plain, name), getattr(expected, name)) + floor

    assert out.valid_token_count == expected.valid_token_count
    check_number("token_weight_sum", out.token_weight_sum, expected.token_weight_sum, FP32_LOSS_TOLERANCE)
    check_number("target_weight_sum", out.target_weight_sum, expected.target_weight_sum, FP32_LOSS_TOLERANCE)
    for name in ("loss_sum", "soft_loss_sum", "hard_loss_sum", "z_loss_sum"):
        check_number(name, getattr(out, name), getattr(expected, name), tolerance(name, FP32_LOSS_TOLERANCE))
    check_tensor("grad_hidden", out.grad_hidden, expected.grad_hidden, tolerance("grad_hidden", FP32_GRADIENT_TOLERANCE))
    if head.spec.trainable:
        gradient = head.gradient(bias=True) if has_bias else (head.gradient(),)
        for name, actual in zip(("grad_weight", "grad_bias"), gradient, strict=False):
            check_tensor(name, actual, getattr(expected, name), tolerance(name, FP32_GRADIENT_TOLERANCE))
    absolute = FP32_TOKEN_TOLERANCE * max(1, expected.max_logit)
    np.testing.assert_allclose(out.token_loss, expected.token_loss, rtol=0, atol=absolute)
    for name, values in expected.outputs.items():
        if name == "argmax":
            np.testing.assert_array_equal(out.argmax, values)
        else:
            np.testing.assert_allclose(getattr(out, name), values, rtol=1e-6, atol=absolute, err_msg=name)
    assert out.non_finite_row_count == 0


HEAD_OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 15.0},
    "logit_scale": {"logit_scale": 0.25},
    "padded_vocabulary": {"valid_vocab_size": 500, "bias": True},
    "all_of_them": {"softcap": 20.0, "logit_scale": 1.5, "valid_vocab_size": 401, "bias": True},
}
CROSS_ENTROPY_OPTIONS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3},
    "class_weights": {"class_weights": True},
    "class_weights_and_smoothing": {"class_weights": True, "label_smoothing": 0.2},
    "token_weights": {"token_weights": True},
    "ignored_few": {"ignored": 0.1},
    "ignored_many": {"ignored": 0.7},
    "ignore_index_in_vocabulary": {"ignored": 0.3, "ignore_index": 7},
    "scales": {"loss_scale": 1 / 37, "grad_hidden_scale": 2.0},
    "temperature": {"temperature": 0.7},
    "token_scaling": {"token_scaling": True, "z_loss": 1e-3},
    "all_mass_smoothed": {"label_smoothing": 1.0},
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
    },
}


def make(case, rng, make_head, client, *, bias=False, **options):
    """The head on the backend, and for the oracle."""
    values = case.bias if bias else None
    head = make_head(client, case.stored("weight"), case.stored("bias") if bias else None, **options)
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
    case = Case(rng)
    head, oracle = make(case, rng, make_head, backend.client, bias=True)
    targets, options = arguments(case, rng, VOCAB_SIZE, CROSS_ENTROPY_OPTIONS[option])
    out = head.cross_entropy(case.hidden, targets, micro_batch=0, outputs=OUTPUTS, **options)
    check(out, head, compute(oracle, case.hidden, targets, **options), has_bias=True)
    assert out.state == "COMMITTED" and out.form == "DIRECT" and not out.replayed


@pytest.mark.parametrize("loss", ("cross_entropy", "jsd"))
def test_a_gradient_resolution_changes_gradients_alone(backend, make_head, rng, loss):
    case = Case(rng)
    head, _ = make(case, rng, make_head, backend.client)

    def compute_loss(micro_batch, **options):
        if loss == "cross_entropy":
            return head.cross_entropy(case.hidden, case.targets, micro_batch=micro_batch, outputs=("token_loss", "lse"), **options)
        teacher = case.hidden[::-1].copy()
        return head.jsd(case.hidden, head, teacher, micro_batch=micro_batch, outputs=("token_loss", "lse"), **options)

    exact = compute_loss(0)
    dithered = compute_loss(1, gradient_resolution=2.0**-4)
    assert exact.dither is None and dithered.loss_sum == exact.loss_sum
    np.testing.assert_array_equal(dithered.token_loss, exact.token_loss)
    np.testing.assert_array_equal(dithered.lse, exact.lse)
    assert 0 < dithered.dither.entry_count <= case.hidden.shape[0] * VOCAB_SIZE
    difference = np.linalg.norm(dithered.grad_hidden - exact.grad_hidden) / np.linalg.norm(exact.grad_hidden)
    # One draw of the gradient of the logits, times a weight whose rows are not alike.
    assert dithered.dither.relative_error / 5 < difference < 5 * dithered.dither.relative_error


@pytest.mark.parametrize("option", HEAD_OPTIONS)
def test_head_option_matches_fp64(backend, make_head, rng, option):
    case = Case(rng)
    head, oracle = make(case, rng, make_head, backend.client, **HEAD_OPTIONS[option])
    targets, options = arguments(
        case, rng, oracle.valid_vocab_size or VOCAB_SIZE, {"label_smoothing": 0.1, "z_loss": 1e-3, "ignored": 0.2}
    )
    out = head.cross_entropy(case.hidden, targets, micro_batch=0, outputs=OUTPUTS, **options)
    check(out, head, compute(oracle, case.hidden, targets, **options), has_bias=oracle.bias is not None)


@pytest.mark.parametrize("num_tokens", (1, 2))
@pytest.mark.parametrize("target", (0, VOCAB_SIZE - 1))
def test_targets_on_the_edges_match_fp64(backend, make_head, rng, num_tokens, target):
    case = Case(rng, num_tokens=num_tokens)
    head, oracle = make(case, rng, make_head, backend.client)
    targets = [target] * num_tokens
    out = head.cross_entropy(case.hidden, targets, micro_batch=0, outputs=OUTPUTS)
    check(out, head, compute(oracle, case.hidden, targets), has_bias=False)


def test_a_real_vocabulary_matches_fp64(backends, make_head, rng):
    case = Case(rng, vocab_size=50257, hidden_size=33, num_tokens=11)
    head, oracle = make(case, rng, make_head, backends("remote-3").client)
    out = head.cross_entropy(case.hidden, case.targets, micro_batch=0, outputs=OUTPUTS)
    check(out, head, compute(oracle, case.hidden, case.targets), has_bias=False)


def test_confident_and_enormous_logits_match_fp64(backend, make_head, rng):
    case = Case(rng, spread=1.0)
    # Row 0: p of the target is about 1 - 1e-9; the others: |logits| up to 600.
    case.weight[:] *= 0.05
    case.hidden[1:] *= 600 / np.abs(case.hidden[1:] @ case.weight.T).max()
    case.weight[case.targets[0]] = 0
    case.weight[case.targets[0], 0] = 1
    case.hidden[0] = 0
    case.hidden[0, 0] = 27.0
    head, oracle = make(case, rng, make_head, backend.client)
    expected = compute(oracle, case.hidden, case.targets)
    assert 0 < expected.token_loss[0] < 1e-6 and expected.max_logit > 100
    out = head.cross_entropy(case.hidden, case.targets, micro_batch=0, outputs=OUTPUTS)
    check(out, head, expected, has_bias=False)
    check_number("loss of the confident row", out.token_loss[0], expected.token_loss[0], 1e-4)


@pytest.mark.parametrize("data_type", ("bfloat16", "float16"))
@pytest.mark.parametrize("loss", ("cross_entropy", "jsd"))
def test_16_bit_is_as_good_as_the_plain_computation(backend, make_head, rng, data_type, loss):
    case = Case(rng, data_type=data_type, num_tokens=131)
    head, oracle = make(case, rng, make_head, backend.client, bias=True)
    if loss == "cross_entropy":
        options = {"label_smoothing": 0.1}
        out = head.cross_entropy(case.stored("hidden"), case.targets, micro_batch=0, outputs=OUTPUTS, **options)
    else:
        teacher_case = Case(rng, data_type=data_type, num_tokens=131)
        teacher, teacher_oracle = make(teacher_case, rng, make_head, backend.client, trainable=False)
        options = {"teacher": teacher_oracle, "teacher_hidden": teacher_case.hidden, "beta": 0.3}
        out = head.jsd(
            case.stored("hidden"),
            teacher,
            teacher_case.stored("hidden"),
            targets=case.targets,
            beta=0.3,
            micro_batch=0,
            outputs=OUTPUTS,
        )
    expected = compute(oracle, case.hidden, case.targets, **options)
    plain = compute(oracle, case.hidden, case.targets, **options, dtype=np.float32, grad_logits_type=data_type)
    plain.grad_hidden = round_to(plain.grad_hidden, data_type)
    check(out, head, expected, plain, has_bias=True)


JSD_OPTIONS = {
    "default": {},
    "beta_0": {"beta": 0.0},
    "beta_1": {"beta": 1.0},
    "beta_small": {"beta": 0.01},
    "temperatures": {"student_temperature": 2.0, "teacher_temperature": 0.5},
    "temperature_at_beta_0": {"beta": 0.0, "student_temperature": 3.0, "teacher_temperature": 3.0},
    "ignored": {"ignored": 0.4},
    "token_weights": {"token_weights": True},
    "hard_loss": {"hard_loss_weight": 0.3, "ignored": 0.2},
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
}


@pytest.mark.parametrize("option", JSD_OPTIONS)
def test_jsd_option_matches_fp64(backend, make_head, rng, option):
    case = Case(rng)
    # A teacher with another hidden size.
    teacher_case = Case(rng, hidden_size=29)
    head, oracle = make(case, rng, make_head, backend.client, bias=True)
    teacher, teacher_oracle = make(teacher_case, rng, make_head, backend.client, trainable=False)
    targets, options = arguments(case, rng, VOCAB_SIZE, JSD_OPTIONS[option])
    out = head.jsd(case.hidden, teacher, teacher_case.hidden, targets=targets, micro_batch=0, outputs=OUTPUTS, **options)
    expected = compute(oracle, case.hidden, targets, teacher=teacher_oracle, teacher_hidden=teacher_case.hidden, **options)
    check(out, head, expected, has_bias=True)


def test_jsd_of_a_nearly_distilled_student_matches_fp64(backend, make_head, rng):
    case = Case(rng)
    teacher_hidden = case.hidden + (0.003 * rng.standard_normal(case.hidden.shape)).astype(np.float32)
    head, oracle = make(case, rng, make_head, backend.client)
    teacher = make_head(backend.client, case.weight, trainable=False)
    out = head.jsd(case.hidden, teacher, teacher_hidden, micro_batch=0)
    expected = compute(oracle, case.hidden, teacher=oracle, teacher_hidden=teacher_hidden)
    # The divergence is about 1e-5 of the logits' square: what fp32 products leave of it bounds what can be asked.
    plain = compute(oracle, case.hidden, teacher=oracle, teacher_hidden=teacher_hidden, dtype=np.float32)
    floor = 2 * abs(plain.loss_sum / expected.loss_sum - 1)
    check_number("loss_sum", out.loss_sum, expected.loss_sum, floor + 1e-4)
    tolerance = 2 * error(plain.grad_weight, expected.grad_weight) + FP32_GRADIENT_TOLERANCE
    check_tensor("grad_weight", head.gradient(), expected.grad_weight, tolerance)


def test_jsd_of_far_apart_distributions_matches_fp64(backend, make_head, rng):
    # Both log-probabilities are below -120 in most columns: the mixture underflows outside of log space.
    case = Case(rng, vocab_size=64)
    case.hidden *= 300 / np.abs(case.hidden @ case.weight.T).max()
    teacher_hidden = -case.hidden
    head, oracle = make(case, rng, make_head, backend.client)
    teacher = make_head(backend.client, case.weight, trainable=False)
    out = head.jsd(case.hidden, teacher, teacher_hidden, micro_batch=0)
    expected = compute(oracle, case.hidden, teacher=oracle, teacher_hidden=teacher_hidden)
    check_number("loss_sum", out.loss_sum, expected.loss_sum, FP32_LOSS_TOLERANCE)
    plain = compute(oracle, case.hidden, teacher=oracle, teacher_hidden=teacher_hidden, dtype=np.float32)
    tolerance = 2 * error(plain.grad_weight, expected.grad_weight) + FP32_GRADIENT_TOLERANCE
    check_tensor("grad_weight", head.gradient(), expected.grad_weight, tolerance)


def test_unequal_vocabularies_are_compared_over_the_common_part(backend, make_head, rng):
    case, teacher_case = Case(rng), Case(rng, vocab_size=300)
    head, oracle = make(case, rng, make_head, backend.client)
    teacher, teacher_oracle = make(teacher_case, rng, make_head, backend.client, trainable=False)
    out = head.jsd(case.hidden, teacher, teacher_case.hidden, micro_batch=0, truncate_to_common=True)
    expected = compute(oracle, case.hidden, teacher=teacher_oracle, teacher_hidden=teacher_case.hidden, truncate_to_common=True)
    check_number("loss_sum", out.loss_sum, expected.loss_sum, FP32_LOSS_TOLERANCE)
    check_tensor("grad_weight", head.gradient(), expected.grad_weight, FP32_GRADIENT_TOLERANCE)


def test_no_valid_token_adds_nothing(backend, make_head, rng):
    case = Case(rng)
    head, _ = make(case, rng, make_head, backend.client)
    out = head.cross_entropy(case.hidden, [-100] * NUM_TOKENS, micro_batch=0, outputs=("token_loss", "argmax"))
    empty = head.cross_entropy(case.hidden[:0], [], micro_batch=1)
    assert out.loss_sum == 0 and out.valid_token_count == 0 and empty.valid_token_count == 0
    assert not out.grad_hidden.any() and out.grad_hidden.shape == case.hidden.shape and empty.grad_hidden.shape == (0, HIDDEN_SIZE)
    assert not out.token_loss.any() and (out.argmax == -1).all()
    assert not head.gradient().any()
    assert head.seal(expected_micro_batches=2).totals.micro_batch_count == 2


def test_frozen_head_and_forward_only_add_nothing(backend, make_head, rng):
    case = Case(rng)
    frozen, oracle = make(case, rng, make_head, backend.client, trainable=False)
    expected = compute(oracle, case.hidden, case.targets)
    out = frozen.cross_entropy(case.hidden, case.targets, outputs=OUTPUTS)
    check(out, frozen, expected, has_bias=False)
    assert out.state == "UNSPECIFIED" and out.step is None
    head, _ = make(case, rng, make_head, backend.client)
    forward = head.cross_entropy(case.hidden, case.targets, backward=False)
    check_number("loss_sum", forward.loss_sum, expected.loss_sum, FP32_LOSS_TOLERANCE)
    assert forward.grad_hidden is None and not head.gradient().any()


def test_frozen_hidden_states_still_train_the_head(one_shard, make_head, rng):
    case = Case(rng)
    head, oracle = make(case, rng, make_head, one_shard.client)
    out = head.cross_entropy(case.hidden, case.targets, micro_batch=0, return_grad_hidden=False)
    assert out.grad_hidden is None
    check_tensor("grad_weight", head.gradient(), compute(oracle, case.hidden, case.targets).grad_weight, FP32_GRADIENT_TOLERANCE)


@pytest.mark.parametrize("count", (2, 5))
def test_many_micro_batches_equal_one_big_one(backend, make_head, rng, count):
    case = Case(rng)
    head, oracle = make(case, rng, make_head, backend.client, bias=True)
    expected = compute(oracle, case.hidden, case.targets)
    total = 0.0
    for index, rows in enumerate(np.array_split(np.arange(NUM_TOKENS), count)):
        total += head.cross_entropy(case.hidden[rows], case.targets[rows], micro_batch=index).loss_sum
    check_number("loss_sum", total, expected.loss_sum, FP32_LOSS_TOLERANCE)
    weight, bias = head.gradient(bias=True)
    check_tensor("grad_weight", weight, expected.grad_weight, FP32_GRADIENT_TOLERANCE)
    check_tensor("grad_bias", bias, expected.grad_bias, FP32_GRADIENT_TOLERANCE)
    assert abs(head.gradient_norm() / np.sqrt((weight**2).sum(dtype=float) + (bias**2).sum(dtype=float)) - 1) <= 1e-6


def test_the_same_steps_give_the_same_bits(backend, make_head, rng):
    case = Case(rng)
    results = []
    for _ in range(2):
        head, _ = make(case, rng, make_head, backend.client)
        outs = [head.cross_entropy(case.hidden, case.targets, micro_batch=index) for index in range(2)]
        results.append((outs[0].loss_sum, outs[0].grad_hidden.tobytes(), head.gradient().tobytes()))
    assert results[0] == results[1]


def test_all_backends_agree(backends, make_head, rng):
    case = Case(rng)
    gradients = []
    for kind in ("remote-1", "local-1"):
        head, _ = make(case, rng, make_head, backends(kind).client)
        head.cross_entropy(case.hidden, case.targets, micro_batch=0)
        gradients.append(head.gradient())
    # One engine, one plan: not a bit differs, whichever way the rows went.
    np.testing.assert_array_equal(gradients[0], gradients[1])
