"""ctypes over the C ABI of the engines (headwater/kernels/c_api.h). Translates; decides nothing. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import code_name, make_error
from headwater._requests import ComputeRequest, CrossEntropyOptions, TermRequest
from headwater._types import SGD, AdamW, HeadSpec, LossResult, TermResult, combine_terms

ABI_VERSION = 3
LIBRARY_NAME = "libheadwater_local.so"
LIBRARY_VARIABLE = "HEADWATER_LOCAL_LIBRARY"

# HeadTensor by name.
TENSORS = {
    name: number
    for number, name in enumerate(
        (
            "weight",
            "bias",
            "master_weight",
            "master_bias",
            "grad_weight",
            "grad_bias",
            "moment1_weight",
            "moment1_bias",
            "moment2_weight",
            "moment2_bias",
        ),
        start=1,
    )
}

_GRAD_WEIGHT = {"none": 0, "accumulate": 1, "stage": 2}


class _Sized(Structure):
    """A struct whose first member is its size."""

    def __init__(self, **members: Any):
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), **members)


class _EngineOptions(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("engine", c_char_p),
        ("shard_count", c_int32),
        ("thread_count", c_int32),
        ("memory_budget_bytes", c_int64),
        ("workspace_bytes", c_int64),
        ("token_chunk_rows", c_int64),
        ("shard_weights", POINTER(c_int64)),
        ("device_index", c_int32),
        ("no_timed_search", c_int32),
        ("algorithm_cache_path", c_char_p),
    ]


class _OptimizerSpec(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("kind", c_int32),
        ("nesterov", c_int32),
        ("beta1", c_double),
        ("beta2", c_double),
        ("epsilon", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("weight_decay", c_double),
    ]


class _HeadSpec(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("vocab_size", c_int64),
        ("hidden_size", c_int64),
        ("data_type", c_int32),
        ("has_bias", c_int32),
        ("logit_scale", c_double),
        ("softcap", c_double),
        ("valid_vocab_size", c_int64),
        ("trainable", c_int32),
        ("staging_slots", c_int32),
        ("optimizer", _OptimizerSpec),
    ]


class _OptimizerStep(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("learning_rate", c_double),
        ("gradient_multiplier", c_double),
        ("update_count", c_int64),
        ("settings", _OptimizerSpec),
    ]


class _CrossEntropy(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("label_smoothing", c_double),
        ("z_loss", c_double),
        ("class_weights", POINTER(c_float)),
        ("class_weight_count", c_int64),
    ]


class _Jsd(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("beta", c_double),
        ("student_temperature", c_double),
        ("teacher_temperature", c_double),
        ("hard_loss_weight", c_double),
        ("truncate_to_common", c_int32),
        ("reserved", c_int32),
        ("hard_loss", _CrossEntropy),
    ]


class _LossTerm(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("head", c_void_p),
        ("row_start", c_int64),
        ("row_count", c_int64),
        ("targets", c_void_p),
        ("token_weights", c_void_p),
        ("ignore_index", c_int32),
        ("teacher_data_type", c_int32),
        ("loss_scale", c_double),
        ("cross_entropy", POINTER(_CrossEntropy)),
        ("jsd", POINTER(_Jsd)),
        ("teacher_head", c_void_p),
        ("teacher_hidden", c_void_p),
        ("token_loss", c_void_p),
        ("lse", c_void_p),
        ("target_log_probability", c_void_p),
        ("entropy", c_void_p),
        ("argmax", c_void_p),
    ]


class _MicroBatch(_Sized):
    _fields_ = [
        ("struct_bytes", c_int64),
        ("hidden", c_void_p),
        ("row_count", c_int64),
        ("hidden_size", c_int64),
        ("hidden_data_type", c_int32),
        ("backward", c_int32),
        ("terms", POINTER(_LossTerm)),
        ("term_count", c_int64),
        ("grad_hidden", c_void_p),
        ("grad_hidden_data_type", c_int32),
        ("grad_weight", c_int32),
        ("grad_hidden_scale", c_double),
        ("refuse_non_finite", c_int32),
        ("reserved", c_int32),
    ]


class _LossSums(Structure):
    _fields_ = [
        ("loss_sum", c_double),
        ("soft_loss_sum", c_double),
        ("hard_loss_sum", c_double),
        ("z_loss_sum", c_double),
        ("token_weight_sum", c_double),
        ("target_weight_sum", c_double),
        ("valid_token_count", c_int64),
        ("non_finite_row_count", c_int64),
    ]


# Name, result, arguments. A result of c_void_p is an error or NULL.
_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("hw_abi_version", c_int32, []),
    ("hw_error_code", c_int32, [c_void_p]),
    ("hw_error_reason", c_char_p, [c_void_p]),
    ("hw_error_message", c_char_p, [c_void_p]),
    ("hw_error_metadata_count", c_int32, [c_void_p]),
    ("hw_error_metadata_key", c_char_p, [c_void_p, c_int32]),
    ("hw_error_metadata_value", c_char_p, [c_void_p, c_int32]),
    ("hw_error_free", None, [c_void_p]),
    ("hw_engine_create", c_void_p, [POINTER(_EngineOptions), POINTER(c_void_p)]),
    ("hw_engine_destroy", None, [c_void_p]),
    ("hw_head_create", c_void_p, [c_void_p, POINTER(_HeadSpec), POINTER(c_void_p)]),
    ("hw_head_destroy", None, [c_void_p]),
    ("hw_head_plan", c_void_p, [c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    ("hw_head_element_count", c_int64, [c_void_p, c_int32]),
    ("hw_head_tensor_data_type", c_int32, [c_void_p, c_int32]),
    ("hw_head_read", c_void_p, [c_void_p, c_int32, c_int64, c_int64, c_void_p]),
    ("hw_head_write", c_void_p, [c_void_p, c_int32, c_int64, c_int64, c_void_p]),
    ("hw_head_zero_gradient", c_void_p, [c_void_p]),
    ("hw_head_add_gradient", c_void_p, [c_void_p, c_int32, c_int64, c_int64, c_double, c_void_p]),
    ("hw_head_reset_optimizer_state", c_void_p, [c_void_p]),
    ("hw_head_gradient_stats", c_void_p, [c_void_p, POINTER(c_double), POINTER(c_int64)]),
    ("hw_head_free_staging_slots", c_int32, [c_void_p]),
    ("hw_head_apply_optimizer", c_void_p, [c_void_p, POINTER(_OptimizerStep)]),
    ("hw_compute", c_void_p, [c_void_p, POINTER(_MicroBatch), POINTER(_LossSums), POINTER(c_void_p)]),
    ("hw_staged_commit", c_void_p, [c_void_p, c_double]),
    ("hw_staged_discard", None, [c_void_p]),
)


@functools.cache
def _library() -> ctypes.CDLL:
    """Loads the library from HEADWATER_LOCAL_LIBRARY, or from beside this file."""
    path = os.environ.get(LIBRARY_VARIABLE) or str(Path(__file__).with_name(LIBRARY_NAME))
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise make_error(
            "UNAVAILABLE", "", f"the in-process engine could not be loaded ({error}); set {LIBRARY_VARIABLE} to {LIBRARY_NAME}"
        ) from None
    for name, result, arguments in _FUNCTIONS:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.hw_abi_version() != ABI_VERSION:
        raise make_error(
            "FAILED_PRECONDITION", "", f"{path} has ABI version {library.hw_abi_version()}, this package needs {ABI_VERSION}"
        )
    return library


def _check(error: int | None) -> None:
    if error is None:
        return
    library = _library()
    try:
        metadata = {
            library.hw_error_metadata_key(error, index).decode(): library.hw_error_metadata_value(error, index).decode()
            for index in range(library.hw_error_metadata_count(error))
        }
        code = code_name(library.hw_error_code(error))
        raise make_error(code, library.hw_error_reason(error).decode(), library.hw_error_message(error).decode(), metadata)
    finally:
        library.hw_error_free(error)


def _optimizer(optimizer: AdamW | SGD | None) -> _OptimizerSpec:
    if isinstance(optimizer, AdamW):
        return _OptimizerSpec(
            kind=1, beta1=optimizer.beta1, beta2=optimizer.beta2, epsilon=optimizer.epsilon, weight_decay=optimizer.weight_decay
        )
    if isinstance(optimizer, SGD):
        return _OptimizerSpec(
            kind=2,
            momentum=optimizer.momentum,
            dampening=optimizer.dampening,
            nesterov=int(optimizer.nesterov),
            weight_decay=optimizer.weight_decay,
        )
    return _OptimizerSpec()


def _pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class Engine:
    """An engine in this process, "cpu" or "cuda". Calls that touch one head must not overlap; heads go before their engine."""

    def __init__(
        self,
        *,
        name: str,
        device: int,
        timed_search: bool,
        algorithm_cache: str,
        shards: int,
        threads: int,
        memory_budget_bytes: int,
        workspace_bytes: int,
        token_chunk_rows: int,
        shard_weights: Any,
    ):
        weights = None if shard_weights is None else (c_int64 * shards)(*shard_weights)
        options = _EngineOptions(
            engine=name.encode(),
            shard_count=shards,
            thread_count=threads,
            memory_budget_bytes=memory_budget_bytes,
            workspace_bytes=workspace_bytes,
            token_chunk_rows=token_chunk_rows,
            shard_weights=weights,
            device_index=device,
            no_timed_search=int(not timed_search),
            algorithm_cache_path=os.fsencode(algorithm_cache),
        )
        self.name = name
        self._handle = c_void_p()
        _check(_library().hw_engine_create(byref(options), byref(self._handle)))

    def destroy(self) -> None:
        """Frees the engine."""
        _library().hw_engine_destroy(self._handle)

    def create_head(self, spec: HeadSpec) -> EngineHead:
        """Allocates a head without weights."""
        options = _HeadSpec(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            data_type=_arrays.DATA_TYPE_NUMBERS[spec.data_type],
            has_bias=int(spec.has_bias),
            logit_scale=spec.logit_scale,
            softcap=spec.softcap or 0.0,
            valid_vocab_size=spec.valid_size,
            trainable=int(spec.trainable),
            staging_slots=spec.staging_slots or 0,
            optimizer=_optimizer(spec.optimizer),
        )
        handle = c_void_p()
        _check(_library().hw_head_create(self._handle, byref(options), byref(handle)))
        return EngineHead(handle)

    def compute(
        self, request: ComputeRequest, heads: Mapping[str, EngineHead], grad_weight: str
    ) -> tuple[LossResult, Staged | None]:
        """Computes one micro-batch; `heads` by name; `grad_weight` is "none", "accumulate" or "stage"."""
        row_count, hidden_size = request.hidden.shape
        assert isinstance(request.hidden, HostArray)
        outputs = [_new_outputs(request.outputs, term.row_count) for term in request.terms]
        terms = (_LossTerm * len(request.terms))(
            *(_loss_term(term, heads, arrays) for term, arrays in zip(request.terms, outputs, strict=True))
        )
        grad_hidden = None
        if request.return_grad_hidden:
            grad_hidden = request.grad_hidden_out
            if not isinstance(grad_hidden, np.ndarray):  # none, or in device memory: then it is copied there afterwards
                grad_hidden = np.empty(request.hidden.shape, dtype=_arrays.host_dtype(request.grad_hidden_data_type))
        micro_batch = _MicroBatch(
            hidden=_pointer(request.hidden.data),
            row_count=row_count,
            hidden_size=hidden_size,
            hidden_data_type=_arrays.DATA_TYPE_NUMBERS[request.hidden.data_type],
            backward=int(request.backward),
            terms=terms,
            term_count=len(request.terms),
            grad_hidden=_pointer(grad_hidden),
            grad_hidden_data_type=_arrays.DATA_TYPE_NUMBERS[request.grad_hidden_data_type],
            grad_weight=_GRAD_WEIGHT[grad_weight],
            grad_hidden_scale=request.grad_hidden_scale,
            refuse_non_finite=int(request.refuse_non_finite and grad_weight == "stage"),
        )
        sums, staged = (_LossSums * len(request.terms))(), c_void_p()
        try:
            _check(_library().hw_compute(self._handle, byref(micro_batch), sums, byref(staged)))
            results = tuple(
                TermResult(**{name: getattr(values, name) for name, _ in _LossSums._fields_}, **arrays)
                for values, arrays in zip(sums, outputs, strict=True)
            )
            return combine_terms(results, grad_hidden=grad_hidden), Staged(staged) if staged else None
        except BaseException:  # an interrupt comes when the library has returned
            if staged:
                Staged(staged).discard()
            raise


def _new_outputs(names: tuple[str, ...], row_count: int) -> dict[str, np.ndarray]:
    return {name: np.empty(row_count, dtype=np.int32 if name == "argmax" else np.float32) for name in names}


def _loss_term(request: TermRequest, heads: Mapping[str, EngineHead], outputs: Mapping[str, np.ndarray]) -> _LossTerm:
    term = _LossTerm(
        head=heads[request.head].handle,
        row_start=request.row_start,
        row_count=request.row_count,
        targets=_pointer(request.targets),
        token_weights=_pointer(request.token_weights),
        ignore_index=request.ignore_index,
        loss_scale=request.loss_scale,
        **{name: _pointer(array) for name, array in outputs.items()},
    )
    loss = request.loss
    if isinstance(loss, CrossEntropyOptions):
        term.cross_entropy = ctypes.pointer(_cross_entropy(loss))
    else:
        term.jsd = ctypes.pointer(
            _Jsd(
                beta=loss.beta,
                student_temperature=loss.student_temperature,
                teacher_temperature=loss.teacher_temperature,
                hard_loss_weight=loss.hard_loss_weight,
                truncate_to_common=int(loss.truncate_to_common),
                hard_loss=_cross_entropy(loss.hard_loss),
            )
        )
    if request.teacher is not None:
        term.teacher_head = heads[request.teacher.head].handle
        rows = request.teacher.sent
        assert isinstance(rows, HostArray)  # a joined teacher's have come by now
        term.teacher_hidden = _pointer(rows.data)
        term.teacher_data_type = _arrays.DATA_TYPE_NUMBERS[rows.data_type]
    return term


def _cross_entropy(options: CrossEntropyOptions) -> _CrossEntropy:
    weights = options.class_weights
    if weights is None:
        return _CrossEntropy(label_smoothing=options.label_smoothing, z_loss=options.z_loss)
    return _CrossEntropy(
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        class_weights=weights.ctypes.data_as(POINTER(c_float)),
        class_weight_count=weights.size,
    )


class Staged:
    """A contribution beside the accumulator. Decide it exactly once."""

    def __init__(self, handle: c_void_p):
        self._handle = handle

    def commit(self, factor: float) -> None:
        """Adds factor x contribution, and frees it."""
        _check(_library().hw_staged_commit(self._handle, factor))

    def discard(self) -> None:
        """Drops the contribution, and frees it."""
        _library().hw_staged_discard(self._handle)


class EngineHead:
    """A head on the engine."""

    def __init__(self, handle: c_void_p):
        self.handle = handle

    def destroy(self) -> None:
        """Frees the head."""
        _library().hw_head_destroy(self.handle)

    def plan(self) -> tuple[int, int]:
        """Bytes that it takes, and rows that are computed at once."""
        total_bytes, rows = c_int64(), c_int64()
        _check(_library().hw_head_plan(self.handle, byref(total_bytes), byref(rows)))
        return total_bytes.value, rows.value

    def has(self, tensor: str) -> bool:
        """Whether it has this tensor."""
        return _library().hw_head_element_count(self.handle, TENSORS[tensor]) > 0

    def read(self, tensor: str) -> tuple[np.ndarray, str]:
        """A whole tensor, flat, with its element type."""
        count = _library().hw_head_element_count(self.handle, TENSORS[tensor])
        data_type = _arrays.DATA_TYPE_NAMES[_library().hw_head_tensor_data_type(self.handle, TENSORS[tensor])]
        data = np.empty(count, dtype=_arrays.host_dtype(data_type))
        _check(_library().hw_head_read(self.handle, TENSORS[tensor], 0, count, _pointer(data)))
        return data, data_type

    def write(self, tensor: str, data: np.ndarray) -> None:
        """A whole tensor, in the element type that `read` gives."""
        _check(_library().hw_head_write(self.handle, TENSORS[tensor], 0, data.size, _pointer(data)))

    def zero_gradient(self) -> None:
        """Sets the accumulator to 0."""
        _check(_library().hw_head_zero_gradient(self.handle))

    def add_to_gradient(self, tensor: str, element_start: int, data: np.ndarray, factor: float) -> None:
        """Adds factor x float32 elements to "grad_weight" or "grad_bias", from `element_start` on."""
        _check(_library().hw_head_add_gradient(self.handle, TENSORS[tensor], element_start, data.size, factor, _pointer(data)))

    def free_staging_slots(self) -> int:
        """Staging slots that are not taken now."""
        return int(_library().hw_head_free_staging_slots(self.handle))

    def reset_optimizer_state(self) -> None:
        """Sets the optimizer's state to 0."""
        _check(_library().hw_head_reset_optimizer_state(self.handle))

    def gradient_stats(self) -> tuple[float, int]:
        """Squared norm of the accumulator, and its number of non-finite elements."""
        norm_squared, non_finite_count = c_double(), c_int64()
        _check(_library().hw_head_gradient_stats(self.handle, byref(norm_squared), byref(non_finite_count)))
        return norm_squared.value, non_finite_count.value

    def apply_optimizer(self, settings: AdamW | SGD, learning_rate: float, multiplier: float, update_count: int) -> None:
        """Updates the weights from the accumulator, then zeroes it."""
        step = _OptimizerStep(
            learning_rate=learning_rate, gradient_multiplier=multiplier, update_count=update_count, settings=_optimizer(settings)
        )
        _check(_library().hw_head_apply_optimizer(self.handle, byref(step)))
