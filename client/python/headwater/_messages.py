"""Between the package's plain data and the wire's messages. No calls are made here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater import _arrays, _wire
from headwater._errors import invalid_argument
from headwater._requests import (
    TOKEN_OUTPUTS,
    ApplyArguments,
    CommitRequest,
    ComputeRequest,
    CrossEntropyOptions,
    Expected,
    GradientRequest,
    JoinedRows,
    JsdOptions,
    StepKey,
    TeacherRows,
    TermRequest,
)
from headwater._types import (
    PARALLELISMS,
    SGD,
    AdamW,
    CheckpointInfo,
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

_TENSORS = {"weight": _wire.HEAD_TENSOR_WEIGHT, "bias": _wire.HEAD_TENSOR_BIAS}
_OUTPUTS = {
    "token_loss": _wire.TOKEN_OUTPUT_LOSS,
    "lse": _wire.TOKEN_OUTPUT_LSE,
    "target_log_probability": _wire.TOKEN_OUTPUT_TARGET_LOG_PROBABILITY,
    "entropy": _wire.TOKEN_OUTPUT_ENTROPY,
    "argmax": _wire.TOKEN_OUTPUT_ARGMAX,
}


def seconds_of(message: Any) -> float:
    """Seconds of a Duration or Timestamp."""
    return message.seconds + message.nanos * 1e-9


def tensor_number(tensor: str) -> int:
    """The wire's number of "weight" or "bias"."""
    return _TENSORS[tensor]


def head_step(key: StepKey) -> Any:
    """A HeadStep."""
    return _wire.HeadStep(head=key.head, head_epoch=key.epoch, step=key.step)


def head_spec_message(spec: HeadSpec) -> Any:
    """A HeadSpec; what is None stays unset."""
    transform = _wire.LogitTransform(logit_scale=spec.logit_scale, softcap=spec.softcap, valid_vocab_size=spec.valid_vocab_size)
    optimizer = None
    if isinstance(spec.optimizer, AdamW):
        settings = spec.optimizer
        optimizer = _wire.OptimizerSpec(
            adamw=_wire.AdamW(
                beta1=settings.beta1, beta2=settings.beta2, epsilon=settings.epsilon, weight_decay=settings.weight_decay
            )
        )
    elif isinstance(spec.optimizer, SGD):
        sgd = spec.optimizer
        optimizer = _wire.OptimizerSpec(
            sgd=_wire.Sgd(momentum=sgd.momentum, dampening=sgd.dampening, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay)
        )
    return _wire.HeadSpec(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        data_type=_arrays.DATA_TYPE_NUMBERS[spec.data_type],
        has_bias=spec.has_bias,
        transform=transform,
        trainable=spec.trainable,
        optimizer=optimizer,
        staging_slots=spec.staging_slots,
        initial_step=spec.initial_step,
        parallelism=PARALLELISMS[spec.parallelism],
    )


def head_spec(message: Any) -> HeadSpec:
    """A spec as the server filled it in."""
    optimizer: AdamW | SGD | None = None
    which = message.optimizer.WhichOneof("optimizer")
    if which == "adamw":
        adamw = message.optimizer.adamw
        optimizer = AdamW(adamw.beta1, adamw.beta2, adamw.epsilon, adamw.weight_decay)
    elif which == "sgd":
        sgd = message.optimizer.sgd
        optimizer = SGD(sgd.momentum, sgd.dampening, sgd.nesterov, sgd.weight_decay)
    transform = message.transform
    return HeadSpec(
        vocab_size=message.vocab_size,
        hidden_size=message.hidden_size,
        data_type=_arrays.DATA_TYPE_NAMES[message.data_type],
        has_bias=message.has_bias,
        logit_scale=transform.logit_scale if transform.HasField("logit_scale") else 1.0,
        softcap=transform.softcap if transform.HasField("softcap") else None,
        valid_vocab_size=transform.valid_vocab_size if transform.HasField("valid_vocab_size") else None,
        trainable=message.trainable,
        optimizer=optimizer,
        staging_slots=message.staging_slots if message.HasField("staging_slots") else None,
        initial_step=message.initial_step,
        parallelism=next((name for name, number in PARALLELISMS.items() if number == message.parallelism), "vocabulary"),
    )


