"""Arguments of a micro-batch, checked and brought into one form before anything is sent."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import invalid_argument, must_be, refused, wrong_shape, wrong_type
from headwater._memory import DeviceArray, PrivateRows, Rows, torch
from headwater._types import check_integer, check_number

# Exactly 0 ... n-1, or exactly these ids.
Expected = int | Sequence[int]
Progress = Callable[[int, int], None]

DEFAULT_IGNORE_INDEX = -100

# Per-token outputs by name and fill value of ignored rows.
TOKEN_OUTPUTS: dict[str, float] = {
    "token_loss": 0,
    "lse": 0,
    "target_log_probability": 0,
    "entropy": 0,
    "argmax": -1,
    "mean_logits": 0,
    "log_sum_sq_probs": 0,
}

# Vectors of a term that multiply the gradients of per-token outputs.
FACTORS = ("entropy_factors", "lse_factors")

# Ignored rows are left out of the upload from this share on; below it the gather costs more than it saves.
COMPACTION_SHARE = 1 / 8


# Options of losses that every server has; for any other, `ServerInfo.features` has its name.
OPTIONS_OF_01 = {"label_smoothing", "z_loss", "beta", "student_temperature", "teacher_temperature", "hard_loss_weight"}

# Fields of a message, by name.
Fields = tuple[tuple[str, float | bool], ...]


class CrossEntropyFields(NamedTuple):
    """Options of a cross entropy that are not the default."""

    fields: Fields


class JsdFields(NamedTuple):
    """Options of a Jensen-Shannon divergence that are not the default."""

    fields: Fields
    hard_loss: Fields | None  # None: it has none
    truncate_to_common: bool


@dataclass(slots=True)
class JoinedRows:
    """Hidden states that another stream brings (`Client.teacher`)."""

    join_key: str
    total_rows: int
    row_indices: np.ndarray | None  # (rows of the term,) int32, each in [0, total_rows); None: row i of the term is row i
    data_type: str


@dataclass(slots=True)
class TeacherRows:
    """A teacher's head and the hidden states that it sees."""

    head: str
    epoch: bytes
    hidden: Rows | JoinedRows  # (rows of the term, hidden_size of the teacher)

    @property
    def sent(self) -> Rows | None:
        """The hidden states that travel with the call; None if another stream brings them."""
        return None if isinstance(self.hidden, JoinedRows) else self.hidden


@dataclass(slots=True)
class TopKRows:
    """A top-k teacher's ids and log-probabilities, by row."""

    ids: np.ndarray  # (rows of the term, k) int32; -1: not used
    log_probs: np.ndarray  # (rows of the term, k) float32

    def rows(self, kept: np.ndarray) -> TopKRows:
        """Some of the rows, by their indices."""
        return TopKRows(self.ids[kept], self.log_probs[kept])


@dataclass(frozen=True, slots=True)
class StepKey:
    """A head, at an epoch, and a step of it."""

    head: str
    epoch: bytes
    step: int


@dataclass(slots=True)
class TermRequest:
    """One loss term over rows [row_start, row_start + row_count), complete and checked."""

    head: str
    epoch: bytes
    step: int | None  # None: nothing is added to this head
    row_start: int
    row_count: int
    targets: np.ndarray | None  # (row_count,) int32
    may_ignore: bool  # whether a target may be ignore_index
    ignore_index: int
    token_weights: np.ndarray | None  # (row_count,) float32
    entropy_factors: np.ndarray | None  # (row_count,) float32
    lse_factors: np.ndarray | None  # (row_count,) float32
    loss_scale: float
    loss: CrossEntropyFields | JsdFields
    class_weights: np.ndarray | None  # (valid_vocab_size,) or (vocab_size,) float32
    teacher: TeacherRows | None  # its hidden: (row_count, hidden_size of the teacher)
    expected_weight_version: int | None = None
    gradient_resolution: float = 0.0  # 0: the gradient is exact
    top_k: TopKRows | None = None  # the teacher, instead of `teacher`

    @property
    def features(self) -> list[str]:
        """Which of `ServerInfo.features` the term needs: an older server would ignore the fields that they stand for."""
        has_factors = self.entropy_factors is not None or self.lse_factors is not None
        needed = {
            "entropy_factors": has_factors,
            "gradient_resolution": self.gradient_resolution != 0,
            "top_k_teacher": self.top_k is not None,
        }
        options = [name for name, _ in self.loss.fields if name not in OPTIONS_OF_01]
        return options + [name for name, is_needed in needed.items() if is_needed]


