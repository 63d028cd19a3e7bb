"""Joined teachers of the backend in this process: what one thread streams, the micro-batch of another uses."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater import _arrays
from headwater._arrays import HostArray
from headwater._errors import HeadwaterError, make_error
from headwater._requests import ComputeRequest, JoinedRows, TeacherRows

# Bytes of the rows that wait to be joined; the server's default of max_join_bytes.
MAX_JOIN_BYTES = 4 << 30

_Key = tuple[str, str]  # tenant, join_key


@dataclass
class _Set:
    """Rows under one key, as far as they have come."""

    place: JoinedRows  # with its own total_rows and data_type
    hidden_size: int
    rows: dict[int, np.ndarray]


@dataclass(frozen=True)
class Use:
    """The rows of a set that a micro-batch uses."""

    key: _Key
    indices: tuple[int, ...]


def _tenant_of(head: str) -> str:
    return head.split("/")[1]


class LocalJoins:
    """All sets of one backend. The caller holds the lock of `changed`; `gather` gives it away while it waits."""

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        self._sets: dict[_Key, _Set] = {}
        self._bytes = 0

    def clear(self) -> None:
        """Drops everything."""
        self._sets.clear()
        self._bytes = 0

    def add(self, tenant: str, rows: HostArray, place: JoinedRows) -> int:
        """Keeps a copy of rows that have come; all of them or none."""
        count, hidden_size = rows.shape
        known = self._sets.get((tenant, place.join_key))
        if known is not None:
            _check_same(known, place, hidden_size)
        if self._bytes + rows.nbytes > MAX_JOIN_BYTES:
            raise make_error(
                "RESOURCE_EXHAUSTED",
                "IN_FLIGHT_BYTES_EXCEEDED",
                f"teacher rows of {self._bytes} bytes wait to be joined already, and at most {MAX_JOIN_BYTES} may",
                {"limit": "max_join_bytes", "maximum": str(MAX_JOIN_BYTES), "actual": str(self._bytes + rows.nbytes)},
            )
        indices = _indices(place, count).tolist()
        there = set() if known is None else known.rows.keys()
        seen: set[int] = set()
        for index in indices:
            if index in there or index in seen:
                raise make_error(
                    "INVALID_ARGUMENT",
                    "CHUNK_OUT_OF_RANGE",
                    f"row {index} of the joined set {place.join_key!r} has come before",
                    {"row": str(index)},
                )
            seen.add(index)
        if known is None:
            known = self._sets[(tenant, place.join_key)] = _Set(place, hidden_size, {})
        data = rows.data.copy()
        known.rows.update(zip(indices, data, strict=True))
        self._bytes += data.nbytes
        self._changed.notify_all()
        return count

    def gather(
        self, request: ComputeRequest, hidden_size_of: Callable[[str], int], deadline: float
    ) -> tuple[ComputeRequest, tuple[Use, ...]]:
        """The request with the rows of its joined teachers, once all have come, and what it uses of the sets."""
        while True:
            terms, uses = [], []
            missing = None
            for term in request.terms:
                teacher = term.teacher
                if teacher is not None and isinstance(teacher.hidden, JoinedRows):
                    indices = tuple(_indices(teacher.hidden, term.row_count).tolist())
                    use = Use((_tenant_of(teacher.head), teacher.hidden.join_key), indices)
                    found = self._rows(use, teacher, hidden_size_of(teacher.head))
                    if isinstance(found, int):
                        missing = (teacher.hidden.join_key, found)
                        break
                    uses.append(use)
                    term = dataclasses.replace(term, teacher=dataclasses.replace(teacher, hidden=found))
                terms.append(term)
            if missing is None:
                return dataclasses.replace(request, terms=tuple(terms)), tuple(uses)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise make_error(
                    "FAILED_PRECONDITION",
                    "JOIN_INCOMPLETE",
                    f"row {missing[1]} of the joined set {missing[0]!r} did not come in time",
                    {"joinKey": missing[0], "row": str(missing[1])},
                )
            self._changed.wait(remaining)

    def _rows(self, use: Use, teacher: TeacherRows, hidden_size: int) -> HostArray | int:
        """The rows, or the first index that is missing."""
        assert isinstance(teacher.hidden, JoinedRows)
        known = self._sets.get(use.key)
        if not use.indices:
            data_type = teacher.hidden.data_type
            return HostArray(np.empty((0, hidden_size), _arrays.host_dtype(data_type)), data_type, _arrays.to_numpy)
        if known is None:
            return use.indices[0]
        _check_same(known, teacher.hidden, hidden_size)
        for index in use.indices:
            if index not in known.rows:
                return index
        data = np.empty((len(use.indices), hidden_size), _arrays.host_dtype(known.place.data_type))
        for row, index in zip(data, use.indices, strict=True):
            row[:] = known.rows[index]
        return HostArray(data, known.place.data_type, _arrays.to_numpy)

    def release(self, uses: tuple[Use, ...]) -> None:
        """The micro-batch that used these rows is decided."""
        for use in uses:
            known = self._sets.get(use.key)
            if known is None:
                continue
            for index in use.indices:
                row = known.rows.pop(index, None)
                self._bytes -= 0 if row is None else row.nbytes
            if not known.rows:
                del self._sets[use.key]


def _indices(place: JoinedRows, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32) if place.row_indices is None else place.row_indices


def _check_same(known: _Set, place: JoinedRows, hidden_size: int) -> None:
    ours = (place.total_rows, place.data_type, hidden_size)
    theirs = (known.place.total_rows, known.place.data_type, known.hidden_size)
    if ours != theirs:
        raise _different(place.join_key, ours, theirs)


def _different(join_key: str, ours: tuple[int, str, int], theirs: tuple[int, str, int]) -> HeadwaterError:
    fields = ("total_row_count", "data_type", "hidden_size")
    field = next(name for name, our, their in zip(fields, ours, theirs, strict=True) if our != their)
    return make_error(
        "FAILED_PRECONDITION",
        "JOIN_INCOMPLETE",
        f"the joined set {join_key!r} has {theirs[0]} rows of {theirs[2]} x {theirs[1]}, this call says {ours[0]} of "
        f"{ours[2]} x {ours[1]}",
        {"joinKey": join_key, "field": field, "expected": str(theirs), "actual": str(ours)},
    )
