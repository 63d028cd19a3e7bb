"""Which way micro-batches take: the client core's or grpcio's, and why no better one."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import grpc

from headwater import _channel
from headwater._client_library import Connection, LibraryNotFound, library
from headwater._errors import HeadwaterError, from_rpc_error, make_error
from headwater._library_transfers import LibraryTransfers
from headwater._security import Security
from headwater._session import Session
from headwater._transfers import PythonTransfers, Transfers
from headwater.v1 import session_service_pb2

_log = logging.getLogger("headwater")


class Paths:
    """The transfers and the session of one client, and what is to be said about them."""

    def __init__(
        self,
        address: str,
        connect_timeout_s: float,
        *,
        transport: str,
        stripes: int,
        session_lease_s: float | None,
        sessions: Any,
        python: PythonTransfers,
        security: Security,
    ):
        """`sessions` is the stub of SessionService; `python` is what is used where the client core is not."""
        self.session: Session | None = None
        self._demanded = transport
        self._sessions = sessions
        self._connection: Connection | None = None
        self._why_python = 'transport="python" asks for grpcio'
        self.transfers: Transfers
        client_name = _channel.client_name()
        if transport != "python":
            try:
                library()
                self._connection = Connection(
                    address,
                    {
                        "transport": transport,
                        "stripes": stripes,
                        "connect_timeout_ms": max(1, int(connect_timeout_s * 1e3)),
                        **({} if session_lease_s is None else {"session_lease_ms": max(1, int(session_lease_s * 1e3))}),
                        "client_name": client_name,
                        **security.core_options(),
                    },
                )
            except LibraryNotFound as error:
                self._why_python = f"the client core is missing: {error}"
                if transport != "auto":
                    raise _unavailable(transport, self._why_python) from None
                _log.info("headwater: rows go through grpcio, which is slower: %s", error)
        self.transfers = python if self._connection is None else LibraryTransfers(self._connection)
        if session_lease_s is not None:
            on_forgotten = None if self._connection is None else self._connection.forget_session
            self.session = Session(lambda: _channel.make_channel(address, security), session_lease_s, client_name, on_forgotten)
        if transport in ("shared_memory", "cuda_ipc"):
            try:
                why = self._why_not(transport, self._server(connect_timeout_s), demanded=True)
                if why is not None:
                    raise _unavailable(transport, why)
            except BaseException:
                self.transfers.close()
                raise

    def note(self) -> str:
        """One sentence why tensors take no better path; empty if there is none, or nothing is known yet."""
        return self._why_python if self._connection is None else self._connection.info().get("why_not_better", "")

    def transports(self, timeout_s: float) -> dict[str, str | None]:
        """By path, why it is not available; None if it is."""
        server = self._server(timeout_s) if self._connection is not None else None
        known = {path: self._why_not(path, server) for path in ("cuda_ipc", "shared_memory", "grpc")}
        return {**known, "python": None}

    def _server(self, timeout_s: float) -> Any:
        try:
            return self._sessions.GetServerInfo(session_service_pb2.GetServerInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _why_not(self, path: str, server: Any, *, demanded: bool = False) -> str | None:
        connection = self._connection
        if connection is None:
            return self._why_python
        if path == "grpc":
            return None
        if self._demanded == "grpc":
            return 'transport="grpc" asks for gRPC'
        if path == "cuda_ipc":
            return _why_no_device(connection, server, demanded)
        if not server.descriptor_socket and not server.named_regions:
            return "the server shares no memory: it was started without --descriptor_socket"
        if server.descriptor_socket and not server.named_regions and not os.path.exists(server.descriptor_socket):
            return f"the server's descriptor socket {server.descriptor_socket} is not here: it runs elsewhere, or in a container"
        info = connection.info()
        if info.get("host_transport") == "grpc" and not demanded:
            return info.get("why_not_better") or "the server has not registered this client's memory"
        return None


def _why_no_device(connection: Connection, server: Any, demanded: bool) -> str | None:
    if server.engine != "cuda":
        return f"the server computes with the {server.engine} engine, which has no device memory"
    torch = sys.modules.get("torch")
    if torch is None and not demanded:
        return "torch is not imported here, so there are no CUDA tensors"
    if torch is not None and not torch.cuda.is_available():
        return "this process has no CUDA device"
    info = connection.info()
    if info.get("cuda_transport") not in (None, "", "cuda_ipc"):
        return info.get("why_not_better") or "the last CUDA tensor could not be shared"
    return None


def _unavailable(transport: str, why: str) -> HeadwaterError:
    return make_error(
        "FAILED_PRECONDITION",
        "TRANSPORT_UNAVAILABLE",
        f'transport="{transport}" was demanded, but {why}',
        {"field": "transport", "transport": transport},
    )
