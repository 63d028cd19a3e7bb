"""Arrays in and out: numpy, ml_dtypes, torch and `BFloat16`, brought to contiguous host memory and back.

numpy has no bfloat16. Four spellings are understood: an array of `ml_dtypes.bfloat16`, a torch tensor of `torch.bfloat16`,
a `BFloat16`, and (for weights) an array of uint16 together with `dtype="bfloat16"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater._errors import invalid_argument, must_be, wrong_shape, wrong_type

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"

# Values of headwater.v1.DataType and of the C ABI.
DATA_TYPE_NUMBERS = {FLOAT32: 1, BFLOAT16: 2, FLOAT16: 3}
DATA_TYPE_NAMES = {number: name for name, number in DATA_TYPE_NUMBERS.items()}

# How the elements lie in host memory; bfloat16 as its bits.
HOST_DTYPES = {FLOAT32: np.dtype("<f4"), BFLOAT16: np.dtype("<u2"), FLOAT16: np.dtype("<f2")}


_INT32_LEAST, _INT32_LARGEST = -(2**31), 2**31 - 1
_FEW = 16  # entries, that Python compares faster than numpy


class BFloat16:
    """An array of bfloat16 for people without ml_dtypes: a view of its bits.

    Attributes:
        bits: uint16 array of any shape; the upper halves of the binary32 patterns. Not copied.
    """

    def __init__(self, bits: np.ndarray):
        refuse_mask(bits, "bits")
        bits = np.asarray(bits)
        if bits.dtype != np.uint16:
            raise wrong_type("bits", "uint16", bits.dtype)
        self.bits = bits

    @classmethod
    def from_float32(cls, values: Any) -> BFloat16:
        """Rounds real numbers to nearest, ties to even. NaN stays NaN, infinities stay."""
        array = numbers(values, "values")
        _check_kind(array, values, "values", "iuf", "real numbers")
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(array, dtype=np.float32)
        pattern = values.view(np.uint32)
        rounded = ((pattern.astype(np.uint64) + 0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)
        quiet = ((pattern >> 16) | 0x40).astype(np.uint16)
        return cls(np.where(np.isnan(values), quiet, rounded).astype(np.uint16).reshape(values.shape))

    def to_float32(self) -> np.ndarray:
        """The same values as float32, exactly."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.bits.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.bits.ndim

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, index: Any) -> BFloat16:
        """A part, as numpy's indices name it; a view where numpy's is one."""
        return BFloat16(self.bits[index])

    def __repr__(self) -> str:
        return f"BFloat16(shape={self.shape})"


@dataclass(slots=True)
class HostArray:
    """Elements in contiguous little-endian host memory, and how to give such elements back in the caller's own kind of array."""

    data: np.ndarray  # float32, float16, or uint16 bits of bfloat16; C-contiguous
    data_type: str  # "float32", "bfloat16", "float16"
    like: Callable[[HostArray], Any]  # turns a HostArray into the kind of array that this one came from

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.data.shape

    def byte_view(self) -> memoryview:
        """All bytes, without a copy."""
        return memoryview(self.data.reshape(-1).view(np.uint8))

    def rows(self, index: np.ndarray) -> HostArray:
        """A copy of some rows."""
        return HostArray(np.ascontiguousarray(self.data[index]), self.data_type, self.like)

    def give(self, values: np.ndarray, data_type: str) -> Any:
        """An answer about these elements, in the kind of array that they came from."""
        return self.like(HostArray(values, data_type, self.like))


def to_numpy(array: HostArray) -> Any:
    """float32 and float16 as themselves; bfloat16 as ml_dtypes' if that is imported already, else as `BFloat16`."""
    if array.data_type != BFLOAT16:
        return array.data
    ml_dtypes = sys.modules.get("ml_dtypes")
    return array.data.view(ml_dtypes.bfloat16) if ml_dtypes is not None else BFloat16(array.data)


def to_float32(array: HostArray) -> np.ndarray:
    """The values as float32, exactly."""
    return BFloat16(array.data).to_float32() if array.data_type == BFLOAT16 else array.data.astype(np.float32)


def to_torch(array: HostArray) -> Any:
    """A torch tensor on the CPU over these elements; a copy where they cannot be written."""
    torch = sys.modules["torch"]
    data = array.data if array.data.flags.writeable else array.data.copy()
    return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16) if array.data_type == BFLOAT16 else torch.from_numpy(data)


def is_torch_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dense_tensor(value: Any, field: str) -> Any:
    """A torch tensor whose elements are there and lie in memory as numbers; detached.

    Raises:
        InvalidArgumentError: a sparse or quantized tensor, or one on the meta device.
    """
    torch = sys.modules["torch"]
    for found, kind, remedy in (
        (value.layout is not torch.strided, "sparse", "pass .to_dense()"),
        (value.is_quantized, "quantized", "pass .dequantize()"),
        (value.device.type == "meta", "on the meta device", "load its values first"),
    ):
        if found:
            raise wrong_type(field, "a dense tensor with values", f"one that is {kind}", remedy)
    value = value.detach()
    return value.resolve_neg() if value.is_neg() else value


