"""Arguments that are wrong are found before anything is sent, with a message that says what was expected and what came."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch
from conftest import HIDDEN_SIZE, NUM_TOKENS, VOCAB_SIZE
from expectations import refused

import headwater
import headwater.torch
from headwater._futures import Executors


@pytest.fixture
def head(client, make_head, weight):
    return make_head(client, weight, valid_vocab_size=30)


@pytest.fixture
def teacher(client, make_head, weight):
    return make_head(client, weight, trainable=False, valid_vocab_size=30)


class Unreachable:
    """A backend that fails the test when anything is sent."""

    def current_epoch(self, name, epoch):
        return epoch  # looked up on this side

    timeout_s = 10.0
    executors = Executors()

    def warn_unconfirmed(self, name):
        pass

    def __getattr__(self, name):
        pytest.fail(f"{name} was called")


@pytest.fixture
def rejects(monkeypatch):
    """A function: the call is refused with the reason, and nothing reaches the backend of the heads."""

    def rejects(reason, call, *heads):
        with monkeypatch.context() as patch, refused(reason, headwater.InvalidArgumentError) as info:
            backend = Unreachable()
            for head in heads:
                patch.setattr(head, "_backend", backend)
            call()
        return info.value

    return rejects


VECTOR = np.ones(NUM_TOKENS, np.float32)
BAD_CROSS_ENTROPY = {
    "one_dimension": ("SHAPE_MISMATCH", {"hidden": np.zeros(HIDDEN_SIZE, np.float32)}),
    "other_width": ("SHAPE_MISMATCH", {"hidden": np.zeros((NUM_TOKENS, HIDDEN_SIZE + 1), np.float32)}),
    "too_few_targets": ("SHAPE_MISMATCH", {"targets": [1, 2, 3]}),
    "target_of_the_padding": ("TARGET_OUT_OF_VOCAB", {"targets": [30] * NUM_TOKENS}),
    "negative_target": ("TARGET_OUT_OF_VOCAB", {"targets": [-1] * NUM_TOKENS}),
    "no_micro_batch": ("MISSING_FIELD", {"micro_batch": None}),
    "negative_micro_batch": ("INVALID_FIELD", {"micro_batch": -1}),
    "fractional_micro_batch": ("INVALID_FIELD", {"micro_batch": 0.5}),
    "negative_step": ("INVALID_FIELD", {"step": -1}),
    "infinite_scale": ("INVALID_FIELD", {"loss_scale": np.inf}),
    "scale_in_words": ("INVALID_FIELD", {"loss_scale": "1"}),
    "several_scales": ("INVALID_FIELD", {"loss_scale": VECTOR}),
    "scale_beyond_fp32": ("INVALID_FIELD", {"loss_scale": 1e39}),
    "scale_beyond_fp64": ("INVALID_FIELD", {"loss_scale": 10**400}),
    "grad_hidden_scale_beyond_fp32": ("INVALID_FIELD", {"grad_hidden_scale": -1e39}),
    "several_micro_batches": ("INVALID_FIELD", {"micro_batch": np.arange(3)}),
    "weights_in_words": ("DATA_TYPE_MISMATCH", {"token_weights": "heavy"}),
    "no_outputs": ("INVALID_FIELD", {"outputs": None}),
    "nested_outputs": ("INVALID_FIELD", {"outputs": [["lse"]]}),
    "nan_weights": ("INVALID_FIELD", {"token_weights": VECTOR * np.nan}),
    "short_weights": ("SHAPE_MISMATCH", {"token_weights": VECTOR[:3]}),
    "infinite_class_weight": ("INVALID_FIELD", {"class_weights": np.full(30, np.inf)}),
    "token_scaling_in_words": ("INVALID_FIELD", {"token_scaling": "yes"}),
    "nan_entropy_factors": ("INVALID_FIELD", {"entropy_factors": VECTOR * np.nan}),
    "short_lse_factors": ("SHAPE_MISMATCH", {"lse_factors": VECTOR[:3]}),
    "factors_and_late_ones": (
        "INVALID_COMBINATION",
        {"commit": "explicit", "late_token_factors": True, "entropy_factors": VECTOR},
    ),
    "class_weights_of_other_size": ("SHAPE_MISMATCH", {"class_weights": np.ones(31)}),
    "commit": ("INVALID_FIELD", {"commit": "later"}),
    "outputs": ("INVALID_FIELD", {"outputs": ("logits",)}),
    "on_mismatch": ("INVALID_FIELD", {"on_mismatch": "last_wins"}),
    "non_finite": ("INVALID_FIELD", {"non_finite": "ignore"}),
    "backward_in_words": ("INVALID_FIELD", {"backward": "no"}),
    "grad_hidden_without_backward": ("INVALID_COMBINATION", {"backward": False, "micro_batch": None, "return_grad_hidden": True}),
    "micro_batch_without_backward": ("INVALID_COMBINATION", {"backward": False}),
    "explicit_without_backward": ("INVALID_COMBINATION", {"backward": False, "micro_batch": None, "commit": "explicit"}),
    "grad_hidden_dtype": ("DATA_TYPE_MISMATCH", {"grad_hidden_dtype": "float64"}),
    "grad_hidden_scale": ("INVALID_FIELD", {"grad_hidden_scale": np.nan}),
    "ignore_index": ("INVALID_FIELD", {"ignore_index": 2**31}),
    "timeout": ("INVALID_FIELD", {"timeout_s": 0}),
}


@pytest.mark.parametrize("case", BAD_CROSS_ENTROPY)
def test_cross_entropy_rejects(rejects, head, rows, case):
    reason, change = BAD_CROSS_ENTROPY[case]
    arguments = {"hidden": rows[0], "targets": rows[1] % 30, "micro_batch": 0, **change}
    rejects(reason, lambda: head.cross_entropy(**arguments), head)


def test_signatures_show_the_options_of_losses():
    for name, positional in (("cross_entropy", 3), ("jsd", 4), ("multi", 3)):
        method, future = getattr(headwater.Head, name), getattr(headwater.Head, f"{name}_future")
        parameters = inspect.signature(method).parameters
        assert inspect.signature(future).parameters == parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        assert kinds == [kinds[0]] * positional + [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - positional)
        assert parameters["commit"].default == "eager" and ("label_smoothing" in parameters) == (name != "multi")
    for loss in (headwater.torch.CrossEntropyLoss, headwater.torch.JSDLoss):
        assert {"head", "weight", "ignore_index", "label_smoothing", "z_loss"} <= set(inspect.signature(loss).parameters)


def test_an_option_that_is_none_is_a_type_error(head, rows):
    with pytest.raises(TypeError, match="nonsense"):
        head.cross_entropy(*rows, nonsense=1)
    with pytest.raises(TypeError, match="nonsense"):
        head.cross_entropy_future(*rows, nonsense=1).result(60)


BAD_JSD = {
    "smoothing_without_hard_loss": ("INVALID_COMBINATION", {"label_smoothing": 0.1}),
    "fewer_teacher_rows": ("SHAPE_MISMATCH", {"teacher_hidden": np.zeros((3, HIDDEN_SIZE), np.float32)}),
    "no_teacher": ("INVALID_FIELD", {"teacher": "teacher"}),
    "truncate_in_words": ("INVALID_FIELD", {"truncate_to_common": "yes"}),
}


@pytest.mark.parametrize("case", BAD_JSD)
def test_jsd_rejects(rejects, head, teacher, rows, case):
    reason, change = BAD_JSD[case]
    arguments = {"teacher": teacher, "teacher_hidden": rows[0], "targets": rows[1] % 30, "micro_batch": 0, **change}
    rejects(reason, lambda: head.jsd(rows[0], **arguments), head, teacher)


def test_jsd_rejects_other_vocabularies_and_clients(head, client, remote, make_head, rows, weight):
    other, stranger = (make_head(of, weight, trainable=False) for of in (client, remote.client))
    with refused("VOCAB_SIZE_MISMATCH", headwater.InvalidArgumentError, "30", "40"):
        head.jsd(rows[0], other, rows[0], micro_batch=0)
    with refused("INVALID_COMBINATION"):
        head.jsd(rows[0], stranger, rows[0], micro_batch=0)


BAD_STEPS = {
    "factor": ("INVALID_FIELD", lambda head: head.commit(micro_batch=0, factor=np.nan)),
    "factor_beyond_fp32": ("INVALID_FIELD", lambda head: head.commit(micro_batch=0, factor=1e39)),
    "learning_rate": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=-1, expected_micro_batches=0)),
    "learning_rate_beyond_fp32": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1e39)),
    "apply_beyond_fp32": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, gradient_factor=1e39)),
    "gradient_beyond_fp32": ("INVALID_FIELD", lambda head: head.gradient(gradient_factor=1e39)),
    "norm_beyond_fp32": ("INVALID_FIELD", lambda head: head.gradient_norm(gradient_factor=1e39)),
    "beta1": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, beta1=1.0)),
    "epsilon_beyond_fp32": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, epsilon=1e60)),
    "weight_decay_beyond_fp32": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, weight_decay=4e38)),
    "max_grad_norm": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, max_grad_norm=-1)),
    "max_grad_norm_nan": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, max_grad_norm=float("nan"))),
    "other_norm": ("INVALID_FIELD", lambda head: head.apply_optimizer_step(learning_rate=1, other_grad_norm_squared=-1)),
    "expected_twice": ("INVALID_FIELD", lambda head: head.seal(expected_micro_batches=[1, 1])),
    "expected_missing": ("INVALID_FIELD", lambda head: head.seal(expected_micro_batches=None)),
    "expected_fraction": ("INVALID_FIELD", lambda head: head.seal(expected_micro_batches=3.0)),
    "expected_fractions": ("INVALID_FIELD", lambda head: head.seal(expected_micro_batches=np.ones(3))),
    "one_token_factor": ("SHAPE_MISMATCH", lambda head: head.commit(micro_batch=0, token_factors=2.0)),
    "nan_token_factors": ("INVALID_FIELD", lambda head: head.commit(micro_batch=0, token_factors=np.full(NUM_TOKENS, np.nan))),
    "token_factor_matrix": ("SHAPE_MISMATCH", lambda head: head.commit(micro_batch=0, token_factors=np.ones((2, 2)))),
    "no_terms": ("INVALID_FIELD", lambda head: head.multi(np.zeros((2, HIDDEN_SIZE), np.float32), None, micro_batch=0)),
    "expected_negative": ("INVALID_FIELD", lambda head: head.seal(expected_micro_batches=-1)),
    "bias_gradient": ("INVALID_COMBINATION", lambda head: head.gradient(bias=True)),
    "bias": ("INVALID_COMBINATION", lambda head: head.bias()),
    "weight_dtype": ("DATA_TYPE_MISMATCH", lambda head: head.weight(dtype="float16")),
    "set_weight_shape": ("SHAPE_MISMATCH", lambda head: head.set_weight(np.zeros((3, 3), np.float32))),
    "set_weight_nothing": ("MISSING_FIELD", lambda head: head.set_weight(None)),
    "set_weight_type": ("DATA_TYPE_MISMATCH", lambda head: head.set_weight(np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float16))),
    "checkpoint_outside": ("INVALID_NAME", lambda head: head.save("../elsewhere")),
    "checkpoint_empty": ("INVALID_NAME", lambda head: head.restore("")),
    "upload_id": ("INVALID_FIELD", lambda head: head.set_weight(np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32), upload_id="")),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_step_and_weight_calls_reject(rejects, head, case):
    reason, call = BAD_STEPS[case]
    rejects(reason, lambda: call(head), head)


@pytest.mark.parametrize(
    "ids", (np.arange(3), torch.arange(3), np.array(3), {0, 1, 2}, range(3)), ids=lambda ids: type(ids).__name__
)
def test_expected_micro_batches_may_be_an_array(head, rows, ids):
    for micro_batch in range(3):
        head.cross_entropy(rows[0], rows[1] % 30, micro_batch=micro_batch)
    assert head.seal(expected_micro_batches=ids).totals.micro_batch_count == 3


def test_gradients_beyond_fp32_are_infinite(head, rows):
    head.cross_entropy(rows[0], rows[1] % 30, micro_batch=0, loss_scale=100.0)
    assert np.isinf(head.gradient(gradient_factor=3e38)).any() and np.isfinite(head.gradient(gradient_factor=1e30)).all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"targets": [1, 2**31] + [0] * (NUM_TOKENS - 2)}, "targets must be in int32, got 2147483648 at index 1"),
        (
            {"token_weights": [1.0, 2.0, np.nan] + [1.0] * (NUM_TOKENS - 3)},
            "token_weights must be finite in float32, got nan at index 2",
        ),
        # Ranges of a loss's options are the server's to refuse.
        ({"z_loss": 4e38}, "cross_entropy.z_loss: expected a number >= 0 that is finite in float32, got 4e+38"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(head, rows, arguments, told):
    with refused("INVALID_FIELD", headwater.InvalidArgumentError, told):
        head.cross_entropy(rows[0], micro_batch=0, **{"targets": rows[1] % 30, **arguments})


def test_torch_takes_no_factor_beyond_fp32(client, make_head, weight):
    head = make_head(client, weight, optimizer=headwater.SGD())
    for made, name in (
        (headwater.torch.CrossEntropyLoss, "loss_scale"),
        (headwater.torch.CrossEntropyLoss, "grad_hidden_scale"),
        (headwater.torch.TrainingLoop, "gradient_factor"),
    ):
        told = f"{name} must be a number", "that is finite in float32, got 1e+39"
        with refused("INVALID_FIELD", headwater.InvalidArgumentError, *told):
            made(head, **{name: 1e39})


BAD_HEADS = {
    "name": ("INVALID_NAME", {"name": "Upper Case"}),
    "weight_type": ("DATA_TYPE_MISMATCH", {"weight": np.zeros((4, 4))}),
    "uint16": ("DATA_TYPE_MISMATCH", {"weight": np.zeros((4, 4), np.uint16)}),
    "weight_shape": ("SHAPE_MISMATCH", {"weight": np.zeros(4, np.float32)}),
    "bias_shape": ("SHAPE_MISMATCH", {"bias": np.zeros(3, np.float32)}),
    "softcap": ("INVALID_FIELD", {"softcap": 0}),
    "logit_scale": ("INVALID_FIELD", {"logit_scale": 0}),
    "valid_vocab_size": ("INVALID_FIELD", {"valid_vocab_size": 5}),
    "optimizer": ("INVALID_FIELD", {"optimizer": "adam"}),
    "optimizer_of_a_frozen_head": ("INVALID_COMBINATION", {"optimizer": headwater.SGD(), "trainable": False}),
    "dtype": ("DATA_TYPE_MISMATCH", {"dtype": "float64"}),
    "sizes_without_dtype": ("INVALID_FIELD", {"weight": (4, 4)}),
    "initial_step": ("INVALID_FIELD", {"initial_step": -1}),
    "parallelism": ("INVALID_FIELD", {"parallelism": "columns"}),
    "int8_teacher_of_float32": ("INVALID_COMBINATION", {"int8_teacher": True, "trainable": False}),
    "if_exists": ("INVALID_FIELD", {"if_exists": "overwrite"}),
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_create_head_rejects(case):
    reason, change = BAD_HEADS[case]
    arguments = {"name": "head", "weight": np.zeros((4, 4), np.float32), **change}
    with refused(reason, headwater.InvalidArgumentError):
        headwater.Client(Unreachable()).create_head(**arguments)


def test_a_layer_in_the_place_of_its_weight_is_called_by_its_name(head, rows):
    layer = torch.nn.Linear(4, 4)
    for told, call in (
        ("pass its .weight", lambda: headwater.Client(Unreachable()).create_head("head", layer)),
        ("", lambda: head.set_weight(layer)),
        ("", lambda: head.cross_entropy(layer, rows[1], micro_batch=0)),
        ("", lambda: head.cross_entropy(rows[0], layer, micro_batch=0)),
    ):
        with refused("DATA_TYPE_MISMATCH", headwater.InvalidArgumentError, "got Linear", told):
            call()


# Values that a conversion to what is sent would change or drop, by the kind of argument; and the kinds that every argument refuses.
def _masked(values):
    mask = np.zeros(np.shape(values), bool)
    mask[0] = True
    return np.ma.masked_array(values, mask=mask)


EVERYWHERE = {
    "sparse": lambda x: torch.as_tensor(np.asarray(x)).to_sparse(),
    "meta": lambda x: torch.as_tensor(np.asarray(x)).to("meta"),
    "masked": _masked,
    "complex": lambda x: np.asarray(x) + 1j,
    "complex_tensor": lambda x: torch.as_tensor(np.asarray(x)).to(torch.complex64) * 1j,
    "words": lambda x: np.asarray(x).astype(str),
    "objects": lambda x: np.asarray(x).astype(object),
    "dates": lambda x: np.asarray(x).astype(np.int64).astype("datetime64[s]"),
    "ragged": lambda x: [*np.asarray(x).tolist(), [1, [2]]],
    "subclass": lambda x: Wrapped(torch.as_tensor(np.asarray(x))),
}
CHANGED = {
    "rows": {
        "float64": np.float64,
        "int32": np.int32,
        "bool": np.bool_,
        "big_endian": ">f4",
        "uint16": np.uint16,
        "float64_tensor": lambda x: torch.from_numpy(x).double(),
    },
    "integers": {
        "fractions": lambda x: x + 0.5,
        "whole_floats": np.float32,
        "floats_of_bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
        "nan": lambda x: np.full(len(x), np.nan),
        "bool": np.bool_,
        "beyond_int32": lambda x: x + 2**32,  # modulo 2^32 as before
        "beyond_int64": lambda x: x.astype(np.uint64) + np.uint64(2**63),
        "big_endian_beyond_int32": lambda x: (x + 2**32).astype(">i8"),
    },
    "reals": {
        "beyond_float32": lambda x: x.astype(np.float64) * 1e39,
        "tensor_beyond_float32": lambda x: torch.from_numpy(x).double() * 1e39,
        "integers_beyond_fp64": lambda x: [10**400] * len(x),
        "none": lambda x: [None] * len(x),
    },
}


class Wrapped(torch.Tensor):
    """A tensor that keeps its elements elsewhere, as quantizers' do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        inner = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Wrapped) else x for x in arguments]
        made = function(*inner, **(options or {}))
        return Wrapped(made) if isinstance(made, torch.Tensor) else made


