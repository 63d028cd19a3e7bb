"""Loss terms: the computation, its rows, and its head. `Head.multi` takes several; the other losses are one each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np

from headwater import _arrays, _wire
from headwater._errors import FailedPreconditionError, invalid_argument, must_be, refused, wrong_shape
from headwater._loss import _requests
from headwater._loss._requests import DEFAULT_IGNORE_INDEX, FACTORS, CrossEntropyFields, JsdFields, TeacherRows, TermRequest
from headwater._memory import Rows
from headwater._remote import RemoteBackend
from headwater._types import HeadSpec, check_factor, check_integer, check_number

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")
Options = TypeVar("Options")


class Handle:
    """Stands for something elsewhere, which a copy means too: that of a module that has a loss, say."""

    _WHY_NOT_PICKLED: ClassVar[str]

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(self._WHY_NOT_PICKLED)


class HeadReference(Handle):
    """A head as terms name it: `headwater.Head` is one.

    Attributes:
        step: the step that calls work on unless they say otherwise.
    """

    def __init__(self, backend: RemoteBackend, name: str, spec: HeadSpec, epoch: bytes, step: int | None):
        self._backend = backend
        self._name = name
        self._spec = spec
        self._known_epoch = epoch
        self.step = step

    @property
    def name(self) -> str:
        """`tenants/{tenant}/heads/{head}`."""
        return self._name

    @property
    def spec(self) -> HeadSpec:
        """The head's specification, fixed for its life."""
        return self._spec

    @property
    def epoch(self) -> bytes:
        """The 16 bytes that this object's calls carry."""
        return self._backend.current_epoch(self._name, self._known_epoch)


class _Join:
    """The type of `JOIN`."""

    def __repr__(self) -> str:
        return "headwater.JOIN"

    def __reduce__(self) -> str:
        return "JOIN"


# In the place of a teacher's hidden states: another stream brings them (`Client.teacher`).
JOIN = _Join()
# The options of a loss that belong to it.
JOIN_OPTIONS = ("join_key", "total_rows", "row_indices", "teacher_dtype")


@dataclass(eq=False)
class TopKTeacher:
    """A teacher that is known by k vocabulary ids of each token: `teacher` of `Head.jsd`, without `teacher_hidden` and with beta=0.

    All other ids together have the mass 1 - sum(exp(log_probs)); below 1e-6 it counts as 0. The loss is the forward KL divergence
    of the given ids, with one bucket for the other ids. The k likeliest ids give a biased gradient: nothing says how the teacher
    divides the rest. Ids that were drawn from the teacher, each with its share of the draws, give an unbiased one.

    Attributes:
        ids: (num_tokens, k) integers in [0, vocab_size), each at most once in a row, in any order; -1: not used. k from 1 to 1024.
        log_probs: (num_tokens, k) natural logarithms, finite and <= 0 where the id is used; a row's probabilities add up to at
            most 1 (0.1 % more for rounding).
    """

    ids: Any
    log_probs: Any


# ---- options: each is declared once, and a loss takes those of the classes that it is made of ----------------------------


@dataclass(eq=False, kw_only=True)
class HardLossOptions:
    """Options of a cross entropy, and of the one within a divergence. Losses of headwater.torch take them too."""

    ignore_index: int = DEFAULT_IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(eq=False, kw_only=True)
class PlainCrossEntropyOptions(HardLossOptions):
    """Options of a cross entropy that is no divergence's part. `CrossEntropyLoss` of headwater.torch takes them too."""

    temperature: float = 1.0
    token_scaling: bool = False


@dataclass(eq=False, kw_only=True)
class DivergenceOptions:
    """Options of a Jensen-Shannon divergence. `JSDLoss` of headwater.torch takes them too."""

    beta: float = 0.5
    hard_loss_weight: float = 0.0
    truncate_to_common: bool = False


@dataclass(eq=False, kw_only=True)
class TermOptions(HardLossOptions):
    """Options of a loss term of either kind."""

    token_weights: Any = None  # (rows of the term,) finite, any sign; None: 1
    loss_scale: float = 1.0
    class_weights: Any = None
    gradient_resolution: float = 0.0
    step: int | None = None  # None: `step` of the term's head
    expected_weight_version: int | None = None


