"""The calls of a client: plain data in, plain data out, already checked. It makes and reads messages; the rest is the core's."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headwater import _arrays, _core, _wire
from headwater._arrays import HostArray
from headwater._core import NO_TENSORS, Connection, Tensors
from headwater._errors import HeadwaterError, make_error, warn
from headwater._futures import Cancel, Done, Executors
from headwater._loss._requests import ComputeRequest, JoinedRows, Progress, StepKey
from headwater._memory import Block, BlockPool, DeviceArray, PrivateRows, Rows, one_stream, ordinary_block
from headwater._messages import (
    TENSORS,
    check_header,
    compute_header,
    head_info,
    head_step,
    read,
    seconds_of,
    summary_fields,
    teacher_header,
)
from headwater._types import Device, HeadInfo, HeadSpec, ServerInfo

# grpc.health.v1, by hand: HealthCheckResponse is one enum, field 1.
_HEALTH_METHOD = b"/grpc.health.v1.Health/Check"
_HEALTH_NAMES = {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}


class RemoteBackend:
    """One connection to one server, and the state that the client, its heads and its teachers share. Thread-safe.

    Attributes:
        address: the server's.
        timeout_s: bound of every call that does not bring its own, in seconds.
        executors: the threads of futures.
        row_memory: where answers are put that stay on the host.
        unconfirmed: heads by name that keep weights of their own, with the warning for their first loss.
    """

    def __init__(self, address: str, options: dict[str, Any], *, timeout_s: float):
        """`options`: those of hw_client_connect(), complete."""
        self.address = address
        self.timeout_s = timeout_s
        self.executors = Executors()
        self.unconfirmed: dict[str, str] = {}
        self._follows = options.get("replay_bytes", 0) > 0
        self._demanded = options["transport"]
        self._features: frozenset[str] | None = None  # of the server, once they were asked for
        self.connection = Connection(address, options)
        self.row_memory = BlockPool(functools.partial(_allocate, self.connection))
        if self._demanded in ("shared_memory", "cuda_ipc"):
            try:
                why = self._why_not(self._demanded, self.call("GetServerInfo", options["connect_timeout_ms"] * 1e-3), demanded=True)
                if why is not None:
                    raise make_error(
                        "FAILED_PRECONDITION",
                        "TRANSPORT_UNAVAILABLE",
                        f'transport="{self._demanded}" was demanded, but {why}',
                        {"field": "transport", "transport": self._demanded},
                    )
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Ends the session and the calls that are under way. Idempotent."""
        self.executors.shutdown()
        if self.connection.is_own:
            self.row_memory.close()
        self.connection.close()

    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        """The epoch that calls which were made with `epoch` carry now: another one after the core has followed a restart."""
        return self.connection.head_epoch(name, epoch) if self._follows else epoch

    def warn_unconfirmed(self, name: str) -> None:
        """Warns, once, that the head keeps weights of its own."""
        if self.unconfirmed and (message := self.unconfirmed.pop(name, None)) is not None:
            warn(message)

    def call(
        self, method: str, timeout_s: float, tensors: Tensors = NO_TENSORS, *, on_progress: Progress | None = None, **fields: Any
    ) -> Any:
        """Makes a call of an RPC, by its name, with these fields of its request, and returns the answer's message."""
        path, request, answer = _wire.rpc(method)
        message = request(**fields).SerializeToString()
        return answer.FromString(self.connection.call(path, message, timeout_s, tensors, on_progress=on_progress).message)

    def pages(self, method: str, timeout_s: float, **fields: Any) -> Iterator[Any]:
        """The answers of a call that lists, page by page."""
        token = ""
        while True:
            reply = self.call(method, timeout_s, page_token=token, **fields)
            yield reply
            token = reply.next_page_token
            if not token:
                return

    # ---- server -------------------------------------------------------------------------------------------------------

    def server_info(self, timeout_s: float) -> ServerInfo:
        reply = self.call("GetServerInfo", timeout_s)
        return read(
            ServerInfo,
            reply,
            devices=tuple(read(Device, device) for device in reply.devices),
            limits={field.name: getattr(reply.limits, field.name) for field in reply.limits.DESCRIPTOR.fields},
            features=tuple(reply.features),
            start_time_s=seconds_of(reply.start_time),
        )

    def require(self, features: list[str], timeout_s: float) -> None:
        """Raises FeatureNotBuiltError if the server lacks one of these."""
        if self._features is None:
            self._features = frozenset(self.call("GetServerInfo", timeout_s).features)
        missing = [name for name in features if name not in self._features]
        if missing:
            raise make_error(
                "UNIMPLEMENTED",
                "FEATURE_NOT_BUILT",
                f"the server at {self.address} is older than this client, and has no {missing[0]}",
                {"feature": missing[0]},
            )

    def health(self, timeout_s: float) -> str:
        answer = self.connection.call(_HEALTH_METHOD, b"", timeout_s, flags=_core.DO_NOT_WAIT)
        return _HEALTH_NAMES.get(answer.message, "UNKNOWN")

    # ---- paths of rows ------------------------------------------------------------------------------------------------

    def transports(self, timeout_s: float) -> dict[str, str | None]:
        """By path, why it is not available; None if it is."""
        server = self.call("GetServerInfo", timeout_s)
        return {path: self._why_not(path, server) for path in ("cuda_ipc", "shared_memory", "grpc")}

    def transport_note(self) -> str:
        """One sentence why tensors take no better path than they do; empty if there is none, or nothing is known yet."""
        return self.connection.info().get("why_not_better", "")

    def _why_not(self, path: str, server: Any, *, demanded: bool = False) -> str | None:
        if path == "grpc":
            return None
        if self._demanded == "grpc":
            return 'transport="grpc" asks for gRPC'
        if path == "cuda_ipc":
            return self._why_no_device(server, demanded)
        if not server.descriptor_socket and not server.named_regions:
            return "the server shares no memory: it was started without --descriptor_socket"
        if server.descriptor_socket and not server.named_regions and not os.path.exists(server.descriptor_socket):
            return f"the server's descriptor socket {server.descriptor_socket} is not here: it runs elsewhere, or in a container"
        info = self.connection.info()
        if info.get("host_transport") == "grpc" and not demanded:
            return info.get("why_not_better") or "the server has not registered this client's memory"
        return None

    def _why_no_device(self, server: Any, demanded: bool) -> str | None:
        if server.engine != "cuda":
            return f"the server computes with the {server.engine} engine, which has no device memory"
        torch = sys.modules.get("torch")
        if torch is None and "jax" not in sys.modules and not demanded:
            return "neither torch nor jax is imported here, so there are no CUDA tensors"
        if torch is not None and not torch.cuda.is_available():
            return "this process has no CUDA device"
        info = self.connection.info()
        if info.get("cuda_transport") not in (None, "", "cuda_ipc"):
            return info.get("why_not_better") or "the last CUDA tensor could not be shared"
        return None

    # ---- weights ------------------------------------------------------------------------------------------------------

    def upload(
        self, tensor: str, array: HostArray, timeout_s: float, *, on_progress: Progress | None = None, **fields: Any
    ) -> HeadInfo:
        """Sends "weight" or "bias", with these fields of the header beside those that describe the tensor."""
        return head_info(
            self.call(
                "UploadWeights",
                timeout_s,
                Tensors(rows=_place(array), keep_alive=array),
                on_progress=on_progress,
                tensor=TENSORS[tensor],
                data_type=_arrays.DATA_TYPE_NUMBERS[array.data_type],
                total_bytes=array.data.nbytes,
                **fields,
            )
        )

    def receive(self, method: str, tensor: str, spec: HeadSpec, data_type: str, timeout_s: float, /, **fields: Any) -> np.ndarray:
        """Brings "weight" or "bias" of a head, or the gradient of it, by an RPC with these fields beside the tensor."""
        shape = (spec.vocab_size, spec.hidden_size) if tensor == "weight" else (spec.vocab_size,)
        data = np.empty(shape, _arrays.HOST_DTYPES[data_type])
        tensors = Tensors(result_rows=_place(HostArray(data, data_type, _arrays.to_numpy)), keep_alive=data)
        path, request, _ = _wire.rpc(method)
        message = request(tensor=TENSORS[tensor], **fields).SerializeToString()
        self.connection.call(path, message, timeout_s, tensors)
        return data

    def download(self, name: str, epoch: bytes, tensor: str, spec: HeadSpec, data_type: str, timeout_s: float) -> np.ndarray:
        """`epoch`: empty, or the one that the head must be of."""
        wanted = _arrays.DATA_TYPE_NUMBERS[data_type]
        return self.receive("DownloadWeights", tensor, spec, data_type, timeout_s, name=name, epoch=epoch, data_type=wanted)

    # ---- micro-batches ------------------------------------------------------------------------------------------------

    def compute(self, request: ComputeRequest, timeout_s: float) -> dict[str, Any]:
        """The fields of the LossResult, about the rows that were sent."""
        header, tensors, grad_hidden = self._loss(request)
        return _loss_fields(request, grad_hidden, self.connection.call(_wire.rpc("ComputeLoss")[0], header, timeout_s, tensors))

    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel:
        """Begins `compute`; `done` gets a function that returns its result, or raises."""
        header, tensors, grad_hidden = self._loss(request)

        def on_end(call: _core.Call) -> None:
            done(lambda: _loss_fields(request, grad_hidden, call.result()))

        return self.connection.start(on_end, _wire.rpc("ComputeLoss")[0], header, timeout_s, tensors).cancel

    def _loss(self, request: ComputeRequest) -> tuple[bytes, Tensors, Any]:
        """Header and tensors of the call, and where it puts grad_hidden."""
        header = check_header(compute_header(request))
        sent = [term.teacher.sent if term.teacher is not None else None for term in request.terms]
        grad_hidden = request.grad_hidden_out
        if grad_hidden is None and request.options.return_grad_hidden:
            hidden, data_type = request.hidden, request.grad_hidden_data_type
            if isinstance(hidden, DeviceArray):
                grad_hidden = hidden.empty(data_type)
            else:
                grad_hidden = self.row_memory.empty(hidden.shape, data_type)
        answer: Rows | None = None
        if isinstance(grad_hidden, np.ndarray):
            answer = HostArray(grad_hidden, request.grad_hidden_data_type, _arrays.to_numpy)
        elif isinstance(grad_hidden, PrivateRows):
            answer = grad_hidden
        elif grad_hidden is not None:
            answer = DeviceArray.over(grad_hidden, request.grad_hidden_data_type)
        tensors = Tensors(
            rows=_place(request.hidden),
            teachers=list(map(_place, sent)) if any(rows is not None for rows in sent) else None,
            result_rows=_place(answer),
            cuda_stream=_stream(request.hidden, *sent, answer),
            keep_alive=(request, grad_hidden),
        )
        return header, tensors, grad_hidden

    def stream_teacher(self, tenant: str, rows: Rows, place: JoinedRows, owned: bool, timeout_s: float) -> int:
        """Brings rows of a joined set; how many were taken."""
        path, _, answer = _wire.rpc("StreamTeacher")
        reply = self.connection.call(
            path,
            check_header(teacher_header(tenant, place, rows.shape[1])),
            timeout_s,
            Tensors(rows=_place(rows), cuda_stream=_stream(rows), keep_alive=rows),
            flags=_core.OWNED if owned else 0,
        )
        return int(answer.FromString(reply.message).row_count)

    def abandon(self, key: StepKey, micro_batch: int) -> Callable[[], None]:
        """A function that hands an undecided micro-batch over to the core, which discards it; safe in a finalizer."""
        message = _wire.DiscardMicroBatchRequest(heads=[head_step(key)], micro_batch=micro_batch).SerializeToString()
        connection = self.connection
        return lambda: connection.abandon(message)

    def add_gradient(self, key: StepKey, rows: np.ndarray, timeout_s: float, **fields: Any) -> bool:
        """`rows`: (number of rows, hidden_size) float32, C-contiguous. `fields`: of the header; None: the core's to choose."""
        sent = HostArray(rows, _arrays.FLOAT32, _arrays.to_numpy)
        tensors = Tensors(rows=_place(sent), keep_alive=sent)
        return bool(self.call("AddGradient", timeout_s, tensors, head=head_step(key), row_count=len(rows), **fields).replayed)


