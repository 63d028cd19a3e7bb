"""Calls of the host by programs on a CUDA GPU: an FFI handler on the device's stream, in place of JAX's callbacks.

JAX's callbacks bring operands to the host and results back. Here rows stay on the device. The function gets the addresses of its
inputs and outputs, as PrivateRows, so that no other process opens XLA's memory. The Python package cffi makes the handler from the
declarations that jaxlib installs (xla/ffi/api/c_api.h), whose layouts are those of the XLA that calls it. The handler has no trait,
so that XLA captures no call in a command buffer.

Operands and results of two dimensions and float32, bfloat16 or float16 are rows. An operand of rows is a PrivateRows, good until
the function returns; everything else is a numpy array. `memory` has a PrivateRows for each result of rows, where the function may
write it. The function returns an array for each result, or that PrivateRows once it is written.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cffi
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo as hlo

from headwater._arrays import DATA_TYPE_NUMBERS
from headwater._errors import warn
from headwater._memory import DeviceAddress, PrivateRows, Stream
from headwater.jax import _callbacks

# An error that XLA reports: INTERNAL, as of JAX's callbacks.
_INTERNAL = 13
_TARGET = "headwater_call"
_CUDA = """
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void* stream);
int cuMemsetD32Async(uintptr_t to, unsigned int value, size_t count, void* stream);
int cuStreamSynchronize(void* stream);
"""


def call_now(
    function: Callable[..., Sequence[Any]], results: Sequence[jax.ShapeDtypeStruct], operands: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """Calls `function(memory, **operands)` outside of a program: with arrays that have their values, on one device."""
    given = {name: concrete(value) for name, value in operands.items()}
    device = next((operands[name].device for name, value in given.items() if isinstance(value, PrivateRows)), None)
    places = [memory_for(result, device) if device is not None and _is_rows(result) else (None, None) for result in results]
    values = zip(places, function(tuple(memory for _, memory in places), **given), strict=True)
    return tuple(array if array is not None and value is memory else jnp.asarray(value) for (array, memory), value in values)


def memory_for(rows: Any, device: Any) -> tuple[jax.Array, PrivateRows]:
    """A new array of this shape and dtype on a GPU, and the memory of it, which the loss call may write."""
    array = jnp.zeros(rows.shape, rows.dtype, device=device)
    return array, concrete(array)


def concrete(value: jax.Array) -> Any:
    """An array's values on one device as an argument for `Head`'s losses: rows on a GPU where they are, or a numpy array."""
    if not (_is_rows(value) and is_on_gpu(value)):
        return np.asarray(value)
    value.block_until_ready()  # so that any stream may read it
    return _private_rows(value.unsafe_buffer_pointer(), value.shape, value.dtype, 0)


@functools.cache
def is_handled(platform: str) -> bool:
    """Whether the handler is called on a platform of JAX's; where it cannot be, warns once."""
    try:
        if platform != "cuda":
            raise RuntimeError(f"it is CUDA's, and this platform is {platform}")
        register("CUDA", functools.partial(_Device, _declarations()[0].dlopen("libcuda.so.1")))
    except Exception as error:
        warn(f"rows of headwater's losses go through host memory, by a callback of JAX: the handler cannot be used ({error})")
        return False
    return True


def register(platform: str, device_of: Callable[[Any, Any], _Device]) -> None:
    """Registers the handler with XLA, for a platform as XLA calls it.

    Args:
        device_of: gets cffi and the call's XLA_FFI_CallFrame.
    """
    ffi, library = _declarations()
    handler = ffi.callback("XLA_FFI_Handler*", functools.partial(_handle, ffi, library, device_of))
    _handlers.append(handler)
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(int(ffi.cast("intptr_t", handler))))
    jax.ffi.register_ffi_target(_TARGET, capsule, platform=platform)


_handlers: list[Any] = []  # XLA calls them as long as the process lives


@functools.cache
def _declarations() -> tuple[cffi.FFI, Any]:
    """The declarations of XLA's FFI from jaxlib, with functions of CUDA's driver, and the constants in it."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    text = re.sub(r"//[^\n]*|/\*.*?\*/|#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^#(?!define \w+ \d+$)(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"XLA_FFI_DEFINE_STRUCT_TRAITS\((\w+),\s*\w+\)", r"typedef struct \1 \1", text)
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"\1* \1", text)
    ffi = cffi.FFI()
    ffi.cdef(text.replace("1u <<", "1 <<") + _CUDA)
    return ffi, ffi.dlopen(None)


@functools.cache
def _gpus() -> frozenset[Any]:
    try:
        return frozenset(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return frozenset()


def is_on_gpu(array: jax.Array) -> bool:
    """Whether rows of an array can stay where they are."""
    return array.devices() <= _gpus()


def _is_rows(array: Any) -> bool:
    return len(array.shape) == 2 and np.dtype(array.dtype).name in DATA_TYPE_NUMBERS


def _private_rows(address: int, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> PrivateRows:
    return PrivateRows(DeviceAddress(address, shape, dtype.itemsize), dtype.name, Stream(0, stream))


class _Function:
    """A function that a program calls, with the types of its arguments and results. The program keeps it alive."""

    def __init__(self, run: Callable[..., Sequence[Any]], operands: dict[str, np.dtype], results: Sequence[np.dtype]):
        self.run, self.operands, self.results = run, operands, results
        # Counted, and no address: the processes that run one program write the same into it.
        self.number = next(_numbers)
        _functions[self.number] = self

    def __call__(self) -> None:
        """XLA keeps the callables, and calls them by their number alone."""


_numbers = itertools.count()
_functions: weakref.WeakValueDictionary[int, _Function] = weakref.WeakValueDictionary()


def _handle(ffi: Any, library: Any, device_of: Callable[[Any, Any], _Device], frame: Any) -> Any:
    """XLA_FFI_Handler."""
    extension = frame.extension_start
    if extension != ffi.NULL and extension.type == library.XLA_FFI_Extension_Metadata:
        metadata = ffi.cast("XLA_FFI_Metadata_Extension*", extension).metadata
        metadata.api_version.major_version = library.XLA_FFI_API_MAJOR
        metadata.api_version.minor_version = library.XLA_FFI_API_MINOR
        metadata.traits = 0
        return ffi.NULL
    try:
        attribute = ffi.cast("XLA_FFI_Scalar*", frame.attrs.attrs[0])
        function = _functions[ffi.cast("int64_t*", attribute.value)[0]]
        operands = _buffers(ffi, frame.args.args, function.operands.values())
        results = _buffers(ffi, frame.rets.rets, function.results)
        _run(function, operands, results, device_of(ffi, frame))
    except BaseException as error:
        text = ffi.new("char[]", f"{type(error).__name__}: {error}".encode())
        size = ffi.sizeof("XLA_FFI_Error_Create_Args")
        arguments = ffi.new("XLA_FFI_Error_Create_Args*", {"struct_size": size, "message": text, "errc": _INTERNAL})
        return frame.api.XLA_FFI_Error_Create(arguments)
    return ffi.NULL


class _Buffer(NamedTuple):
    """Memory of an operand or a result."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype


