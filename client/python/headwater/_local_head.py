"""One head of this process: its engine head, its ledger, and what waits for a decision. Guarded by its backend's lock."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._backend import ApplyArguments
from headwater._engine_library import EngineHead, Staged
from headwater._errors import make_error
from headwater._ledger import Ledger
from headwater._requests import ComputeRequest, GradientRequest
from headwater._types import ApplyResult, HeadInfo, HeadSpec, MemoryPlan


class LocalHead:
    """What is known of one head."""

    def __init__(self, name: str, spec: HeadSpec, engine_head: EngineHead):
        self.name = name
        self.spec = spec
        self.engine_head = engine_head
        self.epoch = os.urandom(16)
        self.missing = {"weight", "bias"} if spec.has_bias else {"weight"}
        self.weight_version = 0
        self.update_count = 0
        self.ledger = Ledger(spec.initial_step)
        self.pending: dict[int, Pending] = {}
        self.shadow: dict[str, HostArray] = {}  # tensors that are to close the sealed step
        self.shadow_digests: dict[str, bytes] = {}
        self.last_apply: tuple[ApplyArguments, Any, ApplyResult] | None = None
        self.last_replace: dict[str, bytes] = {}  # digests of the tensors that closed the last closed step
        self.create_time_s = time.time()
        self.lost = False

    @property
    def state(self) -> str:
        """As `HeadInfo.state`."""
        if self.lost:
            return "LOST"
        return "LOADING" if self.missing else "READY"

    def info(self) -> HeadInfo:
        """A snapshot for callers."""
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

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of "weight" or "bias"."""
        return (self.spec.vocab_size, self.spec.hidden_size) if tensor == "weight" else (self.spec.vocab_size,)

    def set_tensor(self, tensor: str, array: HostArray) -> None:
        """Writes weight or bias. As on the server: float32 for a 16-bit head is rounded for storage, and kept whole in the master
        weights."""
        if array.data_type == self.spec.data_type:
            self.engine_head.write(tensor, array.data)
        elif self.engine_head.has(f"master_{tensor}"):
            self.engine_head.write(f"master_{tensor}", array.data)
        elif self.spec.data_type == _arrays.FLOAT16:
            self.engine_head.write(tensor, array.data.astype(np.float16))
        else:
            self.engine_head.write(tensor, _arrays.BFloat16.from_float32(array.data).bits)

    def drop_pending(self) -> None:
        """Drops everything undecided, in all heads that it belongs to."""
        for pending in list(self.pending.values()):
            pending.drop()

    def close_step(self, how: str) -> None:
        """Closes the open step, with everything that belonged to it alone."""
        self.drop_pending()
        self.ledger.close(how)
        self.shadow.clear()
        self.last_apply = None
        self.last_replace = {}

    def start_over(self, step: int) -> None:
        """The state is no continuation: a new epoch, an empty step."""
        self.drop_pending()
        if self.spec.trainable:
            self.engine_head.zero_gradient()
        self.ledger.reset(step)
        self.shadow.clear()
        self.last_apply = None
        self.last_replace = {}
        self.epoch = os.urandom(16)
        self.lost = False

    def destroy(self) -> None:
        """Frees the head."""
        self.drop_pending()
        self.engine_head.destroy()


@dataclass(eq=False)
class Pending:
    """A computed micro-batch that waits for its decision, shared by all heads that it adds to."""

    heads: tuple[LocalHead, ...]
    micro_batch: int
    staged: Staged | None = None  # STAGED, or
    held: ComputeRequest | None = None  # HELD: with rows of its own
    teachers: dict[str, tuple[LocalHead, int]] = field(default_factory=dict)  # by name: teachers of a HELD one, with weight_version
    decided: Callable[[], object] = lambda: None  # called when it is committed or discarded

    def attach(self) -> None:
        """Makes all heads know it."""
        for head in self.heads:
            head.pending[self.micro_batch] = self

    def release(self) -> Staged | None:
        """Makes all heads forget it, without a word in their ledgers. The staged contribution is the caller's now."""
        for head in self.heads:
            head.pending.pop(self.micro_batch, None)
        staged, self.staged = self.staged, None
        return staged

    def drop(self) -> None:
        """Drops the contribution; a tombstone stays with every head that has it undecided."""
        staged = self.release()
        if staged is not None:
            staged.discard()
        for head in self.heads:
            record = head.ledger.open.records.get(self.micro_batch)
            if record is not None and record.state == "STAGED":
                record.bury(record.attempt)
        self.decided()


def settings_of(head: LocalHead, arguments: ApplyArguments) -> Any:
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


# How a call is to be treated, not what it brings: no part of the digest.
_UNHASHED = ("attempt", "first_wins", "allow_held", "late_token_factors", "expected_weight_version", "grad_hidden_out")


def digest_of(request: ComputeRequest | GradientRequest) -> bytes:
    """16 bytes over everything that decides the answer: options, targets, weights and rows. Not the server's function."""
    digest = hashlib.blake2b(digest_size=16)

    def add(data: bytes | memoryview) -> None:
        digest.update(struct.pack("<q", len(data)))
        digest.update(data)

    def describe(value: Any) -> None:
        if isinstance(value, np.ndarray):
            add(repr((value.dtype.str, value.shape)).encode())
            add(memoryview(value.reshape(-1).view(np.uint8)))
        elif isinstance(value, HostArray):
            add(repr((value.data_type, value.shape)).encode())
            add(value.byte_view())
        elif isinstance(value, tuple):
            add(repr(len(value)).encode())
            for item in value:
                describe(item)
        elif dataclasses.is_dataclass(value):
            add(type(value).__name__.encode())
            for member in dataclasses.fields(value):
                if member.name not in _UNHASHED:
                    describe(getattr(value, member.name))
        else:
            add(repr(value).encode())

    describe(request)
    return digest.digest()
