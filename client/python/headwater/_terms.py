"""Loss terms: what is computed over which rows, against which head. `Head.multi` takes several; the other losses are one each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwater import _arrays, _requests
from headwater._errors import FailedPreconditionError, invalid_argument
from headwater._memory import Rows
from headwater._requests import DEFAULT_IGNORE_INDEX, JsdOptions, TeacherRows, TermRequest
from headwater._types import check_factor, check_integer, check_number

if TYPE_CHECKING:
    from headwater._head import Head


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """A cross entropy over some rows of a micro-batch: a term of `Head.multi`. Arguments are those of `Head.cross_entropy`."""

    targets: Any  # (rows of the term,) integers, aligned with the rows
    head: Head | None = None  # None: the head whose `multi` is called
    rows: Any = None  # slice(start, stop) or (start, stop), half-open, not empty; None: all
    token_weights: Any = None  # (rows of the term,) finite, any sign; None: 1
    loss_scale: float = 1.0
    ignore_index: int = DEFAULT_IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Any = None
    step: int | None = None  # None: `step` of the term's head
    expected_weight_version: int | None = None


class _Join:
    """The type of `JOIN`."""

    def __repr__(self) -> str:
        return "headwater.JOIN"

    def __reduce__(self) -> str:
        return "JOIN"


# In the place of a teacher's hidden states: another stream brings them (`Client.teacher`).
JOIN = _Join()


@dataclass(frozen=True, eq=False)
class JSD:
    """A divergence to a teacher over some rows of a micro-batch: a term of `Head.multi`. Arguments are those of `Head.jsd`."""

    teacher: Head
    teacher_hidden: Any  # (rows of the term, hidden_size of the teacher's head), or headwater.JOIN
    head: Head | None = None  # None: the head whose `multi` is called
    rows: Any = None  # slice(start, stop) or (start, stop), half-open, not empty; None: all
    targets: Any = None  # (rows of the term,)
    beta: float = 0.5
    student_temperature: float = 1.0
    teacher_temperature: float = 1.0
    hard_loss_weight: float = 0.0
    token_weights: Any = None
    loss_scale: float = 1.0
    ignore_index: int = DEFAULT_IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Any = None
    truncate_to_common: bool = False
    step: int | None = None  # None: `step` of the term's head
    expected_weight_version: int | None = None
    join_key: str | None = None  # with JOIN: 1 to 256 bytes of UTF-8
    total_rows: int | None = None  # with JOIN: rows of the joined set, >= 1
    row_indices: Any = (
        None  # with JOIN: (rows of the term,) integers in [0, total_rows); None: row i of the term is row i of the set
    )
    teacher_dtype: Any = None  # with JOIN: that of the rows; None: that of the student's


Term = CrossEntropy | JSD


def _row_range(rows: Any, row_count: int) -> tuple[int, int]:
    """(start, stop) within the micro-batch."""
    if rows is None:
        return 0, row_count
    if isinstance(rows, slice):
        if rows.step not in (None, 1):
            raise invalid_argument("INVALID_FIELD", f"rows must be consecutive, got {rows}", field="rows")
        rows = (0 if rows.start is None else rows.start, row_count if rows.stop is None else rows.stop)
    try:
        start, stop = rows
    except (TypeError, ValueError):
        raise invalid_argument(
            "INVALID_FIELD", f"rows must be slice(start, stop) or (start, stop), got {rows!r}", field="rows"
        ) from None
    start, stop = check_integer(start, "rows"), check_integer(stop, "rows")
    if not start < stop <= row_count:
        raise invalid_argument(
            "INVALID_FIELD",
            f"rows must be a range that is not empty within [0, {row_count}), got [{start}, {stop})",
            field="rows",
            expected=f"[0, {row_count})",
            actual=f"[{start}, {stop})",
        )
    return start, stop


def check_head(value: Any, field: str, owner: Head) -> Head:
    """A head of the same client as `owner`."""
    from headwater._head import Head  # which imports this module

    if not isinstance(value, Head):
        raise invalid_argument("INVALID_FIELD", f"{field} must be a headwater.Head, got {type(value).__name__}", field=field)
    if value._backend is not owner._backend:
        raise invalid_argument("INVALID_COMBINATION", f"{field} must be a head of the same client as {owner.name}", field=field)
    return value


def check_term(owner: Head, term: Term, hidden: Rows, hidden_name: str, backward: bool) -> TermRequest:
    """The term, checked against its heads and the micro-batch's rows."""
    if not isinstance(term, (CrossEntropy, JSD)):
        raise invalid_argument(
            "INVALID_FIELD", f"a term must be headwater.CrossEntropy or headwater.JSD, got {type(term).__name__}", field="terms"
        )
    head = owner if term.head is None else check_head(term.head, "head", owner)
    if hidden.shape[1] != head.spec.hidden_size:
        _requests.check_rows(hidden, hidden_name, head.spec.hidden_size)
    start, stop = _row_range(term.rows, hidden.shape[0])
    count = stop - start
    ignore_index = check_integer(term.ignore_index, "ignore_index", low=-(2**31), high=2**31 - 1)
    targets = None
    if isinstance(term, CrossEntropy) or term.targets is not None:
        targets = _requests.check_targets(term.targets, count, ignore_index, head.spec.valid_size)
    hard_loss = _requests.check_cross_entropy(head.spec, term.label_smoothing, term.z_loss, term.class_weights)
    token_weights = term.token_weights
    if token_weights is not None:
        token_weights = _arrays.float_vector(token_weights, "token_weights", (count,))
    version = term.expected_weight_version
    step = None
    if head.spec.trainable and backward:
        step = check_integer(head.step if term.step is None else term.step, "step")
    jsd = isinstance(term, JSD)
    return TermRequest(
        head=head.name,
        epoch=head.epoch,
        step=step,
        row_start=start,
        row_count=count,
        targets=targets,
        ignore_index=ignore_index,
        token_weights=token_weights,
        loss_scale=check_factor(term.loss_scale, "loss_scale"),
        loss=_jsd_options(head, term, hard_loss) if jsd else hard_loss,
        teacher=_teacher_rows(owner, term, count, hidden, hidden_name) if jsd else None,
        expected_weight_version=None if version is None else check_integer(version, "expected_weight_version"),
    )