FLOATS = np.linspace(1, 2, NUM_TOKENS * HIDDEN_SIZE).reshape(NUM_TOKENS, HIDDEN_SIZE).astype(np.float32)
WEIGHT = np.linspace(1, 2, VOCAB_SIZE * HIDDEN_SIZE).reshape(VOCAB_SIZE, HIDDEN_SIZE).astype(np.float32)
IDS = np.arange(NUM_TOKENS)


def stream(head, *rows):
    return headwater.Client(head._backend).teacher("key", total_rows=NUM_TOKENS).stream(*rows)


# By name: the kind, a value that is right, and a call that takes it.
ARRAYS = {
    "hidden": ("rows", FLOATS, lambda head, x: head.cross_entropy(x, IDS, backward=False)),
    "multi": ("rows", FLOATS, lambda head, x: head.multi(x, [headwater.CrossEntropy(IDS)], backward=False)),
    "grad_hidden_out": (
        "rows",
        np.zeros_like(FLOATS),
        lambda head, x: head.cross_entropy(FLOATS, IDS, micro_batch=0, grad_hidden_out=x),
    ),
    "teacher_hidden": ("rows", FLOATS, lambda head, x: head.jsd(FLOATS, head, x, backward=False)),
    "teacher_rows": ("rows", FLOATS, lambda head, x: stream(head, x)),
    "gradient": ("rows", FLOATS, lambda head, x: head.add_gradient(x, micro_batch=0)),
    "weight": ("rows", WEIGHT, lambda head, x: headwater.Client(head._backend).create_head("converted", x)),
    "set_weight": ("rows", WEIGHT, lambda head, x: head.set_weight(x)),
    "targets": ("integers", IDS, lambda head, x: head.cross_entropy(FLOATS, x, backward=False)),
    "row_indices": ("integers", IDS, lambda head, x: stream(head, FLOATS, x)),
    "joined_row_indices": (
        "integers",
        IDS,
        lambda head, x: head.jsd(FLOATS, head, headwater.JOIN, join_key="k", total_rows=99, row_indices=x, backward=False),
    ),
    "token_weights": ("reals", VECTOR, lambda head, x: head.cross_entropy(FLOATS, IDS, token_weights=x, backward=False)),
    "class_weights": (
        "reals",
        np.ones(30, np.float32),
        lambda head, x: head.cross_entropy(FLOATS, IDS, class_weights=x, backward=False),
    ),
    "token_factors": ("reals", VECTOR, lambda head, x: head.commit(micro_batch=0, token_factors=x)),
    "bfloat16": ("reals", FLOATS[0], lambda head, x: headwater.BFloat16.from_float32(x)),
}
CONVERSIONS = [
    (name, change)
    for name, (kind, _, _) in ARRAYS.items()
    for change in {**EVERYWHERE, **CHANGED[kind]}
    if not (name == "bfloat16" and "beyond_float32" in change)  # it rounds to infinity, as documented
]


