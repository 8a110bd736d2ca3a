"""The port: had before the model is loaded, opened after."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from server.engine.errors import ConfigError

_BACKLOG = 2048
# Seconds (the last: milliseconds) after which the kernel gives up a client that vanished or takes nothing.
_PATIENCE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address and not yet listening; ConfigError says why it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"--host {host} is not known here; give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token must not wait for an ACK
        for option, value in _PATIENCE.items():
            if hasattr(socket, option):  # Linux has all; connections inherit them
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refused(error, host, port) from None
    return listener


def listen(listener: socket.socket, host: str) -> None:
    """Listen. Of two servers started at once on one port, the later finds out here."""
    port = listener.getsockname()[1]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _refused(error, host, port) from None


def url(listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = "[::1]" if ":" in host else "127.0.0.1"
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def where(listener: socket.socket) -> str:
    """The same in words, with what a URL does not say: whether others find it too."""
    if ip_address(listener.getsockname()[0]).is_unspecified:
        return f"all addresses (from here {url(listener)})"
    return url(listener)


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(error: OSError, host: str, port: int) -> ConfigError:
    match error.errno:
        case errno.EADDRINUSE:
            return ConfigError(
                f"port {port} of {host} is taken; choose another with --port, or stop who has it"
            )
        case errno.EACCES | errno.EPERM:
            return ConfigError(
                f"port {port} of {host} is not open to this user; choose one above 1023 with --port"
            )
        case errno.EADDRNOTAVAIL:
            return ConfigError(f"--host {host} is not an address of this machine; 127.0.0.1 and 0.0.0.0 are")
        case _:
            return ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}")