def head_info(message: Any) -> HeadInfo:
    """A Head."""
    plan = message.memory_plan
    return HeadInfo(
        name=message.name,
        spec=head_spec(message.spec),
        epoch=message.epoch,
        state=_wire.value_name("HeadState", message.state),
        weight_version=message.weight_version,
        open_step=message.open_step if message.HasField("open_step") else None,
        shards=tuple(VocabShard(shard.vocab_start, shard.vocab_end, shard.device) for shard in message.shards),
        memory_plan=MemoryPlan(
            {item.purpose: item.total_bytes for item in plan.items}, plan.total_bytes, plan.available_bytes, plan.token_chunk_rows
        ),
        create_time_s=seconds_of(message.create_time),
        weight_checksum=message.weight_checksum,
        restored_checkpoint=message.restored_checkpoint,
        recovers_epochs=tuple(message.recovers_epochs),
    )


def checkpoint_info(message: Any) -> CheckpointInfo:
    """A Checkpoint."""
    save_time_s = seconds_of(message.save_time) if message.HasField("save_time") else None
    return CheckpointInfo(message.checkpoint, message.step, message.total_bytes, save_time_s, message.damaged)


def _float_tensor(values: np.ndarray | None) -> Any:
    if values is None:
        return None
    return _wire.Tensor(data_type=_wire.DATA_TYPE_FLOAT32, shape=values.shape, data=values.astype("<f4", copy=False).tobytes())


def _cross_entropy(options: CrossEntropyOptions) -> Any:
    return _wire.CrossEntropyLoss(
        label_smoothing=options.label_smoothing, z_loss=options.z_loss, class_weights=_float_tensor(options.class_weights)
    )


def _jensen_shannon(options: JsdOptions) -> Any:
    return _wire.JensenShannonLoss(
        beta=options.beta,
        student_temperature=options.student_temperature,
        teacher_temperature=options.teacher_temperature,
        hard_loss_weight=options.hard_loss_weight,
        hard_loss=_cross_entropy(options.hard_loss) if options.hard_loss_weight > 0 else None,
        vocab_alignment=(_wire.VOCAB_ALIGNMENT_TRUNCATE_TO_COMMON if options.truncate_to_common else _wire.VOCAB_ALIGNMENT_REFUSE),
    )


def _int_tensor(values: np.ndarray | None) -> Any:
    if values is None:
        return None
    return _wire.Tensor(data_type=_wire.DATA_TYPE_INT32, shape=values.shape, data=values.astype("<i4", copy=False).tobytes())


def _teacher_hidden(teacher: TeacherRows | None) -> Any:
    if teacher is None or teacher.sent is None:
        return None
    return _wire.TeacherHidden(
        head=teacher.head, head_epoch=teacher.epoch, data_type=_arrays.DATA_TYPE_NUMBERS[teacher.sent.data_type]
    )


def _joined_teacher(teacher: TeacherRows | None) -> Any:
    if teacher is None or not isinstance(teacher.hidden, JoinedRows):
        return None
    joined = teacher.hidden
    return _wire.JoinedTeacher(
        head=teacher.head,
        head_epoch=teacher.epoch,
        join_key=joined.join_key,
        row_indices=_int_tensor(joined.row_indices),
        total_row_count=joined.total_rows,
        data_type=_arrays.DATA_TYPE_NUMBERS[joined.data_type],
    )


