"""A server that answers by a script, and remembers every call: for what a client does about failures, restarts and lost sessions.

tests/e2e/protocol/exchange.py has a language for its scripts.
"""

import collections
import concurrent.futures
import contextlib
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from google.protobuf import duration_pb2
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
OPEN_STEP = 5
LIMIT_S = 10
# The code of each reason, as the product has them.
ERRORS = Path(__file__).parents[3] / "kernels/include/headwater/kernels/error.h"
CODES = {
    reason: grpc.StatusCode[re.sub(r"\B(?=[A-Z])", "_", code).upper()]
    for reason, code in re.findall(r"X\(k\w+, (\w+), k(\w+)\)", ERRORS.read_text())
}
# Calls that give a head another state, and with it another epoch.
STATE_CHANGES = ("RestoreCheckpoint", "LoadWeights", "UploadWeights")
# Calls that name no epoch, or a condition.
UNFENCED = ("CreateHead", "GetHead", "TakeHead", "ListHeads", "DeleteCheckpoint")


@dataclass(frozen=True)
class Failure:
    """An answer that is an error; without a reason as a cut connection makes it."""

    code: grpc.StatusCode
    reason: str = ""
    retry_after_ms: int | None = None
    metadata: dict = field(default_factory=dict)

    def abort(self, context):
        status = error_pb2.RpcStatus(code=self.code.value[0], message="scripted")
        details = {}
        if self.reason:
            details["ErrorInfo"] = error_pb2.ErrorInfo(reason=self.reason, domain="headwater", metadata=self.metadata)
        if self.retry_after_ms is not None:
            details["RetryInfo"] = error_pb2.RetryInfo()
            details["RetryInfo"].retry_delay.FromMilliseconds(self.retry_after_ms)
        for name, message in details.items():
            status.details.add(type_url=f"type.googleapis.com/google.rpc.{name}", value=message.SerializeToString())
        if details:
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(self.code, "scripted")


CUT = Failure(grpc.StatusCode.UNAVAILABLE)
# Answers that change nothing, by method.
ANSWERS = {
    "AddGradient": lambda server, it: head_service_pb2.AddGradientResponse(),
    "ApplyOptimizerStep": lambda server, it: head_service_pb2.ApplyOptimizerStepResponse(open_step=it.head.step + 1, clip_factor=1),
    "CommitMicroBatch": lambda server, it: loss_service_pb2.CommitMicroBatchResponse(),
    "CreateHead": lambda server, it: head_service_pb2.CreateHeadResponse(head=server.head_message(it.name), created=True),
    "DeleteCheckpoint": lambda server, it: head_service_pb2.DeleteCheckpointResponse(deleted=True),
    "DeleteHead": lambda server, it: head_service_pb2.DeleteHeadResponse(),
    "DiscardGradient": lambda server, it: head_service_pb2.DiscardGradientResponse(open_step=it.head.step + 1),
    "DiscardMicroBatch": lambda server, it: loss_service_pb2.DiscardMicroBatchResponse(dropped=True),
    "GetGradientNorm": lambda server, it: head_service_pb2.GetGradientNormResponse(),
    "GetStep": lambda server, it: head_service_pb2.GetStepResponse(),
    "ListHeads": lambda server, it: head_service_pb2.ListHeadsResponse(),
    "LoadWeights": lambda server, it: server.head_message(it.name),
    "RestoreCheckpoint": lambda server, it: server.head_message(it.name),
    "SaveCheckpoint": lambda server, it: head_service_pb2.SaveCheckpointResponse(checkpoint=it.checkpoint),
    "SealStep": lambda server, it: head_service_pb2.SealStepResponse(),
    "StreamTeacher": lambda server, it: loss_service_pb2.StreamTeacherResponse(),
}


def answer(word):
    """The answer that a word of a script stands for: `ok`, `CUT`, `CANCELLED`, or a reason with `/MS` for RetryInfo and `!` for a
    server that says that it restarts."""
    if word == "ok":
        return None
    if word in ("CUT", "CANCELLED"):
        return CUT if word == "CUT" else Failure(grpc.StatusCode.CANCELLED)
    reason, _, delay_ms = word.rstrip("!").partition("/")
    metadata = {"serverRestarts": "true"} if word.endswith("!") else {}
    return Failure(CODES[reason], reason, int(delay_ms) if delay_ms else None, metadata)


@dataclass
class HeadState:
    """What the server knows of one head."""

    epoch: bytes
    open_step: int = OPEN_STEP
    state: str = "READY"
    recovers: list = field(default_factory=list)
    checksum: bytes = b"given"
    deleted: bool = False


