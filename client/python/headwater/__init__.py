"""Headwater: a remote loss head for training language models.

    client = headwater.connect("localhost:50051")                 # or "unix:/run/headwater/headwater.sock"
    head = client.create_head("student", weight, optimizer=headwater.AdamW())
    out = head.cross_entropy(hidden, targets, step=0, micro_batch=0, loss_scale=1 / num_tokens)
    head.apply_optimizer_step(step=0, learning_rate=1e-3, expected_micro_batches=1)

`headwater.torch` has losses for autograd, `headwater.local` starts a server of this process's own.
"""

from headwater._arrays import BFloat16 as BFloat16
from headwater._client import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S, Client as Client
from headwater._connect import connect as connect
from headwater._errors import (
    AbortedError as AbortedError,
    AlreadyExistsError as AlreadyExistsError,
    CancelledError as CancelledError,
    ClientClosedError as ClientClosedError,
    DataLossError as DataLossError,
    DeadlineExceededError as DeadlineExceededError,
    EpochFencedError as EpochFencedError,
    FailedPreconditionError as FailedPreconditionError,
    FeatureNotBuiltError as FeatureNotBuiltError,
    HeadWarning as HeadWarning,
    HeadwaterError as HeadwaterError,
    InternalError as InternalError,
    InvalidArgumentError as InvalidArgumentError,
    MicroBatchConflictError as MicroBatchConflictError,
    NotFoundError as NotFoundError,
    PermissionDeniedError as PermissionDeniedError,
    ResourceExhaustedError as ResourceExhaustedError,
    StagingFullError as StagingFullError,
    StepConflictError as StepConflictError,
    StepLostError as StepLostError,
    StepMismatchError as StepMismatchError,
    TransportUnavailableError as TransportUnavailableError,
    UnauthenticatedError as UnauthenticatedError,
    UnavailableError as UnavailableError,
    UnimplementedError as UnimplementedError,
)
from headwater._futures import Future as Future
from headwater._head import Head as Head
from headwater._loss._teacher import Teacher as Teacher
from headwater._loss._terms import JOIN as JOIN, JSD as JSD, CrossEntropy as CrossEntropy, TopKTeacher as TopKTeacher
from headwater._recovery import StateFiles as StateFiles, StateStore as StateStore, train as train
from headwater._types import (
    SGD as SGD,
    TLS as TLS,
    AdamW as AdamW,
    ApplyResult as ApplyResult,
    CheckpointInfo as CheckpointInfo,
    Device as Device,
    DiscardGradientResult as DiscardGradientResult,
    GradientDither as GradientDither,
    HeadInfo as HeadInfo,
    HeadSpec as HeadSpec,
    LossResult as LossResult,
    MemoryPlan as MemoryPlan,
    MicroBatchState as MicroBatchState,
    RetryPolicy as RetryPolicy,
    SaveResult as SaveResult,
    SealResult as SealResult,
    ServerInfo as ServerInfo,
    Step as Step,
    StepStatus as StepStatus,
    StepTotals as StepTotals,
    TermResult as TermResult,
    Timing as Timing,
    VocabShard as VocabShard,
)

__version__ = "0.1.0"

# Tracebacks name errors and warnings as callers do.
for _error in [
    value for value in globals().values() if isinstance(value, type) and issubclass(value, (HeadwaterError, HeadWarning))
]:
    _error.__module__ = __name__
