"""Going on after the server was started again: a log of what was sent, and a backend that repeats it.

A restarted server brings a head back from its newest checkpoint, and refuses calls on its steps (`STEP_LOST`) until a trainer takes
it. What is missing then is what was submitted since the restored step was opened, and the calls that have closed steps since: this
backend keeps that as far back as it has room, takes the head, sends it again in the same order, and goes on with the call that
failed.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from headwater._arrays import HostArray
from headwater._backend import ApplyArguments, Expected, UploadOptions
from headwater._errors import (
    AbortedError,
    ClientClosedError,
    EpochFencedError,
    HeadwaterError,
    NotFoundError,
    StepLostError,
    StepMismatchError,
)
from headwater._futures import Cancel, Done
from headwater._remote import RemoteBackend
from headwater._replay_log import Entry, ReplayLog
from headwater._requests import CommitRequest, ComputeRequest, GradientRequest, StepKey, copy_request, request_bytes
from headwater._retry import AWAY_BACKOFF_S, is_away, may_wait, pause
from headwater._types import ApplyResult, DiscardGradientResult, HeadInfo, HeadSpec, LossResult, SaveResult, SealResult, StepStatus

R = TypeVar("R")

# How often one call follows a server that goes down again and again.
_MAX_RECOVERIES = 8
# Bound of a recovery that no call waits for, and the time between its tries, in seconds.
_BACKGROUND_TIMEOUT_S = 60.0
_BACKGROUND_RETRY_S = 1.0
# The server takes no more of them (TakeHeadRequest.recovers_epochs).
_MAX_RECOVERS_EPOCHS = 16
_ANOTHER_RUN = "another run has taken the head since the server was started again"


def _still_lost(error: AbortedError, why: str, steps: Mapping[str, int]) -> AbortedError:
    """The error, with why it could not be helped, and with this client's step."""
    metadata = {**error.metadata, "noReplay": why}
    if len(steps) == 1:
        metadata["trainerStep"] = str(next(iter(steps.values())))
    return type(error)(f"{error.message} (no replay: {why})", reason=error.reason, metadata=metadata)


def _epochs(keys: Sequence[StepKey]) -> dict[str, bytes]:
    return {key.head: key.epoch for key in keys}