def epoch_of(name):
    """The 16 bytes of an epoch that scripts call so."""
    return name.encode().ljust(16, b".")


def name_of(epoch):
    return epoch.rstrip(b".").decode()


def message_of(call):
    """The request of a call; of a stream, its header."""
    first = call[0] if isinstance(call, list) else call
    return getattr(first, "header", first)


def rows_sum(call):
    """The sum of all float32 rows that a stream has carried."""
    data = b"".join(message.chunk.data for message in call)
    return f"{np.frombuffer(data, np.float32).sum():g}"


# One line on what a call does to its step, by method; None or no entry: nothing.
LINES = {
    "ComputeLoss": lambda it, call: f"loss {it.micro_batch} {rows_sum(call)}" if it.HasField("micro_batch") else None,
    "AddGradient": lambda it, call: f"gradient {it.micro_batch} {rows_sum(call)}",
    "CommitMicroBatch": lambda it, _: f"commit {it.micro_batch} {it.factor:g}",
    "DiscardMicroBatch": lambda it, _: f"discard {it.micro_batch}",
    "SealStep": lambda it, _: "seal wait" if it.wait else "seal",
    "ApplyOptimizerStep": lambda it, _: f"apply {it.head.step}",
    "DiscardGradient": lambda it, _: f"discard_gradient {it.head.step}",
    "UploadWeights": lambda it, _: f"replace {it.closes_step}" if it.HasField("closes_step") else None,
}


def uses_of(method, message):
    """The heads that a call names: name, epoch, and step or None."""
    steps = [message.head] if hasattr(message, "head") else []
    if method == "ComputeLoss":
        steps = [term.head for term in message.terms]
        kinds = ("teacher_hidden", "joined_teacher")
        steps += [getattr(term, kind) for term in message.terms for kind in kinds if term.HasField(kind)]
    elif method in ("CommitMicroBatch", "DiscardMicroBatch"):
        steps = message.heads
    elif hasattr(message, "epoch"):
        step = message.closes_step if method == "UploadWeights" and message.HasField("closes_step") else None
        return [(message.name, message.epoch, step)] if message.epoch else []
    has_step = [hasattr(use, "step") and use.HasField("step") for use in steps]
    return [(use.head, use.head_epoch, use.step if has else None) for use, has in zip(steps, has_step, strict=True)]