@dataclass(eq=False, kw_only=True)
class CrossEntropyTermOptions(TermOptions, PlainCrossEntropyOptions):
    """Options of a cross entropy."""

    entropy_factors: Any = None  # (rows of the term,) finite, any sign; None: 0
    lse_factors: Any = None  # as entropy_factors


@dataclass(eq=False, kw_only=True)
class JsdTermOptions(TermOptions, DivergenceOptions):
    """Options of a divergence to a teacher."""

    student_temperature: float = 1.0
    teacher_temperature: float = 1.0
    join_key: str | None = None  # with JOIN: 1 to 256 bytes of UTF-8
    total_rows: int | None = None  # with JOIN: rows of the joined set, >= 1
    row_indices: Any = None  # with JOIN: (rows of the term,) integers in [0, total_rows); None: row i is row i of the set
    teacher_dtype: Any = None  # with JOIN: that of the rows; None: that of the student's


@dataclass(eq=False)
class CrossEntropy(CrossEntropyTermOptions):
    """A cross entropy over some rows of a micro-batch: a term of `Head.multi`. Arguments are those of `Head.cross_entropy`."""

    targets: Any  # (rows of the term,) integers, aligned with the rows
    head: HeadReference | None = None  # None: the head whose `multi` is called
    rows: Any = None  # slice(start, stop) or (start, stop), half-open, not empty; None: all


@dataclass(eq=False)
class JSD(JsdTermOptions):
    """A divergence to a teacher over some rows of a micro-batch: a term of `Head.multi`. Arguments are those of `Head.jsd`."""

    teacher: HeadReference | TopKTeacher
    teacher_hidden: Any = None  # (rows of the term, hidden_size of the teacher's head), or headwater.JOIN
    head: HeadReference | None = None  # as in CrossEntropy
    rows: Any = None  # as in CrossEntropy
    targets: Any = None  # (rows of the term,)


@dataclass(eq=False, kw_only=True)
class MicroBatchOptions:
    """How a micro-batch is submitted: options of every loss of `Head`."""

    micro_batch: int | None = None
    commit: str = "eager"
    allow_held: bool = False
    late_token_factors: bool = False
    attempt: int | None = None
    outputs: Sequence[str] = ()
    backward: bool = True
    return_grad_hidden: bool | None = None
    grad_hidden_scale: float = 1.0
    grad_hidden_dtype: Any = None
    grad_hidden_out: Any = None
    on_mismatch: str = "conflict"
    non_finite: str = "report"
    timeout_s: float | None = None

    rows_field: ClassVar[str] = "hidden"  # name of the argument with the rows


@dataclass(eq=False)
class CrossEntropyCall(MicroBatchOptions, CrossEntropyTermOptions):
    """Arguments of `Head.cross_entropy`, which is one term."""

    hidden: Any
    targets: Any


@dataclass(eq=False)
class JsdCall(MicroBatchOptions, JsdTermOptions):
    """Arguments of `Head.jsd`, which is one term."""

    student_hidden: Any
    teacher: HeadReference | TopKTeacher
    teacher_hidden: Any = None
    _: KW_ONLY
    targets: Any = None

    rows_field: ClassVar[str] = "student_hidden"


@dataclass(eq=False)
class MultiCall(MicroBatchOptions):
    """Arguments of `Head.multi`."""

    hidden: Any
    terms: Iterable[CrossEntropy | JSD]


Term = CrossEntropy | JSD | CrossEntropyCall | JsdCall
LossCall = CrossEntropyCall | JsdCall | MultiCall


def spread(options: Callable[P, Options]) -> Callable[[Callable[[Self, Options], R]], Callable[Concatenate[Self, P], R]]:
    """Makes a method of one argument, a dataclass, take the dataclass's own arguments, which `help` and type checkers see."""

    def decorate(method: Callable[[Self, Options], R]) -> Callable[Concatenate[Self, P], R]:
        @functools.wraps(method)
        def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, options(*args, **kwargs))

        signature = inspect.signature(method)
        own = next(iter(signature.parameters.values()))
        parameters = [own, *inspect.signature(options).parameters.values()]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.options = options  # type: ignore[attr-defined]
        return call

    return decorate


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
        raise must_be("rows", "slice(start, stop) or (start, stop)", rows) from None
    start, stop = check_integer(start, "rows"), check_integer(stop, "rows")
    if not start < stop <= row_count:
        raise must_be("rows", f"a range that is not empty within [0, {row_count})", (start, stop))
    return start, stop