def _tensor_to_numpy(value: Any, field: str) -> np.ndarray:
    """The elements of a dense CPU tensor, without a copy where it is contiguous; bfloat16 as its bits in int16."""
    torch = sys.modules["torch"]
    host = value.contiguous()
    try:
        array: np.ndarray = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
    except (RuntimeError, TypeError) as error:  # a subclass that keeps its elements some other way, a torch.func transform
        raise invalid_argument(
            "DATA_TYPE_MISMATCH",
            f"{field} is a {type(value).__name__} of {value.dtype} whose elements cannot be read ({error}); convert it to a plain "
            "tensor, and call this outside of torch.func transforms",
            field=field,
        ) from None
    return array


def _from_torch(value: Any, field: str, device_rows: Callable[[Any, str], Any] | None) -> Any:
    torch = sys.modules["torch"]
    names = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    if value.dtype not in names:
        raise _bad_dtype(field, value.dtype)
    value = dense_tensor(value, field)
    device = value.device
    if device.type == "cuda" and device_rows is not None:
        return device_rows(value, names[value.dtype])

    data = _tensor_to_numpy(value.to("cpu"), field)
    data = data.view(np.uint16) if value.dtype == torch.bfloat16 else data
    return HostArray(data, names[value.dtype], like=lambda array: to_torch(array).to(device))


def refuse_mask(value: Any, field: str) -> None:
    """Raises InvalidArgumentError for an array of numpy.ma, whose mask a conversion would drop."""
    if isinstance(value, np.ma.MaskedArray):
        raise wrong_type(field, "a plain array", "a masked one, whose mask would be dropped", "pass .filled(value)")


def _kind(array: np.ndarray, value: Any) -> Any:
    """The element type of an array for messages, or the type of a value that numpy sees no array in."""
    return type(value).__name__ if array.dtype == object and array.ndim == 0 else array.dtype


def _bad_dtype(field: str, dtype: Any, *, layer: Any = None) -> Exception:
    remedy = "convert it first" if layer is None else f"pass its .weight ({field}=layer.weight)"
    return wrong_type(field, "float32, float16 or bfloat16", dtype, remedy)


def from_any(value: Any, field: str, *, bits_of: str | None = None, device_rows: Callable[[Any, str], Any] | None = None) -> Any:
    """A `HostArray` of a floating-point array; copies only an array that is not contiguous or lies elsewhere.

    Args:
        value: numpy, ml_dtypes, torch or `BFloat16`.
        field: name of the argument, for messages.
        bits_of: "bfloat16" says that uint16 elements are bits of that type.
        device_rows: the replacement for a CUDA tensor, given its element type. None: it is brought to the host.
    Raises:
        InvalidArgumentError: another element type.
    """
    if isinstance(value, HostArray):
        return value
    if is_torch_tensor(value):
        return _from_torch(value, field, device_rows)
    if isinstance(value, BFloat16):
        return HostArray(
            np.ascontiguousarray(value.bits),
            BFLOAT16,
            lambda array: BFloat16(array.data) if array.data_type == BFLOAT16 else array.data,
        )
    array = numbers(value, field)
    for name in (FLOAT32, FLOAT16):
        if array.dtype == HOST_DTYPES[name]:
            return HostArray(np.ascontiguousarray(array), name, to_numpy)
    if array.dtype.name == "bfloat16":
        dtype = array.dtype
        return HostArray(
            np.ascontiguousarray(array).view(np.uint16),
            BFLOAT16,
            lambda result: result.data.view(dtype) if result.data_type == BFLOAT16 else result.data,
        )
    if array.dtype == np.uint16 and bits_of == BFLOAT16:
        return HostArray(np.ascontiguousarray(array), BFLOAT16, to_numpy)
    raise _bad_dtype(field, _kind(array, value), layer=value if hasattr(value, "weight") else None)


def data_type_name(dtype: Any, field: str = "dtype") -> str:
    """`"float32"`, `"bfloat16"` or `"float16"` from a name, a numpy type or a torch type."""
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in DATA_TYPE_NUMBERS and not isinstance(dtype, str):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            pass
    if name not in DATA_TYPE_NUMBERS:
        raise _bad_dtype(field, dtype)
    return name


