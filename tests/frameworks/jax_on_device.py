"""Runs a program as on a GPU: programs on the CPU call the handler of headwater.jax, and memory of XLA is the fake CUDA driver's.

python jax_on_device.py SCRIPT ARGUMENT...
"""

import ctypes
import functools
import math
import os
import runpy
import sys
import types
from pathlib import Path

import jax
import numpy as np
from jax.interpreters import mlir

import headwater.jax
from headwater.jax import _callbacks, _device

_register = functools.cache(_device.register)  # XLA takes one handler for a platform


def call_on_cpu(device_of) -> None:
    """Makes programs on the CPU call the handler, where `_device.is_handled` says so."""
    _register("cpu", device_of)
    mlir.register_lowering(_callbacks.call_p, functools.partial(_device.lower, "cpu"), platform="cpu")


def call_back_on_cpu() -> None:
    """The opposite of `call_on_cpu`."""
    mlir.register_lowering(_callbacks.call_p, _callbacks.lower, platform="cpu", cacheable=False)


class Host:
    """XLA's memory on the host, in the place of a GPU's: no rows stay where they are."""

    def __init__(self, ffi, frame):
        self._ffi = ffi

    def rows(self, buffer):
        return None

    def copy(self, to, source, nbytes):
        self._ffi.memmove(self._ffi.cast("void*", to), self._ffi.cast("void*", source), nbytes)

    def write(self, to, array):
        self.copy(to, array.ctypes.data, array.nbytes)

    def wait(self):
        pass


class FakeDriver:
    """tests/e2e/cpp/support/fake_cuda_driver.cc, for this process: what asks for libcuda.so.1 gets it."""

    def __init__(self):
        path = Path(os.environ["HEADWATER_BUILD_DIR"], "tests/fake_cuda_driver/libcuda.so.1")
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.FakeCudaAddMemory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool)
        self.rows = 0  # that were left where they are

    def install(self) -> None:
        """Makes XLA's memory on the host this driver's, and calls the handler."""
        private_rows = _device._private_rows

        def rows_of_device(address, shape, dtype, stream):
            self.rows += 1
            self._library.FakeCudaAddMemory(address, math.prod(shape) * dtype.itemsize, True)
            return private_rows(address, shape, dtype, stream)

        def device_of(ffi, frame):
            def give_stream(arguments):
                arguments.stream = ffi.cast("void*", 0x77)
                return ffi.NULL

            api = types.SimpleNamespace(XLA_FFI_Stream_Get=give_stream)
            return _device._Device(ffi.dlopen("libcuda.so.1"), ffi, types.SimpleNamespace(ctx=frame.ctx, api=api))

        call_on_cpu(device_of)
        _device._private_rows = rows_of_device
        _device.is_handled = _device.is_on_gpu = lambda _: True


def losses(client, name, dtype):
    """Loss, and gradients of rows and weight, for equal numbers; and the micro-batches that were counted."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (9, 16)).astype(dtype)
    weights = jax.random.normal(keys[1], (16, 40)).astype(dtype)
    labels = jax.random.randint(keys[2], (9,), 0, 40).at[2:5].set(-100)
    head = headwater.jax.create_head(client, name, weights)
    try:
        loss = functools.partial(headwater.jax.linear_softmax_cross_entropy_loss, head, labels=labels, reduction="mean")
        value, grad = jax.jit(jax.value_and_grad(loss))(x)
        jax.block_until_ready(grad)
        return np.asarray(value), np.asarray(grad), head.gradient(), head.step_state().open.totals.micro_batch_count
    finally:
        client.head(name).delete(force=True)


if __name__ == "__main__":
    driver = FakeDriver()
    driver.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert driver.rows > 0