def check_head(value: Any, field: str, owner: HeadReference) -> HeadReference:
    """A head of the same client as `owner`."""
    if not isinstance(value, HeadReference):
        raise must_be(field, "a headwater.Head", type(value))
    if value._backend is not owner._backend:
        raise refused(f"{field} must be a head of the same client as {owner.name}", field)
    return value


def check_term(owner: HeadReference, term: Term, hidden: Rows, hidden_name: str, backward: bool) -> TermRequest:
    """The term, checked against its heads and the micro-batch's rows."""
    if not isinstance(term, Term):
        raise must_be("terms", "headwater.CrossEntropy or headwater.JSD", type(term))
    head, rows = owner, None
    if isinstance(term, (CrossEntropy, JSD)):
        rows = term.rows
        head = owner if term.head is None else check_head(term.head, "head", owner)
    if hidden.shape[1] != head.spec.hidden_size:
        _requests.check_rows(hidden, hidden_name, head.spec.hidden_size)
    start, stop = _row_range(rows, hidden.shape[0])
    count = stop - start
    ignore_index = check_integer(term.ignore_index, "ignore_index", low=-(2**31), high=2**31 - 1)
    targets, may_ignore = None, False
    if not isinstance(term, (JSD, JsdCall)) or term.targets is not None:
        targets, may_ignore = _requests.check_targets(term.targets, count, ignore_index, head.spec.valid_size)
    class_weights = _vector(term.class_weights, "class_weights", head.spec.valid_size, head.spec.vocab_size)
    vectors = {name: _vector(getattr(term, name, None), name, count) for name in ("token_weights", *FACTORS)}
    top_k, teacher = None, None
    if isinstance(term, (JSD, JsdCall)):
        if isinstance(term.teacher, TopKTeacher):
            top_k = _top_k_rows(term, term.teacher, count, head.spec.valid_size)
        else:
            teacher = _teacher_rows(owner, term, count, hidden, hidden_name)
    version = term.expected_weight_version
    step = None
    if head.spec.trainable and backward:
        step = check_integer(head.step if term.step is None else term.step, "step")
    return TermRequest(
        head=head.name,
        epoch=head.epoch,
        step=step,
        row_start=start,
        row_count=count,
        targets=targets,
        may_ignore=may_ignore,
        ignore_index=ignore_index,
        **vectors,
        loss_scale=check_factor(term.loss_scale, "loss_scale"),
        loss=_jsd_fields(head, term) if isinstance(term, (JSD, JsdCall)) else CrossEntropyFields(_cross_entropy(term)),
        class_weights=class_weights,
        teacher=teacher,
        top_k=top_k,
        expected_weight_version=None if version is None else check_integer(version, "expected_weight_version"),
        gradient_resolution=check_number(term.gradient_resolution, "gradient_resolution"),
    )


def _vector(values: Any, name: str, *lengths: int) -> np.ndarray | None:
    return None if values is None else _arrays.float_vector(values, name, lengths)


MAX_JOIN_KEY_BYTES = 256


def check_join(
    join_key: Any, total_rows: Any, row_indices: Any, row_count: int, data_type: str, row_field: str
) -> _requests.JoinedRows:
    """The place of `row_count` rows in a joined set."""
    if not isinstance(join_key, str) or not 1 <= len(join_key.encode()) <= MAX_JOIN_KEY_BYTES:
        raise must_be("join_key", f"a string of 1 to {MAX_JOIN_KEY_BYTES} bytes", join_key)
    total_rows = check_integer(total_rows, "total_rows", low=1)
    indices = None
    if row_indices is not None:
        indices, least, largest = _arrays.int_vector(row_indices, "row_indices", row_count)
        if least < 0 or largest >= total_rows:
            row = int(((indices < 0) | (indices >= total_rows)).argmax())
            raise invalid_argument(
                "INVALID_FIELD",
                f"row_indices[{row}] is {indices[row]}; expected an index in [0, {total_rows})",
                field="row_indices",
                row=row,
                actual=indices[row],
                expected=f"[0, {total_rows})",
            )
    elif row_count > total_rows:
        expected = f">= {row_count}, the rows of {row_field}: without row_indices row i is row i of the set"
        raise must_be("total_rows", expected, total_rows, "SHAPE_MISMATCH")
    return _requests.JoinedRows(join_key, total_rows, indices, data_type)


