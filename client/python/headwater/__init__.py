"""Headwater: a remote loss head for training language models.

    client = headwater.connect("localhost:50051")                 # or "unix:/run/headwater/headwater.sock"
    head = client.create_head("student", weight, optimizer=headwater.AdamW())
    out = head.cross_entropy(hidden, targets, step=0, micro_batch=0, loss_scale=1 / num_tokens)
    head.apply_optimizer_step(step=0, learning_rate=1e-3, expected_micro_batches=1)

`headwater.torch` has losses for autograd, `headwater.local` a server of this process's own.
"""

from typing import Any

from headwater._arrays import BFloat16
from headwater._client import DEFAULT_TIMEOUT_S, Client, check_tenant
from headwater._errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    ClientClosedError,
    DataLossError,
    DeadlineExceededError,
    EpochFencedError,
    FailedPreconditionError,
    FeatureNotBuiltError,
    HeadWarning,
    HeadwaterError,
    InternalError,
    InvalidArgumentError,
    MicroBatchConflictError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StagingFullError,
    StepConflictError,
    StepLostError,
    StepMismatchError,
    TransportUnavailableError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    invalid_argument,
)
from headwater._futures import Future
from headwater._head import Head
from headwater._recovery import StateFiles, StateStore, train
from headwater._requests import check_bool, check_choice
from headwater._retry import DEFAULT_RETRIES, RetryPolicy
from headwater._security import TLS, check_address, make_security
from headwater._teacher import Teacher
from headwater._terms import JOIN, JSD, CrossEntropy
from headwater._types import (
    SGD,
    AdamW,
    ApplyResult,
    CheckpointInfo,
    Device,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    LossResult,
    MemoryPlan,
    MicroBatchState,
    SaveResult,
    SealResult,
    ServerInfo,
    Step,
    StepStatus,
    StepTotals,
    TermResult,
    Timing,
    VocabShard,
    check_integer,
    check_number,
)

__version__ = "0.1.0"

_LONGEST_LEASE_S = 2147483.0  # the client library takes 2^31 ms