def converted(right, change):
    """What a function makes of a value, or the value in another type."""
    return right.astype(change) if isinstance(change, (str, type)) else change(right)


@pytest.mark.parametrize(("name", "change"), CONVERSIONS)
def test_no_conversion_changes_or_drops_a_value(rejects, head, name, change):
    """What was passed is read as it is, or refused before anything is sent."""
    kind, right, call = ARRAYS[name]
    value = converted(right.copy(), {**EVERYWHERE, **CHANGED[kind]}[change])
    beyond = any(text in change for text in ("ragged", "beyond_float32", "beyond_int"))
    assert rejects("INVALID_FIELD" if beyond else "DATA_TYPE_MISMATCH", lambda: call(head, value), head).metadata["field"]


KEPT = {
    "targets": (">i8", "<u8", np.uint8, lambda x: torch.from_numpy(x).to(torch.uint8), lambda x: [*x]),
    "token_weights": (np.bool_, np.float64, ">f8", np.float16, lambda x: torch.from_numpy(x).double(), lambda x: [*x]),
    "hidden": (lambda x: torch.from_numpy(x * 1j).conj().imag.neg(), np.asfortranarray),
}


@pytest.mark.parametrize("name", KEPT)
def test_conversions_that_keep_the_values_are_made(head, name):
    _, right, call = ARRAYS[name]
    wanted = call(head, right).loss_sum
    for change in KEPT[name]:
        assert call(head, converted(right, change)).loss_sum == wanted, change


