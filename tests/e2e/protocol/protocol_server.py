"""A scripted server with heads, epochs, restarts and sessions: one side of the exchanges in case_table.py."""

import contextlib
import threading
from dataclasses import dataclass, field

import grpc
import numpy as np
from headwater.v1 import head_service_pb2, session_service_pb2
from scripted_server import CUT, Failure, ScriptedServer, a_head

OPEN_STEP = 5
LIMIT_S = 10
STATES = {"READY": head_service_pb2.HEAD_STATE_READY, "RESTORED": head_service_pb2.HEAD_STATE_RESTORED}
# The code that belongs to a reason, where it is another one than ABORTED.
CODES = {
    "DRAINING": "UNAVAILABLE",
    "STARTING": "UNAVAILABLE",
    "SHARD_NOT_READY": "UNAVAILABLE",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "STAGING_FULL": "RESOURCE_EXHAUSTED",
    "IN_FLIGHT_BYTES_EXCEEDED": "RESOURCE_EXHAUSTED",
    "ORDERED_WINDOW_FULL": "RESOURCE_EXHAUSTED",
    "MEMORY_BUDGET_EXCEEDED": "RESOURCE_EXHAUSTED",
    "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
    "INVALID_FIELD": "INVALID_ARGUMENT",
    "STEP_MISMATCH": "FAILED_PRECONDITION",
    "STEP_SEALED": "FAILED_PRECONDITION",
    "ENGINE_FAILED": "INTERNAL",
    "NOT_SESSION_OWNER": "PERMISSION_DENIED",
    "FEATURE_NOT_BUILT": "UNIMPLEMENTED",
    "SESSION_NOT_FOUND": "NOT_FOUND",
    "HEAD_NOT_FOUND": "NOT_FOUND",
    "TRANSFER_NOT_FOUND": "NOT_FOUND",
    "REGION_NOT_FOUND": "NOT_FOUND",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
}
# Calls that give a head another state, and with it another epoch.
STATE_CHANGES = ("RestoreCheckpoint", "LoadWeights", "UploadWeights")
# Calls that name no epoch, or a condition.
UNFENCED = ("CreateHead", "GetHead", "TakeHead", "ListHeads", "DeleteCheckpoint")


def answer(word):
    """The answer that a word of a script stands for: `ok`, `CUT`, `CANCELLED`, or a reason with `/MS` for RetryInfo and `!` for a
    server that says that it restarts."""
    if word == "ok":
        return None
    if word in ("CUT", "CANCELLED"):
        return CUT if word == "CUT" else Failure(grpc.StatusCode.CANCELLED)
    reason, _, delay_ms = word.rstrip("!").partition("/")
    metadata = {"serverRestarts": "true"} if word.endswith("!") else {}
    code = grpc.StatusCode[CODES.get(reason, "ABORTED")]
    return Failure(code, reason, float(delay_ms) / 1000 if delay_ms else None, metadata)


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
    """The name of an epoch."""
    return epoch.rstrip(b".").decode()


def message_of(call):
    """The request of a call; of a stream, its header."""
    first = call[0] if isinstance(call, list) else call
    return getattr(first, "header", first)


def rows_sum(call):
    """The sum of all float32 rows that a stream has carried."""
    data = b"".join(message.chunk.data for message in call)
    return f"{np.frombuffer(data, np.float32).sum():g}"


def describe(method, call):
    """One line on what a call does to its step; None if it does nothing."""
    message = message_of(call)
    if method == "ComputeLoss":
        return f"loss {message.micro_batch} {rows_sum(call)}" if message.HasField("micro_batch") else None
    if method == "AddGradient":
        return f"gradient {message.micro_batch} {rows_sum(call)}"
    if method == "CommitMicroBatch":
        return f"commit {message.micro_batch} {message.factor:g}"
    if method == "DiscardMicroBatch":
        return f"discard {message.micro_batch}"
    if method == "SealStep":
        return "seal wait" if message.wait else "seal"
    if method == "ApplyOptimizerStep":
        return f"apply {message.head.step}"
    if method == "DiscardGradient":
        return f"discard_gradient {message.head.step}"
    if method == "UploadWeights" and message.HasField("closes_step"):
        return f"replace {message.closes_step}"
    return None


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


class ProtocolServer(ScriptedServer):
    """Answers as its heads' states and the script say, and writes down what it accepted since it was last restarted."""

    def __init__(self):
        self.heads = {}
        self.incarnation = 0
        self.taken = self.changes = 0
        self.accepted = []
        self.open_sessions = set()
        self.refused = self.held = None
        self.barrier = None
        self._changed = threading.Condition()
        self.is_held = self.is_abandoned = False
        super().__init__()

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

    def take_by_others(self, head="h", epoch="others", recovers=""):
        """Another client takes a head; `recovers`: it goes on from this epoch, else it is another run."""
        state = self.head(head)
        state.epoch, state.state = epoch_of(epoch), "READY"
        state.recovers = [epoch_of(name) for name in recovers.split("+") if name]

    def skip_step(self, head="h"):
        """Another client closes the open step of a head."""
        self.head(head).open_step += 1

    def change_weights(self, head):
        """A head has other weights than it had."""
        self.head(head).checksum = b"others"

    def cut_upload(self, size_bytes):
        """The next upload is cut when so many bytes have come."""
        self.fail("UploadWeights", int(size_bytes))

    def forget_sessions(self):
        """All leases end."""
        self.open_sessions.clear()

    def grant(self, lease_s):
        """Sessions get this lease, whatever they ask for."""
        self.lease_s = float(lease_s)

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
        line = describe(method, call)
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
        head, message = self.head(name), a_head(name)
        message.epoch, message.state = head.epoch, STATES[head.state]
        message.recovers_epochs.extend(head.recovers)
        message.weight_checksum = head.checksum
        message.spec.trainable = "frozen" not in name
        if message.spec.trainable:
            message.open_step = head.open_step
        else:
            message.ClearField("open_step")
            message.state = STATES["READY"]
        return message

    def _GetServerInfo(self, _):
        return session_service_pb2.ServerInfo(version="scripted", incarnation=self.incarnation.to_bytes(16, "big"))

    def _OpenSession(self, request):
        reply = super()._OpenSession(request)
        self.open_sessions.add(reply.session_id)
        return reply

    def _KeepAlive(self, request, context):
        if request.session_id not in self.open_sessions:
            answer("SESSION_NOT_FOUND").abort(context)
        return super()._KeepAlive(request)

    def _CloseSession(self, request):
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

    def _LoadWeights(self, request):
        return self.head_message(request.name)

    def _SaveCheckpoint(self, request):
        return head_service_pb2.SaveCheckpointResponse(checkpoint=request.checkpoint)

    def _DeleteCheckpoint(self, _):
        return head_service_pb2.DeleteCheckpointResponse(deleted=True)