class ReplayBackend:
    """A remote backend that follows a restart. Thread-safe.

    A micro-batch of several heads is repeated only if all of them came back at its step or before; otherwise the error is final.
    """

    def __init__(self, inner: RemoteBackend, max_bytes: int, max_steps: int | None, timeout_s: float):
        self._inner = inner
        # For recoveries, which keep the others waiting: _patiently() waits for them.
        self._hasty = inner.without_waiting()
        self._log = ReplayLog(max_bytes, max_steps)
        self._lock = threading.RLock()
        # The server's incarnation under which an epoch was learned, by head and epoch.
        self._learned: dict[tuple[str, bytes], bytes] = {}
        # The epoch that followed another one, by head and that one.
        self._successors: dict[tuple[str, bytes], bytes] = {}
        # Epochs of this client whose head another run had taken when the server had been started again, by head: they do not go on.
        self._overtaken: set[tuple[str, bytes]] = set()
        self._checksums: dict[str, bytes] = {}  # of frozen heads' weights
        self._timeout_s = timeout_s
        # Entries that a recovery has not got round to yet; nothing else may be sent before them.
        self._unsent: list[Entry] = []
        this = weakref.ref(self)

        def on_lost() -> None:
            backend = this()
            if backend is not None:
                backend._recover_idle()

        inner.watch_session(on_lost, timeout_s)

    def __getattr__(self, name: str) -> Any:
        # What neither changes a step nor carries an epoch.
        return getattr(self._inner, name)

    # ---- epochs -------------------------------------------------------------------------------------------------------

    def current_epoch(self, name: str, epoch: bytes) -> bytes:
        while (successor := self._successors.get((name, epoch))) is not None:
            epoch = successor
        return epoch

    def _lineage(self, name: str, epoch: bytes) -> list[bytes]:
        """The epochs under which this client has worked on a head, as far as recoveries have led to this one, which is the last."""
        lineage = [epoch]
        for (head, before), after in reversed(self._successors.items()):
            if head == name and after in lineage and before not in lineage:
                lineage.insert(0, before)
        return lineage[-_MAX_RECOVERS_EPOCHS:]

    def _is_outdated(self, carried: Mapping[str, bytes]) -> bool:
        """Whether a restart has been followed since these epochs were current."""
        return any(self.current_epoch(name, epoch) != epoch for name, epoch in carried.items())

    def _update(self, value: Any) -> Any:
        """A key, tuple of keys, or request with the epochs of now."""
        if isinstance(value, tuple):
            return tuple(map(self._update, value))
        if isinstance(value, StepKey):
            return dataclasses.replace(value, epoch=self.current_epoch(value.head, value.epoch))
        if isinstance(value, GradientRequest):
            return dataclasses.replace(value, key=self._update(value.key))
        if isinstance(value, CommitRequest):
            return dataclasses.replace(value, keys=self._update(value.keys))
        terms = []
        for term in value.terms:
            teacher = term.teacher
            if teacher is not None:
                teacher = dataclasses.replace(teacher, epoch=self.current_epoch(teacher.head, teacher.epoch))
            terms.append(dataclasses.replace(term, epoch=self.current_epoch(term.head, term.epoch), teacher=teacher))
        return dataclasses.replace(value, terms=tuple(terms))

    def _learn(self, info: HeadInfo) -> HeadInfo:
        """Remembers which run of the server a head's epoch is of, so that a restart can be told from another trainer."""
        key = (info.name, info.epoch)
        if not info.spec.trainable:
            self._checksums[info.name] = info.weight_checksum
        if key not in self._learned:
            # Asked afterwards: if the server was started again in between, the epoch is not followed, rather than wrongly.
            self._learned[key] = self._hasty.server_info(self._timeout_s).incarnation
        if info.open_step is not None:
            self._log.begin(info.name, info.open_step)
        return info

    # ---- calls that follow a restart ----------------------------------------------------------------------------------

    def _follow(
        self,
        heads: Mapping[str, bytes],
        steps: Mapping[str, int],
        timeout_s: float,
        call: Callable[[float, bool], R],
        log: Callable[[R], None] | None = None,
    ) -> R:
        """Runs `call(seconds left, whether the server was followed)`, again after each restart that can be followed.

        `heads` are the epochs that the call would carry, `steps` the steps that it names. `log` enters what was answered.
        """
        deadline = time.monotonic() + timeout_s
        recoveries = 0
        while True:
            if self._unsent:
                self._patiently(deadline, lambda: self._send(deadline))
            carried = {name: self.current_epoch(name, epoch) for name, epoch in heads.items()}
            try:
                result = call(max(deadline - time.monotonic(), 0.001), recoveries > 0)
            except (StepLostError, EpochFencedError) as error:
                recoveries += 1
                why = f"{_MAX_RECOVERIES} restarts in one call" if recoveries > _MAX_RECOVERIES else None
                why = why or self._patiently(deadline, functools.partial(self._recover, carried, steps, deadline))
                if why is not None:
                    raise _still_lost(error, why, steps) from error.__cause__
                continue
            with self._lock:
                if recoveries < _MAX_RECOVERIES and self._is_outdated(carried):
                    recoveries += 1
                    continue  # answered by a server that is gone, and not in the log that was repeated
                for name, step in steps.items():
                    self._log.opened(name, step)
                if log is not None:
                    try:
                        log(result)
                    except MemoryError:
                        keys = [StepKey(name, carried.get(name, b""), step) for name, step in steps.items()]
                        self._log.drop(keys, "there was no memory for what was sent in it")
            return result

    def _patiently(self, deadline: float, work: Callable[[], R]) -> R:
        """Runs a part of a recovery, again if the server goes away meanwhile. Other calls have the lock in between."""
        while True:
            try:
                with self._lock:
                    return work()
            except HeadwaterError as error:
                if not is_away(error) or not may_wait(AWAY_BACKOFF_S, deadline):
                    raise
                away = error
            pause(AWAY_BACKOFF_S, away=away)

    def _recover(self, carried: Mapping[str, bytes], steps: Mapping[str, int], deadline: float) -> str | None:
        """Takes the heads of the log, and those that a failed call has carried, and repeats the log. Why not, if it cannot."""
        with self._lock:
            if self._is_outdated(carried):
                return None  # another thread has done it
            incarnation = self._hasty.server_info(max(deadline - time.monotonic(), 0.001)).incarnation
            if all(self._learned.get(head, incarnation) == incarnation for head in carried.items()):
                return "the server has not been started again: another run has taken the head, or its engine failed"
            heads = self._logged_heads() | dict(carried)
            states = {}
            for name, epoch in heads.items():
                try:
                    state = self._hasty.get_head(name, max(deadline - time.monotonic(), 0.001))
                except NotFoundError:
                    self._log.forget(name)  # deleted, or never saved: what was sent to it is gone with it
                    if name in carried:
                        return f"{name} is not there any more"
                    continue
                if not self._is_overtaken(state, epoch):
                    states[name] = state
                elif name in carried:
                    return _ANOTHER_RUN
            wanted: dict[str, int | None] = {}
            for name, state in states.items():
                known = self._log.known_step(name)
                asked = steps.get(name, known)
                # A call for a later step than the log's: this trainer does not close steps itself, and the other one had closed it.
                if state.open_step is not None and known is not None and state.open_step == asked > known:
                    self._log.opened(name, state.open_step)
                wanted[name] = asked if known is None or (asked is not None and asked > known) else known
                if (why := self._cannot_follow(state, heads[name], wanted[name])) is not None:
                    return why
            entries = self._log.since({name: -1 if state.open_step is None else state.open_step for name, state in states.items()})
            if entries is None:
                return (
                    "what would be repeated is not what it was: a micro-batch is in a step that one of its heads has closed and "
                    "another one has not, or has read a trainable teacher whose weights are not those of then"
                )
            taken: dict[str, bytes] = {}
            for name, state in states.items():
                if state.epoch == heads[name] and state.state != "RESTORED":
                    continue
                new_epoch = self._take(state, heads[name], wanted[name], deadline)
                if new_epoch is None:
                    return self._recover(carried, steps, deadline)  # from the beginning, now that this is known
                taken[name] = new_epoch
            # These calls follow a restart, too: epochs of a later process must not be taken for this one's.
            if self._hasty.server_info(max(deadline - time.monotonic(), 0.001)).incarnation != incarnation:
                return self._recover(carried, steps, deadline)
            self._unsent = entries
            for name, epoch in taken.items():
                self._learned[(name, epoch)] = incarnation
                self._successors[(name, heads[name])] = epoch
            self._send(deadline)
            self._hasty.open_session(max(deadline - time.monotonic(), 0.001))
            return None

    def _is_overtaken(self, state: HeadInfo, epoch: bytes) -> bool:
        """Whether a head that came back is another run's. What was sent under the epoch is dropped then, and never repeated.

        While it is RESTORED nobody has it. Whoever has taken it is of this run if it went on from an epoch under which this client
        has worked as well.
        """
        key = (state.name, epoch)
        if key not in self._overtaken:
            if not state.spec.trainable or state.state == "RESTORED" or state.epoch == epoch:
                return False
            if not set(self._lineage(*key)).isdisjoint(state.recovers_epochs):
                return False
            self._overtaken.add(key)
        name = state.name
        gone = [
            entry for entry in self._log.entries if name in entry.heads and self.current_epoch(name, entry.heads[name]) == epoch
        ]
        if self._logged_heads().get(name) == epoch:
            self._log.forget(name)
            self._unsent = [entry for entry in self._unsent if all(entry is not other for other in gone)]
            if state.open_step is not None and (name, state.epoch) in self._learned:
                self._log.begin(name, state.open_step)  # the client has opened the head again
        else:
            self._remove(gone)  # and newer calls are under its epoch of now
        return True

    def _cannot_follow(self, state: HeadInfo, epoch: bytes, step: int | None) -> str | None:
        """Whether a head that has come back is what this client left, but for what the log holds: if not, why."""
        if not state.spec.trainable:
            known = self._checksums.get(state.name, b"")
            if state.state == "READY" and (not known or not state.weight_checksum or known == state.weight_checksum):
                return None
            return f"{state.name} came back with other weights"
        if state.epoch == epoch and state.state == "READY":
            return None
        first = self._log.first_step(state.name)
        if state.state not in ("READY", "RESTORED"):
            return f"{state.name} is {state.state}"
        if state.open_step is None or step is None or first is None or state.open_step > step:
            return f"{state.name} is at step {state.open_step}, this client at step {step}"
        if state.open_step < first:
            return (
                f"{state.name} came back at step {state.open_step}, this client is at step {step}, and its log reaches back to "
                f"step {first}: {self._log.why(state.name)}"
            )
        return None

    def _take(self, state: HeadInfo, epoch: bytes, last: int | None, deadline: float) -> bytes | None:
        """Takes a head that waits for a trainer; of several trainers of a run one does, and the others go on with its epoch.

        Returns that epoch, or None if another run was faster.
        """
        if state.state != "RESTORED":
            return state.epoch
        lineage = self._lineage(state.name, epoch)
        try:
            return self._hasty.take_head(state.name, state.epoch, max(deadline - time.monotonic(), 0.001), lineage).epoch
        except EpochFencedError:
            now = self._hasty.get_head(state.name, max(deadline - time.monotonic(), 0.001))
            if self._is_overtaken(now, epoch):
                return None
            first = self._log.first_step(state.name)
            reached = now.open_step is not None and first is not None and last is not None and first <= now.open_step <= last
            if not reached or now.state != "READY":
                raise
            return now.epoch

    def _send(self, deadline: float) -> None:
        """Repeats what a recovery has left to repeat. Where it fails, the rest stays for the next call."""
        while self._unsent:
            entry = self._unsent[0]
            try:
                entry.run(self._hasty, self._update, max(deadline - time.monotonic(), 0.001))
            except (StepLostError, EpochFencedError) as error:
                carried = {name: self.current_epoch(name, epoch) for name, epoch in entry.heads.items()}
                steps = {key.head: key.step for key in entry.keys}
                if time.monotonic() >= deadline:
                    raise
                if (why := self._recover(carried, steps, deadline)) is None:
                    return  # the recovery has begun anew, and ended
                if any(other is entry for other in self._unsent):
                    raise _still_lost(error, why, steps) from error.__cause__
                continue  # it was dropped: another run has the head of the epoch under which it was sent
            except StepMismatchError as error:
                # Another trainer repeats too, and has closed this step with its gradient discarded, as it did before.
                if int(error.metadata.get("openStep", "-1")) <= min(key.step for key in entry.keys):
                    raise
            if self._unsent and self._unsent[0] is entry:
                del self._unsent[0]

    def _recover_idle(self) -> None:
        """The session is gone. If the server was started again, others may wait for what this client had submitted."""
        deadline = time.monotonic() + _BACKGROUND_TIMEOUT_S
        while True:
            try:
                with self._lock:
                    carried = self._logged_heads()
                if carried:
                    self._recover(carried, {}, deadline)
                self._inner.open_session(self._timeout_s)  # which is watched in turn
                return
            except HeadwaterError as error:
                if isinstance(error, ClientClosedError) or time.monotonic() >= deadline:
                    return  # the next call meets the same failure, and raises it
                time.sleep(_BACKGROUND_RETRY_S)

    def _logged_heads(self) -> dict[str, bytes]:
        """All heads of the log, with their epochs of now."""
        return {name: self.current_epoch(name, epoch) for name, epoch in self._log.heads().items()}

    # ---- the log ------------------------------------------------------------------------------------------------------

    def _remove(self, entries: Sequence[Entry]) -> None:
        """Neither kept nor sent any more."""
        self._log.remove(entries)
        self._unsent = [entry for entry in self._unsent if all(entry is not gone for gone in entries)]

    def _forget(self, name: str) -> None:
        """This client has given the head another state: nothing is to be repeated on it."""
        with self._lock:
            self._log.forget(name)
            self._unsent = [entry for entry in self._unsent if all(key.head != name for key in entry.keys)]

    def _keep(self, kind: str, keys: Sequence[StepKey], micro_batch: int | None, nbytes: int, run: Callable[..., Any]) -> None:
        """Enters a call that names no other heads than those it is about."""
        self._log.add(Entry(kind, tuple(keys), _epochs(keys), micro_batch, nbytes, run))

    # ---- the backend's calls ------------------------------------------------------------------------------------------

    # A micro-batch is followed to its end by the thread that submits it.
    can_start = False

    def start(self, request: ComputeRequest, timeout_s: float, done: Done) -> Cancel | None:
        return None

    def compute(self, request: ComputeRequest, timeout_s: float) -> LossResult:
        heads = {term.head: term.epoch for term in request.terms}
        heads |= {term.teacher.head: term.teacher.epoch for term in request.terms if term.teacher is not None}
        steps = {key.head: key.step for key in request.keys}

        def log(result: LossResult) -> None:
            keys, micro_batch = request.keys, request.micro_batch
            if micro_batch is None or result.payload_differs:
                return
            if any(term.teacher is not None and term.teacher.sent is None for term in request.terms):
                # The rows of a joined teacher are gone with the server, and whoever has sent them does not know.
                self._log.drop(keys, "it has micro-batches whose teacher's rows came from another stream (headwater.JOIN)")
                return
            known = self._log.find("compute", keys, micro_batch)
            if known is not None and result.replayed:
                return
            if known is not None:
                self._remove([known])
            own = copy_request(request)

            def run(inner: RemoteBackend, update: Callable[[Any], Any], remaining_s: float) -> LossResult:
                return inner.compute(update(own), remaining_s)

            read = {
                term.teacher.head: self._log.known_step(term.teacher.head) for term in request.terms if term.teacher is not None
            }
            teachers = {name: step for name, step in read.items() if step is not None}
            self._log.add(Entry("compute", keys, heads, micro_batch, request_bytes(own), run, teachers))

        return self._follow(heads, steps, timeout_s, lambda left_s, _: self._inner.compute(self._update(request), left_s), log)

    def _follow_keys(
        self,
        keys: Sequence[StepKey],
        timeout_s: float,
        call: Callable[[tuple[StepKey, ...], float, bool], R],
        log: Callable[[R], None] | None = None,
    ) -> R:
        keys = tuple(keys)
        steps = {key.head: key.step for key in keys}
        return self._follow(
            _epochs(keys), steps, timeout_s, lambda left_s, followed: call(self._update(keys), left_s, followed), log
        )

    def commit(self, request: CommitRequest, timeout_s: float) -> bool:
        keys, micro_batch = request.keys, request.micro_batch

        def log(replayed: bool) -> None:
            if self._log.find("compute", keys, micro_batch) is None or self._log.find("commit", keys, micro_batch) is not None:
                return
            factors = request.token_factors
            own = dataclasses.replace(request, token_factors=None if factors is None else factors.copy())

            def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> bool:
                return inner.commit(update(own), left_s)

            self._keep("commit", keys, micro_batch, 0 if factors is None else factors.nbytes, run)

        return self._follow_keys(keys, timeout_s, lambda _, left_s, __: self._inner.commit(self._update(request), left_s), log)

    def discard(self, keys: Sequence[StepKey], micro_batch: int, attempt: int | None, timeout_s: float) -> bool:
        own_keys = tuple(keys)

        def log(dropped: bool) -> None:
            known = (self._log.find(kind, own_keys, micro_batch) for kind in ("compute", "commit", "discard", "add_gradient"))
            self._remove([entry for entry in known if entry is not None])

            def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> bool:
                return inner.discard(update(own_keys), micro_batch, attempt, left_s)

            self._keep("discard", own_keys, micro_batch, 0, run)

        return self._follow_keys(
            own_keys, timeout_s, lambda now, left_s, _: self._inner.discard(now, micro_batch, attempt, left_s), log
        )

    def add_gradient(self, request: GradientRequest, timeout_s: float) -> bool:
        keys = (request.key,)

        def log(replayed: bool) -> None:
            if self._log.find("add_gradient", keys, request.micro_batch) is not None:
                return
            own = dataclasses.replace(request, rows=request.rows.copy())

            def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> bool:
                return inner.add_gradient(update(own), left_s)

            self._keep("add_gradient", keys, request.micro_batch, own.rows.nbytes, run)

        return self._follow_keys(
            keys, timeout_s, lambda _, left_s, __: self._inner.add_gradient(self._update(request), left_s), log
        )

    def seal(self, key: StepKey, expected: Expected, wait: bool, timeout_s: float) -> SealResult:
        def log(result: SealResult) -> None:
            # Other trainers may still be repeating their part.
            def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> SealResult:
                return inner.seal(update(key), expected, True, left_s)

            known = self._log.find("seal", (key,), None)
            self._remove([] if known is None else [known])
            self._keep("seal", (key,), None, 0, run)

        return self._follow_keys(
            (key,),
            timeout_s,
            lambda now, left_s, followed: self._inner.seal(now[0], expected, wait or followed, left_s),
            log,
        )

    def apply(self, key: StepKey, expected: Expected | None, arguments: ApplyArguments, timeout_s: float) -> ApplyResult:
        def call(inner: RemoteBackend, now: StepKey, left_s: float, again: bool) -> ApplyResult:
            if again and expected is not None:
                # Other trainers may still be repeating their part.
                began = time.monotonic()
                inner.seal(now, expected, True, left_s)
                left_s = max(left_s - (time.monotonic() - began), 0.001)
            return inner.apply(now, expected, arguments, left_s)

        def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> ApplyResult:
            return call(inner, update(key), left_s, True)

        return self._follow_keys(
            (key,),
            timeout_s,
            lambda now, left_s, followed: call(self._inner, now[0], left_s, followed),
            lambda result: self._closed("apply", key, result.open_step, 0, run),
        )

    def discard_gradient(self, key: StepKey, timeout_s: float) -> DiscardGradientResult:
        def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> DiscardGradientResult:
            return inner.discard_gradient(update(key), left_s)

        return self._follow_keys(
            (key,),
            timeout_s,
            lambda now, left_s, _: self._inner.discard_gradient(now[0], left_s),
            lambda result: self._closed("discard_gradient", key, result.open_step, 0, run),
        )

    def _closed(self, kind: str, key: StepKey, open_step: int | None, nbytes: int, run: Callable[..., Any]) -> None:
        """A call has closed a step, or has done its part of that."""
        known = self._log.find(kind, (key,), None)
        if known is not None:
            self._remove([known])
        if open_step is not None:
            self._log.opened(key.head, open_step)
        self._keep(kind, (key,), None, nbytes, run)

    def gradient(self, key: StepKey, tensor: str, factor: float, timeout_s: float) -> np.ndarray:
        return self._follow_keys((key,), timeout_s, lambda now, left_s, _: self._inner.gradient(now[0], tensor, factor, left_s))

    def gradient_norm_squared(self, key: StepKey, factor: float, timeout_s: float) -> float:
        return self._follow_keys(
            (key,), timeout_s, lambda now, left_s, _: self._inner.gradient_norm_squared(now[0], factor, left_s)
        )

    def _follow_head(self, name: str, epoch: bytes, timeout_s: float, call: Callable[[bytes, float], R]) -> R:
        """A call that names an epoch but no step."""
        return self._follow({name: epoch}, {}, timeout_s, lambda left_s, _: call(self.current_epoch(name, epoch), left_s))

    def step_state(self, name: str, epoch: bytes, timeout_s: float) -> StepStatus:
        return self._follow_head(name, epoch, timeout_s, lambda now, left_s: self._inner.step_state(name, now, left_s))

    def download(self, name: str, epoch: bytes, tensor: str, data_type: str | None, timeout_s: float) -> tuple[np.ndarray, str]:
        if not epoch:
            return self._inner.download(name, epoch, tensor, data_type, timeout_s)
        return self._follow_head(
            name, epoch, timeout_s, lambda now, left_s: self._inner.download(name, now, tensor, data_type, left_s)
        )

    def save(self, name: str, epoch: bytes, checkpoint: str, overwrite: bool, timeout_s: float) -> SaveResult:
        return self._follow_head(
            name, epoch, timeout_s, lambda now, left_s: self._inner.save(name, now, checkpoint, overwrite, left_s)
        )

    def upload(self, name: str, epoch: bytes, tensor: str, array: HostArray, options: UploadOptions, timeout_s: float) -> HeadInfo:
        step = options.closes_step
        if step is None:
            info = self._inner.upload(name, self.current_epoch(name, epoch), tensor, array, options, timeout_s)
            self._forget(name)
            return self._learn(info)

        own: list[HostArray] = []

        def run(inner: RemoteBackend, update: Callable[[Any], Any], left_s: float) -> HeadInfo:
            now = dataclasses.replace(options, upload_id=uuid.uuid4().hex, on_progress=None)
            return inner.upload(name, update(key).epoch, tensor, own[0], now, left_s)

        def log(info: HeadInfo) -> None:
            if self._log.has_room(key, array.nbytes):
                own.append(array.copy())
                self._closed(f"replace {tensor}", key, info.open_step, array.nbytes, run)
            elif info.open_step is not None:
                self._log.opened(name, info.open_step)

        key = StepKey(name, epoch, step)
        return self._follow_keys(
            (key,),
            timeout_s,
            lambda now, left_s, _: self._inner.upload(name, now[0].epoch, tensor, array, options, left_s),
            log,
        )

    # ---- calls that give a head another state -------------------------------------------------------------------------

    def take_head(self, name: str, epoch: bytes, timeout_s: float) -> HeadInfo:
        info = self._inner.take_head(name, epoch and self.current_epoch(name, epoch), timeout_s)
        self._forget(name)
        return self._learn(info)

    def load(self, name: str, epoch: bytes, path: str, weight_tensor: str, bias_tensor: str, timeout_s: float) -> HeadInfo:
        info = self._inner.load(name, self.current_epoch(name, epoch), path, weight_tensor, bias_tensor, timeout_s)
        self._forget(name)
        return self._learn(info)

    def restore(self, name: str, epoch: bytes, checkpoint: str, timeout_s: float) -> HeadInfo:
        info = self._inner.restore(name, self.current_epoch(name, epoch), checkpoint, timeout_s)
        self._forget(name)
        return self._learn(info)

    def create_head(self, name: str, spec: HeadSpec, attach: bool, timeout_s: float) -> tuple[HeadInfo, bool]:
        info, created = self._inner.create_head(name, spec, attach, timeout_s)
        return self._learn(info), created

    def get_head(self, name: str, timeout_s: float) -> HeadInfo:
        return self._learn(self._inner.get_head(name, timeout_s))

    def delete_head(self, name: str, epoch: bytes, force: bool, timeout_s: float) -> None:
        self._inner.delete_head(name, epoch and self.current_epoch(name, epoch), force, timeout_s)
        self._forget(name)
