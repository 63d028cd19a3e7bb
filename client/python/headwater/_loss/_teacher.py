"""`Teacher`: a stream of hidden states that micro-batches of other calls, or other processes, join."""

from __future__ import annotations

from typing import Any

from headwater import _arrays
from headwater._errors import FailedPreconditionError, invalid_argument
from headwater._futures import as_future
from headwater._loss import _requests, _terms
from headwater._remote import RemoteBackend
from headwater._types import check_number


class Teacher:
    """One set of teacher rows under a key. Made by `Client.teacher`. Thread-safe.

    The trainer's side is `Head.jsd(..., teacher_hidden=headwater.JOIN, join_key=..., total_rows=...)`. Either side may come first.
    Rows are kept until the contributions that use them are decided, so a trainer may repeat its call.

    Attributes:
        join_key, total_rows: as given.
    """

    def __init__(self, backend: RemoteBackend, join_key: str, *, total_rows: int, tenant: str, owned: bool):
        self._backend = backend
        self._tenant = tenant
        self._owned = _requests.check_bool(owned, "owned")
        checked = _terms.check_join(join_key, total_rows, None, 0, _arrays.FLOAT32, "rows")
        self.join_key = checked.join_key
        self.total_rows = checked.total_rows

    def __repr__(self) -> str:
        return f"<headwater.Teacher {self.join_key!r} of {self.total_rows} rows>"

    def stream(self, rows: Any, row_indices: Any = None, *, timeout_s: float | None = None) -> int:
        """Sends rows of the set; returns when the server keeps them.

        Several calls, of several processes, may bring disjoint rows of one set.

        Args:
            rows: (num_rows, hidden_size of the teacher's head) float32, float16 or bfloat16, at least one row. A tensor's leading
                dimensions are flattened.
            row_indices: (num_rows,) integers in [0, total_rows), each once: which row of the set each one is. None: all rows of the
                set, in order.
        Returns:
            Number of rows that were taken: all.
        Raises:
            InvalidArgumentError: `CHUNK_OUT_OF_RANGE`: a row that came before.
            FailedPreconditionError: `JOIN_INCOMPLETE`: the set has another number of rows, another element type or size.
            ResourceExhaustedError: `IN_FLIGHT_BYTES_EXCEEDED`: too many rows wait for their trainers (max_join_bytes).
        """
        if _arrays.is_torch_tensor(rows) and rows.dim() > 2:
            rows = rows.reshape(-1, rows.shape[-1])
        shape = getattr(rows, "shape", None)
        hidden_size = shape[1] if shape is not None and len(shape) == 2 else 0
        sent = _requests.check_rows(rows, "rows", hidden_size, on_device=True)
        count = sent.shape[0]
        if count == 0:
            raise invalid_argument("INVALID_FIELD", "rows must have at least one row", field="rows", actual=0)
        if row_indices is None:
            _arrays.check_shape((count,), (self.total_rows,), "rows without row_indices (their number)")
        place = _terms.check_join(self.join_key, self.total_rows, row_indices, count, sent.data_type, "rows")
        bound_s = self._backend.timeout_s if timeout_s is None else check_number(timeout_s, "timeout_s", low=0, low_open=True)
        try:
            return self._backend.stream_teacher(self._tenant, sent, place, self._owned, bound_s)
        except FailedPreconditionError as error:
            raise _terms.explained(error) from None

    stream_future = as_future(stream, threads="stream")