def connect(
    address: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = 10.0,
    tenant: str = "default",
    session: bool = True,
    session_lease: float = 30.0,
    retries: RetryPolicy | None = DEFAULT_RETRIES,
    replay: bool = False,
    replay_bytes: int = 1 << 30,
    replay_steps: int | None = None,
    transport: str = "auto",
    stripes: int = 8,
    tls: TLS | bool | None = None,
    token: str | None = None,
    allow_plaintext_token: bool = False,
    traceparent: str | None = None,
) -> Client:
    """Connects to a server.

    Args:
        address: `host:port` (an IPv6 host in brackets; before it gRPC's dns:, ipv4: or ipv6: if need be, as in `dns:///host:port`),
            `unix:/path/to/headwater.sock` or `unix-abstract:name`.
        timeout_s: bound of every call that does not bring its own, in seconds; retries and replays included. Not of connecting.
        connect_timeout_s: how long this function waits for the server to answer at all, in seconds.
        tenant: whose heads short names mean.
        session: own what this client leaves undecided: if the process dies, its explicit micro-batches are discarded when the lease
            ends, and their staging slots are free again; other clients cannot decide them. The session is opened by the first
            explicit micro-batch, renewed by a daemon thread on a connection of its own, and closed with the client.
        session_lease: seconds, > 0 and at most 2147483; the server may shorten it.
        retries: how often calls that can be repeated without harm are tried: 5 times by default, after 0.1 s and more. None: once.
        replay: follow a server that was started again: keep what was sent, and how steps were closed; when a head comes back at
            the step that this client works on, or at an older one that is still kept, take it, send everything since again in the
            same order, and go on. If it comes back at one that is not, calls are `StepLostError`, whose `restored_step` and
            `checkpoint` say where to go back to. Of several trainers of a run one takes the head, and the others join it; if
            another run has taken it since, calls are `EpochFencedError`. Whatever `retries` says, such calls are repeated while
            the server is away (it cannot be reached, or says DRAINING or STARTING), at most 1 s apart unless it asks for more,
            until about a second before the end of their `timeout_s`; `health` is not.
        replay_bytes: bound of what is kept, >= 0. The oldest closed steps go first. An open step with more, or with a joined
            teacher's micro-batches (`JOIN`), is not kept, which is warned of once.
        replay_steps: closed steps that are kept, >= 0; 0: only the open one. None: as many as `replay_bytes` have room for. Fewer
            than there are between two checkpoints are of use only now and then.
        transport: what micro-batches take. "auto": the best that works: CUDA tensors are read and written in place ("cuda_ipc"),
            rows in host memory lie in memory that is shared with the server ("shared_memory"), or go over several connections
            ("grpc"). One of these names demands it. "python": grpcio alone, slower; "auto" falls back to it where
            libheadwater_client.so is not beside the package (or where HEADWATER_CLIENT_LIBRARY says). `LossResult.transport` says
            which it was, `Client.transports` and `Client.transport_note` why no better one.
        stripes: connections that one micro-batch is spread over at most, in [1, 64]; fewer where the server allows fewer or the
            rows are few. "grpc" only.
        tls: encrypt, and check that the server is who it should be: a `headwater.TLS`, or True for the authorities of the system.
            Not for a Unix socket.
        token: sent with every call, for a server that asks for one. Not in plain text but to loopback addresses and Unix sockets.
        allow_plaintext_token: send it nevertheless, in a network that nobody else can listen on.
        traceparent: sent with every call: the caller's span, as W3C Trace Context says it (00-TRACE_ID-SPAN_ID-FLAGS). The server's
            log names it, and a server with --trace_dir writes traces if its flags say that the trace is recorded.
    Returns:
        A Client; close it, or use it in a `with` statement. It makes no calls in a process that is forked from this one, nor can
        that one connect: use the spawn or forkserver start method, or connect only after forking.
    Raises:
        UnavailableError: no server answered in time.
        ClientClosedError: this process was forked from one that had connected.
        TransportUnavailableError: the transport that is demanded does not work here.
    """
    from headwater._remote import RemoteBackend
    from headwater._replay import ReplayBackend
    from headwater._transfers import MAX_STRIPES, TRANSPORTS

    check_address(address)
    check_number(session_lease, "session_lease", low=0, low_open=True, high=_LONGEST_LEASE_S)
    check_integer(replay_bytes, "replay_bytes")
    if replay_steps is not None:
        check_integer(replay_steps, "replay_steps")
    security = make_security(tls, token, allow_plaintext_token, traceparent, address)
    policy = RetryPolicy(max_attempts=1) if retries is None else retries
    if not isinstance(policy, RetryPolicy):
        raise invalid_argument("INVALID_FIELD", f"retries must be a headwater.RetryPolicy or None, got {policy!r}", field="retries")
    check_tenant(tenant)
    check_choice(transport, "transport", TRANSPORTS)
    check_integer(stripes, "stripes", low=1, high=MAX_STRIPES)
    backend: Any = RemoteBackend(
        address,
        connect_timeout_s,
        retries=policy,
        awaits_server=check_bool(replay, "replay"),
        session_lease_s=session_lease if check_bool(session, "session") else None,
        transport=transport,
        stripes=stripes,
        security=security,
    )
    if replay:
        backend = ReplayBackend(backend, replay_bytes, replay_steps, connect_timeout_s)
    return Client(backend, timeout_s=timeout_s, tenant=tenant)


# Tracebacks name errors and warnings as callers do.
for _error in [
    value for value in globals().values() if isinstance(value, type) and issubclass(value, (HeadwaterError, HeadWarning))
]:
    _error.__module__ = __name__

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JOIN",
    "JSD",
    "SGD",
    "TLS",
    "AbortedError",
    "AdamW",
    "AlreadyExistsError",
    "ApplyResult",
    "BFloat16",
    "CancelledError",
    "CheckpointInfo",
    "Client",
    "ClientClosedError",
    "CrossEntropy",
    "DataLossError",
    "DeadlineExceededError",
    "Device",
    "DiscardGradientResult",
    "EpochFencedError",
    "FailedPreconditionError",
    "FeatureNotBuiltError",
    "Future",
    "Head",
    "HeadInfo",
    "HeadSpec",
    "HeadWarning",
    "HeadwaterError",
    "InternalError",
    "InvalidArgumentError",
    "LossResult",
    "MemoryPlan",
    "MicroBatchConflictError",
    "MicroBatchState",
    "NotFoundError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "SaveResult",
    "SealResult",
    "ServerInfo",
    "StagingFullError",
    "StateFiles",
    "StateStore",
    "Step",
    "StepConflictError",
    "StepLostError",
    "StepMismatchError",
    "StepStatus",
    "StepTotals",
    "Teacher",
    "TermResult",
    "Timing",
    "TransportUnavailableError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "VocabShard",
    "__version__",
    "connect",
    "train",
]
