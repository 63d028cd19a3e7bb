"""Errors: one root, a subclass for each canonical code, and a few for the reasons that callers handle apart.

Callers switch on the class or on `HeadwaterError.reason` (catalogue: docs/errors.md), never on the text.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

# Failures that leave open whether the call was carried out.
AMBIGUOUS_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
_INSTEAD_OF_A_FORK = "use the spawn or forkserver start method, or connect only after forking"


class HeadWarning(UserWarning):
    """A call works, but may not do as the caller means: an attached head keeps weights of its own, for example."""


def warn(message: str, category: type[Warning] = HeadWarning) -> None:
    """Warns about the line outside this package, and outside torch, that has led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("headwater", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class HeadwaterError(Exception):
    """Root of every error that this package raises on its own.

    Attributes:
        reason: machine-readable reason, `STEP_MISMATCH` and the like; empty if the transport made the error.
        metadata: the values that the message mentions, by lowerCamel key (`field`, `expected`, `actual`, `openStep`, ...).
        retry_after_s: how long to wait, in seconds, before the same call may succeed; None if waiting does not help.
        code: canonical gRPC code by name, `INVALID_ARGUMENT` and the like.
    """

    code = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ):
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}/{self.reason}: {self.message}" if self.reason else f"{self.code}: {self.message}"


class InvalidArgumentError(HeadwaterError, ValueError):
    """The arguments are wrong whatever the state. Most are found before anything is sent."""


class NotFoundError(HeadwaterError, LookupError):
    """No such head, checkpoint, micro-batch or file."""


class AlreadyExistsError(HeadwaterError):
    """A head or checkpoint of that name exists."""


class FailedPreconditionError(HeadwaterError):
    """The state must change first."""


class AbortedError(HeadwaterError):
    """The caller's knowledge of the head is out of date."""


class ResourceExhaustedError(HeadwaterError):
    """Memory, a staging slot, a queue or a quota is used up."""


class UnavailableError(HeadwaterError, ConnectionError):
    """The server is not there, is starting or is draining. The call may or may not have been carried out: see `Head.step_state`."""


class ClientClosedError(UnavailableError):
    """This client was closed, or stayed behind in a fork; or nothing can connect in this fork. Nothing was sent."""

    @classmethod
    def of_parent(cls) -> ClientClosedError:
        """The error of a client whose threads have stayed behind in a fork."""
        return cls(f"this client was made by the process that this one was forked from: {_INSTEAD_OF_A_FORK}")

    @classmethod
    def of_fork(cls) -> ClientClosedError:
        """The error of a connection which a fork cannot make, because the library's threads and locks are those of its parent."""
        return cls(
            f"this process was forked from one that had connected, which the client library does not survive: {_INSTEAD_OF_A_FORK}"
        )


class UnimplementedError(HeadwaterError, NotImplementedError):
    """The server does not have this part of the API."""


class DataLossError(HeadwaterError):
    """A checksum does not match, or a file is damaged."""


class CancelledError(HeadwaterError):
    """The call was cancelled."""


class DeadlineExceededError(HeadwaterError, TimeoutError):
    """The call took longer than its `timeout_s`."""


class InternalError(HeadwaterError):
    """The engine failed, or the server has a defect."""


class UnauthenticatedError(HeadwaterError):
    """No token or certificate, or one that is not known."""


class PermissionDeniedError(HeadwaterError, PermissionError):
    """The token does not allow this call."""


class TransportUnavailableError(FailedPreconditionError):
    """`connect(transport=...)` demands a path that tensors cannot take here; the message says why."""


def is_restarting(error: HeadwaterError) -> bool:
    """Whether the server has lost a rank or its device, with the content of its heads, and restarts."""
    return "serverRestarts" in error.metadata


def checkpoints_in(metadata: Mapping[str, str]) -> dict[str, int]:
    """The checkpoints that `checkpoints` names: "step-20=20,step-10=10"."""
    pairs = (pair.rpartition("=") for pair in metadata.get("checkpoints", "").split(","))
    return {name: int(step) for name, _, step in pairs if name and step.isdecimal()}


class _KnowsCheckpoints:
    """An error whose answer may name the head's checkpoints."""

    metadata: dict[str, str]

    @property
    def checkpoints(self) -> dict[str, int]:
        """The head's checkpoints by name, newest first, with the step that each begins; empty where the answer has none."""
        return checkpoints_in(self.metadata)


class _OutdatedError(_KnowsCheckpoints, AbortedError):
    """Facts in errors about a head that has moved on; None where the answer lacks them."""

    def _integer(self, key: str) -> int | None:
        value = self.metadata.get(key, "")
        return int(value) if value.isdecimal() else None

    @property
    def open_step(self) -> int | None:
        """The head's open step now."""
        return self._integer("openStep")

    @property
    def head_epoch(self) -> bytes | None:
        """The head's epoch now, 16 bytes."""
        try:
            return bytes.fromhex(self.metadata["headEpoch"])
        except (KeyError, ValueError):
            return None


class EpochFencedError(_OutdatedError):
    """The head was restored, re-created or taken over since this `Head` was made. Get a new one with `Client.head`.

    Attributes:
        open_step, head_epoch: the head's open step and epoch now; None where the answer lacks them.
    """