def _teacher_rows(owner: HeadReference, term: JSD | JsdCall, row_count: int, hidden: Rows, hidden_name: str) -> TeacherRows:
    teacher = check_head(term.teacher, "teacher", owner)
    if term.teacher_hidden is None:
        raise invalid_argument("MISSING_FIELD", "teacher_hidden is required with a teacher's head", field="teacher_hidden")
    if isinstance(term.teacher_hidden, _Join):
        data_type = hidden.data_type if term.teacher_dtype is None else _arrays.data_type_name(term.teacher_dtype, "teacher_dtype")
        joined = check_join(term.join_key, term.total_rows, term.row_indices, row_count, data_type, hidden_name)
        return TeacherRows(teacher.name, teacher.epoch, joined)
    for name in JOIN_OPTIONS:
        if getattr(term, name) is not None:
            raise refused(f"{name} belongs to teacher_hidden=headwater.JOIN; leave it out", name)
    rows = _requests.check_rows(term.teacher_hidden, "teacher_hidden", teacher.spec.hidden_size, on_device=True)
    if rows.shape[0] != row_count:
        raise wrong_shape("teacher_hidden", (row_count, rows.shape[1]), rows.shape)
    return TeacherRows(teacher.name, teacher.epoch, rows)


def _top_k_rows(term: JSD | JsdCall, teacher: TopKTeacher, row_count: int, valid_size: int) -> _requests.TopKRows:
    for name in ("teacher_hidden", *JOIN_OPTIONS):
        if getattr(term, name) is not None:
            raise refused(f"{name} must be left out: a TopKTeacher has no hidden states", name)
    return _requests.check_top_k(teacher.ids, teacher.log_probs, row_count, valid_size)


def _cross_entropy(term: Term) -> _requests.Fields:
    return _requests.option_fields(term, _wire.CrossEntropyLoss)


def _jsd_fields(head: HeadReference, term: JSD | JsdCall) -> JsdFields:
    teacher = None if isinstance(term.teacher, TopKTeacher) else check_head(term.teacher, "teacher", head)
    fields, hard_loss = _requests.option_fields(term, _wire.JensenShannonLoss), _cross_entropy(term)
    if term.hard_loss_weight == 0 and (hard_loss or term.class_weights is not None):
        names = [name for name, _ in hard_loss] + ["class_weights"] * (term.class_weights is not None)
        raise refused(f"{' and '.join(names)}: of the hard loss alone; set hard_loss_weight > 0", "hard_loss_weight")
    truncate_to_common = _requests.check_bool(term.truncate_to_common, "truncate_to_common")
    student_size = head.spec.valid_size
    teacher_size = student_size if teacher is None else teacher.spec.valid_size
    if not truncate_to_common and student_size != teacher_size:
        raise invalid_argument(
            "VOCAB_SIZE_MISMATCH",
            f"the student's head has {student_size} valid columns, the teacher's {teacher_size}; "
            "pass truncate_to_common=True to compare what both have",
            field="teacher",
            expected=student_size,
            actual=teacher_size,
        )
    return JsdFields(fields, hard_loss if term.hard_loss_weight != 0 else None, truncate_to_common)


def explained(error: FailedPreconditionError) -> FailedPreconditionError:
    """The error of a call that joins a set. If the set's rows are of another type than the call says, it names the argument for the
    type."""
    if error.reason != "JOIN_INCOMPLETE" or error.metadata.get("field") != "data_type":
        return error
    message = f"{error.message}; teacher_dtype= of the loss names the type of the teacher's rows, without it the student's is meant"
    return type(error)(message, reason=error.reason, metadata=error.metadata)


def check_one_step(terms: tuple[TermRequest, ...]) -> None:
    """Terms that name the same head must name the same step of it."""
    steps: dict[str, int | None] = {}
    for term in terms:
        if steps.setdefault(term.head, term.step) != term.step:
            raise refused(
                f"the terms name steps {steps[term.head]} and {term.step} of {term.head}; a micro-batch belongs to one",
                "step",
                expected=steps[term.head],
                actual=term.step,
            )