def _allocate(connection: Connection, nbytes: int) -> Block:
    try:
        return connection.allocate(nbytes)
    except HeadwaterError:
        return ordinary_block(nbytes)  # no shared memory, or the client is closed


def _loss_fields(request: ComputeRequest, grad_hidden: Any, answer: _core.Answer) -> dict[str, Any]:
    summary = _wire.MicroBatchSummary.FromString(answer.message)
    if len(summary.terms) != len(request.terms):
        raise make_error("INTERNAL", "", f"the server answered {len(summary.terms)} terms, expected {len(request.terms)}")
    return summary_fields(summary, request.options.outputs) | {"grad_hidden": grad_hidden, "attempt": answer.attempt}


def _place(rows: Rows | None) -> _core.Rows | None:
    """Where rows lie; a vector is a column."""
    if rows is None:
        return None
    shape, data_type = rows.shape, _arrays.DATA_TYPE_NUMBERS[rows.data_type]
    columns = shape[1] if len(shape) == 2 else 1
    if isinstance(rows, DeviceArray):
        memory = _core.CUDA_PRIVATE if isinstance(rows, PrivateRows) else _core.CUDA
        return _core.Rows(rows.tensor.data_ptr(), shape[0], columns, data_type, memory)
    return _core.Rows(rows.data, shape[0], columns, data_type)


def _stream(*rows: Rows | None) -> int:
    on_device = [array for array in rows if isinstance(array, DeviceArray)]
    return one_stream(on_device) if on_device else 0
