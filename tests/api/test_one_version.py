"""Clients that offer HTTP/2 or WebSocket are answered in HTTP/1.1, and those of HTTP/1.0 without chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.test_answers import C, asked
from tests.api.test_protocol import answer_to
from tests.support.api import serving

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def request(body: bytes, offer: bytes, chunked: bool) -> bytes:
    """A completion; its connection stays open."""
    head = f"POST {C} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode() + offer
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    half = len(body) // 2
    pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:half], body[half:], b"")]
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces)


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_an_offered_upgrade_is_declined_and_the_body_read(
    words: Path, offer: bytes, chunked: bool, size: int
) -> None:
    """Whatever pieces it comes in; twice on a connection, and then a request without an offer."""
    async with serving(words) as api:
        body = json.dumps(asked(C)).encode()
        plain = await answer_to(api.port, request(body, b"Connection: close\r\n", chunked))
        text = json.loads(plain.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        assert text
        data = request(body, offer, chunked) * 2 + LAST
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        reply = await answer_to(api.port, *pieces, pause=0)
        answers = reply.split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"200", b"200"]
        for answer in answers[:2]:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text
        assert b'{"version":' in answers[2]


async def test_an_offer_without_a_body(words: Path) -> None:
    async with serving(words) as api:
        for offer in (H2C, WEBSOCKET):
            asking = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
            reply = await answer_to(api.port, asking, LAST)
            assert [answer[:3] for answer in reply.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200"]


async def test_what_is_wrong_behind_an_offer_is_refused_as_ever(words: Path) -> None:
    async with serving(words) as api:
        for wrong in (b"zz\r\nabc\r\n", b"-1\r\n", b"5\r\nabcdefgh"):
            head = request(b"{}", H2C, chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            reply = await answer_to(api.port, head + wrong)
            assert reply.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in reply
        large = request(b"", H2C, chunked=False).replace(b"Length: 0", b"Length: 99999999")
        assert (await answer_to(api.port, large + b"x", pause=0.05)).startswith(b"HTTP/1.1 413 ")
        assert (await api.http.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_has_no_chunks(words: Path, stream: bool) -> None:
    async with serving(words) as api:
        body = json.dumps(asked(C, stream=stream)).encode()
        old = request(body, b"", chunked=False).replace(b"HTTP/1.1", b"HTTP/1.0")
        head, _, answer = (await answer_to(api.port, old)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        if stream:
            events = answer.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""] and len(events) > 3
            assert all(event.startswith("data: {") for event in events[:-2])
        else:
            assert json.loads(answer)["object"] == "text_completion"
            assert b"content-length: %d" % len(answer) in head
