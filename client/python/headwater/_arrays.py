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

from headwater._errors import invalid_argument

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"

# Values of headwater.v1.DataType and of the C ABI.
DATA_TYPE_NUMBERS = {FLOAT32: 1, BFLOAT16: 2, FLOAT16: 3}
DATA_TYPE_NAMES = {number: name for name, number in DATA_TYPE_NUMBERS.items()}

# How the elements lie in host memory; bfloat16 as its bits.
_HOST_DTYPES = {FLOAT32: np.dtype("<f4"), BFLOAT16: np.dtype("<u2"), FLOAT16: np.dtype("<f2")}


def host_dtype(data_type: str) -> np.dtype:
    """numpy type in which elements of `data_type` are held; uint16 bits for bfloat16."""
    return _HOST_DTYPES[data_type]


class BFloat16:
    """An array of bfloat16 for people without ml_dtypes: a view of its bits.

    Attributes:
        bits: uint16 array of any shape; the upper halves of the binary32 patterns. Not copied.
    """

    def __init__(self, bits: np.ndarray):
        bits = np.asarray(bits)
        if bits.dtype != np.uint16:
            raise invalid_argument(
                "DATA_TYPE_MISMATCH", f"BFloat16 takes the bits as uint16, got {bits.dtype}", expected="uint16", actual=bits.dtype
            )
        self.bits = bits

    @classmethod
    def from_float32(cls, values: Any) -> BFloat16:
        """Rounds to nearest, ties to even. NaN stays NaN, infinities stay."""
        values = np.ascontiguousarray(values, dtype=np.float32)
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

    def __repr__(self) -> str:
        return f"BFloat16(shape={self.shape})"


@dataclass(frozen=True)
class HostArray:
    """Elements in contiguous little-endian host memory, and how to give such elements back in the caller's own kind of array."""

    data: np.ndarray  # float32, float16, or uint16 bits of bfloat16; C-contiguous
    data_type: str  # "float32", "bfloat16", "float16"
    like: Callable[[HostArray], Any]  # turns a HostArray into the kind of array that this one came from
    pool: Any = None  # BlockPool in which answers about these elements are put; None: the backend's own

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.data.shape

    def byte_view(self) -> memoryview:
        """All bytes, without a copy."""
        return memoryview(self.data.reshape(-1).view(np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.data.nbytes

    def rows(self, index: np.ndarray) -> HostArray:
        """A copy of some rows."""
        return HostArray(np.ascontiguousarray(self.data[index]), self.data_type, self.like, self.pool)

    def copy(self) -> HostArray:
        """The same elements in memory of its own."""
        return HostArray(self.data.copy(), self.data_type, self.like, self.pool)

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


def is_torch_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(value: Any, field: str, device_rows: Callable[[Any, str], Any] | None) -> Any:
    torch = sys.modules["torch"]
    names = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    if value.dtype not in names:
        raise _bad_dtype(field, value.dtype)
    device = value.device
    if device.type == "cuda" and device_rows is not None:
        return device_rows(value, names[value.dtype])

    def like(array: HostArray) -> Any:
        if array.data_type == BFLOAT16:
            result = torch.from_numpy(array.data.view(np.int16)).view(torch.bfloat16)
        else:
            result = torch.from_numpy(array.data)
        return result.to(device)

    host = value.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        data = host.view(torch.int16).numpy().view(np.uint16)
    else:
        data = host.numpy()
    return HostArray(data, names[value.dtype], like)


def _kind(array: np.ndarray, value: Any) -> Any:
    """What came, for messages: the element type, or the type of a value that numpy sees no array in."""
    return type(value).__name__ if array.dtype == object and array.ndim == 0 else array.dtype


def _bad_dtype(field: str, dtype: Any) -> Exception:
    return invalid_argument(
        "DATA_TYPE_MISMATCH",
        f"{field} must be float32, float16 or bfloat16, got {dtype}; convert it first",
        field=field,
        expected="float32, float16, bfloat16",
        actual=dtype,
    )


def from_any(value: Any, field: str, *, bits_of: str | None = None, device_rows: Callable[[Any, str], Any] | None = None) -> Any:
    """A `HostArray` of a floating-point array; copies only what is not contiguous or lies elsewhere.

    Args:
        value: numpy, ml_dtypes, torch or `BFloat16`.
        field: name of the argument, for messages.
        bits_of: "bfloat16" says that uint16 elements are bits of that type.
        device_rows: what is made of a CUDA tensor, given its element type, instead. None: it is brought to the host.
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
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        dtype = array.dtype
        return HostArray(
            np.ascontiguousarray(array).view(np.uint16),
            BFLOAT16,
            lambda result: result.data.view(dtype) if result.data_type == BFLOAT16 else result.data,
        )
    if array.dtype == np.uint16 and bits_of == BFLOAT16:
        return HostArray(np.ascontiguousarray(array), BFLOAT16, to_numpy)
    for name in (FLOAT32, FLOAT16):
        if array.dtype == _HOST_DTYPES[name]:
            return HostArray(np.ascontiguousarray(array), name, to_numpy)
    raise _bad_dtype(field, _kind(array, value))


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


def _numbers(value: Any, field: str, dtype: Any = None) -> np.ndarray:
    """The array of what may be nested sequences; beyond the dtype's range lies infinity."""
    try:
        with np.errstate(over="ignore"):
            return np.asarray(value, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise invalid_argument("INVALID_FIELD", f"{field} must be an array of numbers: {error}", field=field) from None


def int_vector(value: Any, field: str, row_count: int) -> np.ndarray:
    """int32 vector of `row_count` entries from any array of integers.

    Raises:
        InvalidArgumentError: not integers, another shape, or a value outside int32.
    """
    array = value.detach().cpu().numpy() if is_torch_tensor(value) else _numbers(value, field)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)  # an empty list
    if array.dtype.kind not in "iu":
        kind = _kind(array, value)
        raise invalid_argument(
            "DATA_TYPE_MISMATCH",
            f"{field} must be integers, got {kind}",
            field=field,
            expected="integers",
            actual=kind,
        )
    check_shape(array.shape, (row_count,), field)
    info = np.iinfo(np.int32)
    if array.size and (array.min() < info.min or array.max() > info.max):
        raise _bad_element(field, array, (array < info.min) | (array > info.max), "in int32")
    return np.ascontiguousarray(array, dtype=np.int32)


def float_vector(value: Any, field: str, lengths: tuple[int, ...]) -> np.ndarray:
    """Finite float32 vector with one of the given lengths.

    Raises:
        InvalidArgumentError: another shape, or a value that is not finite.
    """
    array = value.detach().float().cpu().numpy() if is_torch_tensor(value) else _numbers(value, field, np.float32)
    if array.ndim != 1 or array.shape[0] not in lengths:
        check_shape(array.shape, (lengths[0],), field)
    finite = np.isfinite(array)
    if not finite.all():
        raise _bad_element(field, array, ~finite, "finite")
    return np.ascontiguousarray(array, dtype=np.float32)


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
        raise invalid_argument(
            "SHAPE_MISMATCH",
            f"{field} must have shape {tuple(expected)}, got {tuple(actual)}",
            field=field,
            expected=tuple(expected),
            actual=tuple(actual),
        )
