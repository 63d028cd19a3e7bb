"""Arguments and results, as plain frozen data. Shapes in parentheses; nats are natural-log units."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from headwater._errors import invalid_argument, must_be, refused

Result = TypeVar("Result")


# How types of elements begin that are no real numbers: those of words and records by their byte order.
_OTHER_TYPES = ("bool", "complex", "datetime", "timedelta", "object", "str", "<U", ">U", "|")


def _is_number(value: Any) -> bool:
    """Whether this is a number or an array of numbers. numpy's and torch's scalars convert to float and int whatever they are."""
    if isinstance(value, (bool, str)):
        return False
    return not str(getattr(value, "dtype", "")).removeprefix("torch.").startswith(_OTHER_TYPES)


def _to_number(value: Any, name: str) -> float:
    if type(value) is float:  # most are
        return value
    if not _is_number(value) or not hasattr(value, "__float__"):
        raise must_be(name, "a number", type(value))
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # an array of several elements, an integer beyond fp64
        raise invalid_argument("INVALID_FIELD", f"{name} must be one finite number: {error}", field=name) from None


def check_number(
    value: Any,
    name: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    nonzero: bool = False,
) -> float:
    """A finite float within a range.

    Raises:
        InvalidArgumentError: not a number, not finite, or outside of the range.
    """
    number = _to_number(value, name)
    inside = (number > low if low_open else number >= low) and (number < high if high_open else number <= high)
    if not math.isfinite(number) or not inside or (nonzero and number == 0):
        left, right = "(" if low_open or low == -math.inf else "[", ")" if high_open or high == math.inf else "]"
        expected = "finite" if low == -math.inf and high == math.inf else f"in {left}{low:g}, {high:g}{right}"
        raise must_be(name, expected + (", not 0" if nonzero else ""), number)
    return number


def check_max_grad_norm(value: Any, name: str = "max_grad_norm") -> float | None:
    """A number > 0, or None for no clipping, which 0 and infinity mean too, as in trainers' options.

    Raises:
        InvalidArgumentError: not a number, NaN, or below 0.
    """
    if value is None:
        return None
    number = _to_number(value, name)
    if number in (0, math.inf):
        return None
    return check_number(number, name, low=0, low_open=True)


# The least number that rounds to infinity in float32.
_FLOAT32_END = (2 - 2.0**-24) * 2.0**127


def _check_float32(value: Any, name: str, kind: str, holds: Callable[[float], bool]) -> float:
    # As the server has it: a value that rounds to a finite float32 may be beyond the largest one by half a unit.
    number = _to_number(value, name)
    if not -_FLOAT32_END < number < _FLOAT32_END or not holds(number):
        raise must_be(name, f"{kind} that is finite in float32", number)
    return number


def check_factor(value: Any, name: str = "factor", *, nonzero: bool = False) -> float:
    """A number that is finite in float32, in which losses and gradients are multiplied: beyond it they would be NaN."""
    kind = "a number other than 0" if nonzero else "a number"
    return _check_float32(value, name, kind, lambda number: not nonzero or number != 0)


def check_not_negative(value: Any, name: str) -> float:
    """A number >= 0 that is finite in float32, in which optimizers and losses compute: beyond it weights would be NaN."""
    return _check_float32(value, name, "a number >= 0", lambda number: number >= 0)


def check_integer(value: Any, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
    """An integer in [low, high].

    Raises:
        InvalidArgumentError: not an integer, or outside of the range.
    """
    if type(value) is int and low <= value <= high:  # most are
        return value
    if not _is_number(value) or not hasattr(value, "__index__"):
        raise must_be(name, "an integer", value)
    try:
        number = value.__index__()
    except TypeError as error:  # an array
        raise invalid_argument("INVALID_FIELD", f"{name} must be one integer: {error}", field=name) from None
    if not low <= number <= high:
        raise must_be(name, f"in [{low}, {high}]", number)
    return number


_check_fraction = functools.partial(check_number, low=0, high=1, high_open=True)
# The settings of optimizers that each step may override, with their ranges.
OPTIMIZER_SETTINGS: dict[str, Callable[[Any, str], float]] = {
    "weight_decay": check_not_negative,
    "beta1": _check_fraction,
    "beta2": _check_fraction,
    "epsilon": check_not_negative,
    "momentum": _check_fraction,
}


class _Optimizer:
    """Names the option to use instead of one of PyTorch's."""

    _PYTORCHS: ClassVar[Mapping[str, str]] = {}  # PyTorch's name -> ours

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        for name in settings.keys() & {"lr", "learning_rate"}:
            raise TypeError(
                f"headwater.{cls.__name__} takes no {name}=: the learning rate comes with each step, as learning_rate= of "
                "Head.apply_optimizer_step"
            )
        for name in settings.keys() & cls._PYTORCHS.keys():
            raise TypeError(f"headwater.{cls.__name__} takes no {name}=, which is PyTorch's name: pass {cls._PYTORCHS[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, check in OPTIMIZER_SETTINGS.items():
            if hasattr(self, name):
                check(getattr(self, name), name)


@dataclass(frozen=True)
class AdamW(_Optimizer):
    """AdamW on the server, in PyTorch's order of operations ("Decoupled Weight Decay Regularization", arXiv:1711.05101).

    Applies to weight and bias; fp32 master weights whatever the head's dtype. The learning rate comes with each step.
    """

    _PYTORCHS: ClassVar[Mapping[str, str]] = {"betas": "beta1= and beta2=", "eps": "epsilon="}

    beta1: float = 0.9  # [0, 1)
    beta2: float = 0.999  # [0, 1)
    epsilon: float = 1e-8  # >= 0, finite in float32
    weight_decay: float = 0.01  # >= 0, finite in float32


@dataclass(frozen=True)
class SGD(_Optimizer):
    """Stochastic gradient descent on the server, as torch.optim.SGD defines it. The learning rate comes with each step."""

    momentum: float = 0.0  # [0, 1); 0 takes no memory
    dampening: float = 0.0  # [0, 1]
    nesterov: bool = False  # needs momentum > 0 and dampening == 0
    weight_decay: float = 0.0  # >= 0, finite in float32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.dampening, "dampening", low=0, high=1)
        if not isinstance(self.nesterov, (bool, np.bool_)):
            raise must_be("nesterov", "True or False", self.nesterov)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise refused("nesterov needs momentum > 0 and dampening == 0", "nesterov")


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is tried, and how long to wait in between. The call's `timeout_s` bounds all of it together."""

    max_attempts: int = 5  # >= 1; 1: no retries
    initial_backoff: float = 0.1  # > 0, seconds before the second attempt; doubles with each one
    max_backoff: float = 5.0  # >= initial_backoff, seconds

    def __post_init__(self) -> None:
        check_integer(self.max_attempts, "max_attempts", low=1, high=2**31 - 1)
        check_number(self.initial_backoff, "initial_backoff", low=0, low_open=True)
        check_number(self.max_backoff, "max_backoff", low=self.initial_backoff)


DEFAULT_RETRIES = RetryPolicy()


@dataclass(frozen=True)
class TLS:
    """TLS to the server. Files are in PEM; new connections take up new files when these change."""

    ca_certificate: str | None = None
    """File with the authorities that may have signed the server's certificate; None: those of the system."""
    client_certificate: str | None = None
    """File with the certificate chain for a server that asks for it (mTLS)."""
    client_key: str | None = None
    """File with its key; both or neither."""
    server_name: str | None = None
    """The name that the server's certificate must be for; None: the host of the address."""


# How a group of ranks shares a head's work, with the wire API's numbers.
PARALLELISMS = {"vocabulary": 1, "rows": 2}


@dataclass(frozen=True)
class HeadSpec:
    """The specification of a head, fixed for its life."""

    vocab_size: int  # rows of `weight`
    hidden_size: int  # columns of `weight`
    data_type: str = "float32"  # of weight and bias: "float32", "bfloat16" or "float16"
    has_bias: bool = False
    logit_scale: float = 1.0  # finite, not 0
    softcap: float | None = None  # > 0
    valid_vocab_size: int | None = None  # in [1, vocab_size]; columns from here on never get probability. None: vocab_size
    trainable: bool = True
    optimizer: AdamW | SGD | None = None
    staging_slots: int | None = None  # explicit micro-batches that may wait for their decision. None: 1 if trainable
    initial_step: int = 0
    parallelism: str = "vocabulary"  # how a group of ranks shares the work: "vocabulary" or "rows"
    int8_teacher: bool = False  # a frozen 16-bit head whose logits as a teacher come from int8 products

    def __post_init__(self) -> None:
        check_integer(self.vocab_size, "vocab_size", low=1)
        check_integer(self.hidden_size, "hidden_size", low=1)
        check_number(self.logit_scale, "logit_scale", nonzero=True)
        if self.softcap is not None:
            check_number(self.softcap, "softcap", low=0, low_open=True)
        if self.valid_vocab_size is not None:
            check_integer(self.valid_vocab_size, "valid_vocab_size", low=1, high=self.vocab_size)
        if self.staging_slots is not None:
            check_integer(self.staging_slots, "staging_slots")
        check_integer(self.initial_step, "initial_step")
        if self.parallelism not in PARALLELISMS:
            raise must_be("parallelism", f"one of {', '.join(PARALLELISMS)}", self.parallelism)
        if self.optimizer is not None and not isinstance(self.optimizer, (AdamW, SGD)):
            raise must_be("optimizer", "headwater.AdamW, headwater.SGD or None", self.optimizer)
        if self.optimizer is not None and not self.trainable:
            raise refused("a frozen head takes no optimizer", "optimizer")
        if self.staging_slots and not self.trainable:
            raise refused("a frozen head takes no staging slots", "staging_slots")
        if self.int8_teacher and (self.trainable or self.data_type == "float32"):
            raise refused("only a frozen head of bfloat16 or float16 takes int8_teacher", "int8_teacher")

    @property
    def valid_size(self) -> int:
        """`valid_vocab_size` with its default filled in."""
        return self.vocab_size if self.valid_vocab_size is None else self.valid_vocab_size


@dataclass(frozen=True)
class VocabShard:
    """Rows [vocab_start, vocab_end) of a head on one executor."""

    vocab_start: int
    vocab_end: int
    device: str


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a head, by purpose, in bytes."""

    items: dict[str, int]
    total_bytes: int
    available_bytes: int
    token_chunk_rows: int


@dataclass(frozen=True)
class HeadInfo:
    """A head as the server has it now."""

    name: str  # tenants/{tenant}/heads/{head}
    spec: HeadSpec
    epoch: bytes  # 16 bytes
    state: str  # "LOADING", "READY", "LOST", or "RESTORED": brought back by a restarted server, waits for `Head.take`
    weight_version: int
    open_step: int | None = None  # None for a frozen head
    shards: tuple[VocabShard, ...] = ()
    memory_plan: MemoryPlan | None = None
    create_time_s: float = 0.0  # seconds since 1970
    weight_checksum: bytes = b""  # XXH3-128 of the weights last set from outside; empty after an optimizer step
    restored_checkpoint: str = ""  # that a RESTORED head came back from
    # The earlier epochs of the trainer that has taken the head to continue after a restart; empty after any other call.
    recovers_epochs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Device:
    """A place where shards live."""

    name: str
    model: str
    memory_budget_bytes: int
    memory_planned_bytes: int
    uuid: bytes = b""  # of a CUDA device: 16 bytes


@dataclass(frozen=True)
class ServerInfo:
    """Description of the server and its features."""

    version: str
    incarnation: bytes  # new at every start
    engine: str  # "cpu" or "cuda"
    devices: tuple[Device, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    engine_note: str = ""  # why the engine is not a faster one, and on the CPU the libraries of its products
    start_time_s: float = 0.0  # seconds since 1970
    descriptor_socket: str = ""  # path of the Unix socket through which memory is shared; empty: there is none
    named_regions: bool = False  # whether memory may be shared by a name under /dev/shm
    deterministic: bool = False  # whether contributions are added in ascending id


@dataclass(frozen=True)
class Timing:
    """Where a micro-batch's time went, in seconds on the server's clock. The parts may overlap."""

    queue_s: float = 0.0
    upload_s: float = 0.0
    engine_s: float = 0.0
    download_s: float = 0.0


@dataclass(frozen=True)
class GradientDither:
    """The error that `gradient_resolution` adds to a term's gradient G of the logits, before token and class weights and scales."""

    entry_count: int  # entries below their row's resolution
    squared_error: float  # expected squared distance of the dithered G from the exact one
    squared_norm: float  # of the exact G

    @property
    def relative_error(self) -> float:
        """The expected relative error of G, a root mean square; 0 where G is 0."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True)
class TermResult:
    """The result of one loss term. Sums are over its valid rows, in nats, with token weights and without `loss_scale`."""

    loss_sum: float  # soft + hard + z-loss parts
    soft_loss_sum: float  # the divergence's part; 0 for cross entropy
    hard_loss_sum: float  # the cross entropy's part without z-loss
    z_loss_sum: float
    valid_token_count: int  # rows whose target is not ignored
    token_weight_sum: float
    target_weight_sum: float  # sum of token weight x class weight of the target: PyTorch's divisor of a mean
    non_finite_row_count: int = 0
    token_loss: Any = None  # (rows of the term,) float32, before token weight and scale; 0 for ignored rows
    lse: Any = None  # (rows of the term,) float32
    target_log_probability: Any = None  # (rows of the term,) float32
    entropy: Any = None  # (rows of the term,) float32, nats
    argmax: Any = None  # (rows of the term,) int32; -1 for ignored rows
    mean_logits: Any = None  # (rows of the term,) float32: mean over the valid vocabulary
    log_sum_sq_probs: Any = None  # (rows of the term,) float32: ln of the sum of squared probabilities
    weight_version: int = 0
    teacher_weight_version: int = 0
    dither: GradientDither | None = None  # with gradient_resolution; of several terms in `LossResult.terms` alone
    teacher_mean_square_error: float = 0.0  # expected of an int8 teacher's logits; of several terms in `LossResult.terms` alone

    @property
    def teacher_logit_error(self) -> float:
        """The expected error of an int8 teacher's logits, a root mean square in nats; 0 of an exact teacher's."""
        return math.sqrt(self.teacher_mean_square_error)


# The sums of a term, by name: those that several terms have together.
LOSS_SUMS = tuple(name for name in TermResult.__annotations__ if name.endswith(("_sum", "_count")))


@dataclass(frozen=True)
class LossResult(TermResult):
    """The result of a micro-batch: the fields of its one term.

    With several terms (`Head.multi`) the sums are added up, and per-token outputs and versions are in `terms` alone.
    """

    grad_hidden: Any = None  # (num_tokens, hidden_size), in the kind and dtype of `hidden`; None if not computed
    state: str = "UNSPECIFIED"  # "COMMITTED", "STAGED", or "UNSPECIFIED" where nothing is added at all
    form: str = "UNSPECIFIED"  # "DIRECT", "STAGED", "HELD" or "UNSPECIFIED"
    replayed: bool = False  # nothing was added: the same micro-batch had been accepted before
    payload_differs: bool = False  # nothing was added: the micro-batch had been accepted before with other content
    digest: bytes = b""
    step: int | None = None
    timing: Timing = Timing()
    transport: str = ""  # path that the hidden states took: "grpc", "shared_memory" or "cuda_ipc"
    attempt: int = 0  # the attempt that was answered; above 0 after retries
    terms: tuple[TermResult, ...] = ()  # one for each term, in order
    _decision: Any = field(default=None, repr=False, compare=False)

    def commit(self, factor: float = 1.0, token_factors: Any = None, *, timeout_s: float | None = None) -> bool:
        """Adds this explicit micro-batch to all its heads, as `Head.commit` does; every head of every term, or none.

        Args:
            factor: finite in float32; multiplies the contribution.
            token_factors: (num_tokens,) finite, a factor for each row; only for one that is HELD.
        Returns:
            True if an equal call had committed it before.
        Raises:
            InvalidArgumentError: there is nothing to decide: eager micro-batches are committed already.
        """
        return self._decidable().commit(factor, token_factors, timeout_s)

    def discard(self, *, timeout_s: float | None = None) -> bool:
        """Drops this explicit micro-batch in all its heads, as `Head.discard` does. True if something was dropped."""
        return self._decidable().discard(timeout_s)

    def _decidable(self) -> Any:
        if self._decision is None:
            raise refused('only a micro-batch with commit="explicit" is decided', "commit")
        return self._decision


def result_of(cls: type[Result], values: dict[str, Any]) -> Result:
    """A frozen dataclass of these values and defaults, as its constructor makes it, in a fraction of the time."""
    result = object.__new__(cls)
    vars(result).update(values)
    return result


def combine_terms(terms: tuple[TermResult, ...]) -> dict[str, Any]:
    """The fields of a LossResult that come from its terms."""
    if len(terms) == 1:
        return {**vars(terms[0]), "terms": terms}
    return {**{name: sum(getattr(term, name) for term in terms) for name in LOSS_SUMS}, "terms": terms}


@dataclass(frozen=True)
class StepTotals:
    """Sums over a step's committed micro-batches."""

    micro_batch_count: int = 0
    valid_token_count: int = 0
    loss_sum: float = 0.0
    token_weight_sum: float = 0.0
    non_finite_row_count: int = 0


@dataclass(frozen=True)
class MicroBatchState:
    """The state of one micro-batch within a step."""

    micro_batch: int
    attempt: int
    state: str  # "IN_PROGRESS", "STAGED", "COMMITTED" or "DISCARDED"
    digest: bytes
    valid_token_count: int
    factor: float
    form: str = "UNSPECIFIED"  # how it is, or was, held: "DIRECT", "STAGED" or "HELD"


@dataclass(frozen=True)
class Step:
    """A step and its micro-batches."""

    step: int
    state: str  # "OPEN", "SEALED", "APPLIED", "DISCARDED" or "REPLACED"
    micro_batches: dict[int, MicroBatchState]
    totals: StepTotals


@dataclass(frozen=True)
class StepStatus:
    """The step that takes contributions or is sealed, and the one before it."""

    open: Step
    last_closed: Step | None


@dataclass(frozen=True)
class SealResult:
    """Totals of a sealed step; the norm is without `gradient_factor`."""

    totals: StepTotals
    gradient_norm_squared: float
    non_finite_count: int
    replayed: bool


@dataclass(frozen=True)
class ApplyResult:
    """The outcome of an optimizer step."""

    open_step: int
    weight_version: int
    global_grad_norm: float  # sqrt(gradient_norm_squared + other_grad_norm_squared)
    gradient_norm_squared: float  # the head's part, with gradient_factor, before clipping
    clip_factor: float  # in (0, 1]; multiply the trainer's own gradients by it
    totals: StepTotals
    replayed: bool


@dataclass(frozen=True)
class DiscardGradientResult:
    """The step that is open now."""

    open_step: int
    replayed: bool


@dataclass(frozen=True)
class SaveResult:
    """A checkpoint that was written."""

    checkpoint: str
    step: int  # the step that a restored head opens
    total_bytes: int


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint under a head's name."""

    checkpoint: str
    step: int  # the step that a restored head opens
    total_bytes: int
    save_time_s: float | None  # seconds since 1970; None for those of version 0.1
    damaged: bool  # it cannot be restored; the other fields are not known