MAX_JOIN_KEY_BYTES = 256


def check_join(
    join_key: Any, total_rows: Any, row_indices: Any, row_count: int, data_type: str, row_field: str
) -> _requests.JoinedRows:
    """The place of `row_count` rows in a joined set."""
    if not isinstance(join_key, str) or not 1 <= len(join_key.encode()) <= MAX_JOIN_KEY_BYTES:
        raise invalid_argument(
            "INVALID_FIELD",
            f"join_key must be a string of 1 to {MAX_JOIN_KEY_BYTES} bytes, got {join_key!r}",
            field="join_key",
            actual=join_key,
        )
    total_rows = check_integer(total_rows, "total_rows", low=1)
    indices = None
    if row_indices is not None:
        indices = _arrays.int_vector(row_indices, "row_indices", row_count)
        outside = (indices < 0) | (indices >= total_rows)
        if outside.any():
            row = int(outside.argmax())
            raise invalid_argument(
                "INVALID_FIELD",
                f"row_indices[{row}] is {indices[row]}; expected an index in [0, {total_rows})",
                field="row_indices",
                row=row,
                actual=indices[row],
                expected=f"[0, {total_rows})",
            )
    elif row_count > total_rows:
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"{row_field} has {row_count} rows, the joined set {total_rows}: without row_indices row i is row i of the set",
            field="total_rows",
            expected=f">= {row_count}",
            actual=total_rows,
        )
    return _requests.JoinedRows(join_key, total_rows, indices, data_type)