class ScriptedServer:
    """Answers as its heads' states and `fail` say, and writes down what it accepted since it was last restarted.

    On loopback TCP, so that connections can be told apart.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._failures = collections.defaultdict(collections.deque)
        self._always = {}
        # By method: every request (of a stream: its messages), and the connection that it came on.
        self.calls = collections.defaultdict(list)
        self.peers = collections.defaultdict(list)
        self.times = collections.defaultdict(list)  # when they came
        self.uploads = {}
        self.cut_at = None
        self.lease = None  # that sessions are granted; None: what they ask for
        self.heads = {}
        self.incarnation = 0
        self.taken = self.changes = 0
        self.accepted = []
        self.open_sessions = set()
        self.refused = self.held = None
        self.barrier = None
        self._changed = threading.Condition()
        self.is_held = self.is_abandoned = False
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16), options=(("grpc.so_reuseport", 0),))
        for module, name in (
            (loss_service_pb2_grpc, "LossServiceServicer"),
            (head_service_pb2_grpc, "HeadServiceServicer"),
            (session_service_pb2_grpc, "SessionServiceServicer"),
        ):
            base = getattr(module, name)
            methods = {method: self._handler(method) for method in vars(base) if not method.startswith("_")}
            getattr(module, f"add_{name}_to_server")(type(name, (base,), methods)(), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self):
        self._server.stop(0).wait()

    def fail(self, method, *failures):
        """The next calls of this method get these answers. None: a good one; what can be called is called before that."""
        self._failures[method].extend(failures)

    def fail_always(self, method, failure):
        """All calls of this method get this answer once those that `fail` has announced are used up. None: a good one."""
        self._always[method] = failure

    def count(self, method):
        return len(self.calls[method])

    def _handler(self, name):
        answer = getattr(self, f"_{name}", lambda request, _: ANSWERS[name](self, request))

        def begin(request, context):
            """The request; of a stream, its messages; of an upload, which is read beside its answers, the first of them."""
            message = [next(request)] if name == "UploadWeights" else list(request) if hasattr(request, "__next__") else request
            with self._lock:
                failure = self._failures[name].popleft() if self._failures[name] else self._always.get(name)
                self.calls[name].append(message)
                self.peers[name].append(context.peer())
                self.times[name].append(time.monotonic())
            if callable(failure):
                failure()
            elif failure is not None:
                failure.abort(context)
            self.admit(name, message, context)
            return message

        def unary(_, request, context):
            return answer(begin(request, context), context)

        def stream(_, request, context):
            yield from answer(begin(request, context), context, request)

        return stream if name in ("ComputeLoss", "UploadWeights", "DownloadGradient", "DownloadWeights") else unary

    # ---- what a script does -------------------------------------------------------------------------------------------

    def head(self, name):
        """The state of a head, by its short or full name."""
        return self.heads.setdefault(name.rpartition("/")[2], HeadState(epoch_of("first")))

    def restart(self, open_step=OPEN_STEP, deleted="", **open_steps):
        """Comes back as another process, with all heads as their checkpoints have them; `open_steps`: of single heads."""
        for name, head in self.heads.items():
            head.epoch, head.open_step = epoch_of(f"restored-{self.incarnation + 1}"), int(open_steps.get(name, open_step))
            head.state, head.recovers, head.deleted = "RESTORED", [], name == deleted
        self.accepted.clear()
        self.incarnation += 1
        self.open_sessions.clear()  # last: a client that makes no call finds out by this

    def take_by_others(self, recovers=""):
        """Another client takes the head; `recovers`: it goes on from this epoch, else it is another run."""
        head = self.head("h")
        head.epoch, head.state = epoch_of("others"), "READY"
        head.recovers = [epoch_of(name) for name in recovers.split("+") if name]

    def skip_step(self):
        """Another client closes the open step of the head."""
        self.head("h").open_step += 1

    def change_weights(self, head):
        """A head has other weights than it had."""
        self.head(head).checksum = b"others"

    def cut_upload(self, size_bytes):
        """The next upload is cut when so many bytes have come."""
        self.cut_at = int(size_bytes)

    def forget_sessions(self):
        self.open_sessions.clear()

    def grant(self, lease_s):
        """Sessions get this lease, whatever they ask for."""
        self.lease = duration_pb2.Duration(seconds=int(lease_s))

    def hold(self, *line):
        """Calls whose line begins so are not answered before `release`."""
        with self._changed:
            self.held, self.is_held, self.is_abandoned = " ".join(line), False, False

    def release(self):
        with self._changed:
            self.held = None
            self._changed.notify_all()

    def refuse(self, *line):
        """Calls whose line begins so are a conflict; without a line none are."""
        self.refused = " ".join(line) or None

    def meet(self, calls):
        """The next `calls` that find their step lost are answered together."""
        self.barrier = threading.Barrier(int(calls))

    def clear(self):
        """Forgets which calls there were, but for those that opened sessions, which are numbered."""
        for method in list(self.calls):
            if method != "OpenSession":
                del self.calls[method]
        self.times.clear()

    def wait_until(self, flag):
        """Waits for `is_held` or `is_abandoned`."""
        with self._changed:
            assert self._changed.wait_for(lambda: getattr(self, flag), LIMIT_S), flag

    # ---- answers ------------------------------------------------------------------------------------------------------

    def admit(self, method, call, context):
        message = message_of(call)
        line = LINES[method](message, call) if method in LINES else None
        if line is not None and self.held is not None and line.startswith(self.held):
            self._await_release(context)
        session = getattr(message, "session_id", b"")
        if session and method != "KeepAlive" and session not in self.open_sessions:
            answer("SESSION_NOT_FOUND").abort(context)
        if method in UNFENCED:
            return
        for name, epoch, step in uses_of(method, message):
            if method == "UploadWeights" and step == self.head(name).open_step - 1:
                return  # the step was closed by the same call before
            self._check(self.head(name), epoch, step, context)
        if line is None:
            if method in STATE_CHANGES:
                self.changes += 1
                self._give_epoch(self.head(message.name), f"set-{self.changes}")
            return
        if self.refused is not None and line.startswith(self.refused):
            answer("MICRO_BATCH_CONFLICT").abort(context)
        with self._lock:
            self.accepted.append(line)
            if method in ("ApplyOptimizerStep", "DiscardGradient", "UploadWeights"):
                self.head(getattr(message, "name", "") or message.head.head).open_step += 1

    def _check(self, head, epoch, step, context):
        if head.deleted:
            answer("HEAD_NOT_FOUND").abort(context)
        if head.state == "RESTORED" and (step is not None or epoch != head.epoch):
            if self.barrier is not None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.barrier.wait(LIMIT_S)
            metadata = {"restoredStep": str(head.open_step), "checkpoint": "newest", "checkpoints": "newest=4"}
            Failure(grpc.StatusCode.ABORTED, "STEP_LOST", metadata=metadata).abort(context)
        if epoch != head.epoch:
            answer("EPOCH_FENCED").abort(context)
        if step is not None and step != head.open_step:
            metadata = {"openStep": str(head.open_step)}
            Failure(grpc.StatusCode.FAILED_PRECONDITION, "STEP_MISMATCH", metadata=metadata).abort(context)

    @staticmethod
    def _give_epoch(head, name):
        head.epoch, head.state, head.recovers = epoch_of(name), "READY", []

    def _await_release(self, context):
        with self._changed:
            self.is_held = True
            self._changed.notify_all()
            while self.held is not None:
                if not context.is_active():
                    self.is_abandoned = True
                    self._changed.notify_all()
                    context.abort(grpc.StatusCode.CANCELLED, "the client has ended the call")
                self._changed.wait(0.005)

    def head_message(self, name):
        head = self.head(name)
        message = head_service_pb2.Head(
            name=name,
            spec=head_service_pb2.HeadSpec(
                vocab_size=VOCAB_SIZE,
                hidden_size=HIDDEN_SIZE,
                data_type=tensor_pb2.DATA_TYPE_FLOAT32,
                trainable="frozen" not in name,
            ),
            epoch=head.epoch,
            state=f"HEAD_STATE_{head.state}",
            recovers_epochs=head.recovers,
            weight_checksum=head.checksum,
        )
        if message.spec.trainable:
            message.open_step = head.open_step
        else:
            message.state = head_service_pb2.HEAD_STATE_READY
        return message

    def _GetServerInfo(self, *_):
        return session_service_pb2.ServerInfo(version="scripted", incarnation=self.incarnation.to_bytes(16, "big"))

    def _lease(self):
        return self.lease or self.calls["OpenSession"][-1].lease

    def _OpenSession(self, *_):
        session = len(self.calls["OpenSession"]).to_bytes(32, "big")
        self.open_sessions.add(session)
        return session_service_pb2.OpenSessionResponse(session_id=session, lease=self._lease())

    def _KeepAlive(self, request, context):
        if request.session_id not in self.open_sessions:
            answer("SESSION_NOT_FOUND").abort(context)
        return session_service_pb2.KeepAliveResponse(lease=self._lease())

    def _CloseSession(self, request, _):
        self.open_sessions.discard(request.session_id)
        return session_service_pb2.CloseSessionResponse()

    def _GetHead(self, request, context):
        if self.head(request.name).deleted:
            answer("HEAD_NOT_FOUND").abort(context)
        return self.head_message(request.name)

    def _TakeHead(self, request, context):
        head = self.head(request.name)
        with self._lock:
            current = not request.epoch or request.epoch == head.epoch
            if current:
                self.taken += 1
                self._give_epoch(head, f"taken-{self.taken}")
                head.recovers = list(request.recovers_epochs)
        if not current:
            answer("EPOCH_FENCED").abort(context)
        return self.head_message(request.name)

    def _DownloadGradient(self, *_):
        shape, data = (VOCAB_SIZE, HIDDEN_SIZE), bytes(4 * VOCAB_SIZE * HIDDEN_SIZE)
        types = {"data_type": tensor_pb2.DATA_TYPE_FLOAT32, "total_bytes": len(data), "weight_version": 1}
        yield head_service_pb2.DownloadTensorResponse(header=head_service_pb2.DownloadTensorHeader(shape=shape, **types))
        yield head_service_pb2.DownloadTensorResponse(chunk=head_service_pb2.ByteChunk(data=data))

    _DownloadWeights = _DownloadGradient

    def _ComputeLoss(self, messages, *_):
        header = messages[0].header
        if header.return_grad_hidden:
            rows = bytes(4 * header.row_count * header.hidden_size)
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

    def _UploadWeights(self, first, context, rest):
        cut_at, self.cut_at = self.cut_at, None
        header = first[0].header
        data = self.uploads.setdefault(header.upload_id, bytearray())
        yield head_service_pb2.UploadWeightsResponse(resume_offset_bytes=len(data))
        for message in rest:
            assert message.chunk.offset_bytes == len(data)
            data += message.chunk.data
            if cut_at is not None and len(data) >= cut_at:
                CUT.abort(context)
        head = self.head_message(header.name)
        if header.HasField("closes_step"):
            head.open_step = header.closes_step + 1
        yield head_service_pb2.UploadWeightsResponse(head=head)
