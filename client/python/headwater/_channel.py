"""What the package's gRPC calls share: how a channel is made, how messages are cut, how a stream is run both ways at once."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from headwater._arrays import HostArray
from headwater._errors import ClientClosedError, HeadwaterError, from_rpc_error, make_error
from headwater._futures import current_scope
from headwater._security import Security, is_unix
from headwater.v1 import head_service_pb2, loss_service_pb2

# Bytes of tensor data in one message, either way.
CHUNK_BYTES = 1 << 20
# Bound of one message in either direction: a chunk, or a header with targets and weights for max_micro_batch_rows rows.
MAX_MESSAGE_BYTES = 16 << 20

CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.experimental.enable_hedging", 0),
    # No service config from DNS may turn them on again.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A proxy that the environment names for web traffic would silently take `localhost` too.
    ("grpc.enable_http_proxy", 0),
    # Clients of one process do not share a connection without saying so.
    ("grpc.use_local_subchannel_pool", 1),
    # A server that was started again is found soon: the back-off between tries is the retry loop's.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# A connection whose other side does not answer is given up after this, twice: its machine is gone, or the way there is. gRPC would
# keep every call on it for as long as the system resends: a quarter of an hour.
_KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 20000),
    ("grpc.keepalive_timeout_ms", 20000),
    ("grpc.http2.max_pings_without_data", 0),
)


class _Grpc:
    """What became of gRPC in this process and those that it was forked from."""

    used = False  # there was a channel
    forked = False  # ... before a fork: a channel that is made now waits for ever for threads that stayed behind

    @classmethod
    def after_fork(cls) -> None:
        """Called in the child."""
        cls.forked = cls.used


os.register_at_fork(after_in_child=_Grpc.after_fork)


def make_channel(address: str, security: Security) -> grpc.Channel:
    """A connection of its own.

    Raises:
        ClientClosedError: this process was forked from one that had made a channel before.
    """
    if _Grpc.forked:
        raise ClientClosedError.of_fork()
    _Grpc.used = True
    keepalive = () if is_unix(address) else _KEEPALIVE_OPTIONS
    return security.make_channel(address, (*CHANNEL_OPTIONS, *keepalive))


def client_name() -> str:
    """What the server shows of this client; at most 128 bytes."""
    return f"python-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _closed(error: ValueError) -> HeadwaterError:
    return ClientClosedError(f"the client is closed ({error})")


class Calls:
    """Makes calls in the process that it was made in: gRPC's threads stay behind in a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of that one."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises ClientClosedError in a fork."""
        if self.is_forked:
            raise ClientClosedError.of_parent()

    def unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        """The answer to one request, or to an iterator of messages. The future that this thread works on can cancel it."""
        self.check_process()
        scope = current_scope()
        try:
            if scope is None:
                return method(request, timeout=timeout_s)
            call = method.future(request, timeout=timeout_s)
            scope.attach(call.cancel)
            return call.result()
        except grpc.FutureCancelledError:
            raise make_error("CANCELLED", "CANCELLED", "the call was cancelled by this client") from None
        except grpc.RpcError as error:
            raise self.failure(error) from None
        except ValueError as error:
            raise _closed(error) from None

    @staticmethod
    def failure(error: grpc.RpcError) -> HeadwaterError:
        """What has failed in a call that only the future which this thread works on can have cancelled."""
        scope = current_scope()
        return from_rpc_error(error, cancelled_here=scope is not None and scope.is_cancelled)

    def start_stream(self, method: Any, request: Any, timeout_s: float) -> Any:
        """A call that is answered by a stream. The future that this thread works on can cancel it."""
        self.check_process()
        try:
            call = method(request, timeout=timeout_s)
        except ValueError as error:
            raise _closed(error) from None
        scope = current_scope()
        if scope is not None:
            scope.attach(call.cancel)
        return call


class Sender:
    """Runs a bidirectional call: messages go out on gRPC's thread while this one reads, so a server that refuses early is heard."""

    def __init__(self) -> None:
        self.stopped = False
        self._error: Exception | None = None

    def guarded(self, messages: Iterable[Any]) -> Iterator[Any]:
        """The messages; an error in making them is kept for `reading` or `check`."""
        try:
            yield from messages
        except Exception as error:
            self._error = error  # gRPC would only log it
            raise

    def check(self) -> None:
        """Raises what went wrong in making the messages."""
        if self._error is not None:
            raise self._error from None

    @contextlib.contextmanager
    def reading(
        self, calls: Calls, method: Any, messages: Iterable[Any], timeout_s: float, wake: Callable[[], None] = lambda: None
    ) -> Iterator[Any]:
        """Yields the responses. `wake` releases a sender that waits for an answer."""
        call = calls.start_stream(method, self.guarded(messages), timeout_s)
        try:
            yield call
        except grpc.RpcError as error:
            self.check()
            raise calls.failure(error) from None
        finally:
            self.stopped = True
            wake()
            call.cancel()  # no effect on a call that has ended


def row_chunks(role: int, term_index: int, rows: HostArray) -> Iterator[Any]:
    """RowChunks of all rows, in ascending order."""
    row_count, width = rows.shape
    rows_per_chunk = max(1, CHUNK_BYTES // (width * rows.data.itemsize))
    data = rows.byte_view()
    row_bytes = width * rows.data.itemsize
    for start in range(0, row_count, rows_per_chunk):
        end = min(start + rows_per_chunk, row_count)
        yield loss_service_pb2.RowChunk(
            role=role,
            term_index=term_index,
            row_start=start,
            row_count=end - start,
            data=bytes(data[start * row_bytes : end * row_bytes]),
        )


def byte_chunks(data: memoryview, offset: int) -> Iterator[Any]:
    """ByteChunks from `offset` to the end."""
    for position in range(offset, len(data), CHUNK_BYTES):
        yield head_service_pb2.ByteChunk(offset_bytes=position, data=bytes(data[position : position + CHUNK_BYTES]))
