"""HTTP by hand over asyncio, where a test needs hundreds of clients, or one that reads as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.server import Served


def port_of(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def post(path: str, body: dict[str, Any] | bytes) -> bytes:
    """The bytes of a request that closes its connection after the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def get(path: str) -> bytes:
    """The same for a GET."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def connected(
    server: Served, request: bytes, limit: int = 2**16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which `request` was sent; closed at the end, whatever is left to read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server), limit=limit)
    try:
        writer.write(request)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass
class Raw:
    """An answer as it came: status 0 is a connection that ended without one."""

    status: int = 0
    head: str = ""
    body: bytes = b""
    seconds: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of pieces of the body (monotonic, s)

    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        error = json.loads(self.body)["error"]
        assert isinstance(error, dict)
        return error

    @property
    def longest_gap(self) -> float:
        """Seconds between two pieces of the body, at most."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


async def exchange(server: Served, request: bytes) -> Raw:
    """Send, and read to the end of the connection. A body in chunks keeps its chunk heads."""
    begin, raw = time.monotonic(), Raw()
    try:
        async with connected(server, request) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            raw.head = head.decode("latin-1").lower()
            raw.status = int(head.split(b" ", 2)[1])
            while piece := await reader.read(2**16):
                raw.arrivals.append(time.monotonic())
                raw.body += piece
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    raw.seconds = time.monotonic() - begin
    return raw