LOSS_ARGUMENTS = {
    "hidden": lambda loss, x: loss(x, torch.from_numpy(IDS)),
    "targets": lambda loss, x: loss(torch.from_numpy(FLOATS), x),
    "token_weights": lambda loss, x: loss(torch.from_numpy(FLOATS), IDS, token_weights=x),
}


@pytest.mark.parametrize("name", LOSS_ARGUMENTS)
def test_torch_losses_refuse_what_would_be_dropped(head, name):
    right = {"hidden": FLOATS, "targets": IDS, "token_weights": VECTOR}[name]
    loss = headwater.torch.CrossEntropyLoss(head)
    for change in ("sparse", "meta", "subclass", *(() if name == "hidden" else ("masked", "objects"))):
        with pytest.raises(headwater.InvalidArgumentError) as info, torch.no_grad():
            LOSS_ARGUMENTS[name](loss, EVERYWHERE[change](right))
        assert name in str(info.value), change
    if name != "hidden":
        with torch.no_grad():
            for same in (right, right.astype(right.dtype.newbyteorder(">")), np.ma.filled(right)):
                assert LOSS_ARGUMENTS[name](loss, same) == loss(torch.from_numpy(FLOATS), torch.from_numpy(IDS))


def test_weights_that_the_storage_type_has_no_finite_value_for_are_refused(head):
    for dtype, largest in (("float16", 65520.0), ("bfloat16", 3.3961776e38)):
        weight = np.ones((4, 4), np.float32)
        for value in (largest, -largest):
            weight[1, 2] = value
            with refused("INVALID_FIELD", headwater.InvalidArgumentError, f"finite in {dtype}"):
                headwater.Client(Unreachable()).create_head("head", weight, dtype=dtype)
        weight[1, 2] = np.nextafter(np.float32(largest), np.float32(0))
        made = headwater.Client(head._backend).create_head(f"largest-{dtype}", weight, dtype=dtype)
        assert np.isfinite(made.weight(dtype="float32")).all()
        made.delete()