class SubmitOptions(NamedTuple):
    """How a micro-batch is submitted, checked."""

    backward: bool
    return_grad_hidden: bool
    explicit: bool
    late_token_factors: bool
    allow_held: bool
    first_wins: bool
    refuse_non_finite: bool
    outputs: tuple[str, ...]


@dataclass(slots=True)
class ComputeRequest:
    """One micro-batch, complete and checked."""

    terms: tuple[TermRequest, ...]
    micro_batch: int | None  # None: nothing is added
    attempt: int | None  # None: the core's to choose
    options: SubmitOptions
    hidden: Rows  # (num_tokens, hidden_size)
    grad_hidden_data_type: str
    grad_hidden_scale: float
    grad_hidden_out: Any = None  # where grad_hidden is to be written: an array or a CUDA tensor; None: the client's choice

    @property
    def keys(self) -> tuple[StepKey, ...]:
        """The heads and steps that this adds to, each once, in the order of the terms."""
        return tuple(dict.fromkeys(StepKey(term.head, term.epoch, term.step) for term in self.terms if term.step is not None))


def check_outputs(outputs: Any) -> tuple[str, ...]:
    """Names of per-token outputs, each once."""
    names = tuple(outputs) if hasattr(outputs, "__iter__") and not isinstance(outputs, str) else (outputs,)
    for name in names:
        if not isinstance(name, str) or name not in TOKEN_OUTPUTS:
            raise must_be("outputs", f"among {', '.join(TOKEN_OUTPUTS)}", name)
    return tuple(dict.fromkeys(names))


def check_options(call: Any) -> SubmitOptions:
    """Options of `Head`'s losses, which are attributes of `call`."""
    backward = check_bool(call.backward, "backward")
    wants_grad = backward if call.return_grad_hidden is None else check_bool(call.return_grad_hidden, "return_grad_hidden")
    if wants_grad and not backward:
        raise refused("backward=False computes no grad_hidden", "return_grad_hidden")
    explicit = check_choice(call.commit, "commit", ("eager", "explicit")) == "explicit"
    late_token_factors = check_bool(call.late_token_factors, "late_token_factors")
    if late_token_factors and not explicit:
        raise refused('late_token_factors needs commit="explicit": they come with it', "late_token_factors")
    return SubmitOptions(
        backward,
        wants_grad,
        explicit,
        late_token_factors,
        allow_held=check_bool(call.allow_held, "allow_held"),
        first_wins=check_choice(call.on_mismatch, "on_mismatch", ("conflict", "first_wins")) == "first_wins",
        refuse_non_finite=check_choice(call.non_finite, "non_finite", ("report", "refuse")) == "refuse",
        outputs=check_outputs(call.outputs),
    )


def check_rows(value: Any, field: str, hidden_size: int, *, on_device: bool = False) -> Any:
    """Hidden states of shape (num_tokens, hidden_size); a CUDA tensor is brought to host memory unless it may stay `on_device`."""
    shape = tuple(value.shape) if hasattr(value, "shape") else _arrays.numbers(value, field).shape
    if len(shape) != 2 or shape[1] != hidden_size:
        _arrays.from_any(value, field)  # an element type that is wrong is said first
        raise wrong_shape(field, f"(num_tokens, {hidden_size})", shape)
    if isinstance(value, PrivateRows):
        return value
    return _arrays.from_any(value, field, device_rows=DeviceArray.over if on_device else None)


def check_grad_hidden_out(value: Any, shape: tuple[int, ...], data_type: str) -> Any:
    """Memory that `grad_hidden` is written into: (an array or CUDA tensor, over the caller's own memory)."""
    field = "grad_hidden_out"
    rows = value if isinstance(value, PrivateRows) else _arrays.from_any(value, field, device_rows=DeviceArray.over)
    _arrays.check_shape(rows.shape, shape, field)
    if rows.data_type != data_type:
        raise wrong_type(field, f"{data_type}, as grad_hidden is", rows.data_type)
    if isinstance(rows, PrivateRows):
        return rows
    if isinstance(rows, DeviceArray):
        memory, own = rows.tensor, rows.tensor.data_ptr() == value.data_ptr() and not value.requires_grad
    else:
        memory = rows.data
        if _arrays.is_torch_tensor(value):
            own = value.device.type == "cpu" and value.data_ptr() == memory.ctypes.data and not value.requires_grad
        else:
            array = value.bits if isinstance(value, _arrays.BFloat16) else value
            own = isinstance(array, np.ndarray) and array.ctypes.data == memory.ctypes.data and array.flags.writeable
    if not own:
        raise invalid_argument(
            "INVALID_FIELD",
            f"{field} must be a contiguous array that can be written, and a tensor must not require a gradient",
            field=field,
        )
    return memory