def _buffers(ffi: Any, addresses: Any, dtypes: Iterable[np.dtype]) -> list[_Buffer]:
    buffers = []
    for index, dtype in enumerate(dtypes):
        buffer = ffi.cast("XLA_FFI_Buffer*", addresses[index])
        shape = tuple(ffi.unpack(buffer.dims, buffer.rank)) if buffer.rank else ()
        buffers.append(_Buffer(int(ffi.cast("intptr_t", buffer.data)), shape, dtype))
    return buffers


class _Device:
    """XLA's memory on a GPU, after the work so far of the call's stream.

    Args:
        cuda: the functions of CUDA's driver.
    """

    def __init__(self, cuda: Any, ffi: Any, frame: Any):
        size = ffi.sizeof("XLA_FFI_Stream_Get_Args")
        arguments = ffi.new("XLA_FFI_Stream_Get_Args*", {"struct_size": size, "ctx": frame.ctx})
        if frame.api.XLA_FFI_Stream_Get(arguments) != ffi.NULL:
            raise RuntimeError("XLA has no stream for this call")
        self._cuda, self._stream = cuda, arguments.stream
        self._address = int(ffi.cast("intptr_t", arguments.stream))

    def rows(self, buffer: _Buffer) -> PrivateRows | None:
        """Rows that stay where they are."""
        return _private_rows(buffer.address, buffer.shape, buffer.dtype, self._address) if _is_rows(buffer) else None

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Begins to copy between XLA's memory and an array."""
        self._check(self._cuda.cuMemcpyAsync(to, source, nbytes, self._stream))

    def write(self, to: int, array: np.ndarray) -> None:
        """Writes an array to XLA's memory.

        A number goes as a command of the stream. A copy would be waited for, while the server's process has the GPU.
        """
        if array.nbytes == 4:
            self._check(self._cuda.cuMemsetD32Async(to, int(array.view(np.uint32)), 1, self._stream))
        else:
            self.copy(to, array.ctypes.data, array.nbytes)
            self.wait()

    def wait(self) -> None:
        """Waits until everything is copied."""
        self._check(self._cuda.cuStreamSynchronize(self._stream))

    def _check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"CUDA reports error {result}, of a copy or of the program's work before it")


def _run(function: _Function, operands: list[_Buffer], results: list[_Buffer], device: _Device) -> None:
    """Brings operands to the function, and its results into the result buffers."""
    arrays: dict[str, Any] = {}
    for name, operand in zip(function.operands, operands, strict=True):
        arrays[name] = device.rows(operand)
        if arrays[name] is None:
            arrays[name] = np.empty(operand.shape, operand.dtype)
            device.copy(arrays[name].ctypes.data, operand.address, arrays[name].nbytes)
    device.wait()
    memory = tuple(map(device.rows, results))
    for result, place, value in zip(results, memory, function.run(memory, **arrays), strict=True):
        if place is None or value is not place:
            array = np.asarray(value, result.dtype, order="C")
            if array.shape != result.shape:
                raise ValueError(f"expected a result of the shape {result.shape}, got {array.shape}")
            device.write(result.address, array)


def lower(platform: str, context: Any, *operands: Any, **parameters: Any) -> Any:
    """Makes a call of the host (`_callbacks.call`) one of the handler, where that can be used."""
    if not is_handled(platform):
        return _callbacks.lower(context, *operands, **parameters)
    types = dict(zip(parameters["names"], [np.dtype(value.dtype) for value in context.avals_in], strict=True))
    function = _Function(parameters["function"], types, [np.dtype(value.dtype) for value in context.avals_out])
    # XLA keeps these until an execution that has begun has ended, also where the program is forgotten before.
    context.module_context.add_host_callback(function)
    rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=not parameters["is_pure"])
    # A call's operand can be a slice, or its result can go into one, as in a scan. XLA then makes a fusion beside the call, and
    # runs both. Between barriers it sees no slices.
    outcome = rule(context, *hlo.OptimizationBarrierOp(operands).results, function=np.int64(function.number))
    return hlo.OptimizationBarrierOp(outcome).results


for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_callbacks.call_p, functools.partial(lower, _platform), platform=_platform)
