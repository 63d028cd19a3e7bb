"""How one attempt of a micro-batch travels: what every way has in common, and the way over grpcio, which works everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headwater import _channel
from headwater._arrays import HostArray
from headwater._errors import make_error
from headwater._futures import Cancel
from headwater._memory import RowMemory, Rows
from headwater._requests import ComputeRequest
from headwater.v1 import loss_service_pb2

# What `connect(transport=...)` takes.
TRANSPORTS = ("auto", "grpc", "shared_memory", "cuda_ipc", "python")
MAX_STRIPES = 64


@dataclass(frozen=True)
class Answer:
    """What came back: a MicroBatchSummary, and the gradient of all rows, an array, or a tensor if the rows are one."""

    summary: Any
    grad_hidden: Any


class Transfers(Protocol):
    """One way. Thread-safe."""

    memory: RowMemory
    can_start: bool  # whether `start` may be called

    def compute(self, request: ComputeRequest, header: Any, timeout_s: float) -> Answer:
        """One attempt; raises HeadwaterError."""
        ...

    def start(self, request: ComputeRequest, header: Any, timeout_s: float, done: Callable[[Callable[[], Answer]], Any]) -> Cancel:
        """Begins one attempt, and returns what cancels it. At its end `done` gets what returns the answer or raises, and does not
        block; `done` runs on a thread that must not be held up."""
        ...

    def stream_teacher(self, header: Any, rows: Rows, timeout_s: float) -> int:
        """Sends teacher rows; how many were taken."""
        ...

    def close(self) -> None: ...


def check_answer(request: ComputeRequest, answer: Answer) -> Any:
    """The summary, if it fits the request."""
    if len(answer.summary.terms) != len(request.terms):
        raise make_error("INTERNAL", "", f"the server answered {len(answer.summary.terms)} terms, expected {len(request.terms)}")
    return answer.summary


def answer_memory(request: ComputeRequest, memory: RowMemory) -> Any:
    """Where grad_hidden goes; None if it is not wanted."""
    if not request.return_grad_hidden:
        return None
    if request.grad_hidden_out is not None:
        return request.grad_hidden_out
    return memory.empty_answer(request.hidden, request.grad_hidden_data_type)


def sent_rows(request: ComputeRequest) -> Iterator[tuple[int, int, Rows]]:
    """Role, index of the term, and rows of everything that travels with the call."""
    yield loss_service_pb2.CHUNK_ROLE_HIDDEN, 0, request.hidden
    for index, term in enumerate(request.terms):
        if term.teacher is not None and term.teacher.sent is not None:
            yield loss_service_pb2.CHUNK_ROLE_TEACHER_HIDDEN, index, term.teacher.sent


class PythonTransfers:
    """Over the connection of grpcio that all other calls take: one stream, copied by Python."""

    can_start = False

    def __init__(self, stub: Any, calls: _channel.Calls):
        self.memory = RowMemory()
        self._stub = stub
        self._calls = calls

    def close(self) -> None:
        """Frees what is not in use; the connection is the backend's."""
        self.memory.close()

    def start(self, request: ComputeRequest, header: Any, timeout_s: float, done: Callable[[Callable[[], Answer]], Any]) -> Cancel:
        raise NotImplementedError("a thread waits for every call that goes this way")

    def compute(self, request: ComputeRequest, header: Any, timeout_s: float) -> Answer:
        """One attempt."""
        sender = _channel.Sender()

        def messages() -> Iterator[Any]:
            yield loss_service_pb2.ComputeLossRequest(header=header)
            for role, term_index, rows in sent_rows(request):
                assert isinstance(rows, HostArray)
                for chunk in _channel.row_chunks(role, term_index, rows):
                    if sender.stopped:
                        return
                    yield loss_service_pb2.ComputeLossRequest(chunk=chunk)

        grad_hidden = answer_memory(request, self.memory)
        if grad_hidden is not None and not isinstance(grad_hidden, np.ndarray):
            grad_hidden = self.memory.host.empty(request.hidden.shape, request.grad_hidden_data_type)  # then to the caller's tensor
        received = 0
        summary = None
        with sender.reading(self._calls, self._stub.ComputeLoss, messages(), timeout_s) as responses:
            for response in responses:
                if response.WhichOneof("message") == "summary":
                    summary = response.summary
                else:
                    received += _take_rows(grad_hidden, response.chunk)
        if summary is None:
            raise make_error("INTERNAL", "", "the server ended the call without a summary")
        if grad_hidden is not None and received != len(grad_hidden):
            raise make_error("INTERNAL", "", f"the server sent {received} rows of grad_hidden, expected {len(grad_hidden)}")
        return Answer(summary, grad_hidden)

    def stream_teacher(self, header: Any, rows: Rows, timeout_s: float) -> int:
        """Sends teacher rows."""
        assert isinstance(rows, HostArray)
        sender = _channel.Sender()

        def messages() -> Iterator[Any]:
            yield loss_service_pb2.StreamTeacherRequest(header=header)
            for chunk in _channel.row_chunks(loss_service_pb2.CHUNK_ROLE_TEACHER_HIDDEN, 0, rows):
                yield loss_service_pb2.StreamTeacherRequest(chunk=chunk)

        reply = self._calls.unary(self._stub.StreamTeacher, sender.guarded(messages()), timeout_s)
        return int(reply.row_count)


def _take_rows(grad_hidden: np.ndarray | None, chunk: Any) -> int:
    """Puts a chunk's rows in their place; how many they are."""
    row_count = 0 if grad_hidden is None else len(grad_hidden)
    end = chunk.row_start + chunk.row_count
    if grad_hidden is None or chunk.row_start < 0 or end > row_count:
        raise make_error("INTERNAL", "", f"the server sent rows [{chunk.row_start}, {end}) of grad_hidden, of {row_count}")
    grad_hidden[chunk.row_start : end] = np.frombuffer(chunk.data, grad_hidden.dtype).reshape(-1, grad_hidden.shape[1])
    return int(chunk.row_count)