def _teacher_rows(owner: Head, term: JSD, row_count: int, hidden: Rows, hidden_name: str) -> TeacherRows:
    teacher = check_head(term.teacher, "teacher", owner)
    if isinstance(term.teacher_hidden, _Join):
        data_type = hidden.data_type if term.teacher_dtype is None else _arrays.data_type_name(term.teacher_dtype, "teacher_dtype")
        joined = check_join(term.join_key, term.total_rows, term.row_indices, row_count, data_type, hidden_name)
        return TeacherRows(teacher.name, teacher.epoch, joined)
    for name in ("join_key", "total_rows", "row_indices", "teacher_dtype"):
        if getattr(term, name) is not None:
            raise invalid_argument(
                "INVALID_COMBINATION", f"{name} belongs to teacher_hidden=headwater.JOIN; leave it out", field=name
            )
    rows = _requests.check_rows(term.teacher_hidden, "teacher_hidden", teacher.spec.hidden_size, owner._backend.row_memory)
    if rows.shape[0] != row_count:
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"teacher_hidden has {rows.shape[0]} rows, {hidden_name} has {row_count}",
            field="teacher_hidden",
            expected=row_count,
            actual=rows.shape[0],
        )
    return TeacherRows(teacher.name, teacher.epoch, rows)


def _jsd_options(head: Head, term: JSD, hard_loss: _requests.CrossEntropyOptions) -> JsdOptions:
    check_head(term.teacher, "teacher", head)
    hard_loss_weight = check_number(term.hard_loss_weight, "hard_loss_weight", low=0, high=1)
    if hard_loss_weight == 0 and (term.label_smoothing or term.z_loss or term.class_weights is not None):
        raise invalid_argument(
            "INVALID_COMBINATION",
            "label_smoothing, z_loss and class_weights belong to the hard loss: set hard_loss_weight > 0",
            field="hard_loss_weight",
        )
    if hard_loss_weight > 0 and term.targets is None:
        raise invalid_argument("MISSING_FIELD", "hard_loss_weight > 0 needs targets", field="targets")
    truncate_to_common = _requests.check_bool(term.truncate_to_common, "truncate_to_common")
    student_size, teacher_size = head.spec.valid_size, term.teacher.spec.valid_size
    if not truncate_to_common and student_size != teacher_size:
        raise invalid_argument(
            "VOCAB_SIZE_MISMATCH",
            f"the student's head has {student_size} valid columns, the teacher's {teacher_size}; "
            "pass truncate_to_common=True to compare what both have",
            field="teacher",
            expected=student_size,
            actual=teacher_size,
        )
    return JsdOptions(
        beta=check_number(term.beta, "beta", low=0, high=1),
        student_temperature=_requests.check_temperature(term.student_temperature, "student_temperature"),
        teacher_temperature=_requests.check_temperature(term.teacher_temperature, "teacher_temperature"),
        hard_loss_weight=hard_loss_weight,
        hard_loss=hard_loss,
        truncate_to_common=truncate_to_common,
    )


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """A call that joins a set whose rows are of another type than it says: the error names the argument that says it."""
    try:
        yield
    except FailedPreconditionError as error:
        if error.reason != "JOIN_INCOMPLETE" or error.metadata.get("field") != "data_type":
            raise
        message = (
            f"{error.message}; teacher_dtype= of the loss names the type of the teacher's rows, without it the student's is meant"
        )
        raise type(error)(message, reason=error.reason, metadata=error.metadata) from None


def check_one_step(terms: tuple[TermRequest, ...]) -> None:
    """Terms that name the same head must name the same step of it."""
    steps: dict[str, int | None] = {}
    for term in terms:
        if steps.setdefault(term.head, term.step) != term.step:
            raise invalid_argument(
                "INVALID_COMBINATION",
                f"the terms name steps {steps[term.head]} and {term.step} of {term.head}; a micro-batch belongs to one",
                field="step",
                expected=steps[term.head],
                actual=term.step,
            )
