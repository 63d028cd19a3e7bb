"""The way through the client core: the best path that there is, no copy in Python, no thread that waits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._client_library import CUDA, HOST, Call, Connection
from headwater._client_library import Rows as RowsStruct
from headwater._errors import CancelledError, HeadwaterError
from headwater._futures import Cancel, current_scope
from headwater._memory import Block, BlockPool, DeviceArray, RowMemory, Rows, one_stream, ordinary_block
from headwater._requests import ComputeRequest
from headwater._transfers import Answer, answer_memory
from headwater.v1 import loss_service_pb2


class LibraryMemory(RowMemory):
    """Rows as the client core takes them: CUDA tensors as they are. Answers lie in shared memory where there is any."""

    def __init__(self, connection: Connection):
        super().__init__()
        self._connection = connection
        self.host = BlockPool(self._allocate)

    def _allocate(self, nbytes: int) -> Block:
        try:
            return self._connection.allocate(nbytes)
        except HeadwaterError:
            return ordinary_block(nbytes)  # no shared memory, or the client is closed

    def device_rows(self, tensor: Any, data_type: str) -> Rows:
        """The tensor itself."""
        return DeviceArray.over(tensor, data_type)


class LibraryTransfers:
    """Over connections of the client core's. Thread-safe."""

    can_start = True

    def __init__(self, connection: Connection):
        self._connection = connection
        self.memory: RowMemory = LibraryMemory(connection)

    def close(self) -> None:
        """Lets go of the connections."""
        self.memory.close()
        self._connection.close()

    def __del__(self) -> None:
        # A client that was forgotten without `close`. This may be anywhere, a callback of the library's included.
        if not self._connection.closed:
            threading.Thread(target=self._connection.close, name="headwater-close", daemon=True).start()

    def _submit(
        self, request: ComputeRequest, header: Any, timeout_s: float, done: Callable[[Call], Any] | None
    ) -> tuple[Call, Any]:
        """The call, and where it puts grad_hidden."""
        sent: list[Rows | None] = [term.teacher.sent if term.teacher is not None else None for term in request.terms]
        grad_hidden = answer_memory(request, self.memory)
        answer: Rows | None = None
        if isinstance(grad_hidden, np.ndarray):
            answer = HostArray(grad_hidden, request.grad_hidden_data_type, _arrays.to_numpy)
        elif grad_hidden is not None:
            answer = DeviceArray.over(grad_hidden, request.grad_hidden_data_type)
        call = self._connection.submit(
            header.SerializeToString(),
            timeout_s,
            hidden=_struct(request.hidden),
            teachers=[_struct(rows) for rows in sent] if any(rows is not None for rows in sent) else [],
            grad_hidden=_struct(answer),
            cuda_stream=_stream(request.hidden, *sent, answer),
            keep_alive=(request, grad_hidden),
            done=done,
        )
        return call, grad_hidden

    def compute(self, request: ComputeRequest, header: Any, timeout_s: float) -> Answer:
        """One attempt. The caller's thread waits, without the GIL."""
        call, grad_hidden = self._submit(request, header, timeout_s, None)
        return Answer(loss_service_pb2.MicroBatchSummary.FromString(_wait(call)), grad_hidden)

    def start(self, request: ComputeRequest, header: Any, timeout_s: float, done: Callable[[Callable[[], Answer]], Any]) -> Cancel:
        """Begins one attempt."""
        place: list[Any] = []
        placed = threading.Event()

        def on_end(call: Call) -> None:
            def fetch() -> Answer:
                placed.wait()
                if not place:
                    raise CancelledError("the call was given up at its beginning")
                return Answer(loss_service_pb2.MicroBatchSummary.FromString(call.result()), place[0])

            done(fetch)

        try:
            call, grad_hidden = self._submit(request, header, timeout_s, on_end)
            place.append(grad_hidden)
        finally:
            placed.set()
        return call.cancel

    def stream_teacher(self, header: Any, rows: Rows, timeout_s: float) -> int:
        """Sends teacher rows."""
        call = self._connection.stream_teacher(header.SerializeToString(), timeout_s, _struct(rows), _stream(rows), rows)
        return int(loss_service_pb2.StreamTeacherResponse.FromString(_wait(call)).row_count)


def _wait(call: Call) -> bytes:
    scope = current_scope()
    try:
        if scope is not None:
            scope.attach(call.cancel)
        call.wait()
        return call.result()
    finally:
        call.free()


def _struct(rows: Rows | None) -> RowsStruct:
    if rows is None:
        return RowsStruct()
    on_device = isinstance(rows, DeviceArray)
    return RowsStruct(
        struct_bytes=ctypes.sizeof(RowsStruct),
        data=rows.tensor.data_ptr() if isinstance(rows, DeviceArray) else rows.data.ctypes.data,
        row_count=rows.shape[0],
        hidden_size=rows.shape[1],
        data_type=_arrays.DATA_TYPE_NUMBERS[rows.data_type],
        memory=CUDA if on_device else HOST,
    )


def _stream(*rows: Rows | None) -> int:
    return one_stream(array for array in rows if isinstance(array, DeviceArray))
