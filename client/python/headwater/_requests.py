"""Arguments of a micro-batch, checked and brought into one form before any backend sees them."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import invalid_argument
from headwater._types import HeadSpec, LossResult, check_integer, check_number

DEFAULT_IGNORE_INDEX = -100

# Per-token outputs by name and fill value of ignored rows.
TOKEN_OUTPUTS: dict[str, float] = {"token_loss": 0, "lse": 0, "target_log_probability": 0, "entropy": 0, "argmax": -1}

# Ignored rows are left out of the upload from this share on; below it the gather costs more than it saves.
COMPACTION_SHARE = 1 / 8


@dataclass(frozen=True)
class CrossEntropyOptions:
    """Checked options of a cross entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: np.ndarray | None = None  # (valid_vocab_size,) or (vocab_size,) float32


@dataclass(frozen=True)
class JsdOptions:
    """Checked options of a Jensen-Shannon divergence."""

    beta: float
    student_temperature: float
    teacher_temperature: float
    hard_loss_weight: float
    hard_loss: CrossEntropyOptions
    truncate_to_common: bool


@dataclass(frozen=True)
class TeacherRows:
    """A teacher's head and the hidden states that it sees."""

    head: str
    epoch: bytes
    hidden: HostArray  # (num_tokens, hidden_size of the teacher)


@dataclass(frozen=True)
class ComputeRequest:
    """One micro-batch with one loss term, complete and checked."""

    head: str
    epoch: bytes
    step: int | None  # None: nothing is added
    micro_batch: int | None
    backward: bool
    explicit: bool
    first_wins: bool
    refuse_non_finite: bool
    hidden: HostArray  # (num_tokens, hidden_size)
    targets: np.ndarray | None  # (num_tokens,) int32
    ignore_index: int
    token_weights: np.ndarray | None  # (num_tokens,) float32
    loss_scale: float
    loss: CrossEntropyOptions | JsdOptions
    teacher: TeacherRows | None
    outputs: tuple[str, ...]
    return_grad_hidden: bool
    grad_hidden_data_type: str
    grad_hidden_scale: float
    expected_weight_version: int | None = None


def check_outputs(outputs: Any) -> tuple[str, ...]:
    """Names of per-token outputs, each once."""
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for name in names:
        if name not in TOKEN_OUTPUTS:
            raise invalid_argument(
                "INVALID_FIELD", f"outputs must be among {', '.join(TOKEN_OUTPUTS)}; got {name!r}", field="outputs", actual=name
            )
    return tuple(dict.fromkeys(names))


def check_rows(value: Any, field: str, hidden_size: int) -> HostArray:
    """Hidden states of shape (num_tokens, hidden_size)."""
    rows = _arrays.from_any(value, field)
    if rows.data.ndim != 2 or rows.data.shape[1] != hidden_size:
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"{field} must have shape (num_tokens, {hidden_size}), got {rows.shape}",
            field=field,
            expected=f"(num_tokens, {hidden_size})",
            actual=rows.shape,
        )
    return rows


def check_targets(targets: Any, row_count: int, ignore_index: int, valid_vocab_size: int) -> np.ndarray:
    """int32 targets, each in [0, valid_vocab_size) or `ignore_index`."""
    array = _arrays.int_vector(targets, "targets", row_count)
    bad = (array != ignore_index) & ((array < 0) | (array >= valid_vocab_size))
    if bad.any():
        row = int(np.argmax(bad))
        raise invalid_argument(
            "TARGET_OUT_OF_VOCAB",
            f"targets[{row}] is {array[row]}; expected an id in [0, {valid_vocab_size}) or ignore_index {ignore_index}",
            field="targets",
            row=row,
            actual=array[row],
            expected=f"[0, {valid_vocab_size})",
        )
    return array


