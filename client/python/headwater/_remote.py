"""The backend that speaks gRPC. gRPC's own retries and hedging stay off: a retry of a contribution is a new attempt (_retry.py)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from headwater import _arrays, _channel
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, UploadOptions
from headwater._errors import HeadwaterError, NotFoundError, make_error
from headwater._futures import Cancel, Done
from headwater._memory import RowMemory, Rows
from headwater._messages import (
    apply_request,
    check_rows_message_size,
    checkpoint_info,
    commit_message,
    discard_message,
    expected_message,
    gradient_header,
    head_info,
    head_spec_message,
    head_step,
    seconds_of,
    step_of,
    teacher_header,
    tensor_number,
    totals_of,
)
from headwater._requests import CommitRequest, ComputeRequest, GradientRequest, JoinedRows, StepKey
from headwater._retry import AttemptBook, RetryPolicy, with_retries
from headwater._security import Security
from headwater._submission import Submission
from headwater._transfers import PythonTransfers, Transfers
from headwater._transport import Paths
from headwater._types import (
    ApplyResult,
    CheckpointInfo,
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
    loss_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
)

R = TypeVar("R")

# grpc.health.v1, by hand: distributions do not package its stubs. HealthCheckResponse is one enum, field 1.
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH_NAMES = {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}


class RemoteBackend:
    """One connection to one server. Thread-safe. A forked process is refused, and cannot make one: gRPC's threads stay behind."""

    def __init__(
        self,
        address: str,
        connect_timeout_s: float,
        *,
        retries: RetryPolicy,
        awaits_server: bool = False,
        session_lease_s: float | None,
        transport: str = "auto",
        stripes: int = 8,
        security: Security,
    ):
        """`awaits_server`: calls wait for a server that is away, as long as they may take. `session_lease_s` None: no session."""
        self.address = address
        self._calls = _channel.Calls()
        self._retries = retries
        self._awaits_server = awaits_server
        self.attempts = AttemptBook()
        self._channel = _channel.make_channel(address, security)
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
                f"no server answered at {address} within connect_timeout_s={connect_timeout_s:g} s; is headwaterd running there? "
                f"({security.hint()})",
                {"address": address},
            ) from None
        try:
            self._paths = Paths(
                address,
                connect_timeout_s,
                transport=transport,
                stripes=stripes,
                security=security,
                session_lease_s=session_lease_s,
                sessions=self._sessions,
                python=PythonTransfers(self._losses, self._calls),
            )
        except BaseException:
            self._channel.close()
            raise
        self._session = self._paths.session

    @property
    def transfers(self) -> Transfers:
        """How micro-batches travel."""
        return self._paths.transfers

    @property
    def row_memory(self) -> RowMemory:
        return self._paths.transfers.memory

    @property
    def can_start(self) -> bool:
        return self._paths.transfers.can_start

    @property
    def has_session(self) -> bool:
        """Whether what this client leaves undecided is owned by a session."""
        return self._session is not None

    @property
    def session_id(self) -> bytes:
        """That of the open session; empty while none is open."""
        return b"" if self._session is None else self._session.id

    def close(self) -> None:
        if self._calls.is_forked:
            return  # connection and session are the parent's
        if self._session is not None:
            self._session.close()
        self._paths.transfers.close()
        self._channel.close()

    def without_waiting(self) -> RemoteBackend:
        """This backend, whose calls do not wait for a server that is away, whatever its own do."""
        other = copy.copy(self)
        other._awaits_server = False
        return other

    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        return epoch

    def open_session(self, timeout_s: float) -> None:
        """Opens the session if there is to be one, and none is open."""
        if self._session is not None:
            self.check_process()
            self._session.open(timeout_s)

    def forget_session(self, session_id: bytes) -> None:
        """The server does not know this session any more; another one that was opened since stays."""
        if self._session is not None:
            self._session.forget(session_id)

    def watch_session(self, on_lost: Callable[[], None], timeout_s: float) -> None:
        """Opens the session, and calls `on_lost` on a thread of its own when the server does not know it any more."""
        if self._session is not None:
            self._session.on_lost = on_lost
            self.open_session(timeout_s)

    # ---- calls --------------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raises ClientClosedError in a process that was forked from the client's."""
        self._calls.check_process()

    def retrying(self, timeout_s: float, call: Callable[[float, int], R], *, repeatable: bool = True) -> R:
        return with_retries(self._retries, timeout_s, call, repeatable=repeatable, awaits_server=self._awaits_server)

    def _unary(self, method: Any, request: Any, timeout_s: float, *, repeatable: bool = True) -> Any:
        return self.retrying(
            timeout_s, lambda remaining_s, _: self._calls.unary(method, request, remaining_s), repeatable=repeatable
        )

    def in_session(self, timeout_s: float, call: Callable[[bytes], R], *, opens: bool) -> R:
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

    # ---- server -------------------------------------------------------------------------------------------------------

    def server_info(self, timeout_s: float) -> ServerInfo:
        reply = self._unary(self._sessions.GetServerInfo, session_service_pb2.GetServerInfoRequest(), timeout_s)
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

    def transports(self, timeout_s: float) -> dict[str, str | None]:
        self.check_process()
        return self._paths.transports(timeout_s)

    def transport_note(self) -> str:
        return self._paths.note()

    def health(self, timeout_s: float) -> str:
        return _HEALTH_NAMES.get(self.without_waiting()._unary(self._check_health, b"", timeout_s), "UNKNOWN")

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
        request = head_service_pb2.ListHeadsRequest(parent=parent)
        return [head_info(head) for page in self._pages(self._heads.ListHeads, request, timeout_s) for head in page.heads]

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        request = head_service_pb2.DeleteHeadRequest(name=name, epoch=epoch, force=force)
        self._unary(self._heads.DeleteHead, request, timeout_s, repeatable=False)
        self.attempts.forget_head(name, epoch)

    def take_head(self, name: str, epoch: bytes, timeout_s: float, recovers_epochs: Sequence[bytes] = ()) -> HeadInfo:
        """`recovers_epochs`: of a trainer that goes on; a new run has none."""
        request = head_service_pb2.TakeHeadRequest(name=name, epoch=epoch, recovers_epochs=recovers_epochs)
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
            return self.retrying(timeout_s, once)
        except _Final as final:
            raise final.error from None

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        request = head_service_pb2.LoadWeightsRequest(
            name=name, epoch=epoch, path=path, weight_tensor=weight_tensor, bias_tensor=bias_tensor
        )
        return head_info(self._unary(self._heads.LoadWeights, request, timeout_s, repeatable=False))

    def _receive_tensor(self, method: Any, request: Any, timeout_s: float) -> tuple[np.ndarray, str]:
        return self.retrying(timeout_s, lambda remaining_s, _: self._receive_tensor_once(method, request, remaining_s))

    def _receive_tensor_once(self, method: Any, request: Any, timeout_s: float) -> tuple[np.ndarray, str]:
        call = self._calls.start_stream(method, request, timeout_s)
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
            raise self._calls.failure(error) from None
        finally:
            call.cancel()  # no effect on a call that has ended
        if data is None or position != data.nbytes:
            raise make_error("INTERNAL", "", f"the server ended the download after {position} bytes")
        return data, data_type

    def download(self, name: str, epoch: bytes, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        request = head_service_pb2.DownloadWeightsRequest(
            name=name,
            epoch=epoch,
            tensor=tensor_number(tensor),
            data_type=0 if data_type is None else _arrays.DATA_TYPE_NUMBERS[data_type],
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
        return Submission(self, request, timeout_s).run()

    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel | None:
        return Submission(self, request, timeout_s).start(done)

    def stream_teacher(self, tenant: str, rows: Rows, place: JoinedRows, owned: bool, timeout_s: float) -> int:
        def stream(session_id: bytes, remaining_s: float) -> int:
            self.check_process()
            header = teacher_header(tenant, place, rows.shape[1], session_id)
            check_rows_message_size(header.ByteSize(), _channel.MAX_MESSAGE_BYTES)
            return self.transfers.stream_teacher(header, rows, remaining_s)

        cut = False

        def once(remaining_s: float, tries: int) -> int:
            nonlocal cut
            try:
                if not owned:
                    return stream(b"", remaining_s)
                return self.in_session(remaining_s, lambda session_id: stream(session_id, remaining_s), opens=True)
            except HeadwaterError as error:
                if cut and error.reason == "CHUNK_OUT_OF_RANGE":
                    return int(rows.shape[0])  # the stream whose answer was cut off had worked
                cut |= error.code == "UNAVAILABLE" and not error.reason
                raise

        return self.retrying(timeout_s, once)

    def note_attempt(self, keys: Sequence[StepKey], micro_batch: int, attempt: int, named: int | None) -> None:
        """Remembers the attempt that is submitted; `named` is the caller's."""
        for key in keys:
            self.attempts.note(key, micro_batch, attempt, named)

    def _decide(self, method: Any, timeout_s: float, request: Callable[[bytes], Any]) -> Any:
        """A commit or discard, in this client's session if it has one."""
        return self.retrying(
            timeout_s,
            lambda remaining_s, _: self.in_session(
                remaining_s, lambda session_id: self._calls.unary(method, request(session_id), remaining_s), opens=False
            ),
        )

    def commit(self, request: CommitRequest, timeout_s: float) -> bool:
        attempt = self.attempts.get(request.keys[0], request.micro_batch) if request.attempt is None else request.attempt
        reply = self._decide(
            self._losses.CommitMicroBatch, timeout_s, lambda session_id: commit_message(request, attempt, session_id)
        )
        return bool(reply.replayed)

    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool:
        named = self.attempts.get(keys[0], micro_batch) if attempt is None else attempt
        reply = self._decide(
            self._losses.DiscardMicroBatch, timeout_s, lambda session_id: discard_message(keys, micro_batch, named, session_id)
        )
        return bool(reply.dropped)

    def add_gradient(self, request: GradientRequest, timeout_s: float) -> bool:
        key, micro_batch = request.key, request.micro_batch
        attempt = self.attempts.first(key, micro_batch, request.attempt)
        self.note_attempt((key,), micro_batch, attempt, request.attempt)
        header = gradient_header(request, attempt)
        data = memoryview(request.rows.reshape(-1).view(np.uint8))

        def messages() -> Iterator[Any]:
            yield head_service_pb2.AddGradientRequest(header=header)
            for chunk in _channel.byte_chunks(data, 0):
                yield head_service_pb2.AddGradientRequest(chunk=chunk)

        def once(remaining_s: float, tries: int) -> bool:
            return bool(self._calls.unary(self._heads.AddGradient, messages(), remaining_s).replayed)

        return self.retrying(timeout_s, once)

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

    def list_checkpoints(self, name: str, timeout_s: float) -> list[CheckpointInfo]:
        request = head_service_pb2.ListCheckpointsRequest(name=name)
        pages = self._pages(self._heads.ListCheckpoints, request, timeout_s)
        return [checkpoint_info(checkpoint) for page in pages for checkpoint in page.checkpoints]

    def _pages(self, method: Any, request: Any, timeout_s: float) -> Iterator[Any]:
        """All answers to a call that lists, page by page."""
        while True:
            reply = self._unary(method, request, timeout_s)
            yield reply
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token


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
        sender = _channel.Sender()
        offset = 0
        self.all_sent = False

        def report(position: int) -> None:
            if self._on_progress is not None:
                self._on_progress(position, len(data))

        def messages() -> Iterator[Any]:
            yield head_service_pb2.UploadWeightsRequest(header=self._header)
            resume.wait(timeout_s)
            for chunk in _channel.byte_chunks(data, offset):
                if sender.stopped:
                    return
                report(chunk.offset_bytes)
                self.all_sent = chunk.offset_bytes + len(chunk.data) == len(data)
                yield head_service_pb2.UploadWeightsRequest(chunk=chunk)
            if not sender.stopped:
                report(len(data))

        head = None
        with sender.reading(backend._calls, backend._heads.UploadWeights, messages(), timeout_s, wake=resume.set) as responses:
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
