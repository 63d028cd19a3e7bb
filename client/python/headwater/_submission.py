"""One micro-batch on its way to a server: its attempts, in its session, as often as they are worth it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwater._channel import MAX_MESSAGE_BYTES
from headwater._errors import HeadwaterError
from headwater._futures import Cancel, Done
from headwater._messages import check_rows_message_size, compute_header, summary_result
from headwater._requests import ComputeRequest
from headwater._retry import AMBIGUOUS_CODES
from headwater._transfers import Answer, check_answer
from headwater._types import LossResult

if TYPE_CHECKING:
    from headwater._remote import RemoteBackend


class Submission:
    """Runs once. A retry is a new attempt: the server may still be computing the one before."""

    def __init__(self, backend: RemoteBackend, request: ComputeRequest, timeout_s: float):
        self._backend = backend
        self._request = request
        self._deadline = time.monotonic() + timeout_s
        self._attempt = 0
        # The outcome of the first attempt, where that ran before `run`, and the session that it named.
        self._failure: HeadwaterError | None = None
        self._first_session_id = b""

    def run(self) -> LossResult:
        """Blocks until the last attempt is answered."""
        request, backend = self._request, self._backend
        micro_batch = request.micro_batch
        first = self._failure is None
        if micro_batch is not None and first:
            self._attempt = self._first_attempt(micro_batch)

        def in_session(session_id: bytes, remaining_s: float) -> LossResult:
            nonlocal first
            again, first = not first, False
            if micro_batch is not None:
                self._attempt += again
                backend.note_attempt(request.keys, micro_batch, self._attempt, request.attempt)
            return self._once(session_id, remaining_s)

        def once(remaining_s: float, tries: int) -> LossResult:
            failure, self._failure = self._failure, None
            if failure is not None:
                if failure.reason != "SESSION_NOT_FOUND" or not self._first_session_id:
                    raise failure
                # That one alone is gone: by now another call may have opened the session that its own micro-batch is in.
                backend.forget_session(self._first_session_id)
            if not request.explicit:
                return in_session(b"", remaining_s)
            return backend.in_session(remaining_s, lambda session_id: in_session(session_id, remaining_s), opens=True)

        try:
            return backend.retrying(self._remaining_s(), once)
        except HeadwaterError as error:
            if micro_batch is not None and error.code in AMBIGUOUS_CODES:
                # It may still be computing: who calls again supersedes it.
                backend.note_attempt(request.keys, micro_batch, self._attempt + 1, request.attempt)
            raise

    def start(self, done: Done) -> Cancel | None:
        """Begins the first attempt and returns what cancels it; `done` is called once, on a thread that must not be held up.

        It gets what returns the result. If the attempt has failed, that goes on with the second one, or raises; it may block. None:
        nothing was begun, because that would block; see `run`.
        """
        request, backend = self._request, self._backend
        session_id = b""
        if request.explicit:
            session_id = backend.session_id
            if backend.has_session and not session_id:
                return None
            self._first_session_id = session_id
        backend.check_process()
        if request.micro_batch is not None:
            self._attempt = self._first_attempt(request.micro_batch)
            backend.note_attempt(request.keys, request.micro_batch, self._attempt, request.attempt)

        def on_answer(fetch: Callable[[], Answer]) -> None:
            def outcome() -> LossResult:
                try:
                    answer = fetch()
                except HeadwaterError as error:
                    self._failure = error
                    return self.run()
                return self._result(answer)

            done(outcome)

        return backend.transfers.start(request, self._header(session_id), self._remaining_s(), on_answer)

    def _first_attempt(self, micro_batch: int) -> int:
        return self._backend.attempts.first(self._request.keys[0], micro_batch, self._request.attempt)

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _header(self, session_id: bytes) -> Any:
        header = compute_header(self._request, self._attempt, session_id)
        check_rows_message_size(header.ByteSize(), MAX_MESSAGE_BYTES)
        return header

    def _once(self, session_id: bytes, timeout_s: float) -> LossResult:
        self._backend.check_process()
        return self._result(self._backend.transfers.compute(self._request, self._header(session_id), timeout_s))

    def _result(self, answer: Answer) -> LossResult:
        return summary_result(check_answer(self._request, answer), answer.grad_hidden, self._attempt)
