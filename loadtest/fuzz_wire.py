"""Bytes out, an answer in: a client that sends what no proper client would send."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER_SECONDS = 60.0
ATTACK_SECONDS = 1.5  # what is no request is answered at once or not at all


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as bytes on the wire; `source` is who made it up, `note` what is wrong with it."""

    source: str
    note: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    body: bytes = b""

    def head(self, port: int) -> bytes:
        """Request line and headers. Host and Content-Length are added where the call names none."""
        named = {name.lower() for name, _ in self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        if "host" not in named:
            lines.append(f"Host: 127.0.0.1:{port}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if "content-length" not in named and "transfer-encoding" not in named:
            lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


@dataclass(frozen=True, slots=True)
class Attack:
    """Bytes for a connection of their own, which need not be HTTP; `half_close` ends our side after them,
    `reset` ends the connection without reading."""

    note: str
    data: bytes
    half_close: bool = False
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `status` 0 is a connection that closed without a word."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    headless: bool = False  # the answer to a HEAD: it has no body by rule

    @property
    def kind(self) -> str:
        """The media type, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Wire:
    """One kept-alive connection to the server at `port`, made anew whenever it closes. For one thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """Drop the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, call: Call) -> Answer:
        """The answer to `call`; a connection that the server closed between two calls is made once more."""
        kept = self._socket is not None
        answer = self._try(call)
        return self._try(call) if kept and answer.status == 0 else answer

    def attack(self, attack: Attack) -> Answer:
        """The answer to bytes on a connection of their own; status 0 if none came in ATTACK_SECONDS."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=ATTACK_SECONDS) as wire:
            try:
                wire.sendall(attack.data)
                if attack.reset:
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    return Answer(0)
                if attack.half_close:
                    wire.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed on us while we were sending: an answer may still lie there
            return _read(wire, "GET")[0]

    def _try(self, call: Call) -> Answer:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_SECONDS)
        with contextlib.suppress(OSError):  # refused before all of it was sent; the answer says why
            self._socket.sendall(call.head(self._port) + call.body)
        answer, closed = _read(self._socket, call.method)
        if closed:
            self.close()
        return answer


def _read(wire: socket.socket, method: str) -> tuple[Answer, bool]:
    """An answer, and whether the connection ended with it."""
    reply = http.client.HTTPResponse(wire, method=method)
    try:
        reply.begin()
        body = reply.read()
    except (OSError, http.client.HTTPException, ValueError):
        reply.close()
        return Answer(0), True
    headers: dict[str, Any] = {name.lower(): value for name, value in reply.getheaders()}
    closed = reply.will_close
    reply.close()
    return Answer(reply.status, headers, body, method == "HEAD"), closed
