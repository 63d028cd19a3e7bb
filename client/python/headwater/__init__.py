"""Headwater: a remote loss head for training language models.

    client = headwater.connect("localhost:50051")                 # or "unix:/run/headwater/headwater.sock"
    head = client.create_head("student", weight, optimizer=headwater.AdamW())
    out = head.cross_entropy(hidden, targets, step=0, micro_batch=0, loss_scale=1 / num_tokens)
    head.apply_optimizer_step(step=0, learning_rate=1e-3, expected_micro_batches=1)

`headwater.torch` has losses for autograd, `headwater.local` the same API in this process, without a server.
"""

from headwater._arrays import BFloat16
from headwater._client import DEFAULT_TIMEOUT_S, Client
from headwater._errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    EpochFencedError,
    FailedPreconditionError,
    FeatureNotBuiltError,
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
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from headwater._futures import Future
from headwater._head import Head
from headwater._types import (
    SGD,
    AdamW,
    ApplyResult,
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
    Timing,
    VocabShard,
)

__version__ = "0.1.0"


def connect(address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, connect_timeout_s: float = 10.0) -> Client:
    """Connects to a server.

    Args:
        address: `host:port`, or `unix:/path/to/headwater.sock`.
        timeout_s: bound of every call that does not bring its own, in seconds.
        connect_timeout_s: how long to wait for the server to answer at all, in seconds.
    Returns:
        A Client; close it, or use it in a `with` statement.
    Raises:
        UnavailableError: no server answered in time.
    """
    from headwater._remote import RemoteBackend

    return Client(RemoteBackend(address, connect_timeout_s), timeout_s=timeout_s)


__all__ = [
    "DEFAULT_TIMEOUT_S",
    "SGD",
    "AbortedError",
    "AdamW",
    "AlreadyExistsError",
    "ApplyResult",
    "BFloat16",
    "CancelledError",
    "Client",
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
    "SaveResult",
    "SealResult",
    "ServerInfo",
    "StagingFullError",
    "Step",
    "StepConflictError",
    "StepLostError",
    "StepMismatchError",
    "StepStatus",
    "StepTotals",
    "Timing",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "VocabShard",
    "__version__",
    "connect",
]