@pytest.mark.parametrize(
    "ids",
    (np.array([True, False]), torch.tensor([True]), np.bool_(True), _masked(np.arange(2)), np.array(["0"]), torch.ones(1)),
    ids=str,
)
def test_expected_micro_batches_are_ids_and_no_mask(rejects, head, ids):
    rejects("INVALID_FIELD", lambda: head.seal(expected_micro_batches=ids), head)


def test_scalars_of_numpy_are_what_they_are():
    for value in (np.str_("1"), np.complex64(1 + 2j), np.bool_(True), np.datetime64(1, "s"), np.array(["1"]), torch.tensor(True)):
        with refused("INVALID_FIELD", headwater.InvalidArgumentError):
            headwater.AdamW(weight_decay=value)
    for options in ({"trainable": "no"}, {"trainable": 1}):
        with refused("INVALID_FIELD", headwater.InvalidArgumentError):
            headwater.Client(Unreachable()).create_head("head", WEIGHT, **options)
    with refused("INVALID_FIELD", headwater.InvalidArgumentError):
        headwater.SGD(momentum=0.5, nesterov="no")


def test_errors_are_named_as_callers_name_them():
    assert repr(headwater.StepMismatchError) == "<class 'headwater.StepMismatchError'>"
    error = pickle.loads(pickle.dumps(headwater.NotFoundError("gone")))
    assert type(error) is headwater.NotFoundError