def teacher_header(tenant: str, rows: JoinedRows, hidden_size: int) -> Any:
    """The header of a StreamTeacher call. A flag of the call says whether it belongs to the session."""
    return _wire.StreamTeacherHeader(
        join_key=rows.join_key,
        total_row_count=rows.total_rows,
        row_indices=_int_tensor(rows.row_indices),
        data_type=_arrays.DATA_TYPE_NUMBERS[rows.data_type],
        hidden_size=hidden_size,
        tenant=f"tenants/{tenant}",
    )


def _term_message(request: ComputeRequest, term: TermRequest) -> Any:
    loss = term.loss
    whole = term.row_count == request.hidden.shape[0]
    return _wire.LossTerm(
        head=_wire.HeadStep(head=term.head, head_epoch=term.epoch, step=term.step),
        row_start=term.row_start,
        row_count=None if whole else term.row_count,
        targets=_int_tensor(term.targets),
        ignore_index=term.ignore_index,
        token_weights=_float_tensor(term.token_weights),
        loss_scale=term.loss_scale,
        cross_entropy=_cross_entropy(loss) if isinstance(loss, CrossEntropyOptions) else None,
        jensen_shannon=_jensen_shannon(loss) if isinstance(loss, JsdOptions) else None,
        teacher_hidden=_teacher_hidden(term.teacher),
        joined_teacher=_joined_teacher(term.teacher),
        expected_weight_version=term.expected_weight_version,
    )


# Session, and attempts that the caller does not name, are the core's in all of these.


def compute_header(request: ComputeRequest) -> Any:
    """The header of a ComputeLoss call."""
    row_count, hidden_size = request.hidden.shape
    return _wire.MicroBatchHeader(
        micro_batch=request.micro_batch,
        attempt=request.attempt or 0,
        compute_mode=(_wire.COMPUTE_MODE_FORWARD_BACKWARD if request.backward else _wire.COMPUTE_MODE_FORWARD_ONLY),
        row_count=row_count,
        hidden_size=hidden_size,
        data_type=_arrays.DATA_TYPE_NUMBERS[request.hidden.data_type],
        terms=[_term_message(request, term) for term in request.terms],
        commit_mode=_wire.COMMIT_MODE_EXPLICIT if request.explicit else _wire.COMMIT_MODE_UNSPECIFIED,
        on_mismatch=_wire.ON_MISMATCH_FIRST_WINS if request.first_wins else _wire.ON_MISMATCH_UNSPECIFIED,
        non_finite_policy=(_wire.NON_FINITE_POLICY_REFUSE if request.refuse_non_finite else _wire.NON_FINITE_POLICY_UNSPECIFIED),
        outputs=[_OUTPUTS[name] for name in request.outputs],
        return_grad_hidden=request.return_grad_hidden if request.backward else None,
        grad_hidden_data_type=_arrays.DATA_TYPE_NUMBERS[request.grad_hidden_data_type] if request.return_grad_hidden else 0,
        grad_hidden_scale=request.grad_hidden_scale if request.return_grad_hidden else None,
        allow_held=request.allow_held,
        late_token_factors=request.late_token_factors,
    )


def commit_message(request: CommitRequest) -> Any:
    """A CommitMicroBatchRequest."""
    return _wire.CommitMicroBatchRequest(
        heads=map(head_step, request.keys),
        micro_batch=request.micro_batch,
        attempt=request.attempt or 0,
        factor=request.factor,
        token_factors=_float_tensor(request.token_factors),
    )


def discard_message(keys: Sequence[StepKey], micro_batch: int, attempt: int | None) -> Any:
    """A DiscardMicroBatchRequest."""
    return _wire.DiscardMicroBatchRequest(heads=map(head_step, keys), micro_batch=micro_batch, attempt=attempt or 0)


def gradient_header(request: GradientRequest) -> Any:
    """The header of an AddGradient call."""
    return _wire.AddGradientHeader(
        head=head_step(request.key),
        micro_batch=request.micro_batch,
        attempt=request.attempt or 0,
        row_start=request.row_start,
        row_count=request.rows.shape[0],
        factor=request.factor,
    )


