"""The backend that speaks gRPC. gRPC's own retries stay off: a retry of a contribution is the caller's decision."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, Progress, StepKey
from headwater._errors import HeadwaterError, from_rpc_error, make_error
from headwater._futures import current_scope
from headwater._messages import (
    apply_request,
    check_rows_message_size,
    compute_header,
    expected_message,
    head_info,
    head_spec_message,
    head_step,
    seconds_of,
    step_of,
    summary_result,
    tensor_number,
    totals_of,
)
from headwater._requests import ComputeRequest
from headwater._types import (
    ApplyResult,
    Device,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    LossResult,
    SaveResult,
    SealResult,
    ServerInfo,
    StepStatus,
)
from headwater.v1 import (
    head_service_pb2,
    head_service_pb2_grpc,
    loss_pb2,
    loss_service_pb2,
    loss_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

# Bytes of tensor data in one message, either way.
CHUNK_BYTES = 1 << 20
# Bound of one message in either direction: a chunk, or a header with targets and weights for max_micro_batch_rows rows.
MAX_MESSAGE_BYTES = 16 << 20

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients of one process do not share a connection without saying so.
    ("grpc.use_local_subchannel_pool", 1),
)

# grpc.health.v1, by hand: distributions do not package its stubs. HealthCheckResponse is one enum, field 1.
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH_NAMES = {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}


def _translate(error: grpc.RpcError) -> HeadwaterError:
    return from_rpc_error(error)


class RemoteBackend:
    """One connection to one server. Thread-safe."""

    def __init__(self, address: str, connect_timeout_s: float):
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._heads = head_service_pb2_grpc.HeadServiceStub(self._channel)
        self._losses = loss_service_pb2_grpc.LossServiceStub(self._channel)
        self._sessions = session_service_pb2_grpc.SessionServiceStub(self._channel)
        self._check_health = self._channel.unary_unary(
            _HEALTH_METHOD, request_serializer=lambda request: request, response_deserializer=lambda response: response
        )
        try:
            grpc.channel_ready_future(self._channel).result(timeout=connect_timeout_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise make_error(
                "UNAVAILABLE",
                "",
                f"no server answered at {address} within {connect_timeout_s:g} s; is headwaterd running there?",
                {"address": address},
            ) from None

    def close(self) -> None:
        self._channel.close()

    # ---- calls --------------------------------------------------------------------------------------------------------

    def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        scope = current_scope()
        try:
            if scope is None:
                return method(request, timeout=timeout_s)
            call = method.future(request, timeout=timeout_s)
            scope.attach(call.cancel)
            return call.result()
        except grpc.FutureCancelledError:
            raise make_error("CANCELLED", "CANCELLED", "the call was cancelled by this client") from None
        except grpc.RpcError as error:
            raise _translate(error) from None
        except ValueError as error:
            raise _closed(error) from None

    def _start_stream(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            call = method(request, timeout=timeout_s)
        except ValueError as error:
            raise _closed(error) from None
        scope = current_scope()
        if scope is not None:
            scope.attach(call.cancel)
        return call

    # ---- server -------------------------------------------------------------------------------------------------------

    def server_info(self, timeout_s: float) -> ServerInfo:
        reply = self._unary(self._sessions.GetServerInfo, session_service_pb2.GetServerInfoRequest(), timeout_s)
        return ServerInfo(
            version=reply.version,
            incarnation=reply.incarnation,
            engine=reply.engine,
            devices=tuple(Device(d.name, d.model, d.memory_budget_bytes, d.memory_planned_bytes) for d in reply.devices),
            limits={field.name: getattr(reply.limits, field.name) for field in reply.limits.DESCRIPTOR.fields},
            features=tuple(reply.features),
            engine_note=reply.engine_note,
            start_time_s=seconds_of(reply.start_time),
        )

    def health(self, timeout_s: float) -> str:
        return _HEALTH_NAMES.get(self._unary(self._check_health, b"", timeout_s), "UNKNOWN")

    # ---- heads --------------------------------------------------------------------------------------------------------

    def create_head(self, name: str, spec: HeadSpec, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.CreateHeadRequest(name=name, spec=head_spec_message(spec))
        return head_info(self._unary(self._heads.CreateHead, request, timeout_s).head)

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        return head_info(self._unary(self._heads.GetHead, head_service_pb2.GetHeadRequest(name=name), timeout_s))

    def list_heads(self, timeout_s: float) -> list[HeadInfo]:
        heads: list[HeadInfo] = []
        token = ""
        while True:
            reply = self._unary(self._heads.ListHeads, head_service_pb2.ListHeadsRequest(page_token=token), timeout_s)
            heads += map(head_info, reply.heads)
            token = reply.next_page_token
            if not token:
                return heads

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        self._unary(self._heads.DeleteHead, head_service_pb2.DeleteHeadRequest(name=name, epoch=epoch, force=force), timeout_s)

    # ---- weights ------------------------------------------------------------------------------------------------------

    def upload(
        self, name: str, epoch: bytes, tensor: str, array: HostArray, upload_id: str, on_progress: Progress | None, timeout_s: float
    ) -> HeadInfo:
        data = array.byte_view()
        header = head_service_pb2.UploadWeightsHeader(
            name=name,
            epoch=epoch,
            upload_id=upload_id,
            tensor=tensor_number(tensor),
            data_type=_arrays.DATA_TYPE_NUMBERS[array.data_type],
            total_bytes=len(data),
        )
        resume = threading.Event()
        sender = _Sender()
        offset = 0

        def messages() -> Iterator[Any]:
            yield head_service_pb2.UploadWeightsRequest(header=header)
            resume.wait(timeout_s)
            position = offset
            while not sender.stopped and position < len(data):
                if on_progress is not None:
                    on_progress(position, len(data))
                chunk = bytes(data[position : position + CHUNK_BYTES])
                yield head_service_pb2.UploadWeightsRequest(chunk=head_service_pb2.ByteChunk(offset_bytes=position, data=chunk))
                position += len(chunk)
            if not sender.stopped and on_progress is not None:
                on_progress(position, len(data))

        head = None
        with sender.reading(self, self._heads.UploadWeights, messages(), timeout_s, wake=resume.set) as responses:
            for response in responses:
                if response.WhichOneof("message") == "resume_offset_bytes":
                    offset = response.resume_offset_bytes
                    resume.set()
                else:
                    head = response.head
        if head is None:
            raise make_error("INTERNAL", "", "the server ended the upload without telling the new head")
        return head_info(head)

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.LoadWeightsRequest(
            name=name, epoch=epoch, path=path, weight_tensor=weight_tensor, bias_tensor=bias_tensor
        )
        return head_info(self._unary(self._heads.LoadWeights, request, timeout_s))

    def _receive_tensor(self, method: Any, request: Any, timeout_s: float) -> tuple[np.ndarray, str]:
        call = self._start_stream(method, request, timeout_s)
        data = None
        position = 0
        try:
            for response in call:
                if response.WhichOneof("message") == "header":
                    header = response.header
                    data_type = _arrays.DATA_TYPE_NAMES[header.data_type]
                    data = np.empty(tuple(header.shape), dtype=_arrays.host_dtype(data_type))
                    flat = data.reshape(-1).view(np.uint8)
                    continue
                chunk = response.chunk
                if data is None or chunk.offset_bytes != position or position + len(chunk.data) > flat.size:
                    raise make_error("INTERNAL", "", f"the server sent bytes at {chunk.offset_bytes}, expected {position}")
                flat[position : position + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
                position += len(chunk.data)
        except grpc.RpcError as error:
            raise _translate(error) from None
        finally:
            call.cancel()  # no effect on a call that has ended
        if data is None or position != data.nbytes:
            raise make_error("INTERNAL", "", f"the server ended the download after {position} bytes")
        return data, data_type

    def download(self, name: str, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        request = head_service_pb2.DownloadWeightsRequest(
            name=name, tensor=tensor_number(tensor), data_type=0 if data_type is None else _arrays.DATA_TYPE_NUMBERS[data_type]
        )
        return self._receive_tensor(self._heads.DownloadWeights, request, timeout_s)

    def gradient(self, key: StepKey, tensor: str, factor: float, timeout_s: float) -> np.ndarray:
        request = head_service_pb2.DownloadGradientRequest(
            head=head_step(key), tensor=tensor_number(tensor), gradient_factor=factor
        )
        return self._receive_tensor(self._heads.DownloadGradient, request, timeout_s)[0]

    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float:
        request = head_service_pb2.GetGradientNormRequest(head=head_step(key), gradient_factor=factor)
        return self._unary(self._heads.GetGradientNorm, request, timeout_s).gradient_norm_squared

    # ---- micro-batches ------------------------------------------------------------------------------------------------

    def compute(self, request: ComputeRequest, timeout_s: float) -> LossResult:
        header = compute_header(request)
        check_rows_message_size(header.ByteSize(), MAX_MESSAGE_BYTES)
        sender = _Sender()

        def messages() -> Iterator[Any]:
            yield loss_service_pb2.ComputeLossRequest(header=header)
            parts = [(loss_service_pb2.CHUNK_ROLE_HIDDEN, request.hidden)]
            if request.teacher is not None:
                parts.append((loss_service_pb2.CHUNK_ROLE_TEACHER_HIDDEN, request.teacher.hidden))
            for role, rows in parts:
                for chunk in _row_chunks(role, rows):
                    if sender.stopped:
                        return
                    yield loss_service_pb2.ComputeLossRequest(chunk=chunk)

        row_count = request.hidden.shape[0]
        grad_hidden = None
        if request.return_grad_hidden:
            grad_hidden = np.zeros(request.hidden.shape, dtype=_arrays.host_dtype(request.grad_hidden_data_type))
        received = 0
        summary = None
        with sender.reading(self, self._losses.ComputeLoss, messages(), timeout_s) as responses:
            for response in responses:
                if response.WhichOneof("message") == "summary":
                    summary = response.summary
                    continue
                chunk = response.chunk
                end = chunk.row_start + chunk.row_count
                if grad_hidden is None or chunk.row_start < 0 or end > row_count:
                    raise make_error(
                        "INTERNAL", "", f"the server sent rows [{chunk.row_start}, {end}) of grad_hidden, of {row_count}"
                    )
                grad_hidden[chunk.row_start : end] = np.frombuffer(chunk.data, grad_hidden.dtype).reshape(-1, grad_hidden.shape[1])
                received += chunk.row_count
        if summary is None:
            raise make_error("INTERNAL", "", "the server ended the call without a summary")
        if grad_hidden is not None and received != row_count:
            raise make_error("INTERNAL", "", f"the server sent {received} rows of grad_hidden, expected {row_count}")
        return summary_result(summary, grad_hidden)

    def commit(self, key: StepKey, micro_batch: int, factor: float, timeout_s: float) -> bool:
        request = loss_service_pb2.CommitMicroBatchRequest(heads=[head_step(key)], micro_batch=micro_batch, factor=factor)
        return self._unary(self._losses.CommitMicroBatch, request, timeout_s).replayed

    def discard(self, key: StepKey, micro_batch: int, timeout_s: float) -> bool:
        request = loss_service_pb2.DiscardMicroBatchRequest(heads=[head_step(key)], micro_batch=micro_batch)
        return self._unary(self._losses.DiscardMicroBatch, request, timeout_s).dropped

    # ---- steps --------------------------------------------------------------------------------------------------------

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        request = head_service_pb2.GetStepRequest(head=loss_pb2.HeadStep(head=name, head_epoch=epoch))
        reply = self._unary(self._heads.GetStep, request, timeout_s)
        return StepStatus(step_of(reply.open), step_of(reply.last_closed) if reply.HasField("last_closed") else None)

    def seal(self, key: StepKey, expected: Expected, timeout_s: float) -> SealResult:
        request = head_service_pb2.SealStepRequest(head=head_step(key), expected=expected_message(expected))
        reply = self._unary(self._heads.SealStep, request, timeout_s)
        return SealResult(totals_of(reply.totals), reply.gradient_norm_squared, reply.non_finite_count, reply.replayed)

    def apply(self, key: StepKey, expected: Expected | None, arguments: ApplyArguments, timeout_s: float) -> ApplyResult:
        reply = self._unary(self._heads.ApplyOptimizerStep, apply_request(key, expected, arguments), timeout_s)
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
        request = head_service_pb2.DiscardGradientRequest(head=head_step(key))
        reply = self._unary(self._heads.DiscardGradient, request, timeout_s)
        return DiscardGradientResult(reply.open_step, reply.replayed)

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, name: str, epoch: bytes, checkpoint: str, overwrite: bool, timeout_s: float) -> SaveResult:
        request = head_service_pb2.SaveCheckpointRequest(name=name, epoch=epoch, checkpoint=checkpoint, overwrite=overwrite)
        reply = self._unary(self._heads.SaveCheckpoint, request, timeout_s)
        return SaveResult(reply.checkpoint, reply.step, reply.total_bytes)

    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.RestoreCheckpointRequest(name=name, epoch=epoch, checkpoint=checkpoint)
        return head_info(self._unary(self._heads.RestoreCheckpoint, request, timeout_s))


class _Sender:
    """Runs a bidirectional call: messages go out on gRPC's thread while this one reads, so a server that refuses early is heard."""

    def __init__(self) -> None:
        self.stopped = False
        self._error: Exception | None = None

    def _guarded(self, messages: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from messages
        except Exception as error:
            self._error = error  # gRPC would only log it
            raise

    @contextlib.contextmanager
    def reading(
        self,
        backend: RemoteBackend,
        method: Any,
        messages: Iterable[Any],
        timeout_s: float,
        wake: Callable[[], None] = lambda: None,
    ) -> Iterator[Any]:
        """Yields the responses. `wake` releases a sender that waits for an answer."""
        call = backend._start_stream(method, self._guarded(messages), timeout_s)
        try:
            yield call
        except grpc.RpcError as error:
            if self._error is not None:
                raise self._error from None
            raise _translate(error) from None
        finally:
            self.stopped = True
            wake()
            call.cancel()  # no effect on a call that has ended


def _row_chunks(role: int, rows: HostArray) -> Iterator[Any]:
    row_count, width = rows.shape
    rows_per_chunk = max(1, CHUNK_BYTES // (width * rows.data.itemsize))
    data = rows.byte_view()
    row_bytes = width * rows.data.itemsize
    for start in range(0, row_count, rows_per_chunk):
        end = min(start + rows_per_chunk, row_count)
        yield loss_service_pb2.RowChunk(
            role=role, row_start=start, row_count=end - start, data=bytes(data[start * row_bytes : end * row_bytes])
        )


def _closed(error: ValueError) -> HeadwaterError:
    return make_error("UNAVAILABLE", "", f"the client is closed ({error})")
