"""What a backend does for `Client` and `Head`: plain data in, plain data out, already checked. Remote and local are two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headwater._arrays import HostArray
from headwater._futures import Cancel, Done
from headwater._memory import RowMemory, Rows
from headwater._requests import CommitRequest, ComputeRequest, GradientRequest, JoinedRows, StepKey
from headwater._types import (
    ApplyResult,
    CheckpointInfo,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    LossResult,
    SaveResult,
    SealResult,
    ServerInfo,
    StepStatus,
)

# Exactly 0 ... n-1, or exactly these ids.
Expected = int | Sequence[int]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ApplyArguments:
    """Arguments of an optimizer step; None leaves the head's own setting."""

    learning_rate: float
    gradient_factor: float = 1.0
    max_grad_norm: float | None = None
    other_grad_norm_squared: float = 0.0
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class UploadOptions:
    """How a tensor is uploaded."""

    upload_id: str
    on_progress: Progress | None = None
    closes_step: int | None = None  # the step that the weights close; None: they are set outside of any step


class Backend(Protocol):
    """One method for each call. Tensors are "weight" or "bias"; `timeout_s` bounds each call."""

    @property
    def address(self) -> str:
        """Where the heads are, for people."""
        ...

    def server_info(self, timeout_s: float) -> ServerInfo: ...
    def health(self, timeout_s: float) -> str: ...
    def create_head(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]: ...
    def get_head(self, name: str, timeout_s: float) -> HeadInfo: ...
    def list_heads(self, parent: str, timeout_s: float) -> list[HeadInfo]: ...
    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None: ...
    def take_head(self, name: str, epoch: bytes, timeout_s: float) -> HeadInfo: ...
    def upload(
        self, name: str, epoch: bytes, tensor: str, array: HostArray, options: UploadOptions, timeout_s: float
    ) -> HeadInfo: ...
    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo: ...
    def download(self, name: str, epoch: bytes, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        """`epoch`: empty, or the one that the head must be of."""
        ...

    @property
    def row_memory(self) -> RowMemory:
        """How rows are wanted, and where answers are put."""
        ...

    @property
    def can_start(self) -> bool:
        """Whether `start` may do something."""
        ...

    def compute(self, request: ComputeRequest, timeout_s: float) -> LossResult: ...
    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel | None:
        """Begins `compute` without blocking. None: nothing was begun, because that would block, and `done` is never called."""
        ...

    def stream_teacher(self, tenant: str, rows: Rows, place: JoinedRows, owned: bool, timeout_s: float) -> int:
        """Brings rows of a joined set; how many were taken."""
        ...

    def transports(self, timeout_s: float) -> dict[str, str | None]:
        """By path, why it is not available; None if it is."""
        ...

    def transport_note(self) -> str:
        """One sentence why tensors take no better path than they do; empty if there is none."""
        ...

    def commit(self, request: CommitRequest, timeout_s: float) -> bool: ...
    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool: ...
    def add_gradient(self, request: GradientRequest, timeout_s: float) -> bool: ...
    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus: ...
    def seal(self, key: StepKey, expected: Expected, wait: bool, timeout_s: float) -> SealResult: ...
    def apply(self, key: StepKey, expected: Expected | None, arguments: ApplyArguments, timeout_s: float) -> ApplyResult: ...
    def discard_gradient(self, key: StepKey, timeout_s: float) -> DiscardGradientResult: ...
    def gradient(self, key: StepKey, tensor: str, factor: float, timeout_s: float) -> np.ndarray: ...
    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float: ...
    def save(self, name: str, epoch: bytes, checkpoint: str, overwrite: bool, timeout_s: float) -> SaveResult: ...
    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo: ...
    def list_checkpoints(self, name: str, timeout_s: float) -> list[CheckpointInfo]: ...
    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        """The epoch that calls which were made with `epoch` carry now: another one after the backend has followed a restart."""
        ...

    def close(self) -> None: ...