class StepLostError(_OutdatedError):
    """The open step's contributions are gone: the server came back from a checkpoint, or its engine failed.

    Attributes:
        restored_step: the step that the head is at now. If it is the trainer's, continue with `Head.take` and submit the step
            again. If it is older, the trainer goes back to its own checkpoint of that name first.
        checkpoint: the checkpoint that the head came back from; empty if the engine failed: then restore one.
        checkpoints: the head's checkpoints by name, newest first, with the step that each begins.
        trainer_step: the step that this client's call was for. None where it named none, or without `connect(replay=True)`.
        open_step, head_epoch: the head's open step and epoch now. None where the answer lacks them.
    """

    @property
    def restored_step(self) -> int | None:
        """The step that the restored head is at; None if it was not restored."""
        return self._integer("restoredStep")

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint that the head came back from; empty if it did not."""
        return self.metadata.get("checkpoint", "")

    @property
    def trainer_step(self) -> int | None:
        """The step that the call was for."""
        return self._integer("trainerStep")


class StepConflictError(AbortedError):
    """The step was already closed by a call with other arguments."""


class MicroBatchConflictError(AbortedError):
    """The micro-batch is known with other content, or was decided otherwise."""


class StepMismatchError(_KnowsCheckpoints, FailedPreconditionError):
    """The call names a step that is not the open one; `metadata["openStep"]` says which is."""


class StagingFullError(ResourceExhaustedError):
    """No staging slot is free for an explicit micro-batch: decide earlier ones, or create the head with more `staging_slots`."""


class FeatureNotBuiltError(UnimplementedError):
    """Part of the API that this build does not have; `metadata["feature"]` says which."""


# The codes' own classes, which are called as they are: NotFoundError is NOT_FOUND's.
_CODE_CLASSES: dict[str, type[HeadwaterError]] = {}
for _cls in HeadwaterError.__subclasses__():
    _cls.code = re.sub(r"\B(?=[A-Z])", "_", _cls.__name__.removesuffix("Error")).upper()
    _CODE_CLASSES[_cls.code] = _cls

_REASON_CLASSES: dict[str, type[HeadwaterError]] = {
    "EPOCH_FENCED": EpochFencedError,
    "STEP_LOST": StepLostError,
    "STEP_CONFLICT": StepConflictError,
    "MICRO_BATCH_CONFLICT": MicroBatchConflictError,
    "STEP_MISMATCH": StepMismatchError,
    "STAGING_FULL": StagingFullError,
    "FEATURE_NOT_BUILT": FeatureNotBuiltError,
    "TRANSPORT_UNAVAILABLE": TransportUnavailableError,
}

# Canonical codes by number, as google.rpc.Code counts them.
_CODE_NAMES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED RESOURCE_EXHAUSTED "
    "FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
).split()


def code_name(number: int) -> str:
    """Name of a canonical code; `UNKNOWN` for one that does not exist."""
    return _CODE_NAMES[number] if 0 <= number < len(_CODE_NAMES) else "UNKNOWN"


def make_error(
    code: str, reason: str, message: str, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
) -> HeadwaterError:
    """Makes the error whose class fits the reason, else the code."""
    cls = _REASON_CLASSES.get(reason) or _CODE_CLASSES.get(code) or HeadwaterError
    return cls(message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)


def invalid_argument(reason: str, message: str, **metadata: Any) -> InvalidArgumentError:
    """Makes the error of a check that failed before anything was sent."""
    return InvalidArgumentError(message, reason=reason, metadata={key: str(value) for key, value in metadata.items()})


def must_be(field: str, expected: str, actual: Any, reason: str = "INVALID_FIELD") -> InvalidArgumentError:
    """Makes the error of an argument that is not what it must be; of a type its name is shown."""
    actual, shown = (actual.__name__,) * 2 if isinstance(actual, type) else (actual, repr(actual))
    return invalid_argument(reason, f"{field} must be {expected}, got {shown}", field=field, expected=expected, actual=actual)


def wrong_shape(field: str, expected: Any, actual: Any) -> InvalidArgumentError:
    """Makes the error of an array of another shape."""
    message = f"{field} must have shape {expected}, got {actual}"
    return invalid_argument("SHAPE_MISMATCH", message, field=field, expected=expected, actual=actual)


def wrong_type(field: str, expected: str, actual: Any, remedy: str = "") -> InvalidArgumentError:
    """Makes the error of an array whose elements are of another type."""
    message = f"{field} must be {expected}, got {actual}{remedy and '; '}{remedy}"
    return invalid_argument("DATA_TYPE_MISMATCH", message, field=field, expected=expected, actual=actual)


def refused(message: str, field: str, **metadata: Any) -> InvalidArgumentError:
    """Makes the error of an argument that does not go with the others, or with the abilities of a head."""
    return invalid_argument("INVALID_COMBINATION", message, field=field, **metadata)


def option_refused(option: str, message: str) -> InvalidArgumentError:
    """Makes the error of an option of a framework, by its name, that a remote head cannot follow."""
    return refused(f"{option}: {message}", option)
