"""`connect`: checks the options of a client, and makes it."""

from __future__ import annotations

import dataclasses
import os
import uuid
from typing import Any

from headwater._client import DEFAULT_TIMEOUT_S, Client, check_tenant
from headwater._errors import InvalidArgumentError, invalid_argument, must_be
from headwater._loss._requests import check_bool, check_choice
from headwater._remote import RemoteBackend
from headwater._types import DEFAULT_RETRIES, TLS, RetryPolicy, check_integer, check_number

_TRANSPORTS = ("auto", "grpc", "shared_memory", "cuda_ipc")
_MAX_STRIPES = 64
_LONGEST_S = 2147483.0  # the core takes less than 2^31 ms


def connect(
    address: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = 10.0,
    tenant: str = "default",
    session: bool = True,
    session_lease: float = 30.0,
    retries: RetryPolicy | None = DEFAULT_RETRIES,
    replay: bool = False,
    replay_bytes: int = 1 << 30,
    replay_steps: int | None = None,
    transport: str = "auto",
    stripes: int = 8,
    tls: TLS | bool | None = None,
    token: str | None = None,
    allow_plaintext_token: bool = False,
    traceparent: str | None = None,
) -> Client:
    """Connects to a server.

    Args:
        address: `host:port` (an IPv6 host in brackets; before it gRPC's dns:, ipv4: or ipv6: if need be, as in `dns:///host:port`),
            `unix:/path/to/headwater.sock` or `unix-abstract:name`.
        timeout_s: bound of every call that does not bring its own, in seconds; retries and replays included. Not of connecting.
        connect_timeout_s: how long this function waits for the server to answer at all, in seconds.
        tenant: whose heads short names mean.
        session: own this client's undecided micro-batches. If the process dies, they are discarded when the lease ends, and their
            staging slots are free again. Other clients cannot decide them. The session is opened by the first explicit micro-batch,
            renewed by a daemon thread on a connection of its own, and closed with the client.
        session_lease: seconds, > 0 and at most 2147483; the server may shorten it.
        retries: how often calls that can be repeated without harm are tried: 5 times by default, after 0.1 s and more. None: once.
        replay: follow a restarted server: keep sent calls, and how steps were closed. A head may come back at this client's step,
            or at an older one that is still kept. Then take it, send everything since again in the same order, and continue. If it
            comes back at one that is not, calls are `StepLostError`, whose `restored_step` and `checkpoint` say where to go back
            to. One trainer of a run takes the head, and the others join it; if another run has taken it since, calls are
            `EpochFencedError`. Whatever `retries` says, such calls are repeated while the server is away (it cannot be reached, or
            says DRAINING or STARTING). Repetitions are at most 1 s apart unless the server asks for more, and end about a second
            before the end of `timeout_s`. `health` is not repeated.
        replay_bytes: bound of the replay log, >= 0. The oldest closed steps go first. An open step with more, or with a joined
            teacher's micro-batches (`JOIN`), is not kept, which is warned of once.
        replay_steps: closed steps that are kept, >= 0; 0: only the open one. None: as many as `replay_bytes` have room for. Fewer
            than there are between two checkpoints are of use only now and then.
        transport: the path of micro-batches. "auto": the best that works. CUDA tensors are read and written in place ("cuda_ipc").
            Rows in host memory lie in memory that is shared with the server ("shared_memory"), or go over several connections
            ("grpc"). One of these names demands it. `LossResult.transport` says which it was, `Client.transports` and
            `Client.transport_note` why no better one.
        stripes: connections that one micro-batch is spread over at most, in [1, 64]; fewer where the server allows fewer or the
            rows are few. "grpc" only.
        tls: encrypt, and check that the server is who it should be: a `headwater.TLS`, or True for the authorities of the system.
            Not for a Unix socket.
        token: sent with every call, for a server that asks for one. Not in plain text but to loopback addresses and Unix sockets.
        allow_plaintext_token: send it nevertheless, over a network that only the two sides can read.
        traceparent: sent with every call: the caller's span, as W3C Trace Context says it (00-TRACE_ID-SPAN_ID-FLAGS). The server's
            log names it, and a server with --trace_dir writes traces if its flags say that the trace is recorded.
    Returns:
        A Client; close it, or use it in a `with` statement. It makes no calls in a process that is forked from this one: that one
        connects itself.
    Raises:
        InvalidArgumentError: an argument is wrong, an address, a token or a file of TLS among them: at once.
        UnavailableError: no server answered in time; the message has gRPC's own reason.
        FeatureNotBuiltError: the client library is not there, which wheels have inside.
        TransportUnavailableError: the transport that is demanded does not work here.
    """
    check_number(session_lease, "session_lease", low=0, low_open=True, high=_LONGEST_S)
    check_number(connect_timeout_s, "connect_timeout_s", low=0, low_open=True, high=_LONGEST_S)
    timeout_s = check_number(timeout_s, "timeout_s", low=0, low_open=True)
    check_tenant(tenant)
    if transport == "python":
        raise invalid_argument(
            "INVALID_FIELD",
            'transport="python" (grpcio alone) is gone since 0.2: the wheel `headwater` has the client library inside, for Linux '
            "on x86-64 and arm64; leave transport out",
            field="transport",
        )
    policy = RetryPolicy(max_attempts=1) if retries is None else retries
    if not isinstance(policy, RetryPolicy):
        raise must_be("retries", "a headwater.RetryPolicy or None", policy)
    options: dict[str, Any] = {
        "client_name": f"python-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        "connect_timeout_ms": _milliseconds(connect_timeout_s),
        "session_lease_ms": _milliseconds(session_lease) if check_bool(session, "session") else 0,
        "max_attempts": policy.max_attempts,
        "initial_backoff_ms": _milliseconds(policy.initial_backoff),
        "max_backoff_ms": _milliseconds(policy.max_backoff),
        "transport": check_choice(transport, "transport", _TRANSPORTS),
        "stripes": check_integer(stripes, "stripes", low=1, high=_MAX_STRIPES),
    }
    check_integer(replay_bytes, "replay_bytes")
    if replay_steps is not None:
        check_integer(replay_steps, "replay_steps")
    if check_bool(replay, "replay"):
        options["replay_bytes"] = max(1, replay_bytes)  # 0 would be no log at all
        if replay_steps is not None:
            options["replay_steps"] = replay_steps
    if isinstance(tls, bool):
        tls = TLS() if tls else None
    if tls is not None:
        if not isinstance(tls, TLS):
            raise must_be("tls", "a headwater.TLS, True or None", tls)
        options["tls"] = 1
        files = {name: value for name, value in dataclasses.asdict(tls).items() if value is not None}
        options.update({name: _line(value, f"tls.{name}") for name, value in files.items()})
    if token is not None:
        options["token"] = _line(token, "token", quote=False)
    if check_bool(allow_plaintext_token, "allow_plaintext_token"):
        options["allow_plaintext_token"] = 1
    if traceparent is not None:
        options["traceparent"] = _line(traceparent, "traceparent")
    try:
        backend = RemoteBackend(_line(address, "address"), options, timeout_s=timeout_s)
    except InvalidArgumentError as error:
        if error.metadata.get("field") != "target":
            raise
        message = error.message.replace("target: expected", "address must be", 1)  # as the argument is called here
        raise invalid_argument("INVALID_FIELD", message, **{**error.metadata, "field": "address"}) from None
    return Client(backend, tenant=tenant)


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1e3)), 2**31 - 1)


def _line(value: Any, field: str, *, quote: bool = True) -> str:
    """A string that goes to the core as it is, which checks it; a value ends with its line there."""
    if isinstance(value, os.PathLike) and field.startswith("tls."):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or any(character in value for character in "\0\r\n"):
        given = f", got {value!r}" if quote else ""
        raise invalid_argument("INVALID_FIELD", f"{field} must be a string of one line{given}", field=field)
    return value
