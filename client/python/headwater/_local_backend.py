"""The backend in this process: the engine through its C ABI, with the server's rules for epochs, steps and contributions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from headwater import _arrays, _local_checkpoint
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, StepKey, UploadOptions
from headwater._engine_library import Engine
from headwater._errors import ClientClosedError, HeadwaterError, make_error
from headwater._futures import Cancel, Done
from headwater._local_head import LocalHead, settings_of
from headwater._local_join import LocalJoins
from headwater._local_micro_batches import LocalMicroBatches
from headwater._memory import RowMemory, Rows
from headwater._requests import ComputeRequest, JoinedRows
from headwater._types import (
    ApplyResult,
    CheckpointInfo,
    DiscardGradientResult,
    HeadInfo,
    HeadSpec,
    SaveResult,
    SealResult,
    ServerInfo,
    StepStatus,
)

# As torch.nn.utils.clip_grad_norm_ and the server have it.
_CLIP_EPSILON = 1e-6


# What a seal may wait for.
_INCOMPLETE = ("MICRO_BATCH_MISSING", "MICRO_BATCH_UNCOMMITTED")


class LocalBackend(LocalMicroBatches):
    """Heads in this process. Thread-safe: one lock for everything, because the engine gives all it has to one call anyway."""

    def __init__(
        self,
        engine: Engine,
        *,
        checkpoint_dir: str | os.PathLike[str] | None,
        load_root: str | os.PathLike[str] | None,
    ):
        self._engine: Engine | None = engine
        self._engine_name = engine.name
        self._checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._load_root = None if load_root is None else Path(load_root)
        self._heads: dict[str, LocalHead] = {}
        self._incarnation = os.urandom(16)
        self._start_time_s = time.time()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._joins = LocalJoins(self._changed)
        self.row_memory = RowMemory()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # the engine is the parent's, and so are its threads
        with self._lock:
            engine, self._engine = self._engine, None
            self._changed.notify_all()
            if engine is None:
                return
            for head in self._heads.values():
                head.destroy()
            self._heads.clear()
            self._joins.clear()
            engine.destroy()
        self.row_memory.close()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A client that was forgotten without `close`. The end of the process frees all by itself, this module's names first.
        if hasattr(self, "row_memory") and not _is_finalizing():
            self.close()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[float]:
        """Holds the lock; waits for it at most `timeout_s`. Yields the call's deadline. What has begun is not interrupted."""
        if os.getpid() != self._pid:
            raise ClientClosedError.of_parent()
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise make_error(
                "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", f"another call of this client took longer than {timeout_s:g} s"
            )
        try:
            yield deadline
        finally:
            self._changed.notify_all()
            self._lock.release()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise ClientClosedError("the client is closed")
        return self._engine

    def _find(self, name: str, *, epoch: bytes = b"", ready: bool = False, trainable: bool = False) -> LocalHead:
        self._running_engine()
        head = self._heads.get(name)
        if head is None:
            raise make_error("NOT_FOUND", "HEAD_NOT_FOUND", f"there is no head {name}", {"head": name})
        if trainable and not head.spec.trainable:
            raise make_error("FAILED_PRECONDITION", "HEAD_NOT_TRAINABLE", f"{name} is frozen: it has no steps", {"head": name})
        where = {"head": name, "headEpoch": head.epoch.hex()}
        if head.spec.trainable:
            where["openStep"] = str(head.ledger.open.step)
        if epoch and epoch != head.epoch:
            raise make_error(
                "ABORTED",
                "EPOCH_FENCED",
                f"another run owns {name} now: since this client opened the head, it was taken over, restored or created anew, or "
                "its weights were set. Stop, or open the head again, take it, and start the step over",
                {**where, "expected": head.epoch.hex(), "actual": epoch.hex()},
            )
        if ready and head.lost:
            raise make_error("ABORTED", "STEP_LOST", f"{name} is lost; restore it or set its weights again", where)
        if ready and head.missing:
            missing = " and ".join(sorted(head.missing))
            raise make_error("FAILED_PRECONDITION", "WEIGHTS_NOT_LOADED", f"{name} has no {missing} yet", {"head": name})
        return head

    def _at_step(self, key: StepKey, deadline: float) -> LocalHead:
        """The head, once the step that the call names is not the one after the open one."""
        while True:
            head = self._find(key.head, epoch=key.epoch, ready=True, trainable=True)
            if key.step != head.ledger.open.step + 1:
                return head
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise make_error(
                    "DEADLINE_EXCEEDED",
                    "DEADLINE_EXCEEDED",
                    f"step {key.step} of {key.head} was not opened in time; the open step is {head.ledger.open.step}",
                    {"openStep": str(head.ledger.open.step), "step": str(key.step)},
                )
            self._changed.wait(remaining)

    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        return epoch

    address = "in process"

    # The engine computes on the thread that calls.
    can_start = False

    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel | None:
        return None

    def stream_teacher(self, tenant: str, rows: Rows, place: JoinedRows, owned: bool, timeout_s: float) -> int:
        assert isinstance(rows, HostArray)
        with self._turn(timeout_s):
            self._running_engine()
            return self._joins.add(tenant, rows, place)

    def transports(self, timeout_s: float) -> dict[str, str | None]:
        why = "the engine is in this process: nothing is sent anywhere"
        return dict.fromkeys(("cuda_ipc", "shared_memory", "grpc", "python"), why)

    def transport_note(self) -> str:
        return ""

    # ---- server -------------------------------------------------------------------------------------------------------

    def server_info(self, timeout_s: float) -> ServerInfo:
        from headwater import __version__

        return ServerInfo(
            version=__version__,
            incarnation=self._incarnation,
            engine=self._engine_name,
            features=(
                "cross_entropy",
                "jensen_shannon",
                "explicit_commit",
                "staged",
                "held",
                "several_terms",
                "add_gradient",
                "replace_weight",
                "checkpoints",
                "in_process",
            ),
            start_time_s=self._start_time_s,
        )

    def health(self, timeout_s: float) -> str:
        return "SERVING" if self._engine is not None else "NOT_SERVING"

    # ---- heads --------------------------------------------------------------------------------------------------------

    def create_head(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]:
        filled = dataclasses.replace(
            spec,
            valid_vocab_size=spec.valid_size,
            staging_slots=int(spec.trainable) if spec.staging_slots is None else spec.staging_slots,
        )
        with self._turn(timeout_s):
            engine = self._running_engine()
            known = self._heads.get(name)
            if known is not None and not attach:
                raise make_error("ALREADY_EXISTS", "HEAD_ALREADY_EXISTS", f"{name} exists", {"head": name})
            if known is not None:
                _check_same_spec(name, known.spec, filled)
                return known.info(), False
            head = self._heads[name] = LocalHead(name, filled, engine.create_head(filled))
            return head.info(), True

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            return self._find(name).info()

    def list_heads(self, parent: str, timeout_s: float) -> list[HeadInfo]:
        with self._turn(timeout_s):
            self._running_engine()
            return [head.info() for name, head in sorted(self._heads.items()) if name.startswith(f"{parent}/")]

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            step = head.ledger.open
            if not force and (step.state == "SEALED" or any(record.state != "DISCARDED" for record in step.records.values())):
                raise make_error(
                    "FAILED_PRECONDITION",
                    "HEAD_IN_USE",
                    f"step {step.step} of {name} is sealed, or has micro-batches; force=True deletes it nevertheless",
                    {"head": name},
                )
            del self._heads[name]
            head.destroy()

    def take_head(self, name: str, epoch: bytes, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch, trainable=True)
            if head.lost:
                raise make_error("ABORTED", "STEP_LOST", f"{name} is lost; restore it or set its weights again", {"head": name})
            head.start_over(head.ledger.open.step)
            return head.info()

    # ---- weights ------------------------------------------------------------------------------------------------------

    def upload(self, name: str, epoch: bytes, tensor: str, array: HostArray, options: UploadOptions, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s) as deadline:
            if options.on_progress is not None:
                options.on_progress(0, array.data.nbytes)
            if options.closes_step is not None:
                head = self._replace(StepKey(name, epoch, options.closes_step), tensor, array, deadline)
            else:
                head = self._find(name, epoch=epoch)
                was_ready = head.state == "READY"
                head.set_tensor(tensor, array)
                self._weights_came(head, {tensor}, was_ready)
            if options.on_progress is not None:
                options.on_progress(array.data.nbytes, array.data.nbytes)
            return head.info()

    def _replace(self, key: StepKey, tensor: str, array: HostArray, deadline: float) -> LocalHead:
        """Takes one tensor of the weights that close a sealed step; swaps them in when all are there."""
        head = self._at_step(key, deadline)
        ledger = head.ledger
        digest = hashlib.blake2b(array.byte_view(), digest_size=16, person=array.data_type.encode()).digest()
        if ledger.last_closed is not None and ledger.last_closed.step == key.step:
            if head.last_replace.get(tensor) == digest:
                return head
            raise _closed_otherwise(head, key.step)
        ledger.check_step(key.step)
        if ledger.open.state != "SEALED":
            raise make_error(
                "FAILED_PRECONDITION",
                "STEP_NOT_SEALED",
                f"step {key.step} is open; seal it before its weights are replaced",
                {"step": str(key.step)},
            )
        head.shadow[tensor] = dataclasses.replace(array, data=array.data.copy())
        head.shadow_digests[tensor] = digest
        if len(head.shadow) < 1 + head.spec.has_bias:
            return head
        for name, values in head.shadow.items():
            head.set_tensor(name, values)
        head.engine_head.zero_gradient()
        digests = dict(head.shadow_digests)
        head.close_step("REPLACED")
        head.last_replace = digests
        head.weight_version += 1
        return head

    def _weights_came(self, head: LocalHead, tensors: set[str], was_ready: bool) -> None:
        head.missing -= tensors
        if head.spec.trainable and head.spec.optimizer is not None:
            head.engine_head.reset_optimizer_state()
        head.update_count = 0
        if was_ready or head.lost:
            head.start_over(head.ledger.open.step)
            head.weight_version += 1
        elif not head.missing:
            head.weight_version += 1

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch)
            arrays = _local_checkpoint.load_weights(self._load_root, path, weight_tensor, bias_tensor, head.spec.has_bias)
            for tensor, array in arrays.items():
                if array.shape != head.shape(tensor):
                    raise make_error(
                        "FAILED_PRECONDITION",
                        "CHECKPOINT_SPEC_MISMATCH",
                        f"{tensor} in {path} has shape {array.shape}, {name} has {head.shape(tensor)}",
                        {"expected": str(head.shape(tensor)), "actual": str(array.shape)},
                    )
            was_ready = head.state == "READY"
            for tensor, array in arrays.items():
                matching = array if array.data_type == head.spec.data_type else _to_float32(array)
                head.set_tensor(tensor, matching)
            self._weights_came(head, set(arrays), was_ready)
            return head.info()

    def download(self, name: str, epoch: bytes, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        with self._turn(timeout_s):
            head = self._find(name, epoch=epoch, ready=True)
            if data_type in (None, head.spec.data_type):
                data, stored = head.engine_head.read(tensor)
            elif head.engine_head.has(f"master_{tensor}"):
                data, stored = head.engine_head.read(f"master_{tensor}")
            else:
                data, stored = head.engine_head.read(tensor)
                data, stored = _arrays.to_float32(HostArray(data, stored, _arrays.to_numpy)), _arrays.FLOAT32
            return data.reshape(head.shape(tensor)), stored

    # ---- steps --------------------------------------------------------------------------------------------------------

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        with self._turn(timeout_s):
            ledger = self._find(name, epoch=epoch, trainable=True).ledger
            return StepStatus(ledger.open.describe(), None if ledger.last_closed is None else ledger.last_closed.describe())

    def seal(self, key: StepKey, expected: Expected, wait: bool, timeout_s: float) -> SealResult:
        with self._turn(timeout_s) as deadline:
            while True:
                head = self._at_step(key, deadline)
                try:
                    sealed_now = head.ledger.seal(key.step, expected)
                    break
                except HeadwaterError as error:
                    remaining = deadline - time.monotonic()
                    if not wait or error.reason not in _INCOMPLETE or remaining <= 0:
                        raise
                    self._changed.wait(remaining)
            norm_squared, non_finite_count = head.engine_head.gradient_stats()
            return SealResult(head.ledger.open.totals(), norm_squared, non_finite_count, not sealed_now)

    def apply(self, key: StepKey, expected: Expected | None, arguments: ApplyArguments, timeout_s: float) -> ApplyResult:
        with self._turn(timeout_s) as deadline:
            head = self._at_step(key, deadline)
            settings = settings_of(head, arguments)
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
            norm_squared *= arguments.gradient_factor * arguments.gradient_factor  # ** raises where * is infinite
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

            def close() -> ApplyResult:
                totals = ledger.open.totals()
                head.close_step("APPLIED")
                head.update_count += 1
                head.weight_version += 1
                result = ApplyResult(ledger.open.step, head.weight_version, global_norm, norm_squared, clip_factor, totals, False)
                head.last_apply = (arguments, expectation, result)
                return result

            try:
                head.engine_head.apply_optimizer(
                    settings, arguments.learning_rate, arguments.gradient_factor * clip_factor, head.update_count + 1
                )
            except HeadwaterError as error:
                head.lost |= error.code == "INTERNAL"
                raise
            except BaseException:
                # An interrupt comes before the engine has begun or when it has ended, which has zeroed the accumulator: the weights
                # must not be updated again.
                if head.engine_head.gradient_stats() == (0.0, 0):
                    head.lost |= norm_squared == 0  # it was 0 before, and tells nothing
                    close()
                raise
            return close()

    def discard_gradient(self, key: StepKey, timeout_s: float) -> DiscardGradientResult:
        with self._turn(timeout_s) as deadline:
            head = self._at_step(key, deadline)
            ledger = head.ledger
            if ledger.last_closed is not None and ledger.last_closed.step == key.step:
                if ledger.last_closed.state == "DISCARDED":
                    return DiscardGradientResult(ledger.open.step, True)
                raise _closed_otherwise(head, key.step)
            ledger.check_step(key.step)
            head.drop_pending()
            head.engine_head.zero_gradient()
            head.close_step("DISCARDED")
            return DiscardGradientResult(ledger.open.step, False)

    def gradient(self, key: StepKey, tensor: str, factor: float, timeout_s: float) -> np.ndarray:
        with self._turn(timeout_s) as deadline:
            head = self._at_step(key, deadline)
            head.ledger.check_step(key.step)
            data, _ = head.engine_head.read(f"grad_{tensor}")
        if factor != 1:
            with np.errstate(over="ignore", invalid="ignore"):
                data *= np.float32(factor)
        return data.reshape(head.shape(tensor))

    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float:
        with self._turn(timeout_s) as deadline:
            head = self._at_step(key, deadline)
            head.ledger.check_step(key.step)
            return head.engine_head.gradient_stats()[0] * factor * factor

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
            head.weight_version += 1
            return head.info()

    def list_checkpoints(self, name: str, timeout_s: float) -> list[CheckpointInfo]:
        return _local_checkpoint.list_newest_first(self._checkpoint_dir, name)


def _to_float32(array: HostArray) -> HostArray:
    return HostArray(_arrays.to_float32(array), _arrays.FLOAT32, array.like)


def _closed_otherwise(head: LocalHead, step: int) -> HeadwaterError:
    return make_error(
        "ABORTED",
        "STEP_CONFLICT",
        f"step {step} was closed by another call; the open step is {head.ledger.open.step}",
        {"step": str(step), "openStep": str(head.ledger.open.step)},
    )


def _check_same_spec(name: str, known: HeadSpec, wanted: HeadSpec) -> None:
    """Raises AlreadyExistsError with all fields that differ; the first step's number does not count."""
    names = [member.name for member in dataclasses.fields(HeadSpec) if member.name != "initial_step"]
    differing = [field for field in names if getattr(known, field) != getattr(wanted, field)]
    if differing:
        expected, actual = (", ".join(f"{field} {getattr(spec, field)}" for field in differing) for spec in (known, wanted))
        raise make_error(
            "ALREADY_EXISTS",
            "HEAD_SPEC_MISMATCH",
            f"{name} exists with {expected}; the call has {actual}",
            {"head": name, "field": ", ".join(differing), "expected": expected, "actual": actual},
        )
