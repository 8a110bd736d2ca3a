"""Bytes that are no request, heads without end, connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from server.api import protocol
from tests.api.test_answers import C, asked
from tests.support.api import serving


async def answer_to(port: int, *pieces: bytes, pause: float = 0.01) -> bytes:
    """What comes back, to the end of the connection, for bytes sent piece by piece; b"" for a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    "junk", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01"]
)
async def test_what_is_no_http(words: Path, junk: bytes) -> None:
    async with serving(words) as api:
        reply = await answer_to(api.port, junk)
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert b"application/json" in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
        assert (await api.http.get("/health")).status_code == 200


async def test_heads_without_end(words: Path) -> None:
    async with serving(words) as api:
        start = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: "
        fits = start + b"x" * (protocol.MAX_HEAD - len(start) - 100) + b"\r\nConnection: close\r\n\r\n"
        assert b" 200 OK" in await answer_to(api.port, fits[:1000], fits[1000:])
        for pieces in ([start, *[b"x" * 10_000] * 100], [start[:-14], *[b"a: b\r\n" * 1000] * 100]):
            reply = await answer_to(api.port, *pieces, pause=0)
            if reply:  # unless the reset of what was not read overtook it
                assert b" 431 " in reply
                assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"
        assert (await api.http.get("/health")).status_code == 200


async def test_a_large_body_is_not_a_large_head(words: Path) -> None:
    async with serving(words) as api:
        for _ in range(3):  # on one connection
            reply = await api.http.post(C, json=asked(C, pad="x" * 300_000))
            assert reply.status_code == 200


async def test_silent_connections_are_closed(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    async with serving(words) as api:
        begin = time.monotonic()
        replies = await asyncio.gather(
            answer_to(api.port),
            answer_to(api.port, b"GET / HT"),
            answer_to(api.port, *[b"a"] * 20, pause=0.05),
        )
        assert replies == [b"", b"", b""]
        assert time.monotonic() - begin < 3


async def test_stray_bytes_do_not_end_an_answer(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    async with serving(words) as api:
        api.service.pace = 0.05
        body = json.dumps(asked(C, max_tokens=10, stream=True)).encode()
        head = (
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
            % C.encode()
        )
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        reply = await answer_to(api.port, request, b"\r\n")
        assert b"data: [DONE]" in reply


async def test_too_many_connections(words: Path) -> None:
    """The ones that are open go on; a new one is told, and welcome again when another has left."""
    async with serving(words, connections=3) as api:
        assert (await api.http.get("/health")).status_code == 200  # and stays open
        _, second = await asyncio.open_connection("127.0.0.1", api.port)
        for _ in range(3):
            reply = await answer_to(api.port)
            assert reply.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nretry-after: 5\r\n" in reply
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert (await api.http.get("/health")).status_code == 200
        second.close()
        await asyncio.sleep(0.1)
        request = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert b" 200 OK" in await answer_to(api.port, request)
