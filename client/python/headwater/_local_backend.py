"""The backend in this process: the engine through its C ABI, with the server's rules for epochs, steps and contributions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headwater import _arrays, _local_checkpoint
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, Progress, StepKey
from headwater._engine_library import Engine, EngineHead, Staged
from headwater._errors import HeadwaterError, make_error
from headwater._ledger import Ledger
from headwater._requests import ComputeRequest
from headwater._types import (
    ApplyResult,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    LossResult,
    MemoryPlan,
    SaveResult,
    SealResult,
    ServerInfo,
    StepStatus,
    Timing,
)

# As torch.nn.utils.clip_grad_norm_ and the server have it.
_CLIP_EPSILON = 1e-6


class _LocalHead:
    """What is known of one head. Guarded by its backend's lock."""

    def __init__(self, name: str, spec: HeadSpec, engine_head: EngineHead):
        self.name = name
        self.spec = spec
        self.engine_head = engine_head
        self.epoch = os.urandom(16)
        self.missing = {"weight", "bias"} if spec.has_bias else {"weight"}
        self.weight_version = 0
        self.update_count = 0
        self.ledger = Ledger(spec.initial_step)
        self.staged: dict[int, Staged] = {}
        self.last_apply: tuple[ApplyArguments, Any, ApplyResult] | None = None
        self.create_time_s = time.time()
        self.lost = False

    @property
    def state(self) -> str:
        if self.lost:
            return "LOST"
        return "LOADING" if self.missing else "READY"

    def info(self) -> HeadInfo:
        total_bytes, rows = self.engine_head.plan()
        return HeadInfo(
            name=self.name,
            spec=self.spec,
            epoch=self.epoch,
            state=self.state,
            weight_version=self.weight_version,
            open_step=self.ledger.open.step if self.spec.trainable else None,
            memory_plan=MemoryPlan({}, total_bytes, 0, rows),
            create_time_s=self.create_time_s,
        )

    def drop_staged(self) -> None:
        for staged in self.staged.values():
            staged.discard()
        self.staged.clear()

    def start_over(self, step: int) -> None:
        """The state is no continuation: a new epoch, an empty step."""
        self.drop_staged()
        if self.spec.trainable:
            self.engine_head.zero_gradient()
        self.ledger.reset(step)
        self.last_apply = None
        self.epoch = os.urandom(16)
        self.weight_version += 1
        self.lost = False

    def destroy(self) -> None:
        self.drop_staged()
        self.engine_head.destroy()