# Bound of one message: a header with targets and weights for max_micro_batch_rows rows.
_MAX_MESSAGE_BYTES = 16 << 20


def serialized_header(header: Any) -> bytes:
    """The header of a call with rows.

    Raises:
        InvalidArgumentError: targets and weights do not fit into one message.
    """
    message: bytes = header.SerializeToString()
    if len(message) >= _MAX_MESSAGE_BYTES:
        raise invalid_argument(
            "LIMIT_EXCEEDED",
            f"targets and weights take {len(message)} bytes, a message has at most {_MAX_MESSAGE_BYTES}; use smaller micro-batches",
            limit="max_message_bytes",
            maximum=_MAX_MESSAGE_BYTES,
            actual=len(message),
        )
    return message


def _token_output(message: Any, name: str) -> np.ndarray | None:
    if not message.HasField(name):
        return None
    tensor = getattr(message, name)
    dtype = "<i4" if tensor.data_type == _wire.DATA_TYPE_INT32 else "<f4"
    return np.frombuffer(tensor.data, dtype).reshape(tuple(tensor.shape)).copy()


def summary_fields(summary: Any) -> dict[str, Any]:
    """The fields of a LossResult that a MicroBatchSummary has."""
    timing = summary.timing
    return {
        **combine_terms(tuple(map(_term_result, summary.terms))),
        "state": _wire.value_name("ContributionState", summary.state),
        "form": _wire.value_name("ContributionForm", summary.form),
        "replayed": summary.replayed,
        "payload_differs": summary.payload_differs,
        "digest": summary.digest,
        "step": summary.step if summary.HasField("step") else None,
        "timing": Timing(*map(seconds_of, (timing.queue, timing.upload, timing.engine, timing.download))),
        "transport": summary.transport,
    }


_SUMS = tuple(field.name for field in _wire.LossSums.DESCRIPTOR.fields)


def _term_result(term: Any) -> TermResult:
    sums = term.sums
    values: dict[str, Any] = {name: getattr(sums, name) for name in _SUMS}
    for name in TOKEN_OUTPUTS:
        values[name] = _token_output(term, name)
    for name in ("non_finite_row_count", "weight_version", "teacher_weight_version"):
        values[name] = getattr(term, name)
    return result_of(TermResult, values)


def totals_of(message: Any) -> StepTotals:
    """A StepTotals."""
    return StepTotals(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def step_of(message: Any) -> Step:
    """A Step."""
    return Step(
        step=message.step,
        state=_wire.value_name("StepState", message.state),
        micro_batches={
            entry.micro_batch: MicroBatchState(
                micro_batch=entry.micro_batch,
                attempt=entry.attempt,
                state=_wire.value_name("ContributionState", entry.state),
                digest=entry.digest,
                valid_token_count=entry.valid_token_count,
                factor=entry.factor,
                form=_wire.value_name("ContributionForm", entry.form),
            )
            for entry in message.micro_batches
        },
        totals=totals_of(message.totals),
    )


def expected_message(expected: Expected) -> Any:
    """Ids, or their number."""
    if isinstance(expected, int):
        return _wire.ExpectedMicroBatches(count=expected)
    return _wire.ExpectedMicroBatches(ids=_wire.MicroBatchIds(ids=list(expected)))


def apply_request(key: StepKey, expected: Expected | None, arguments: ApplyArguments) -> Any:
    """An ApplyOptimizerStepRequest; what is None stays unset."""
    return _wire.ApplyOptimizerStepRequest(
        head=head_step(key),
        expected=None if expected is None else expected_message(expected),
        learning_rate=arguments.learning_rate,
        gradient_factor=arguments.gradient_factor,
        max_grad_norm=arguments.max_grad_norm,
        other_grad_norm_squared=arguments.other_grad_norm_squared,
        weight_decay=arguments.weight_decay,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        epsilon=arguments.epsilon,
        momentum=arguments.momentum,
    )
