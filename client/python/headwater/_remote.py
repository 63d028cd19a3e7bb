"""The backend that speaks gRPC. gRPC's own retries and hedging stay off: a retry of a contribution is a new attempt (_retry.py)."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, UploadOptions
from headwater._errors import ClientClosedError, HeadwaterError, NotFoundError, from_rpc_error, make_error
from headwater._futures import current_scope
from headwater._messages import (
    apply_request,
    check_rows_message_size,
    commit_message,
    compute_header,
    discard_message,
    expected_message,
    gradient_header,
    head_info,
    head_spec_message,
    head_step,
    seconds_of,
    step_of,
    summary_result,
    tensor_number,
    totals_of,
)
from headwater._requests import CommitRequest, ComputeRequest, GradientRequest, StepKey
from headwater._retry import AMBIGUOUS_CODES, AttemptBook, RetryPolicy, with_retries
from headwater._session import Session
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

CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.experimental.enable_hedging", 0),
    # No service config from DNS may turn them on again.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients of one process do not share a connection without saying so.
    ("grpc.use_local_subchannel_pool", 1),
    # A server that was started again is found soon: the back-off between tries is the retry loop's.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

R = TypeVar("R")

# grpc.health.v1, by hand: distributions do not package its stubs. HealthCheckResponse is one enum, field 1.
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH_NAMES = {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}


def _translate(error: grpc.RpcError) -> HeadwaterError:
    return from_rpc_error(error)


class RemoteBackend:
    """One connection to one server. Thread-safe. A forked process is refused: gRPC's threads stay behind."""

    def __init__(
        self,
        address: str,
        connect_timeout_s: float,
        *,
        retries: RetryPolicy,
        session_lease_s: float | None,
    ):
        """`session_lease_s` None: no session."""
        self.address = address
        self._pid = os.getpid()
        self._retries = retries
        self._attempts = AttemptBook()
        self._session: Session | None = None
        if session_lease_s is not None:
            self._session = Session(lambda: _make_channel(address), session_lease_s, _client_name())
        self._channel = _make_channel(address)
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
        if os.getpid() != self._pid:
            return  # connection and session are the parent's
        if self._session is not None:
            self._session.close()
        self._channel.close()

    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        return epoch

    def open_session(self, timeout_s: float) -> None:
        """Opens the session if there is to be one, and none is open."""
        if self._session is not None:
            self._check_process()
            self._session.open(timeout_s)

    def watch_session(self, on_lost: Callable[[], None], timeout_s: float) -> None:
        """Opens the session, and calls `on_lost` on a thread of its own when the server does not know it any more."""
        if self._session is not None:
            self._session.on_lost = on_lost
            self.open_session(timeout_s)

    # ---- calls --------------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosedError("this client was made by the process that this one was forked from; connect again here")

    def _unary_once(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._check_process()
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

    def _retrying(self, timeout_s: float, call: Callable[[float, int], R], *, repeatable: bool = True) -> R:
        return with_retries(self._retries, timeout_s, call, repeatable=repeatable)

    def _unary(self, method: Any, request: Any, timeout_s: float, *, repeatable: bool = True) -> Any:
        return self._retrying(
            timeout_s, lambda remaining_s, _: self._unary_once(method, request, remaining_s), repeatable=repeatable
        )

    def _in_session(self, timeout_s: float, call: Callable[[bytes], R], *, opens: bool) -> R:
        """Runs `call(session id)`; a session that the server does not know any more is opened anew, once."""
        session = self._session
        if session is None:
            return call(b"")
        session_id = session.open(timeout_s) if opens else session.id
        try:
            return call(session_id)
        except NotFoundError as error:
            if error.reason != "SESSION_NOT_FOUND" or not session_id:
                raise
            session.forget(session_id)
            return call(session.open(timeout_s))

    def _start_stream(self, method: Any, request: Any, timeout_s: float) -> Any:
        self._check_process()
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

    def create_head(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]:
        if_exists = head_service_pb2.IF_EXISTS_ATTACH_IF_SAME_SPEC if attach else head_service_pb2.IF_EXISTS_FAIL
        request = head_service_pb2.CreateHeadRequest(name=name, spec=head_spec_message(spec), if_exists=if_exists)
        # Attaching is not repeatable either: only the first answer says that the head is new, and wants its weights.
        reply = self._unary(self._heads.CreateHead, request, timeout_s, repeatable=False)
        return head_info(reply.head), reply.created

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        return head_info(self._unary(self._heads.GetHead, head_service_pb2.GetHeadRequest(name=name), timeout_s))

    def list_heads(self, parent: str, timeout_s: float) -> list[HeadInfo]:
        heads: list[HeadInfo] = []
        token = ""
        while True:
            request = head_service_pb2.ListHeadsRequest(parent=parent, page_token=token)
            reply = self._unary(self._heads.ListHeads, request, timeout_s)
            heads += map(head_info, reply.heads)
            token = reply.next_page_token
            if not token:
                return heads

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        request = head_service_pb2.DeleteHeadRequest(name=name, epoch=epoch, force=force)
        self._unary(self._heads.DeleteHead, request, timeout_s, repeatable=False)
        self._attempts.forget_head(name, epoch)

    def take_head(self, name: str, epoch: bytes, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.TakeHeadRequest(name=name, epoch=epoch)
        # A repeat of a conditional one would find the epoch that the first one has made.
        return head_info(self._unary(self._heads.TakeHead, request, timeout_s, repeatable=not epoch))

    # ---- weights ------------------------------------------------------------------------------------------------------

    def upload(self, name: str, epoch: bytes, tensor: str, array: HostArray, options: UploadOptions, timeout_s: float) -> HeadInfo:
        header = head_service_pb2.UploadWeightsHeader(
            name=name,
            epoch=epoch,
            upload_id=options.upload_id,
            tensor=tensor_number(tensor),
            data_type=_arrays.DATA_TYPE_NUMBERS[array.data_type],
            total_bytes=array.data.nbytes,
            closes_step=options.closes_step,
        )
        upload = _Upload(header, array.byte_view(), options)

        def once(remaining_s: float, tries: int) -> HeadInfo:
            try:
                return upload.run(self, remaining_s)
            except HeadwaterError as error:
                # Weights that are set outside of a step change the epoch: once the last byte is on its way, a repeat may be fenced
                # by what the first one did. Weights that close a step may be repeated.
                if options.closes_step is None and upload.all_sent and not error.reason:
                    raise _Final(error) from None
                raise

        try:
            return self._retrying(timeout_s, once)
        except _Final as final:
            raise final.error from None

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.LoadWeightsRequest(
            name=name, epoch=epoch, path=path, weight_tensor=weight_tensor, bias_tensor=bias_tensor
        )
        return head_info(self._unary(self._heads.LoadWeights, request, timeout_s, repeatable=False))

    def _receive_tensor(self, method: Any, request: Any, timeout_s: float) -> tuple[np.ndarray, str]:
        return self._retrying(timeout_s, lambda remaining_s, _: self._receive_tensor_once(method, request, remaining_s))

    def _receive_tensor_once(self, method: Any, request: Any, timeout_s: float) -> tuple[np.ndarray, str]:
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
        micro_batch, keys = request.micro_batch, request.keys
        if micro_batch is None:
            return self._retrying(timeout_s, lambda remaining_s, _: self._compute_once(request, 0, b"", remaining_s))
        attempt = self._attempts.get(keys[0], micro_batch) if request.attempt is None else request.attempt
        first = True

        def in_session(session_id: bytes, remaining_s: float) -> LossResult:
            nonlocal attempt, first
            attempt += not first
            first = False
            self._note_attempt(keys, micro_batch, attempt)
            return self._compute_once(request, attempt, session_id, remaining_s)

        def once(remaining_s: float, tries: int) -> LossResult:
            if not request.explicit:
                return in_session(b"", remaining_s)
            return self._in_session(remaining_s, lambda session_id: in_session(session_id, remaining_s), opens=True)

        try:
            return self._retrying(timeout_s, once)
        except HeadwaterError as error:
            if error.code in AMBIGUOUS_CODES:
                # It may still be computing: who calls again supersedes it.
                self._note_attempt(keys, micro_batch, attempt + 1)
            raise

    def _note_attempt(self, keys: Sequence[StepKey], micro_batch: int, attempt: int) -> None:
        for key in keys:
            self._attempts.note(key, micro_batch, attempt)

    def _compute_once(self, request: ComputeRequest, attempt: int, session_id: bytes, timeout_s: float) -> LossResult:
        header = compute_header(request, attempt, session_id)
        check_rows_message_size(header.ByteSize(), MAX_MESSAGE_BYTES)
        sender = _Sender()

        def messages() -> Iterator[Any]:
            yield loss_service_pb2.ComputeLossRequest(header=header)
            parts = [(loss_service_pb2.CHUNK_ROLE_HIDDEN, 0, request.hidden)]
            parts += [
                (loss_service_pb2.CHUNK_ROLE_TEACHER_HIDDEN, index, term.teacher.hidden)
                for index, term in enumerate(request.terms)
                if term.teacher is not None
            ]
            for role, term_index, rows in parts:
                for chunk in _row_chunks(role, term_index, rows):
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
        if len(summary.terms) != len(request.terms):
            raise make_error("INTERNAL", "", f"the server answered {len(summary.terms)} terms, expected {len(request.terms)}")
        if grad_hidden is not None and received != row_count:
            raise make_error("INTERNAL", "", f"the server sent {received} rows of grad_hidden, expected {row_count}")
        return summary_result(summary, grad_hidden, attempt)

    def _decide(self, method: Any, timeout_s: float, request: Callable[[bytes], Any]) -> Any:
        """A commit or discard, in this client's session if it has one."""
        return self._retrying(
            timeout_s,
            lambda remaining_s, _: self._in_session(
                remaining_s, lambda session_id: self._unary_once(method, request(session_id), remaining_s), opens=False
            ),
        )

    def commit(self, request: CommitRequest, timeout_s: float) -> bool:
        attempt = self._attempts.get(request.keys[0], request.micro_batch) if request.attempt is None else request.attempt
        reply = self._decide(
            self._losses.CommitMicroBatch, timeout_s, lambda session_id: commit_message(request, attempt, session_id)
        )
        return bool(reply.replayed)

    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool:
        named = self._attempts.get(keys[0], micro_batch) if attempt is None else attempt
        reply = self._decide(
            self._losses.DiscardMicroBatch, timeout_s, lambda session_id: discard_message(keys, micro_batch, named, session_id)
        )
        return bool(reply.dropped)

    def add_gradient(self, request: GradientRequest, timeout_s: float) -> bool:
        key, micro_batch = request.key, request.micro_batch
        attempt = self._attempts.get(key, micro_batch) if request.attempt is None else request.attempt
        self._note_attempt((key,), micro_batch, attempt)
        header = gradient_header(request, attempt)
        data = memoryview(request.rows.reshape(-1).view(np.uint8))

        def messages() -> Iterator[Any]:
            yield head_service_pb2.AddGradientRequest(header=header)
            for chunk in _byte_chunks(data, 0):
                yield head_service_pb2.AddGradientRequest(chunk=chunk)

        def once(remaining_s: float, tries: int) -> bool:
            return bool(self._unary_once(self._heads.AddGradient, messages(), remaining_s).replayed)

        return self._retrying(timeout_s, once)

    # ---- steps --------------------------------------------------------------------------------------------------------

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        request = head_service_pb2.GetStepRequest(head=loss_pb2.HeadStep(head=name, head_epoch=epoch))
        reply = self._unary(self._heads.GetStep, request, timeout_s)
        return StepStatus(step_of(reply.open), step_of(reply.last_closed) if reply.HasField("last_closed") else None)

    def seal(self, key: StepKey, expected: Expected, wait: bool, timeout_s: float) -> SealResult:
        request = head_service_pb2.SealStepRequest(head=head_step(key), expected=expected_message(expected), wait=wait)
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
        reply = self._unary(self._heads.SaveCheckpoint, request, timeout_s, repeatable=overwrite)
        return SaveResult(reply.checkpoint, reply.step, reply.total_bytes)

    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.RestoreCheckpointRequest(name=name, epoch=epoch, checkpoint=checkpoint)
        return head_info(self._unary(self._heads.RestoreCheckpoint, request, timeout_s, repeatable=False))


class _Final(Exception):
    """An error that must not be retried, on its way past the retry loop."""

    def __init__(self, error: HeadwaterError):
        super().__init__(str(error))
        self.error = error


class _Upload:
    """The upload of one tensor; `run` goes on where an earlier one was cut."""

    def __init__(self, header: Any, data: memoryview, options: UploadOptions):
        self._header = header
        self._data = data
        self._on_progress = options.on_progress
        self.all_sent = False  # the last byte was given to gRPC

    def run(self, backend: RemoteBackend, timeout_s: float) -> HeadInfo:
        """One stream."""
        data = self._data
        resume = threading.Event()
        sender = _Sender()
        offset = 0
        self.all_sent = False

        def report(position: int) -> None:
            if self._on_progress is not None:
                self._on_progress(position, len(data))

        def messages() -> Iterator[Any]:
            yield head_service_pb2.UploadWeightsRequest(header=self._header)
            resume.wait(timeout_s)
            for chunk in _byte_chunks(data, offset):
                if sender.stopped:
                    return
                report(chunk.offset_bytes)
                self.all_sent = chunk.offset_bytes + len(chunk.data) == len(data)
                yield head_service_pb2.UploadWeightsRequest(chunk=chunk)
            if not sender.stopped:
                report(len(data))

        head = None
        with sender.reading(backend, backend._heads.UploadWeights, messages(), timeout_s, wake=resume.set) as responses:
            for response in responses:
                if response.WhichOneof("message") == "resume_offset_bytes":
                    offset = response.resume_offset_bytes
                    self.all_sent |= offset == len(data)
                    resume.set()
                else:
                    head = response.head
        if head is None:
            raise make_error("INTERNAL", "", "the server ended the upload without telling the new head")
        return head_info(head)


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


def _row_chunks(role: int, term_index: int, rows: HostArray) -> Iterator[Any]:
    row_count, width = rows.shape
    rows_per_chunk = max(1, CHUNK_BYTES // (width * rows.data.itemsize))
    data = rows.byte_view()
    row_bytes = width * rows.data.itemsize
    for start in range(0, row_count, rows_per_chunk):
        end = min(start + rows_per_chunk, row_count)
        yield loss_service_pb2.RowChunk(
            role=role,
            term_index=term_index,
            row_start=start,
            row_count=end - start,
            data=bytes(data[start * row_bytes : end * row_bytes]),
        )


def _byte_chunks(data: memoryview, offset: int) -> Iterator[Any]:
    for position in range(offset, len(data), CHUNK_BYTES):
        yield head_service_pb2.ByteChunk(offset_bytes=position, data=bytes(data[position : position + CHUNK_BYTES]))


def _make_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def _client_name() -> str:
    """What the server shows of this client; at most 128 bytes."""
    return f"python-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _closed(error: ValueError) -> HeadwaterError:
    return ClientClosedError(f"the client is closed ({error})")
