"""Between the package's plain data and the wire's messages. No calls are made here."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, TypeVar

import numpy as np

from headwater import _arrays, _wire
from headwater._errors import invalid_argument
from headwater._loss._requests import (
    FACTORS,
    TOKEN_OUTPUTS,
    ComputeRequest,
    CrossEntropyFields,
    Expected,
    JoinedRows,
    JsdFields,
    StepKey,
    SubmitOptions,
    TeacherRows,
    TermRequest,
)
from headwater._types import (
    PARALLELISMS,
    SGD,
    AdamW,
    CheckpointInfo,
    GradientDither,
    HeadInfo,
    HeadSpec,
    MemoryPlan,
    MicroBatchState,
    Step,
    StepTotals,
    TermResult,
    Timing,
    VocabShard,
    combine_terms,
    result_of,
)

Data = TypeVar("Data")

# Fields of a HeadSpec that are equal in its message.
_PLAIN_FIELDS = ("vocab_size", "hidden_size", "has_bias", "trainable", "staging_slots", "initial_step", "int8_teacher")

# Weight and bias, with the wire's numbers.
TENSORS = {"weight": _wire.HEAD_TENSOR_WEIGHT, "bias": _wire.HEAD_TENSOR_BIAS}
_OUTPUTS = {name: getattr(_wire, f"TOKEN_OUTPUT_{name.removeprefix('token_').upper()}") for name in TOKEN_OUTPUTS}


def seconds_of(message: Any) -> float:
    """Seconds of a Duration or Timestamp."""
    return message.seconds + message.nanos * 1e-9


def head_step(key: StepKey) -> Any:
    return _wire.HeadStep(head=key.head, head_epoch=key.epoch, step=key.step)


@functools.cache
def _fields(cls: type, message: type) -> list[Any]:
    """The fields of a class of messages that a dataclass has, too."""
    names = {field.name for field in dataclasses.fields(cls)}
    return [field for field in message.DESCRIPTOR.fields if field.name in names]  # type: ignore[attr-defined]


def read(cls: type[Data], message: Any, **given: Any) -> Data:
    """A dataclass of the given values, and of the message's fields of the same names; enums as words, unset ones by their
    default."""
    for field in _fields(cls, type(message)):
        name = field.name
        if name not in given and (not field.has_presence or message.HasField(name)):
            value = getattr(message, name)
            given[name] = value if field.enum_type is None else _wire.value_name(field.enum_type.name, value)
    return cls(**given)


def head_spec_message(spec: HeadSpec) -> Any:
    """A HeadSpec; None values stay unset."""
    optimizer = None
    if isinstance(spec.optimizer, AdamW):
        optimizer = _wire.OptimizerSpec(adamw=_wire.AdamW(**vars(spec.optimizer)))
    elif spec.optimizer is not None:
        optimizer = _wire.OptimizerSpec(sgd=_wire.Sgd(**vars(spec.optimizer)))
    return _wire.HeadSpec(
        optimizer=optimizer,
        data_type=_arrays.DATA_TYPE_NUMBERS[spec.data_type],
        transform={name: getattr(spec, name) for name in ("logit_scale", "softcap", "valid_vocab_size")},
        parallelism=PARALLELISMS[spec.parallelism],
        **{name: getattr(spec, name) for name in _PLAIN_FIELDS},
    )


def head_spec(message: Any) -> HeadSpec:
    """A spec as the server filled it in."""
    optimizers: dict[str, type[AdamW | SGD]] = {"adamw": AdamW, "sgd": SGD}
    which = message.optimizer.WhichOneof("optimizer")
    return read(
        HeadSpec,
        message,
        data_type=_arrays.DATA_TYPE_NAMES[message.data_type],
        optimizer=which and read(optimizers[which], getattr(message.optimizer, which)),
        parallelism=next((name for name, number in PARALLELISMS.items() if number == message.parallelism), "vocabulary"),
        **{field.name: value for field, value in message.transform.ListFields()},
    )


def head_info(message: Any) -> HeadInfo:
    plan = message.memory_plan
    return read(
        HeadInfo,
        message,
        spec=head_spec(message.spec),
        shards=tuple(read(VocabShard, shard) for shard in message.shards),
        memory_plan=read(MemoryPlan, plan, items={item.purpose: item.total_bytes for item in plan.items}),
        create_time_s=seconds_of(message.create_time),
        recovers_epochs=tuple(message.recovers_epochs),
    )


def checkpoint_info(message: Any) -> CheckpointInfo:
    return read(CheckpointInfo, message, save_time_s=seconds_of(message.save_time) if message.HasField("save_time") else None)


def step_result(cls: type[Data], message: Any) -> Data:
    """The outcome of a step, with its totals."""
    return read(cls, message, totals=read(StepTotals, message.totals))


def _put(tensor: Any, values: np.ndarray) -> None:
    """An array of float32 or int32, into a Tensor."""
    is_float = values.dtype.kind == "f"
    tensor.data_type = _wire.DATA_TYPE_FLOAT32 if is_float else _wire.DATA_TYPE_INT32
    tensor.shape.extend(values.shape)
    tensor.data = values.astype("<f4" if is_float else "<i4", copy=False).tobytes()


def tensor_message(values: np.ndarray) -> Any:
    """A Tensor of a vector of float32 or int32."""
    message = _wire.Tensor()
    _put(message, values)
    return message


def _jensen_shannon(options: JsdFields) -> Any:
    return _wire.JensenShannonLoss(
        hard_loss=None if options.hard_loss is None else _wire.CrossEntropyLoss(**dict(options.hard_loss)),
        vocab_alignment=(_wire.VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON if options.truncate_to_common else _wire.VOCAB_ALIGNMENT_REFUSE),
        **dict(options.fields),
    )


def _put_teacher(message: Any, teacher: TeacherRows) -> None:
    """Into a LossTerm."""
    if not isinstance(teacher.hidden, JoinedRows):
        part = message.teacher_hidden
        part.data_type = _arrays.DATA_TYPE_NUMBERS[teacher.hidden.data_type]
    else:
        joined, part = teacher.hidden, message.joined_teacher
        part.join_key, part.total_row_count = joined.join_key, joined.total_rows
        part.data_type = _arrays.DATA_TYPE_NUMBERS[joined.data_type]
        if joined.row_indices is not None:
            _put(part.row_indices, joined.row_indices)
    part.head, part.head_epoch = teacher.head, teacher.epoch


def teacher_header(tenant: str, rows: JoinedRows, hidden_size: int) -> bytes:
    """The header of a StreamTeacher call, serialized. A flag of the call says whether it belongs to the session."""
    header = _wire.StreamTeacherHeader(
        join_key=rows.join_key,
        total_row_count=rows.total_rows,
        data_type=_arrays.DATA_TYPE_NUMBERS[rows.data_type],
        hidden_size=hidden_size,
        tenant=f"tenants/{tenant}",
    )
    if rows.row_indices is not None:
        _put(header.row_indices, rows.row_indices)
    return bytes(header.SerializeToString())


@functools.lru_cache(maxsize=256)
def _common_header(options: SubmitOptions, hidden_size: int, data_type: str, grad_hidden_data_type: str) -> bytes:
    return _wire.MicroBatchHeader(
        compute_mode=_wire.COMPUTE_MODE_FORWARD_BACKWARD if options.backward else _wire.COMPUTE_MODE_FORWARD_ONLY,
        hidden_size=hidden_size,
        data_type=_arrays.DATA_TYPE_NUMBERS[data_type],
        commit_mode=_wire.COMMIT_MODE_EXPLICIT if options.explicit else _wire.COMMIT_MODE_UNSPECIFIED,
        on_mismatch=_wire.ON_MISMATCH_FIRST_WINS if options.first_wins else _wire.ON_MISMATCH_UNSPECIFIED,
        non_finite_policy=_wire.NON_FINITE_POLICY_REFUSE if options.refuse_non_finite else _wire.NON_FINITE_POLICY_UNSPECIFIED,
        outputs=[_OUTPUTS[name] for name in options.outputs],
        return_grad_hidden=options.return_grad_hidden if options.backward else None,
        grad_hidden_data_type=_arrays.DATA_TYPE_NUMBERS[grad_hidden_data_type] if options.return_grad_hidden else 0,
        allow_held=options.allow_held,
        late_token_factors=options.late_token_factors,
    ).SerializeToString()


@functools.lru_cache(maxsize=256)
def _common_term(head: str, epoch: bytes, ignore_index: int, loss: CrossEntropyFields | JsdFields) -> bytes:
    return _wire.LossTerm(
        head=_wire.HeadStep(head=head, head_epoch=epoch),
        ignore_index=ignore_index,
        cross_entropy=_wire.CrossEntropyLoss(**dict(loss.fields)) if isinstance(loss, CrossEntropyFields) else None,
        jensen_shannon=_jensen_shannon(loss) if isinstance(loss, JsdFields) else None,
    ).SerializeToString()


def _own_term(term: TermRequest, row_count: int) -> bytes:
    message = _wire.LossTerm()
    message.loss_scale = term.loss_scale
    if term.step is not None:
        message.head.step = term.step
    if term.row_count != row_count:
        message.row_start, message.row_count = term.row_start, term.row_count
    if term.targets is not None:
        _put(message.targets, term.targets)
    for name in ("token_weights", *FACTORS):
        if (vector := getattr(term, name)) is not None:
            _put(getattr(message, name), vector)
    if term.class_weights is not None:
        hard_loss = message.jensen_shannon.hard_loss if isinstance(term.loss, JsdFields) else message.cross_entropy
        _put(hard_loss.class_weights, term.class_weights)
    if term.teacher is not None:
        _put_teacher(message, term.teacher)
    if term.top_k is not None:
        message.top_k_teacher.k = term.top_k.ids.shape[1]
        _put(message.top_k_teacher.ids, term.top_k.ids)
        _put(message.top_k_teacher.log_probs, term.top_k.log_probs)
    if term.expected_weight_version is not None:
        message.expected_weight_version = term.expected_weight_version
    message.gradient_resolution = term.gradient_resolution
    return message.SerializePartialToString()


# How each of its terms begins in a serialized MicroBatchHeader; the number of its bytes follows.
_TERM_TAG = bytes([_wire.MicroBatchHeader.DESCRIPTOR.fields_by_name["terms"].number << 3 | 2])


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


# Session, and attempts that the caller does not name, are the core's in all of these.


def compute_header(request: ComputeRequest) -> bytes:
    """The header of a ComputeLoss call, serialized.

    The part that calls with the same options share is serialized once, because making messages takes longer than everything else
    here. Serialized parts of a message, one behind the other, parse as one message.
    """
    row_count, hidden_size = request.hidden.shape
    options = request.options
    header = _wire.MicroBatchHeader(
        micro_batch=request.micro_batch,
        attempt=request.attempt,
        row_count=row_count,
        grad_hidden_scale=request.grad_hidden_scale if options.return_grad_hidden else None,
    )
    common = _common_header(options, hidden_size, request.hidden.data_type, request.grad_hidden_data_type)
    parts = [common, header.SerializePartialToString()]  # as no field is required, none need be looked for
    for term in request.terms:
        message = _common_term(term.head, term.epoch, term.ignore_index, term.loss) + _own_term(term, row_count)
        parts += (_TERM_TAG, _varint(len(message)), message)
    return b"".join(parts)


# Bound of one message: a header with targets and weights for max_micro_batch_rows rows.
_MAX_MESSAGE_BYTES = 16 << 20


def check_header(message: bytes) -> bytes:
    """The header of a call with rows.

    Raises:
        InvalidArgumentError: targets and weights do not fit into one message.
    """
    if len(message) >= _MAX_MESSAGE_BYTES:
        raise invalid_argument(
            "LIMIT_EXCEEDED",
            f"targets, weights and top-k teachers take {len(message)} bytes, a message has at most {_MAX_MESSAGE_BYTES}; "
            "use smaller micro-batches",
            limit="max_message_bytes",
            maximum=_MAX_MESSAGE_BYTES,
            actual=len(message),
        )
    return message


def _token_output(tensor: Any) -> np.ndarray:
    dtype = "<i4" if tensor.data_type == _wire.DATA_TYPE_INT32 else "<f4"
    return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape)).copy()


def summary_fields(summary: Any, outputs: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a LossResult that a MicroBatchSummary has; of per-token outputs those that were asked for."""
    fields = combine_terms(tuple(_term_result(term, outputs) for term in summary.terms))
    fields["state"] = _wire.value_name("ContributionState", summary.state)
    fields["form"] = _wire.value_name("ContributionForm", summary.form)
    for name in ("replayed", "payload_differs", "digest", "transport"):
        fields[name] = getattr(summary, name)
    fields["step"] = summary.step if summary.HasField("step") else None
    timing = summary.timing
    fields["timing"] = Timing(*map(seconds_of, (timing.queue, timing.upload, timing.engine, timing.download)))
    return fields


_SUMS = tuple(field.name for field in _wire.LossSums.DESCRIPTOR.fields)
_sums_of = operator.attrgetter(*_SUMS)


def _term_result(term: Any, outputs: tuple[str, ...]) -> TermResult:
    values: dict[str, Any] = dict(zip(_SUMS, _sums_of(term.sums), strict=True))
    for name in outputs:
        if term.HasField(name):
            values[name] = _token_output(getattr(term, name))
    for name in ("non_finite_row_count", "weight_version", "teacher_weight_version"):
        values[name] = getattr(term, name)
    if term.HasField("dither"):
        values["dither"] = read(GradientDither, term.dither)
    return result_of(TermResult, values)


def step_of(message: Any) -> Step:
    micro_batches = {entry.micro_batch: read(MicroBatchState, entry) for entry in message.micro_batches}
    return read(Step, message, micro_batches=micro_batches, totals=read(StepTotals, message.totals))


def expected_message(expected: Expected) -> Any:
    """Ids, or their number."""
    if isinstance(expected, int):
        return _wire.ExpectedMicroBatches(count=expected)
    return _wire.ExpectedMicroBatches(ids=_wire.MicroBatchIds(ids=list(expected)))