def test_adamw_says_what_settings_of_pytorchs_are_called_here():
    for name, here in (("betas", "beta1= and beta2="), ("eps", "epsilon=")):
        with pytest.raises(TypeError, match=f"takes no {name}=, which is PyTorch's name: pass {here}"):
            headwater.AdamW(**{name: 0.5})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        headwater.AdamW(nonsense=1)


@pytest.mark.parametrize("optimizer", (headwater.AdamW, headwater.SGD), ids=lambda optimizer: optimizer.__name__)
def test_optimizers_say_where_the_learning_rate_goes(optimizer):
    for name in ("lr", "learning_rate"):
        with pytest.raises(TypeError, match=f"takes no {name}=.*learning_rate= of Head.apply_optimizer_step"):
            optimizer(**{name: 1e-3})
    made = optimizer(weight_decay=0.5)
    assert dataclasses.replace(made) == copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


def test_optimizer_settings_are_checked():
    for bad in (
        {"beta1": 1},
        {"beta2": -0.1},
        {"epsilon": -1},
        {"epsilon": 1e60},
        {"weight_decay": np.inf},
        {"weight_decay": -1e-60},
    ):
        with refused("INVALID_FIELD") as info:
            headwater.AdamW(**bad)
        assert info.value.metadata["field"] in bad
    for bad in ({"momentum": 1}, {"momentum": np.nan}, {"weight_decay": -1}):
        with refused("INVALID_FIELD"):
            headwater.SGD(**bad)
    headwater.AdamW(epsilon=1e-60, weight_decay=3.4028235677973362e38)  # what rounds to 0 and to the largest float32
    with refused("INVALID_COMBINATION"):
        headwater.SGD(nesterov=True)


def test_frozen_heads_have_no_steps(teacher, rows):
    with refused("INVALID_COMBINATION"):
        teacher.cross_entropy(rows[0], rows[1] % 30, micro_batch=0)
    with refused("INVALID_COMBINATION"):
        teacher.seal(expected_micro_batches=0)


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-8, -0.0, np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    back = headwater.BFloat16.from_float32(values).to_float32()
    np.testing.assert_array_equal(back[:7], np.array([1.0, 1.0, 1 + 2**-7, 1.0, -0.0, np.inf, -np.inf], np.float32))
    assert np.isnan(back[7]) and np.isinf(back[8])
    assert np.signbit(back[4])
    with refused("DATA_TYPE_MISMATCH"):
        headwater.BFloat16(np.zeros(3, np.int16))
