"""A server that answers by a script, and remembers every call: for what a client does about failures."""

import collections
import concurrent.futures
import contextlib
import inspect
import threading
import time
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.protobuf import any_pb2, duration_pb2
from headwater.v1 import (
    error_pb2,
    head_service_pb2,
    head_service_pb2_grpc,
    loss_pb2,
    loss_service_pb2,
    loss_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    tensor_pb2,
)

VOCAB_SIZE, HIDDEN_SIZE = 8, 4
EPOCH = bytes(range(16))


@dataclass(frozen=True)
class Failure:
    """An answer that is an error; without a reason as a cut connection makes it."""

    code: grpc.StatusCode
    reason: str = ""
    retry_after_s: float | None = None
    metadata: dict = field(default_factory=dict)

    def abort(self, context):
        status = error_pb2.RpcStatus(code=self.code.value[0], message="scripted")
        details = []
        if self.reason:
            details.append(("ErrorInfo", error_pb2.ErrorInfo(reason=self.reason, domain="headwater", metadata=self.metadata)))
        if self.retry_after_s is not None:
            info = error_pb2.RetryInfo()
            info.retry_delay.FromMilliseconds(int(self.retry_after_s * 1000))
            details.append(("RetryInfo", info))
        for name, message in details:
            status.details.append(any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{name}", value=message.SerializeToString()))
        if details:
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(self.code, "scripted")


CUT = Failure(grpc.StatusCode.UNAVAILABLE)
EMPTY = {  # answers without content
    "CloseSession": session_service_pb2.CloseSessionResponse,
    "ListHeads": head_service_pb2.ListHeadsResponse,
    "DeleteHead": head_service_pb2.DeleteHeadResponse,
    "SealStep": head_service_pb2.SealStepResponse,
    "AddGradient": head_service_pb2.AddGradientResponse,
    "GetStep": head_service_pb2.GetStepResponse,
    "GetGradientNorm": head_service_pb2.GetGradientNormResponse,
    "CommitMicroBatch": loss_service_pb2.CommitMicroBatchResponse,
    "StreamTeacher": loss_service_pb2.StreamTeacherResponse,
}


def a_head(name="tenants/default/heads/scripted"):
    return head_service_pb2.Head(
        name=name,
        spec=head_service_pb2.HeadSpec(
            vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, data_type=tensor_pb2.DATA_TYPE_FLOAT32, trainable=True
        ),
        epoch=EPOCH,
        state=head_service_pb2.HEAD_STATE_READY,
        open_step=0,
    )


def _zeros(shape):
    data = np.zeros(shape, np.float32)
    yield head_service_pb2.DownloadTensorResponse(
        header=head_service_pb2.DownloadTensorHeader(
            data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, total_bytes=data.nbytes, weight_version=1
        )
    )
    yield head_service_pb2.DownloadTensorResponse(chunk=head_service_pb2.ByteChunk(offset_bytes=0, data=data.tobytes()))


class ScriptedServer:
    """Answers every call well, but for what `fail` has announced. On loopback TCP, so that connections can be told apart."""

    def __init__(self, address="127.0.0.1:0"):
        self._lock = threading.Lock()
        self._failures = collections.defaultdict(collections.deque)
        self._always = {}
        # By method: every request (of a stream: its messages), and the connection that it came on.
        self.calls = collections.defaultdict(list)
        self.peers = collections.defaultdict(list)
        self.times = collections.defaultdict(list)  # when they came
        self.uploads = {}
        self.lease_s = None  # that sessions are granted; None: what they ask for
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0),))
        services = (
            (loss_service_pb2_grpc.add_LossServiceServicer_to_server, loss_service_pb2_grpc.LossServiceServicer),
            (head_service_pb2_grpc.add_HeadServiceServicer_to_server, head_service_pb2_grpc.HeadServiceServicer),
            (session_service_pb2_grpc.add_SessionServiceServicer_to_server, session_service_pb2_grpc.SessionServiceServicer),
        )
        for add, base in services:
            add(self._servicer(base), self._server)
        self.port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self):
        self._server.stop(0).wait()

    def fail(self, method, *failures):
        """The next calls of this method get these answers. None: a good one; what can be called is called before that."""
        self._failures[method].extend(failures)

    def fail_always(self, method, failure):
        """All calls of this method get this answer once those that `fail` has announced are used up. None: a good one."""
        self._always[method] = failure

    def admit(self, method, messages, context):
        """Called before a good answer; may abort the call. Of a stream the messages are a list, of an upload the header."""

    def count(self, method):
        return len(self.calls[method])

    def _next_failure(self, method):
        return self._failures[method].popleft() if self._failures[method] else self._always.get(method)

    def _servicer(self, base):
        methods = {name: self._handler(name) for name in vars(base) if not name.startswith("_")}
        return type("Servicer", (base,), methods)()

    def _handler(self, name):
        answer = getattr(self, f"_{name}", None) or (lambda _: EMPTY[name]())
        wants_context = "context" in inspect.signature(answer).parameters
        streams_answer = name in ("ComputeLoss", "UploadWeights", "DownloadGradient", "DownloadWeights")

        def begin(request, context):
            with self._lock:
                failure = self._next_failure(name)
                self.peers[name].append(context.peer())
                self.times[name].append(time.monotonic())
            messages = list(request) if hasattr(request, "__next__") else request
            with self._lock:
                self.calls[name].append(messages)
            if callable(failure):
                failure()
            elif failure is not None:
                failure.abort(context)
            self.admit(name, messages, context)
            return messages

        def unary(_, request, context):
            messages = begin(request, context)
            return answer(messages, context) if wants_context else answer(messages)

        def stream(_, request, context):
            if name == "UploadWeights":
                yield from self._upload(request, context)
            else:
                yield from answer(begin(request, context))

        return stream if streams_answer else unary

    def head_message(self, name):
        """A head as calls that return one answer."""
        return a_head(name)

    # ---- answers ------------------------------------------------------------------------------------------------------

    def _GetServerInfo(self, _):
        return session_service_pb2.ServerInfo(version="scripted", incarnation=EPOCH)

    def _OpenSession(self, request):
        reply = session_service_pb2.OpenSessionResponse(session_id=len(self.calls["OpenSession"]).to_bytes(32, "big"))
        reply.lease.CopyFrom(self._lease())
        return reply

    def _KeepAlive(self, _):
        reply = session_service_pb2.KeepAliveResponse()
        reply.lease.CopyFrom(self._lease())
        return reply

    def _lease(self):
        if self.lease_s is None:
            return self.calls["OpenSession"][-1].lease
        return duration_pb2.Duration(seconds=int(self.lease_s))

    def _GetHead(self, request):
        return self.head_message(request.name)

    _TakeHead = _RestoreCheckpoint = _GetHead

    def _CreateHead(self, request):
        return head_service_pb2.CreateHeadResponse(head=self.head_message(request.name), created=True)

    def _ApplyOptimizerStep(self, request):
        return head_service_pb2.ApplyOptimizerStepResponse(open_step=request.head.step + 1, clip_factor=1)

    def _DiscardGradient(self, request):
        return head_service_pb2.DiscardGradientResponse(open_step=request.head.step + 1)

    def _DiscardMicroBatch(self, _):
        return loss_service_pb2.DiscardMicroBatchResponse(dropped=True)

    def _DownloadGradient(self, _):
        yield from _zeros((VOCAB_SIZE, HIDDEN_SIZE))

    _DownloadWeights = _DownloadGradient

    def _ComputeLoss(self, messages):
        header = messages[0].header
        if header.return_grad_hidden:
            rows = np.zeros((header.row_count, header.hidden_size), np.float32).tobytes()
            yield loss_service_pb2.ComputeLossResponse(
                chunk=loss_service_pb2.RowChunk(role=loss_service_pb2.CHUNK_ROLE_GRAD_HIDDEN, row_count=header.row_count, data=rows)
            )
        explicit = header.commit_mode == loss_service_pb2.COMMIT_MODE_EXPLICIT
        yield loss_service_pb2.ComputeLossResponse(
            summary=loss_service_pb2.MicroBatchSummary(
                terms=[loss_pb2.LossTermResult() for _ in header.terms],
                state=loss_service_pb2.CONTRIBUTION_STATE_STAGED if explicit else loss_service_pb2.CONTRIBUTION_STATE_COMMITTED,
            )
        )

    def _upload(self, request, context):
        """An announced failure is a number of bytes: the stream is cut once they have come."""
        with self._lock:
            cut_at = self._next_failure("UploadWeights")
        header = next(request).header
        with self._lock:
            self.calls["UploadWeights"].append(header)
        if isinstance(cut_at, Failure):
            cut_at.abort(context)
        self.admit("UploadWeights", header, context)
        data = self.uploads.setdefault(header.upload_id, bytearray())
        yield head_service_pb2.UploadWeightsResponse(resume_offset_bytes=len(data))
        for message in request:
            assert message.chunk.offset_bytes == len(data)
            data += message.chunk.data
            if cut_at is not None and len(data) >= cut_at:
                CUT.abort(context)
        head = self.head_message(header.name)
        if header.HasField("closes_step"):
            head.open_step = header.closes_step + 1
        yield head_service_pb2.UploadWeightsResponse(head=head)


@contextlib.contextmanager
def scripted_server():
    """One for a `with` statement."""
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.stop()
