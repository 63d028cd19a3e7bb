"""What a client has sent since some step of each head, as far as it is to be sent again after a restart of the server."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater._remote import RemoteBackend
from headwater._requests import StepKey

# Kinds of calls that close a step.
CLOSING = ("apply", "discard_gradient", "replace weight", "replace bias")

_Subject = tuple[str, frozenset[tuple[str, int]], int | None]


def _subject(kind: str, keys: Iterable[StepKey], micro_batch: int | None) -> _Subject:
    return kind, frozenset((key.head, key.step) for key in keys), micro_batch


def _must_precede(first: Entry, second: Entry) -> bool:
    """Whether `first` can only be repeated before `second`.

    Steps of a head follow each other, and what a step consists of comes before what seals and closes it.
    """
    return any(
        key.head == other.head
        and (key.step < other.step or (key.step == other.step and first.micro_batch is not None and second.micro_batch is None))
        for key in first.keys
        for other in second.keys
    )


@dataclass(frozen=True, eq=False)
class Entry:
    """One call that is to be repeated. `run` gets the backend, what brings keys up to date, and seconds."""

    kind: str  # "compute", "commit", "discard", "add_gradient", "seal", or one of CLOSING
    keys: tuple[StepKey, ...]  # of the heads that it adds to
    heads: Mapping[str, bytes]  # epochs of all heads that it names: those, teachers', frozen ones'
    micro_batch: int | None
    nbytes: int
    run: Callable[[RemoteBackend, Callable[[Any], Any], float], Any]
    teachers: Mapping[str, int] = field(default_factory=dict)  # trainable heads that it reads: the steps that they were at

    @property
    def subject(self) -> _Subject:
        """What it is about; of each kind there is one such entry at most."""
        return _subject(self.kind, self.keys, self.micro_batch)


class ReplayLog:
    """Calls in the order in which they can be repeated, from some step of each head on. Not thread-safe.

    Args:
        max_bytes: of the entries' arrays. Beyond that the oldest closed steps go first; if the open ones alone are too large, all.
        max_steps: closed steps of a head that are kept; None: as many as there is room for.
    """

    def __init__(self, max_bytes: int, max_steps: int | None):
        self.entries: list[Entry] = []
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._bytes = 0
        self._by_subject: dict[_Subject, Entry] = {}
        self._first: dict[str, int] = {}  # by head: from this step on, all that was sent is here
        self._open: dict[str, int] = {}  # by head: the steps before this one are closed, as far as is known
        self._why: dict[str, str] = {}  # by head: why it does not reach further back
        self._warned = False

    def begin(self, name: str, step: int) -> None:
        """The client has come to know a head, or has given it another state: what it sends from this step on is here."""
        if name not in self._first:
            self._first[name] = step
            self._why[name] = "this client has not seen earlier steps"

    def first_step(self, name: str) -> int | None:
        """The first step that can be repeated whole; None for a head that is not known."""
        return self._first.get(name)

    def why(self, name: str) -> str:
        """Why it does not reach further back."""
        return self._why.get(name, "nothing is known of the head")

    def known_step(self, name: str) -> int | None:
        """The newest step that is known to have been open; None for a head that is not known, or has no steps."""
        return self._open.get(name, self._first.get(name))

    def heads(self) -> dict[str, bytes]:
        """All heads that are named, with the epochs that the newest calls carried."""
        return {name: epoch for entry in self.entries for name, epoch in entry.heads.items()}

    def find(self, kind: str, keys: Sequence[StepKey], micro_batch: int | None) -> Entry | None:
        """The entry of this kind about a micro-batch, or a step, of these keys."""
        return self._by_subject.get(_subject(kind, keys, micro_batch))

    def has_room(self, key: StepKey, nbytes: int) -> bool:
        """Whether weights that close a step are worth a copy. If not, the log begins after that step."""
        if nbytes <= self._max_bytes and self._max_steps != 0:
            return True
        self._shorten(key.head, key.step + 1, f"the weights that closed step {key.step} are not kept")
        return False

    def add(self, entry: Entry) -> None:
        """Enters what was answered, unless its step is not whole any more."""
        if any(key.step < self._first.get(key.head, 0) for key in entry.keys):
            return
        self._place(entry)
        self._by_subject[entry.subject] = entry
        self._bytes += entry.nbytes
        while self._bytes > self._max_bytes:
            oldest = next((entry for entry in self.entries if self._is_closed(entry)), None)
            if oldest is None:
                self.drop((), f"it has more than replay_bytes={self._max_bytes} bytes of micro-batches")
                return
            for key in oldest.keys:
                self._shorten(key.head, key.step + 1, f"replay_bytes={self._max_bytes} bytes have no room for earlier steps")

    def _place(self, entry: Entry) -> None:
        # Answers come in an order in which their calls cannot be repeated: that of a seal that waits for a micro-batch before that
        # micro-batch's own, whose gradient takes its time.
        place = len(self.entries)
        for index in range(len(self.entries) - 1, -1, -1):
            if _must_precede(entry, self.entries[index]):
                place = index
            elif len(entry.keys) == 1 and _must_precede(self.entries[index], entry):
                break  # and so must all of this head that is before it
        behind = self.entries[place:]
        before = [other for other in behind if _must_precede(other, entry)]
        self.entries[place:] = [*before, entry, *(other for other in behind if not _must_precede(other, entry))]

    def remove(self, entries: Iterable[Entry]) -> None:
        """Takes entries out that are not to be repeated."""
        gone = {id(entry): entry for entry in entries}
        if not gone:
            return
        self._bytes -= sum(entry.nbytes for entry in gone.values())
        self.entries = [entry for entry in self.entries if id(entry) not in gone]
        for entry in gone.values():
            self._by_subject.pop(entry.subject, None)

    def opened(self, name: str, step: int) -> None:
        """The steps of a head before this one are closed."""
        if self._open.get(name, -1) >= step:
            return
        self._open[name] = step
        if self._max_steps is not None:
            self._shorten(name, step - self._max_steps, f"replay_steps={self._max_steps} steps before the open one are kept")

    def drop(self, keys: Sequence[StepKey], why: str) -> None:
        """The open steps of what is here, and of `keys`, cannot be repeated."""
        for key in (*keys, *(key for entry in self.entries for key in entry.keys)):
            if self._first.get(key.head, 0) <= key.step:
                self._first[key.head] = key.step + 1
                self._why[key.head] = f"step {key.step} is not kept: {why}"
        self.remove(self.entries)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"headwater: the open step is not kept for replay: {why}. A restart of the server in it will be a StepLostError",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget(self, name: str) -> None:
        """This client has given the head another state: nothing is to be repeated on it.

        The steps of other heads whose calls name it cannot be repeated as they were, no matter whether it was trained or a teacher.
        """
        self._first.pop(name, None)
        self._open.pop(name, None)
        gone = [entry for entry in self.entries if name in entry.heads]
        self.remove(gone)
        for key in (key for entry in gone for key in entry.keys):
            if key.head != name:
                self._shorten(key.head, key.step + 1, f"step {key.step} has micro-batches with {name}, which got another state")

    def since(self, steps: Mapping[str, int]) -> list[Entry] | None:
        """What is to be repeated on heads that are at these steps.

        None if that would be something else than it was: a call on several heads is older than one of them, or has read a trainable
        head whose weights this log does not bring back to what they were then.
        """
        repeated: list[Entry] = []
        now = dict(steps)
        for entry in self.entries:
            closed = {key.step < steps[key.head] for key in entry.keys}
            if closed == {True, False} or (closed == {False} and any(now[name] != at for name, at in entry.teachers.items())):
                return None
            if closed == {False}:
                repeated.append(entry)
                if entry.kind in CLOSING:
                    now[entry.keys[0].head] = entry.keys[0].step + 1
        return repeated

    def _is_closed(self, entry: Entry) -> bool:
        return all(key.step < self._open.get(key.head, 0) for key in entry.keys)

    def _shorten(self, name: str, first: int, why: str) -> None:
        """What is before `first` may go. A call on several heads stays until it may on each of them."""
        if self._first.get(name, 0) < first:
            self._first[name] = first
            self._why[name] = why
        self.remove([e for e in self.entries if e.keys and all(key.step < self._first.get(key.head, 0) for key in e.keys)])