class LocalBackend:
    """Heads in this process. Thread-safe: one lock for everything, because the engine uses all cores for one call anyway."""

    def __init__(
        self,
        engine: Engine,
        *,
        checkpoint_dir: str | os.PathLike[str] | None,
        load_root: str | os.PathLike[str] | None,
    ):
        self._engine: Engine | None = engine
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._load_root = None if load_root is None else Path(load_root)
        self._heads: dict[str, _LocalHead] = {}
        self._incarnation = os.urandom(16)
        self._start_time_s = time.time()
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            for head in self._heads.values():
                head.destroy()
            self._heads.clear()
            engine.destroy()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """Holds the lock; waits for it at most `timeout_s`. What has begun is not interrupted."""
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise make_error(
                "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", f"another call of this client took longer than {timeout_s:g} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise make_error("UNAVAILABLE", "", "the client is closed")
        return self._engine

    def _find(self, name: str, *, epoch: bytes = b"", ready: bool = False, trainable: bool = False) -> _LocalHead:
        self._running_engine()
        head = self._heads.get(name)
        if head is None:
            raise make_error("NOT_FOUND", "HEAD_NOT_FOUND", f"there is no head {name}", {"head": name})
        if epoch and epoch != head.epoch:
            metadata = {"head": name, "expected": head.epoch.hex(), "actual": epoch.hex()}
            if head.spec.trainable:
                metadata["openStep"] = str(head.ledger.open.step)
            raise make_error(
                "ABORTED", "EPOCH_FENCED", f"{name} is at epoch {head.epoch.hex()}, the call has {epoch.hex()}", metadata
            )
        if trainable and not head.spec.trainable:
            raise make_error("FAILED_PRECONDITION", "HEAD_NOT_TRAINABLE", f"{name} is frozen: it has no steps", {"head": name})
        if ready and head.lost:
            raise make_error("INTERNAL", "ENGINE_FAILED", f"{name} is lost; restore it or set its weights again", {"head": name})
        if ready and head.missing:
            missing = " and ".join(sorted(head.missing))
            raise make_error("FAILED_PRECONDITION", "WEIGHTS_NOT_LOADED", f"{name} has no {missing} yet", {"head": name})
        return head

    def _at_step(self, key: StepKey) -> _LocalHead:
        return self._find(key.head, epoch=key.epoch, ready=True, trainable=True)

    # ---- server -------------------------------------------------------------------------------------------------------

    def server_info(self, timeout_s: float) -> ServerInfo:
        from headwater import __version__

        return ServerInfo(
            version=__version__,
            incarnation=self._incarnation,
            engine="cpu",
            features=("cross_entropy", "jensen_shannon", "explicit_commit", "staged", "checkpoints", "in_process"),
            start_time_s=self._start_time_s,
        )

    def health(self, timeout_s: float) -> str:
        return "SERVING" if self._engine is not None else "NOT_SERVING"

    # ---- heads --------------------------------------------------------------------------------------------------------

    def create_head(self, name: str, spec: HeadSpec, timeout_s: float) -> HeadInfo:
        filled = dataclasses.replace(
            spec,
            valid_vocab_size=spec.valid_size,
            staging_slots=int(spec.trainable) if spec.staging_slots is None else spec.staging_slots,
        )
        with self._turn(timeout_s):
            engine = self._running_engine()
            if name in self._heads:
                raise make_error("ALREADY_EXISTS", "HEAD_ALREADY_EXISTS", f"{name} exists", {"head": name})
            head = self._heads[name] = _LocalHead(name, filled, engine.create_head(filled))
            return head.info()

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            return self._find(name).info()

    def list_heads(self, timeout_s: float) -> list[HeadInfo]:
        with self._turn(timeout_s):
            self._running_engine()
            return [head.info() for _, head in sorted(self._heads.items())]

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            if head.ledger.open.records and not force:
                raise make_error(
                    "FAILED_PRECONDITION",
                    "HEAD_IN_USE",
                    f"step {head.ledger.open.step} of {name} has micro-batches; pass force=True to drop them",
                    {"head": name},
                )
            del self._heads[name]
            head.destroy()

    # ---- weights ------------------------------------------------------------------------------------------------------

    def _set_tensor(self, head: _LocalHead, tensor: str, array: HostArray) -> None:
        # As on the server: float32 for a 16-bit head is rounded for storage and kept whole in the master weights.
        if array.data_type == head.spec.data_type:
            head.engine_head.write(tensor, array.data)
        elif head.engine_head.has(f"master_{tensor}"):
            head.engine_head.write(f"master_{tensor}", array.data)
        elif head.spec.data_type == _arrays.FLOAT16:
            head.engine_head.write(tensor, array.data.astype(np.float16))
        else:
            head.engine_head.write(tensor, _arrays.BFloat16.from_float32(array.data).bits)

    def upload(
        self, name: str, epoch: bytes, tensor: str, array: HostArray, upload_id: str, on_progress: Progress | None, timeout_s: float
    ) -> HeadInfo:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            if on_progress is not None:
                on_progress(0, array.data.nbytes)
            was_ready = head.state == "READY"
            self._set_tensor(head, tensor, array)
            self._weights_came(head, {tensor}, was_ready)
            if on_progress is not None:
                on_progress(array.data.nbytes, array.data.nbytes)
            return head.info()

    def _weights_came(self, head: _LocalHead, tensors: set[str], was_ready: bool) -> None:
        head.missing -= tensors
        if was_ready or head.lost:
            head.start_over(head.ledger.open.step)
        elif not head.missing:
            head.weight_version += 1

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            arrays = _local_checkpoint.load_weights(self._load_root, path, weight_tensor, bias_tensor, head.spec.has_bias)
            shapes = {"weight": (head.spec.vocab_size, head.spec.hidden_size), "bias": (head.spec.vocab_size,)}
            for tensor, array in arrays.items():
                if array.shape != shapes[tensor]:
                    raise make_error(
                        "FAILED_PRECONDITION",
                        "CHECKPOINT_SPEC_MISMATCH",
                        f"{tensor} in {path} has shape {array.shape}, {name} has {shapes[tensor]}",
                        {"expected": str(shapes[tensor]), "actual": str(array.shape)},
                    )
            was_ready = head.state == "READY"
            for tensor, array in arrays.items():
                matching = array if array.data_type == head.spec.data_type else _to_float32(array)
                self._set_tensor(head, tensor, matching)
            self._weights_came(head, set(arrays), was_ready)
            return head.info()

    def download(self, name: str, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        with self._turn(timeout_s):
            head = self._find(name, ready=True)
            shape = (head.spec.vocab_size, head.spec.hidden_size) if tensor == "weight" else (head.spec.vocab_size,)
            if data_type in (None, head.spec.data_type):
                data, stored = head.engine_head.read(tensor)
            elif head.engine_head.has(f"master_{tensor}"):
                data, stored = head.engine_head.read(f"master_{tensor}")
            else:
                data, stored = head.engine_head.read(tensor)
                data, stored = _arrays.to_float32(HostArray(data, stored, _arrays.to_numpy)), _arrays.FLOAT32
            return data.reshape(shape), stored

    # ---- micro-batches ------------------------------------------------------------------------------------------------

    def compute(self, request: ComputeRequest, timeout_s: float) -> LossResult:
        began = time.monotonic()
        digest = b"" if request.micro_batch is None else _digest(request)
        with self._turn(timeout_s):
            # The epoch of a teacher, or of a head that only looks, is checked as well: the weights must be those that were meant.
            head = self._find(request.head, epoch=request.epoch, ready=True)
            teacher = None
            if request.teacher is not None:
                teacher = self._find(request.teacher.head, epoch=request.teacher.epoch, ready=True)
            version = request.expected_weight_version
            if version is not None and version != head.weight_version:
                raise make_error(
                    "FAILED_PRECONDITION",
                    "WEIGHT_VERSION_MISMATCH",
                    f"the weights of {head.name} are of version {head.weight_version}, expected {version}",
                    {"expected": str(version), "actual": str(head.weight_version)},
                )
            decision = "none"
            if request.step is not None and request.micro_batch is not None:
                decision = head.ledger.begin(request.step, request.micro_batch, digest, request.first_wins)
            queued = time.monotonic()
            result = self._run(request, head, teacher, decision)
            record = None if request.micro_batch is None else head.ledger.open.records[request.micro_batch]
            return dataclasses.replace(
                result,
                weight_version=head.weight_version,
                teacher_weight_version=0 if teacher is None else teacher.weight_version,
                state="UNSPECIFIED" if record is None else record.state,
                form="UNSPECIFIED" if record is None else record.form,
                replayed=decision == "replay",
                payload_differs=decision == "payload_differs",
                digest=digest,
                step=request.step,
                timing=Timing(queue_s=queued - began, engine_s=time.monotonic() - queued),
                transport="in_process",
            )

    def _run(self, request: ComputeRequest, head: _LocalHead, teacher: _LocalHead | None, decision: str) -> LossResult:
        """Computes, and settles the contribution if there is one."""
        adds = decision == "compute"
        stages = adds and (request.explicit or request.refuse_non_finite)
        mode = "none" if not adds else "stage" if stages else "accumulate"
        try:
            result, staged = self._running_engine().compute(
                request, head.engine_head, None if teacher is None else teacher.engine_head, mode
            )
        except HeadwaterError as error:
            if adds and request.micro_batch is not None:
                if mode == "accumulate" and error.code == "INTERNAL":
                    head.lost = True
                head.ledger.abort(request.micro_batch)
            raise
        if request.refuse_non_finite and not stages and result.non_finite_row_count:
            raise make_error(
                "FAILED_PRECONDITION",
                "NON_FINITE_VALUES",
                f"{result.non_finite_row_count} rows have a non-finite loss or gradient; nothing was added",
            )
        if adds and request.micro_batch is not None:
            committed = not request.explicit
            if staged is not None:
                if committed:
                    staged.commit(1.0)
                else:
                    head.staged[request.micro_batch] = staged
            head.ledger.finish(request.micro_batch, staged=stages, committed=committed, result=result)
        return result

    def commit(self, key: StepKey, micro_batch: int, factor: float, timeout_s: float) -> bool:
        with self._turn(timeout_s):
            head = self._at_step(key)
            if not head.ledger.check_commit(key.step, micro_batch, factor):
                return True
            head.staged.pop(micro_batch).commit(factor)
            record = head.ledger.open.records[micro_batch]
            record.state, record.factor = "COMMITTED", factor
            return False

    def discard(self, key: StepKey, micro_batch: int, timeout_s: float) -> bool:
        with self._turn(timeout_s):
            head = self._at_step(key)
            dropped = head.ledger.discard(key.step, micro_batch)
            if dropped:
                head.staged.pop(micro_batch).discard()
            return dropped

    # ---- steps --------------------------------------------------------------------------------------------------------

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        with self._turn(timeout_s):
            ledger = self._find(name, epoch=epoch, trainable=True).ledger
            return StepStatus(ledger.open.describe(), None if ledger.last_closed is None else ledger.last_closed.describe())

    def seal(self, key: StepKey, expected: Expected, timeout_s: float) -> SealResult:
        with self._turn(timeout_s):
            head = self._at_step(key)
            sealed_now = head.ledger.seal(key.step, expected)
            norm_squared, non_finite_count = head.engine_head.gradient_stats()
            return SealResult(head.ledger.open.totals(), norm_squared, non_finite_count, not sealed_now)

    def apply(self, key: StepKey, expected: Expected | None, arguments: ApplyArguments, timeout_s: float) -> ApplyResult:
        with self._turn(timeout_s):
            head = self._at_step(key)
            settings = _settings(head, arguments)
            ledger = head.ledger
            expectation = sorted(expected) if isinstance(expected, list) else expected
            if ledger.last_closed is not None and ledger.last_closed.step == key.step:
                known = head.last_apply
                if known is not None and known[0] == arguments and (None in (expectation, known[1]) or expectation == known[1]):
                    return dataclasses.replace(known[2], replayed=True)
                raise _closed_otherwise(head, key.step)
            if expected is not None:
                ledger.seal(key.step, expected)
            ledger.check_step(key.step)
            if ledger.open.state == "OPEN":
                raise make_error(
                    "INVALID_ARGUMENT",
                    "MISSING_FIELD",
                    f"expected_micro_batches must say what step {key.step} consists of, because it is still open",
                    {"field": "expected"},
                )
            norm_squared, non_finite_count = head.engine_head.gradient_stats()
            norm_squared *= arguments.gradient_factor**2
            total = norm_squared + arguments.other_grad_norm_squared
            global_norm = math.sqrt(total) if math.isfinite(total) else total
            if non_finite_count or not math.isfinite(global_norm):
                raise make_error(
                    "FAILED_PRECONDITION",
                    "NON_FINITE_GRADIENT",
                    f"the gradient of step {key.step} has {non_finite_count} non-finite elements and the global norm "
                    f"{global_norm}; nothing was changed, discard the gradient to go on",
                    {"step": str(key.step), "nonFiniteCount": str(non_finite_count)},
                )
            clip_factor = 1.0
            if arguments.max_grad_norm is not None:
                clip_factor = min(1.0, arguments.max_grad_norm / (global_norm + _CLIP_EPSILON))
            head.engine_head.apply_optimizer(
                settings, arguments.learning_rate, arguments.gradient_factor * clip_factor, head.update_count + 1
            )
            totals = ledger.open.totals()
            ledger.close("APPLIED")
            head.update_count += 1
            head.weight_version += 1
            result = ApplyResult(ledger.open.step, head.weight_version, global_norm, norm_squared, clip_factor, totals, False)
            head.last_apply = (arguments, expectation, result)
            return result

    def discard_gradient(self, key: StepKey, timeout_s: float) -> DiscardGradientResult:
        with self._turn(timeout_s):
            head = self._at_step(key)
            ledger = head.ledger
            if ledger.last_closed is not None and ledger.last_closed.step == key.step:
                if ledger.last_closed.state == "DISCARDED":
                    return DiscardGradientResult(ledger.open.step, True)
                raise _closed_otherwise(head, key.step)
            ledger.check_step(key.step)
            head.drop_staged()
            head.engine_head.zero_gradient()
            ledger.close("DISCARDED")
            head.last_apply = None
            return DiscardGradientResult(ledger.open.step, False)

    def gradient(self, key: StepKey, tensor: str, factor: float, timeout_s: float) -> np.ndarray:
        with self._turn(timeout_s):
            head = self._at_step(key)
            head.ledger.check_step(key.step)
            data, _ = head.engine_head.read(f"grad_{tensor}")
        if factor != 1:
            data *= np.float32(factor)
        return data.reshape((head.spec.vocab_size, head.spec.hidden_size) if tensor == "weight" else (head.spec.vocab_size,))

    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float:
        with self._turn(timeout_s):
            head = self._at_step(key)
            head.ledger.check_step(key.step)
            return head.engine_head.gradient_stats()[0] * factor**2

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, name: str, epoch: bytes, checkpoint: str, overwrite: bool, timeout_s: float) -> SaveResult:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch, ready=True)
            state = _local_checkpoint.State(head.spec, head.ledger.open.step, head.update_count)
            total_bytes = _local_checkpoint.save(self._checkpoint_dir, name, checkpoint, overwrite, state, head.engine_head)
            return SaveResult(checkpoint, state.step, total_bytes)

    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            state = _local_checkpoint.restore(self._checkpoint_dir, name, checkpoint, head.spec, head.engine_head)
            head.missing.clear()
            head.update_count = state.update_count
            head.start_over(state.step)
            return head.info()


