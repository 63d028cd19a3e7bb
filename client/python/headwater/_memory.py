"""Memory for rows: host memory that is used again, and CUDA tensors in place."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray

# Arrays below this many bytes are ordinary ones.
_SMALLEST_BLOCK = 1 << 20
# Blocks come in multiples of this many bytes.
_GRANULE = 1 << 20
# Bytes of blocks that wait to be used again.
_MAX_FREE_BYTES = 512 << 20


@dataclass(frozen=True)
class DeviceArray:
    """Rows that stay in device memory: a contiguous CUDA torch tensor."""

    tensor: Any
    data_type: str
    stream: Any  # the CUDA stream that was current: its work precedes any use

    @classmethod
    def over(cls, tensor: Any, data_type: str) -> DeviceArray:
        """The rows of a CUDA tensor as they are after the work of its device's current stream."""
        tensor = tensor.detach().contiguous()
        return cls(tensor, data_type, torch().cuda.current_stream(tensor.device))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.tensor.shape)

    def rows(self, index: np.ndarray) -> DeviceArray:
        """A copy of some rows, made on the stream that is current."""
        return DeviceArray.over(self.tensor[torch().from_numpy(index).to(self.tensor.device)], self.data_type)

    def give(self, values: Any, data_type: str) -> Any:
        """An answer of the transport's, as the caller gets it."""
        del data_type
        return values

    def empty(self, data_type: str) -> Any:
        """A tensor of this shape, on the same device."""
        return torch().empty(self.shape, dtype=getattr(torch(), data_type), device=self.tensor.device)


@dataclass(frozen=True)
class Stream:
    """A CUDA stream that another framework than PyTorch has made."""

    device: int
    cuda_stream: int  # its handle


@dataclass(frozen=True)
class DeviceAddress:
    """Contiguous elements in device memory, as far as a tensor is asked for them."""

    address: int
    shape: tuple[int, ...]
    itemsize: int

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.address

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.itemsize


class PrivateRows(DeviceArray):
    """Rows in the pool of another framework's allocator: no other process may open it. `tensor` is a DeviceAddress.

    They are copied on the device into the client's own memory, which is also where `grad_hidden_out` comes from. Rows are sent
    whole, because nothing here gathers some of them, and a gradient needs memory of the caller.
    """


Rows = HostArray | DeviceArray


def one_stream(arrays: Iterable[DeviceArray]) -> int:
    """Handle of a stream that follows the work of all these arrays' streams; 0 without arrays.

    Where arrays lie on several devices the handle must be right on each of them. It is then 0, each device's own legacy stream,
    which follows the device's other work. It does not follow streams that PyTorch makes; for those this function waits.
    """
    streams = list(dict.fromkeys(array.stream for array in arrays))
    if len({stream.device for stream in streams}) > 1:
        for stream in streams:
            if stream.cuda_stream:
                stream.synchronize()
        return 0
    for other in streams[1:]:
        streams[0].wait_stream(other)
    return int(streams[0].cuda_stream) if streams else 0


def torch() -> Any:
    """The module torch, where it is imported already."""
    return sys.modules["torch"]


def current_streams() -> Callable[[], Any]:
    """A context that makes this thread's CUDA stream current in a thread of the client's; without CUDA one that does nothing."""
    module = sys.modules.get("torch")
    if module is None or not module.cuda.is_available() or not module.cuda.is_initialized():
        return contextlib.nullcontext
    stream = module.cuda.current_stream()
    return lambda: _on_stream(module.cuda, stream)


@contextlib.contextmanager
def _on_stream(cuda: Any, stream: Any) -> Iterator[None]:
    """A stream and its device, current in this thread.

    The device stays so. PyTorch's own context would restore the former device, which in a new thread is the first. Making that
    device current takes hundreds of megabytes of a GPU that this process may not use.
    """
    cuda.set_device(stream.device)
    before = cuda.current_stream(stream.device)
    cuda.set_stream(stream)
    try:
        yield
    finally:
        cuda.set_stream(before)


class Block(Protocol):
    """Some host memory."""

    address: int
    nbytes: int

    def free(self) -> None:
        """Gives it back. No array refers to it any more."""


class _Owner:
    """The owner of a block's arrays: when all are gone, the block is free again."""

    def __init__(self, block: Block, returned: collections.deque[Block]):
        self.__array_interface__ = {
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }
        self._block = block
        self._returned = returned

    def __del__(self) -> None:
        # May run anywhere, in the middle of anything: takes no lock.
        self._returned.append(self._block)


class BlockPool:
    """Blocks that are used again: the page faults of fresh memory cost as much as a transfer. Thread-safe."""

    def __init__(self, allocate: Callable[[int], Block]):
        self._allocate = allocate
        self._lock = threading.Lock()
        self._returned: collections.deque[Block] = collections.deque()
        self._free: list[Block] = []  # the one that was used last is last
        self._closed = False

    def empty(self, shape: tuple[int, ...], data_type: str, *, whole_block: bool = False) -> np.ndarray:
        """An array in C order with any content; its memory is used again once it and all its views are gone.

        `whole_block`: also a small one has a block of its own.
        """
        dtype = _arrays.HOST_DTYPES[data_type]
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALLEST_BLOCK and not whole_block:
            return np.empty(shape, dtype)
        owner = _Owner(self._take(-(-nbytes // _GRANULE) * _GRANULE), self._returned)
        return np.asarray(owner)[:nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Frees unused memory; the rest is freed as it comes back, by the next pool that is asked, or with the process."""
        with self._lock:
            self._closed = True
        self._take_back()

    def _take(self, nbytes: int) -> Block:
        self._take_back()
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):
                if self._free[index].nbytes == nbytes:
                    return self._free.pop(index)
        return self._allocate(nbytes)

    def _take_back(self) -> None:
        gone: list[Block] = []
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            limit = 0 if self._closed else _MAX_FREE_BYTES
            while self._free and sum(block.nbytes for block in self._free) > limit:
                gone.append(self._free.pop(0))
        for block in gone:
            block.free()


class _ArrayBlock:
    """Ordinary memory."""

    def __init__(self, array: np.ndarray):
        self._array: np.ndarray | None = array
        self.address = array.ctypes.data
        self.nbytes = array.nbytes

    def free(self) -> None:
        self._array = None


def ordinary_block(nbytes: int) -> Block:
    """A block of ordinary memory."""
    return _ArrayBlock(np.empty(nbytes, np.uint8))
