"""Headwater: a remote loss head for training language models.

    client = headwater.connect("localhost:50051")                 # or "unix:/run/headwater/headwater.sock"
    head = client.create_head("student", weight, optimizer=headwater.AdamW())
    out = head.cross_entropy(hidden, targets, step=0, micro_batch=0, loss_scale=1 / num_tokens)
    head.apply_optimizer_step(step=0, learning_rate=1e-3, expected_micro_batches=1)

`headwater.torch` has losses for autograd, `headwater.local` starts a server of this process's own.
"""

from headwater._arrays import BFloat16
from headwater._client import DEFAULT_TIMEOUT_S, Client
from headwater._connect import connect
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
)
from headwater._futures import Future
from headwater._head import Head
from headwater._recovery import StateFiles, StateStore, train
from headwater._teacher import Teacher
from headwater._terms import JOIN, JSD, CrossEntropy
from headwater._types import (
    SGD,
    TLS,
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
    RetryPolicy,
    SaveResult,
    SealResult,
    ServerInfo,
    Step,
    StepStatus,
    StepTotals,
    TermResult,
    Timing,
    VocabShard,
)

__version__ = "0.1.0"

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