def _to_float32(array: HostArray) -> HostArray:
    return HostArray(_arrays.to_float32(array), _arrays.FLOAT32, array.like)


def _closed_otherwise(head: _LocalHead, step: int) -> HeadwaterError:
    return make_error(
        "ABORTED",
        "STEP_CONFLICT",
        f"step {step} was closed by another call; the open step is {head.ledger.open.step}",
        {"step": str(step), "openStep": str(head.ledger.open.step)},
    )


def _settings(head: _LocalHead, arguments: ApplyArguments) -> Any:
    """The head's optimizer with this step's overrides."""
    if head.spec.optimizer is None:
        raise make_error(
            "FAILED_PRECONDITION", "OPTIMIZER_NOT_CONFIGURED", f"{head.name} was created without an optimizer", {"head": head.name}
        )
    overrides = {
        name: value
        for name in ("weight_decay", "beta1", "beta2", "epsilon", "momentum")
        if (value := getattr(arguments, name)) is not None
    }
    known = {field.name for field in dataclasses.fields(head.spec.optimizer)}
    for name in overrides:
        if name not in known or (name == "momentum" and head.spec.optimizer.momentum == 0):  # type: ignore[union-attr]
            raise make_error(
                "INVALID_ARGUMENT", "INVALID_COMBINATION", f"the optimizer of {head.name} has no {name}", {"field": name}
            )
    return dataclasses.replace(head.spec.optimizer, **overrides)


def _digest(request: ComputeRequest) -> bytes:
    """16 bytes over everything that decides the answer: options, targets, weights and rows. Not the server's function."""
    digest = hashlib.blake2b(digest_size=16)

    def add(data: bytes | memoryview) -> None:
        digest.update(struct.pack("<q", len(data)))
        digest.update(data)

    def describe(value: Any) -> None:
        if isinstance(value, np.ndarray):
            add(memoryview(value.reshape(-1).view(np.uint8)))
        elif isinstance(value, HostArray):
            add(repr((value.data_type, value.shape)).encode())
            add(value.byte_view())
        elif dataclasses.is_dataclass(value):
            add(type(value).__name__.encode())
            for field in dataclasses.fields(value):
                describe(getattr(value, field.name))
        else:
            add(repr(value).encode())

    # How a repeat is to be treated is no part of what is repeated.
    for field in dataclasses.fields(request):
        if field.name not in ("first_wins", "expected_weight_version"):
            describe(getattr(request, field.name))
    return digest.digest()