def check_apart(out: Any, rows: Rows, field: str) -> None:
    """Memory of `check_grad_hidden_out` has nothing of rows that may be read again: for a repetition, or when factors come."""

    def begin_and_end(memory: Any) -> tuple[int, int]:
        if isinstance(memory, np.ndarray):
            return memory.ctypes.data, memory.ctypes.data + memory.nbytes
        if isinstance(memory, PrivateRows):
            memory = memory.tensor
        return memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()

    begin, end = begin_and_end(out)
    read_begin, read_end = begin_and_end(rows.tensor if isinstance(rows, DeviceArray) else rows.data)
    if max(begin, read_begin) < min(end, read_end):
        raise refused(f"grad_hidden_out must not overlap {field}, which may be read again", "grad_hidden_out")


def check_targets(targets: Any, row_count: int, ignore_index: int, valid_vocab_size: int) -> tuple[np.ndarray, bool]:
    """int32 targets, each in [0, valid_vocab_size) or `ignore_index`; and whether there may be one of the latter."""
    array, least, largest = _arrays.int_vector(targets, "targets", row_count)
    may_ignore = least <= ignore_index <= largest
    if least >= 0 and largest < valid_vocab_size:
        return array, may_ignore
    bad = ((array < 0) | (array >= valid_vocab_size)) & (array != ignore_index)
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
    return array, may_ignore


MAX_TOP_K = 1024


def check_top_k(ids: Any, log_probs: Any, row_count: int, valid_vocab_size: int) -> TopKRows:
    """A top-k teacher's rows. The server checks that ids differ and probabilities add up to at most 1."""
    shape = tuple(ids.shape) if hasattr(ids, "shape") else _arrays.numbers(ids, "ids").shape
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_TOP_K or shape[0] != row_count:
        raise wrong_shape("ids", f"({row_count}, k) with k from 1 to {MAX_TOP_K}", shape)
    array, least, largest = _arrays.int_vector(_arrays.numbers(ids, "ids").reshape(-1), "ids", row_count * shape[1])
    if least < -1 or largest >= valid_vocab_size:
        index = int(((array < -1) | (array >= valid_vocab_size)).argmax())
        row, column = divmod(index, shape[1])
        raise invalid_argument(
            "TARGET_OUT_OF_VOCAB",
            f"ids[{row}, {column}] is {array[index]}; expected an id in [0, {valid_vocab_size}), or -1 where none is used",
            field="ids",
            row=row,
            actual=array[index],
            expected=f"[0, {valid_vocab_size})",
        )
    values = _arrays.numbers(log_probs, "log_probs")
    _arrays.check_shape(values.shape, shape, "log_probs")
    flat = values.reshape(-1)
    if least < 0:
        flat = np.where(array < 0, 0, flat)  # of entries that are not used: anything
    vector = _arrays.float_vector(flat, "log_probs", (flat.shape[0],))
    return TopKRows(array.reshape(shape), vector.reshape(shape))


def option_fields(options: Any, message: Any) -> Fields:
    """The numbers and booleans of a message that `options`, a dataclass, has by the same names and not as they are by default.

    Ranges, and which options go together, are the server's to check.
    """
    found = []
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None or field.enum_type is not None or not hasattr(options, field.name):
            continue
        value = getattr(options, field.name)
        value = check_bool(value, field.name) if field.type == field.TYPE_BOOL else check_number(value, field.name)
        if value != getattr(type(options), field.name):
            found.append((field.name, value))
    return tuple(found)


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """One of a few words."""
    if value not in choices:
        raise must_be(name, f"one of {', '.join(choices)}", value)
    return str(value)


_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


def check_checkpoint_name(name: Any) -> str:
    """The name of a checkpoint."""
    if not isinstance(name, str) or not _CHECKPOINT_NAME.fullmatch(name):
        letters = "at most 128 letters, digits, '.', '_' and '-', the ends letters or digits"
        raise must_be("checkpoint", letters, name, "INVALID_NAME")
    return name


def check_bool(value: Any, name: str) -> bool:
    """True or False, and nothing that merely behaves like it."""
    if not isinstance(value, (bool, np.bool_)):
        raise must_be(name, "True or False", value)
    return bool(value)


