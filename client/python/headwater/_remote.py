"""The calls of a client: plain data in, plain data out, already checked. It makes and reads messages; the rest is the core's."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from headwater import _arrays, _core, _wire
from headwater._arrays import HostArray
from headwater._core import NO_TENSORS, Connection, Tensors
from headwater._errors import HeadwaterError, make_error, warn
from headwater._futures import Cancel, Done, Executors
from headwater._memory import Block, DeviceArray, RowMemory, Rows, one_stream, ordinary_block
from headwater._messages import (
    check_header,
    checkpoint_info,
    commit_message,
    compute_header,
    discard_message,
    expected_message,
    head_info,
    head_spec_message,
    head_step,
    seconds_of,
    step_of,
    summary_fields,
    teacher_header,
    tensor_number,
    totals_of,
)
from headwater._requests import ComputeRequest, Expected, JoinedRows, Progress, StepKey
from headwater._types import (
    ApplyResult,
    CheckpointInfo,
    Device,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    SaveResult,
    SealResult,
    ServerInfo,
    StepStatus,
)

_HEAD, _LOSS, _SESSION = "/headwater.v1.HeadService/", "/headwater.v1.LossService/", "/headwater.v1.SessionService/"
_COMPUTE_LOSS = f"{_LOSS}ComputeLoss".encode()
# grpc.health.v1, by hand: HealthCheckResponse is one enum, field 1.
_HEALTH_METHOD = b"/grpc.health.v1.Health/Check"
_HEALTH_NAMES = {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}


class RemoteBackend:
    """One connection to one server, and what the client, its heads and its teachers share. Thread-safe.

    Attributes:
        address: the server's.
        timeout_s: bound of every call that does not bring its own, in seconds.
        executors: the threads of futures.
        row_memory: how rows are wanted, and where answers are put.
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
        self.row_memory = RowMemory(functools.partial(_allocate, self.connection))
        if self._demanded in ("shared_memory", "cuda_ipc"):
            try:
                why = self._why_not(self._demanded, self._server(options["connect_timeout_ms"] * 1e-3), demanded=True)
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

    def _unary(self, method: str, request: Any, answer: Any, timeout_s: float, tensors: Tensors = NO_TENSORS, **how: Any) -> Any:
        message = request.SerializeToString()
        return answer.FromString(self.connection.call(method.encode(), message, timeout_s, tensors, **how).message)

    # ---- server -------------------------------------------------------------------------------------------------------

    def _server(self, timeout_s: float) -> Any:
        return self._unary(f"{_SESSION}GetServerInfo", _wire.GetServerInfoRequest(), _wire.ServerInfo, timeout_s)

    def server_info(self, timeout_s: float) -> ServerInfo:
        reply = self._server(timeout_s)
        return ServerInfo(
            version=reply.version,
            incarnation=reply.incarnation,
            engine=reply.engine,
            devices=tuple(Device(d.name, d.model, d.memory_budget_bytes, d.memory_planned_bytes, d.uuid) for d in reply.devices),
            limits={field.name: getattr(reply.limits, field.name) for field in reply.limits.DESCRIPTOR.fields},
            features=tuple(reply.features),
            engine_note=reply.engine_note,
            start_time_s=seconds_of(reply.start_time),
            descriptor_socket=reply.descriptor_socket,
            named_regions=reply.named_regions,
            deterministic=reply.deterministic,
        )

    def require(self, features: list[str], timeout_s: float) -> None:
        """Raises FeatureNotBuiltError if the server lacks one of these."""
        if self._features is None:
            self._features = frozenset(self._server(timeout_s).features)
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
        server = self._server(timeout_s)
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
        if torch is None and not demanded:
            return "torch is not imported here, so there are no CUDA tensors"
        if torch is not None and not torch.cuda.is_available():
            return "this process has no CUDA device"
        info = self.connection.info()
        if info.get("cuda_transport") not in (None, "", "cuda_ipc"):
            return info.get("why_not_better") or "the last CUDA tensor could not be shared"
        return None

    # ---- heads --------------------------------------------------------------------------------------------------------

    def _head(self, method: str, request: Any, timeout_s: float, *how: Any, **options: Any) -> HeadInfo:
        return head_info(self._unary(_HEAD + method, request, _wire.Head, timeout_s, *how, **options))

    def create_head(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]:
        if_exists = _wire.IF_EXISTS_ATTACH_IF_SAME_SPEC if attach else _wire.IF_EXISTS_FAIL
        request = _wire.CreateHeadRequest(name=name, spec=head_spec_message(spec), if_exists=if_exists)
        reply = self._unary(f"{_HEAD}CreateHead", request, _wire.CreateHeadResponse, timeout_s)
        return head_info(reply.head), reply.created

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        return self._head("GetHead", _wire.GetHeadRequest(name=name), timeout_s)

    def list_heads(self, parent: str, timeout_s: float) -> list[HeadInfo]:
        request = _wire.ListHeadsRequest(parent=parent)
        pages = self._pages(f"{_HEAD}ListHeads", request, _wire.ListHeadsResponse, timeout_s)
        return [head_info(head) for page in pages for head in page.heads]

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        request = _wire.DeleteHeadRequest(name=name, epoch=epoch, force=force)
        self._unary(f"{_HEAD}DeleteHead", request, _wire.DeleteHeadResponse, timeout_s)

    def take_head(self, name: str, epoch: bytes, timeout_s: float) -> HeadInfo:
        return self._head("TakeHead", _wire.TakeHeadRequest(name=name, epoch=epoch), timeout_s)

    # ---- weights ------------------------------------------------------------------------------------------------------

    def upload(
        self,
        name: str,
        epoch: bytes,
        tensor: str,
        array: HostArray,
        upload_id: str,
        timeout_s: float,
        *,
        closes_step: int | None = None,
        on_progress: Progress | None = None,
    ) -> HeadInfo:
        """`closes_step`: the step that the weights close; None: they are set outside of any step."""
        header = _wire.UploadWeightsHeader(
            name=name,
            epoch=epoch,
            upload_id=upload_id,
            tensor=tensor_number(tensor),
            data_type=_arrays.DATA_TYPE_NUMBERS[array.data_type],
            total_bytes=array.data.nbytes,
            closes_step=closes_step,
        )
        tensors = Tensors(rows=_place(array), keep_alive=array)
        return self._head("UploadWeights", header, timeout_s, tensors, on_progress=on_progress)

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        request = _wire.LoadWeightsRequest(name=name, epoch=epoch, path=path, weight_tensor=weight_tensor, bias_tensor=bias_tensor)
        return self._head("LoadWeights", request, timeout_s)

    def _receive_tensor(
        self, method: str, request: Any, spec: HeadSpec, tensor: str, data_type: str, timeout_s: float
    ) -> np.ndarray:
        shape = (spec.vocab_size, spec.hidden_size) if tensor == "weight" else (spec.vocab_size,)
        data = np.empty(shape, _arrays.host_dtype(data_type))
        tensors = Tensors(result_rows=_place(HostArray(data, data_type, _arrays.to_numpy)), keep_alive=data)
        self.connection.call((_HEAD + method).encode(), request.SerializeToString(), timeout_s, tensors)
        return data

    def download(self, name: str, epoch: bytes, tensor: str, spec: HeadSpec, data_type: str, timeout_s: float) -> np.ndarray:
        """`epoch`: empty, or the one that the head must be of."""
        request = _wire.DownloadWeightsRequest(
            name=name, epoch=epoch, tensor=tensor_number(tensor), data_type=_arrays.DATA_TYPE_NUMBERS[data_type]
        )
        return self._receive_tensor("DownloadWeights", request, spec, tensor, data_type, timeout_s)

    def gradient(self, key: StepKey, tensor: str, spec: HeadSpec, factor: float, timeout_s: float) -> np.ndarray:
        request = _wire.DownloadGradientRequest(head=head_step(key), tensor=tensor_number(tensor), gradient_factor=factor)
        return self._receive_tensor("DownloadGradient", request, spec, tensor, _arrays.FLOAT32, timeout_s)

    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float:
        request = _wire.GetGradientNormRequest(head=head_step(key), gradient_factor=factor)
        reply = self._unary(f"{_HEAD}GetGradientNorm", request, _wire.GetGradientNormResponse, timeout_s)
        return float(reply.gradient_norm_squared)

    # ---- micro-batches ------------------------------------------------------------------------------------------------

    def compute(self, request: ComputeRequest, timeout_s: float) -> dict[str, Any]:
        """The fields of the LossResult, about the rows that were sent."""
        header, tensors, grad_hidden = self._loss(request)
        return _loss_fields(request, grad_hidden, self.connection.call(_COMPUTE_LOSS, header, timeout_s, tensors))

    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel:
        """Begins `compute`; `done` gets what returns its result, or raises."""
        header, tensors, grad_hidden = self._loss(request)

        def on_end(call: _core.Call) -> None:
            done(lambda: _loss_fields(request, grad_hidden, call.result()))

        return self.connection.start(on_end, _COMPUTE_LOSS, header, timeout_s, tensors).cancel

    def _loss(self, request: ComputeRequest) -> tuple[bytes, Tensors, Any]:
        """Header and tensors of the call, and where it puts grad_hidden."""
        header = check_header(compute_header(request))
        sent = [term.teacher.sent if term.teacher is not None else None for term in request.terms]
        grad_hidden = request.grad_hidden_out
        if grad_hidden is None and request.options.return_grad_hidden:
            grad_hidden = self.row_memory.empty_answer(request.hidden, request.grad_hidden_data_type)
        answer: Rows | None = None
        if isinstance(grad_hidden, np.ndarray):
            answer = HostArray(grad_hidden, request.grad_hidden_data_type, _arrays.to_numpy)
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
        answer = self.connection.call(
            f"{_LOSS}StreamTeacher".encode(),
            check_header(teacher_header(tenant, place, rows.shape[1])),
            timeout_s,
            Tensors(rows=_place(rows), cuda_stream=_stream(rows), keep_alive=rows),
            flags=_core.OWNED if owned else 0,
        )
        return int(_wire.StreamTeacherResponse.FromString(answer.message).row_count)

    def commit(
        self,
        keys: Sequence[StepKey],
        micro_batch: int,
        attempt: int | None,
        factor: float,
        token_factors: np.ndarray | None,
        timeout_s: float,
    ) -> bool:
        """`keys`: every head that it adds to. `attempt` None: the one that was submitted last."""
        request = commit_message(keys, micro_batch, attempt, factor, token_factors)
        return bool(self._unary(f"{_LOSS}CommitMicroBatch", request, _wire.CommitMicroBatchResponse, timeout_s).replayed)

    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool:
        request = discard_message(keys, micro_batch, attempt)
        return bool(self._unary(f"{_LOSS}DiscardMicroBatch", request, _wire.DiscardMicroBatchResponse, timeout_s).dropped)

    def abandon(self, key: StepKey, micro_batch: int) -> Callable[[], None]:
        """What hands a micro-batch over that nobody can decide any more, for the core to discard; good in a finalizer."""
        message = discard_message((key,), micro_batch, None).SerializeToString()
        connection = self.connection
        return lambda: connection.abandon(message)

    def add_gradient(self, key: StepKey, rows: np.ndarray, timeout_s: float, **fields: Any) -> bool:
        """`rows`: (number of rows, hidden_size) float32, C-contiguous. `fields`: of the header; None: the core's to choose."""
        header = _wire.AddGradientHeader(head=head_step(key), row_count=len(rows), **fields)
        sent = HostArray(rows, _arrays.FLOAT32, _arrays.to_numpy)
        tensors = Tensors(rows=_place(sent), keep_alive=sent)
        return bool(self._unary(f"{_HEAD}AddGradient", header, _wire.AddGradientResponse, timeout_s, tensors).replayed)

    # ---- steps --------------------------------------------------------------------------------------------------------

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        request = _wire.GetStepRequest(head=_wire.HeadStep(head=name, head_epoch=epoch))
        reply = self._unary(f"{_HEAD}GetStep", request, _wire.GetStepResponse, timeout_s)
        return StepStatus(step_of(reply.open), step_of(reply.last_closed) if reply.HasField("last_closed") else None)

    def seal(self, key: StepKey, expected: Expected, wait: bool, timeout_s: float) -> SealResult:
        request = _wire.SealStepRequest(head=head_step(key), expected=expected_message(expected), wait=wait)
        reply = self._unary(f"{_HEAD}SealStep", request, _wire.SealStepResponse, timeout_s)
        return SealResult(totals_of(reply.totals), reply.gradient_norm_squared, reply.non_finite_count, reply.replayed)

    def apply(self, key: StepKey, expected: Expected | None, timeout_s: float, **settings: float | None) -> ApplyResult:
        """`settings`: of the request; None leaves the head's own."""
        ids = None if expected is None else expected_message(expected)
        request = _wire.ApplyOptimizerStepRequest(head=head_step(key), expected=ids, **settings)
        reply = self._unary(f"{_HEAD}ApplyOptimizerStep", request, _wire.ApplyOptimizerStepResponse, timeout_s)
        return ApplyResult(
            open_step=reply.open_step,
            weight_version=reply.weight_version,
            global_grad_norm=reply.global_grad_norm,
            gradient_norm_squared=reply.gradient_norm_squared,
            clip_factor=reply.clip_factor,
            totals=totals_of(reply.totals),
            replayed=reply.replayed,
        )

    def discard_gradient(self, key: StepKey, timeout_s: float) -> DiscardGradientResult:
        request = _wire.DiscardGradientRequest(head=head_step(key))
        reply = self._unary(f"{_HEAD}DiscardGradient", request, _wire.DiscardGradientResponse, timeout_s)
        return DiscardGradientResult(reply.open_step, reply.replayed)

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, name: str, epoch: bytes, checkpoint: str, overwrite: bool, timeout_s: float) -> SaveResult:
        request = _wire.SaveCheckpointRequest(name=name, epoch=epoch, checkpoint=checkpoint, overwrite=overwrite)
        reply = self._unary(f"{_HEAD}SaveCheckpoint", request, _wire.SaveCheckpointResponse, timeout_s)
        return SaveResult(reply.checkpoint, reply.step, reply.total_bytes)

    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo:
        request = _wire.RestoreCheckpointRequest(name=name, epoch=epoch, checkpoint=checkpoint)
        return self._head("RestoreCheckpoint", request, timeout_s)

    def list_checkpoints(self, name: str, timeout_s: float) -> list[CheckpointInfo]:
        request = _wire.ListCheckpointsRequest(name=name)
        pages = self._pages(f"{_HEAD}ListCheckpoints", request, _wire.ListCheckpointsResponse, timeout_s)
        return [checkpoint_info(checkpoint) for page in pages for checkpoint in page.checkpoints]

    def _pages(self, method: str, request: Any, answer: Any, timeout_s: float) -> Iterator[Any]:
        """All answers to a call that lists, page by page."""
        while True:
            reply = self._unary(method, request, answer, timeout_s)
            yield reply
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token


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
        return _core.Rows(rows.tensor.data_ptr(), shape[0], columns, data_type, _core.CUDA)
    return _core.Rows(rows.data, shape[0], columns, data_type)


def _stream(*rows: Rows | None) -> int:
    on_device = [array for array in rows if isinstance(array, DeviceArray)]
    return one_stream(on_device) if on_device else 0