def numbers(value: Any, field: str) -> np.ndarray:
    """The array of possibly nested sequences, or of a torch tensor."""
    if is_torch_tensor(value):
        value = dense_tensor(value, field).to("cpu")
        return _tensor_to_numpy(value.float() if value.dtype.is_floating_point else value, field)
    refuse_mask(value, field)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise invalid_argument("INVALID_FIELD", f"{field} must be an array of numbers: {error}", field=field) from None


def _check_kind(array: np.ndarray, value: Any, field: str, kinds: str, expected: str) -> None:
    """Elements of another kind would be converted: words, complex numbers, objects."""
    if array.dtype.kind not in kinds and not ("f" in kinds and array.dtype.name == "bfloat16"):
        kind = value.dtype if is_torch_tensor(value) else _kind(array, value)
        raise wrong_type(field, expected, kind)


def int_vector(value: Any, field: str, row_count: int) -> tuple[np.ndarray, int, int]:
    """int32 vector of `row_count` entries from any array of integers, and its least and its largest entry; 0 if it has none.

    Raises:
        InvalidArgumentError: not integers (True and False are none), another shape, or a value outside int32.
    """
    array = numbers(value, field)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)  # an empty list
    _check_kind(array, value, field, "iu", "integers")
    check_shape(array.shape, (row_count,), field)
    if array.size <= _FEW:
        entries = array.tolist() or [0]
        least, largest = min(entries), max(entries)
    else:
        least, largest = int(np.minimum.reduce(array)), int(np.maximum.reduce(array))
    if least < _INT32_LEAST or largest > _INT32_LARGEST:
        raise _bad_element(field, array, (array < _INT32_LEAST) | (array > _INT32_LARGEST), "in int32")
    return np.ascontiguousarray(array, dtype=np.int32), least, largest


def float_vector(value: Any, field: str, lengths: tuple[int, ...]) -> np.ndarray:
    """Finite float32 vector with one of the given lengths, from any array of real numbers; True is 1. Rounds to nearest.

    Raises:
        InvalidArgumentError: not numbers, another shape, or a value that is not finite in float32.
    """
    array = numbers(value, field)
    _check_kind(array, value, field, "biuf", "real numbers")
    if array.ndim != 1 or array.shape[0] not in lengths:
        check_shape(array.shape, (lengths[0],), field)
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(rounded)
    if not finite.all():
        raise _bad_element(field, array, ~finite, "finite in float32")
    return rounded


def rounded(values: np.ndarray, data_type: str) -> HostArray:
    """float32 values as a head of this type stores them: rounded to nearest, ties to even."""
    if data_type == BFLOAT16:
        return HostArray(BFloat16.from_float32(values).bits, data_type, to_numpy)
    with np.errstate(over="ignore"):
        return HostArray(values.astype(HOST_DTYPES[data_type]), data_type, to_numpy)


def check_fits(array: HostArray, data_type: str, field: str) -> None:
    """Raises InvalidArgumentError unless a head of this type stores such a weight: in its own type, or finite ones of float32."""
    if array.data_type not in (data_type, FLOAT32):
        raise wrong_type(field, f"{data_type}, as the head is, or float32", array.data_type)
    if array.data_type != FLOAT32 or data_type == FLOAT32 or array.data.size == 0:
        return
    extremes = np.array([array.data.min(), array.data.max()])
    bad = np.isfinite(extremes) & ~np.isfinite(to_float32(rounded(extremes, data_type)))
    if bad.any():
        value = float(extremes[int(np.argmax(bad))])
        raise must_be(field, f"finite in {data_type}, which the head stores", value)


# Elements that are compared at a time.
_COMPARED = 1 << 22


def is_stored_as(array: HostArray, stored: np.ndarray, data_type: str) -> bool:
    """Whether a head that was given these weights, of `data_type` or float32, stores `stored`; NaN equals NaN."""
    given, stored = array.data.reshape(-1), stored.reshape(-1)
    for start in range(0, given.size, _COMPARED):
        part, other = given[start : start + _COMPARED], HostArray(stored[start : start + _COMPARED], data_type, to_numpy)
        mine = HostArray(part, data_type, to_numpy) if array.data_type == data_type else rounded(part, data_type)
        if not np.array_equal(to_float32(mine), to_float32(other), equal_nan=True):
            return False
    return given.size == stored.size


def _bad_element(field: str, array: np.ndarray, bad: np.ndarray, expected: str) -> Exception:
    """The first of the bad elements of a vector."""
    index = int(np.argmax(bad))
    actual = f"{array[index]} at index {index}"
    return invalid_argument(
        "INVALID_FIELD", f"{field} must be {expected}, got {actual}", field=field, expected=expected, actual=actual
    )


def check_shape(actual: tuple[int, ...], expected: tuple[int, ...], field: str) -> None:
    """Raises InvalidArgumentError unless the shapes are equal."""
    if tuple(actual) != tuple(expected):
        raise wrong_shape(field, tuple(expected), tuple(actual))