@dataclass(slots=True)
class Compaction:
    """Which rows are sent, and how answers about them become answers about all rows."""

    request: ComputeRequest
    row_count: int
    kept: np.ndarray | None  # indices of the rows that are sent; None: all

    def expand(self, values: Any, fill: float) -> Any:
        """Answers for all rows; the rows that were not sent get `fill`."""
        if values is None or self.kept is None:
            return values
        shape = (self.row_count, *values.shape[1:])
        if isinstance(values, np.ndarray):
            full = np.full(shape, fill, dtype=values.dtype)
            full[self.kept] = values
            return full
        full = values.new_full(shape, fill)
        full[torch().from_numpy(self.kept).to(full.device)] = values
        return full


def compact(request: ComputeRequest) -> Compaction:
    """Leaves ignored rows out where that is worth it: they have no loss and no gradient.

    Not where rows are shared by terms or private, nor where a factor for each row comes later: the server does it for itself then.
    Whether rows may be held makes no difference: a repeat that finds a free slot must send the rows of the first call.
    """
    row_count = request.hidden.shape[0]
    term = request.terms[0]
    shared = len(request.terms) > 1 or term.row_count != row_count or isinstance(request.hidden, PrivateRows)
    # Rows of another stream are kept until they are used: all of them are asked for.
    shared |= term.teacher is not None and term.teacher.sent is None
    if shared or term.targets is None or not term.may_ignore or request.options.late_token_factors:
        return Compaction(request, row_count, None)
    valid = term.targets != term.ignore_index
    ignored = row_count - int(np.count_nonzero(valid))
    if ignored == 0 or ignored < row_count * COMPACTION_SHARE:
        return Compaction(request, row_count, None)
    kept = np.flatnonzero(valid)
    teacher = term.teacher
    if teacher is not None and teacher.sent is not None:
        teacher = dataclasses.replace(teacher, hidden=teacher.sent.rows(kept))
    vectors = {name: getattr(term, name) for name in ("token_weights", *FACTORS)}
    smaller = dataclasses.replace(
        term,
        row_count=len(kept),
        targets=term.targets[kept],
        teacher=teacher,
        top_k=None if term.top_k is None else term.top_k.rows(kept),
        **{name: values[kept] for name, values in vectors.items() if values is not None},
    )
    sent = dataclasses.replace(request, hidden=request.hidden.rows(kept), terms=(smaller,), grad_hidden_out=None)
    return Compaction(sent, row_count, kept)


def finish(compaction: Compaction, request: ComputeRequest, answer: dict[str, Any], grad_hidden_out: Any = None) -> dict[str, Any]:
    """Brings the fields of an answer about the rows that were sent into the caller's form."""
    if compaction.kept is not None:
        outputs = {name: compaction.expand(answer[name], fill) for name, fill in TOKEN_OUTPUTS.items() if name in answer}
        answer = {**answer, **outputs, "terms": (dataclasses.replace(answer["terms"][0], **outputs),)}
    grad_hidden = answer["grad_hidden"]
    if grad_hidden is not None:
        full = compaction.expand(grad_hidden, 0)
        if grad_hidden_out is None:
            answer["grad_hidden"] = request.hidden.give(full, request.grad_hidden_data_type)
        else:
            copy_rows(request.grad_hidden_out, full, request.grad_hidden_data_type)
            answer["grad_hidden"] = grad_hidden_out
    return answer


def copy_rows(out: Any, values: Any, data_type: str) -> None:
    """Copies rows into memory of the caller's, unless they are there already."""
    if values is out:
        return
    if isinstance(out, np.ndarray) and isinstance(values, np.ndarray):
        np.copyto(out, values)
        return
    source, target = (
        _arrays.to_torch(HostArray(rows, data_type, _arrays.to_numpy)) if isinstance(rows, np.ndarray) else rows
        for rows in (values, out)
    )
    target.copy_(source)


def check_micro_batch(contributes: bool, backward: bool, micro_batch: Any) -> int | None:
    """The id of a contribution: present where something is added, absent elsewhere."""
    if not contributes:
        if micro_batch is not None:
            why = "backward=False" if not backward else "the head is frozen"
            raise refused(f"micro_batch must be left out: nothing is added, because {why}", "micro_batch")
        return None
    if micro_batch is None:
        raise invalid_argument(
            "MISSING_FIELD", "micro_batch is required for gradients of a trainable head: k * world_size + rank", field="micro_batch"
        )
    return check_integer(micro_batch, "micro_batch")


def check_token_factors(value: Any) -> np.ndarray | None:
    """(num_tokens,) finite float32, or None. Their number is the server's to check: it knows the micro-batch."""
    if value is None:
        return None
    shape = tuple(value.shape) if hasattr(value, "shape") else (len(value),) if hasattr(value, "__len__") else ()
    if len(shape) != 1:
        raise wrong_shape("token_factors", "(num_tokens,)", shape)
    return _arrays.float_vector(value, "token_factors", shape)
