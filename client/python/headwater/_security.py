"""How connections are secured: TLS, and the token that every call carries; and the trace that calls belong to."""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import re
from collections.abc import Callable
from typing import Any

import grpc

from headwater._errors import invalid_argument

# Neither id is all 0.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TOKEN_BYTES = 4096
# What follows unix: or unix-abstract: is a name; anything else ends with a host and a port, IPv6 in brackets.
_UNIX = re.compile(r"unix(?:-abstract)?:[^\n]+")
_HOST_AND_PORT = re.compile(r"(?:dns:(?://[^/\s]*/)?|ipv4:|ipv6:)?(?:\[[^][/\s]+\]|[^][:/,\s]+):(\d{1,5})")


def is_unix(address: str) -> bool:
    """Whether the address is that of a Unix socket."""
    return address.startswith(("unix:", "unix-abstract:"))


@dataclasses.dataclass(frozen=True)
class TLS:
    """TLS to the server. Files are in PEM.

    The connections that carry rows take up new files when these change; the one of grpcio reads them once, in `connect`.
    """

    ca_certificate: str | None = None
    """File with the authorities that may have signed the server's certificate; None: those of the system."""
    client_certificate: str | None = None
    """File with what this client shows to a server that asks for it (mTLS): the chain."""
    client_key: str | None = None
    """File with its key; both or neither."""
    server_name: str | None = None
    """The name that the server's certificate must be for; None: the host of the address."""


@dataclasses.dataclass(frozen=True)
class Security:
    """What `connect` was given of it, checked against the address."""

    tls: TLS | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    allow_plaintext_token: bool = False
    traceparent: str | None = None

    def check(self, address: str) -> None:
        """Raises InvalidArgumentError, which never quotes the token, for what has no meaning or would give it away."""
        unix = is_unix(address)
        if self.tls is not None:
            if unix:
                raise _invalid("tls", "must be None for a Unix socket, which has no TLS")
            if (self.tls.client_certificate is None) != (self.tls.client_key is None):
                raise _invalid("tls", "needs a client_certificate and its client_key, or neither")
            for name in ("ca_certificate", "client_certificate", "client_key"):
                if (path := getattr(self.tls, name)) is not None:
                    _read(name, path)
        if self.traceparent is not None and not _TRACEPARENT.fullmatch(self.traceparent):
            raise _invalid(
                "traceparent", f"must be 00-TRACE_ID-SPAN_ID-FLAGS as W3C Trace Context says it, got {self.traceparent!r}"
            )
        if self.token is None:
            return
        if not 1 <= len(self.token) <= _MAX_TOKEN_BYTES or not all(" " < character < "\x7f" for character in self.token):
            raise _invalid("token", f"must be 1 to {_MAX_TOKEN_BYTES} printable ASCII characters without blanks")
        host = host_of(address)
        if self.tls is None and not unix and not _is_loopback(host) and not self.allow_plaintext_token:
            raise _invalid(
                "token",
                f"is not sent to {host} in plain text, where everybody on the way could read it: use tls= (or, in a network that "
                "nobody else can listen on, allow_plaintext_token=True)",
            )

    def core_options(self) -> dict[str, str]:
        """The same for the client core."""
        options: dict[str, str] = {}
        if self.tls is not None:
            options["tls"] = "1"
            options.update({name: value for name, value in dataclasses.asdict(self.tls).items() if value is not None})
        if self.token is not None:
            options["token"] = self.token
        if self.allow_plaintext_token:
            options["allow_plaintext_token"] = "1"
        if self.traceparent is not None:
            options["traceparent"] = self.traceparent
        return options

    def make_channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A channel of grpcio."""
        if self.tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            tls = self.tls
            files = [_read(name, getattr(tls, name)) for name in ("ca_certificate", "client_key", "client_certificate")]
            if tls.server_name is not None:
                options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
            channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)
        entries = []
        if self.token is not None:
            entries.append(("authorization", f"Bearer {self.token}"))
        if self.traceparent is not None:
            entries.append(("traceparent", self.traceparent))
        return grpc.intercept_channel(channel, _EntriesInterceptor(entries)) if entries else channel

    def hint(self) -> str:
        """What may be the matter where nobody answers."""
        if self.tls is None:
            return "a server that has TLS does not answer without (tls=)"
        return (
            "its certificate must be for its name and signed by an authority of tls.ca_certificate, and it may ask for a client's"
        )


def make_security(
    tls: TLS | bool | None, token: str | None, allow_plaintext_token: bool, traceparent: str | None, address: str
) -> Security:
    """The arguments of `connect`."""
    if isinstance(tls, bool):
        tls = TLS() if tls else None
    if tls is not None and not isinstance(tls, TLS):
        raise _invalid("tls", f"must be a headwater.TLS, True or None, got {tls!r}")
    if token is not None and not isinstance(token, str):
        raise _invalid("token", f"must be a string, got a {type(token).__name__}")
    if not isinstance(allow_plaintext_token, bool):
        raise _invalid("allow_plaintext_token", f"must be True or False, got {allow_plaintext_token!r}")
    if traceparent is not None and not isinstance(traceparent, str):
        raise _invalid("traceparent", f"must be a string, got a {type(traceparent).__name__}")
    security = Security(tls, token, allow_plaintext_token, traceparent)
    security.check(address)
    return security


def check_address(address: Any) -> str:
    """Where a server listens. gRPC would take anything, and say after `connect_timeout_s` that nobody answers there."""
    given = repr(address) if isinstance(address, str) else f"a {type(address).__name__}"
    if isinstance(address, str):
        host_and_port = _HOST_AND_PORT.fullmatch(address)
        if _UNIX.fullmatch(address) or (host_and_port and 1 <= int(host_and_port[1]) <= 65535):
            return address
    raise _invalid(
        "address",
        "must be host:port (an IPv6 host in brackets, before it dns:, ipv4: or ipv6: if need be), unix:/path/to/socket or "
        f"unix-abstract:name, got {given}",
    )


def host_of(address: str) -> str:
    """The host of host:port, with or without a scheme."""
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(scheme)
    address = address.rsplit("/", 1)[-1]
    if address.startswith("["):
        return address[1:].split("]", 1)[0]
    return address.rsplit(":", 1)[0] if address.count(":") == 1 else address


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _invalid(field: str, what: str) -> Exception:
    return invalid_argument("INVALID_FIELD", f"{field} {what}", field=field)


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    if not isinstance(path, str) or "\n" in path:
        raise _invalid(f"tls.{name}", f"must be a path, got {path!r}")
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise _invalid(f"tls.{name}", f"must be a PEM file that can be read: {error}") from None
    if b"-----BEGIN " not in text:
        raise _invalid(f"tls.{name}", f"must be a PEM file, and {path} is none")
    return text


class _CallDetails(
    collections.namedtuple("_CallDetails", "method timeout metadata credentials wait_for_ready compression"), grpc.ClientCallDetails
):
    pass


class _EntriesInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds entries to the metadata of every call."""

    def __init__(self, entries: list[tuple[str, str]]):
        self._entries = entries

    def _call(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(
            _CallDetails(
                details.method,
                details.timeout,
                [*(details.metadata or ()), *self._entries],
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    intercept_unary_unary = _call
    intercept_unary_stream = _call
    intercept_stream_unary = _call
    intercept_stream_stream = _call
