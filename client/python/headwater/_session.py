"""The session of one client: opened when it is first needed, kept alive on a connection of its own, closed with the client."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from headwater._errors import HeadwaterError, from_rpc_error
from headwater.v1 import session_service_pb2, session_service_pb2_grpc

# A lease is renewed this often while it runs.
_RENEWALS_PER_LEASE = 3
# However short or long a lease is granted, in seconds; longer ones no lock can wait for.
_SHORTEST_PERIOD_S = 0.01
_LONGEST_PERIOD_S = 86400.0
# How soon a renewal that failed is tried again, in seconds.
_RETRY_S = 1.0
# Bounds of one renewal and of closing, in seconds.
_MAX_RENEWAL_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
# Bound of closing all sessions that are left open when the interpreter exits, in seconds.
_EXIT_TIMEOUT_S = 1.0

# The open sessions by id: the process that has opened each, its channel, its stub. A fork inherits those of its parent.
_open: dict[bytes, tuple[int, grpc.Channel, Any]] = {}


def _end(session_id: bytes, timeout_s: float) -> None:
    """Ends a session of this process on the server, as far as that answers; otherwise its lease ends by itself. Once for each."""
    pid, _channel, stub = _open.pop(session_id, (0, None, None))
    if pid == os.getpid():
        with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel was closed
            stub.CloseSession(session_service_pb2.CloseSessionRequest(session_id=session_id), timeout=timeout_s)


@atexit.register
def _end_all() -> None:
    """Clients that nobody has closed end with the process, which is no failure that a lease should have to find out."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    own = [session_id for session_id, (pid, _, _) in list(_open.items()) if pid == os.getpid()]
    for session_id in own:
        if (remaining_s := deadline - time.monotonic()) > 0:
            _end(session_id, remaining_s)


class Session:
    """A lease on the server that owns what this client leaves undecided. Thread-safe.

    A daemon thread renews the lease on a channel of its own, so that a busy connection does not hold it up. It knows this object
    only weakly, and closes the session of a client that is forgotten without `close`.
    """

    def __init__(
        self,
        make_channel: Callable[[], grpc.Channel],
        lease_s: float,
        client_name: str,
        on_forgotten: Callable[[bytes], object] | None = None,
    ):
        """`on_forgotten` is told the id of a session that the server does not know any more."""
        self._on_forgotten = on_forgotten
        self._make_channel = make_channel
        self._lease_s = lease_s
        self._client_name = client_name
        self._lock = threading.Lock()
        self._id = b""
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._stop = threading.Event()
        self._closed = False
        # Called on the thread that keeps the session alive, when the server does not know it any more.
        self.on_lost: Callable[[], None] | None = None

    @property
    def id(self) -> bytes:
        """The session's 32 bytes; empty while none is open."""
        return self._id

    def open(self, timeout_s: float) -> bytes:
        """The session's id; opens one if none is open.

        Raises:
            HeadwaterError: the server grants none.
        """
        with self._lock:
            if self._id or self._closed:
                return self._id
            if self._stub is None:
                self._channel = self._make_channel()
                self._stub = session_service_pb2_grpc.SessionServiceStub(self._channel)
            request = session_service_pb2.OpenSessionRequest(client_name=self._client_name)
            request.lease.FromNanoseconds(int(self._lease_s * 1e9))
            try:
                reply = self._stub.OpenSession(request, timeout=timeout_s)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            self._id = reply.session_id
            _open[self._id] = os.getpid(), self._channel, self._stub
            weakref.finalize(self, self._stop.set).atexit = False
            arguments = (weakref.ref(self), self._stub, self._stop, self._id, _renewal_period(reply.lease))
            threading.Thread(target=_keep_alive, args=arguments, name="headwater-keep-alive", daemon=True).start()
            return self._id

    def forget(self, session_id: bytes) -> None:
        """The server does not know this session any more; the next `open` opens another."""
        with self._lock:
            if self._id != session_id:
                return
            self._id = b""
            _open.pop(session_id, None)
            self._stop.set()
            self._stop = threading.Event()
        if self._on_forgotten is not None:
            self._on_forgotten(session_id)

    def close(self) -> None:
        """Ends the session on the server, as far as that answers, and the thread. Idempotent."""
        with self._lock:
            self._closed = True
            session_id, self._id = self._id, b""
            self._stop.set()
            channel, self._channel = self._channel, None
            if channel is None:
                return
            if session_id:
                _end(session_id, _CLOSE_TIMEOUT_S)
                if self._on_forgotten is not None:
                    self._on_forgotten(session_id)  # its regions went with it: nobody gives them back
            channel.close()


def _renewal_period(lease: Any) -> float:
    return min(max(lease.ToNanoseconds() * 1e-9 / _RENEWALS_PER_LEASE, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)


def _keep_alive(session: weakref.ref[Session], stub: Any, stop: threading.Event, session_id: bytes, period_s: float) -> None:
    while not stop.wait(period_s) and session() is not None:
        try:
            reply = stub.KeepAlive(
                session_service_pb2.KeepAliveRequest(session_id=session_id), timeout=min(period_s, _MAX_RENEWAL_S)
            )
            if reply.HasField("lease"):
                period_s = _renewal_period(reply.lease)
        except grpc.RpcError as error:
            # Anything else may pass, and the lease has not ended yet.
            if _reason(error) == "SESSION_NOT_FOUND":
                owner = session()
                if owner is not None:
                    owner.forget(session_id)
                    if owner.on_lost is not None:
                        owner.on_lost()
                return
            period_s = min(period_s, _RETRY_S)
        except ValueError:
            return  # the channel was closed
    if session() is None:  # forgotten without `close`
        _end(session_id, _CLOSE_TIMEOUT_S)


def _reason(error: grpc.RpcError) -> str:
    failure: HeadwaterError = from_rpc_error(error)
    return failure.reason