def check_cross_entropy(spec: HeadSpec, label_smoothing: Any, z_loss: Any, class_weights: Any) -> CrossEntropyOptions:
    """Options of a cross entropy against a head of this spec."""
    weights = None
    if class_weights is not None:
        weights = _arrays.float_vector(class_weights, "class_weights", (spec.valid_size, spec.vocab_size))
        if (weights < 0).any():
            raise invalid_argument("INVALID_FIELD", "class_weights must be >= 0", field="class_weights", expected=">= 0")
    return CrossEntropyOptions(
        label_smoothing=check_number(label_smoothing, "label_smoothing", low=0, high=1, high_open=True),
        z_loss=check_number(z_loss, "z_loss", low=0),
        class_weights=weights,
    )


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in choices:
        raise invalid_argument(
            "INVALID_FIELD", f"{name} must be one of {', '.join(choices)}; got {value!r}", field=name, actual=value
        )
    return str(value)


_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


def check_checkpoint_name(name: Any) -> str:
    """The name of a checkpoint."""
    if not isinstance(name, str) or not _CHECKPOINT_NAME.fullmatch(name):
        raise invalid_argument(
            "INVALID_NAME",
            f"a checkpoint's name is at most 128 letters, digits, '.', '_' and '-', the ends letters or digits; got {name!r}",
            field="checkpoint",
            actual=name,
        )
    return name


def check_bool(value: Any, name: str) -> bool:
    """True or False, and nothing that merely behaves like it."""
    if not isinstance(value, (bool, np.bool_)):
        raise invalid_argument("INVALID_FIELD", f"{name} must be True or False, got {value!r}", field=name, actual=value)
    return bool(value)


@dataclass(frozen=True)
class Compaction:
    """Which rows are sent, and how answers about them become answers about all rows."""

    request: ComputeRequest
    row_count: int
    kept: np.ndarray | None  # indices of the rows that are sent; None: all

    def expand(self, values: np.ndarray | None, fill: float) -> np.ndarray | None:
        """Answers for all rows; the rows that were not sent get `fill`."""
        if values is None or self.kept is None:
            return values
        full = np.full((self.row_count, *values.shape[1:]), fill, dtype=values.dtype)
        full[self.kept] = values
        return full


def compact(request: ComputeRequest) -> Compaction:
    """Leaves ignored rows out where that is worth it: they have no loss and no gradient."""
    row_count = request.hidden.shape[0]
    if request.targets is None:
        return Compaction(request, row_count, None)
    valid = request.targets != request.ignore_index
    ignored = row_count - int(np.count_nonzero(valid))
    if ignored == 0 or ignored < row_count * COMPACTION_SHARE:
        return Compaction(request, row_count, None)
    kept = np.flatnonzero(valid)
    teacher = request.teacher
    if teacher is not None:
        teacher = dataclasses.replace(teacher, hidden=teacher.hidden.rows(kept))
    smaller = dataclasses.replace(
        request,
        hidden=request.hidden.rows(kept),
        targets=request.targets[kept],
        token_weights=None if request.token_weights is None else request.token_weights[kept],
        teacher=teacher,
    )
    return Compaction(smaller, row_count, kept)


def finish(compaction: Compaction, request: ComputeRequest, result: LossResult) -> LossResult:
    """Brings a backend's answer (host memory, rows that were sent) into the caller's form."""
    changes: dict[str, Any] = {
        name: compaction.expand(getattr(result, name), fill)
        for name, fill in TOKEN_OUTPUTS.items()
        if getattr(result, name) is not None
    }
    if result.grad_hidden is not None:
        full = compaction.expand(result.grad_hidden, 0)
        changes["grad_hidden"] = request.hidden.like(HostArray(full, request.grad_hidden_data_type, request.hidden.like))
    return dataclasses.replace(result, **changes)


def check_micro_batch_key(trainable: bool, backward: bool, step: int | None, micro_batch: Any) -> tuple[int | None, int | None]:
    """The key of a contribution: both present where something is added, both absent elsewhere."""
    if not (trainable and backward):
        if micro_batch is not None:
            why = "the head is frozen" if not trainable else "backward=False"
            raise invalid_argument(
                "INVALID_COMBINATION", f"micro_batch must be left out: nothing is added, because {why}", field="micro_batch"
            )
        return None, None
    if micro_batch is None:
        raise invalid_argument(
            "MISSING_FIELD", "micro_batch is required for gradients of a trainable head: k * world_size + rank", field="micro_batch"
        )
    return check_integer(step, "step"), check_integer(micro_batch, "micro_batch")
