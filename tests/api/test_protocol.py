"""Bytes that are no request, heads without end, connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

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
        return await asyncio.wait_for(reader.read(), 60)
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


@pytest.mark.parametrize("stream", [True, False])
async def test_junk_behind_a_request_does_not_spoil_its_answer(
    words: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is whole, the connection ends with it, and nothing is logged."""
    async with serving(words) as api:
        api.service.pace = 0.02
        body = post(asked(C, stream=stream))
        for junk in (b"hello\r\n\r\n", b"\x00" * 1000):
            for pieces in ([body + junk], [body, junk, junk]):
                reply = await answer_to(api.port, *pieces)
                assert reply.count(b"HTTP/1.1 ") == 1 and reply.startswith(b"HTTP/1.1 200 OK")
                assert reply.endswith(b"0\r\n\r\n" if stream else b"}") and b'"length"' in reply
        refused = post({})[:-2].replace(b"Content-Length: 2", b"Content-Length: 0")
        reply = await answer_to(api.port, refused + b'{"messages": 1}')
        assert reply.count(b"HTTP/1.1 ") == 1 and reply.startswith(b"HTTP/1.1 400 ")
    assert [record for record in caplog.records if record.name.startswith("server")] == []


async def test_a_body_that_is_no_http(words: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads it is told, as if the client had left; the client is told what was wrong."""
    async with serving(words) as api:
        head = post({}).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
        for pieces in ([head + b"5\r\n{    \r\nzzz\r\n"], [head, b"5\r\n{    \r\n", b"zzz\r\n"]):
            reply = await answer_to(api.port, *pieces)
            assert reply.count(b"HTTP/1.1 ") == 1 and reply.startswith(b"HTTP/1.1 400 ")
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert [record for record in caplog.records if record.name.startswith("server")] == []


async def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    async with serving(words) as api:
        refused = post({}).replace(b"Content-Length: 2\r\n\r\n{}", b"Content-Length: 100000000\r\n\r\n")
        begin = time.monotonic()
        reply = await answer_to(api.port, refused, *[b"x"] * 10, pause=0.05)
        assert reply.startswith(b"HTTP/1.1 413 ") or reply == b""  # a byte too late resets the connection
        assert time.monotonic() - begin < 3
        twice = post({"pad": "x" * 100_000}).replace(b"application/json", b"text/plain")
        last = get("/version").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        reply = await answer_to(api.port, twice[:5000], twice[5000:], twice, last)
        assert [part[:3] for part in reply.split(b"HTTP/1.1 ")[1:]] == [b"415", b"415", b"200"]


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
            answer_to(api.port, b"GET / HTTP/1.1\r\n", *[b"a"] * 20, pause=0.05),
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


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("waiting", ["small", "large", "many"])
async def test_leaving_while_requests_wait_for_an_answer(
    words: Path, stream: bool, how: str, waiting: str
) -> None:
    """What is pipelined behind an answer must not hide that the client has left."""
    async with serving(words) as api:
        api.service.pace = 0.05
        behind = {
            "small": get("/health"),
            "large": post({"pad": "x" * 300_000}),
            "many": get("/health") * 100,
        }
        _, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(post(asked(C, max_tokens=1000, stream=stream)))
        await asyncio.sleep(0.2)
        writer.write(behind[waiting])
        await asyncio.sleep(0.2)
        assert api.service.running == 1
        writer.transport.abort() if how == "abort" else writer.close()
        await api.idle(2.0)


async def test_what_waits_is_answered_in_its_turn(words: Path) -> None:
    async with serving(words) as api:
        api.service.pace = 0.1
        last = get("/version").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        body = asked(C, max_tokens=5)
        reply = await answer_to(api.port, post(body) + post(body), get("/health"), last)
        assert reply.count(b"HTTP/1.1 200 OK") == 4
        assert reply.endswith(b'{"version":"1.2.3"}')


async def test_too_much_behind_an_answer_is_not_kept(words: Path) -> None:
    """The answer that runs is whole; what waited has to be sent again."""
    async with serving(words) as api:
        api.service.pace = 0.05
        flood = get("/health") * (protocol.MAX_WAITING // len(get("/health")) + 1)
        reply = await answer_to(api.port, post(asked(C, max_tokens=10, stream=True)), flood, flood)
        assert reply.count(b"HTTP/1.1 200 OK") == 1
        assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_request_that_the_end_overtakes(words: Path) -> None:
    """Half a body when the server stops: told in the one shape, not in uvicorn's."""
    async with serving(words) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(post(asked(C))[:-5])
        await asyncio.sleep(0.1)
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "shutting_down"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def post(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
