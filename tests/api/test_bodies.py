"""What is no request at all: each broken body gets a 4xx in OpenAI's shape that does not repeat it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.body import MAX_DEPTH, parse_object
from server.api.errors import ApiError
from tests.support.api import serving

GOOD = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BROKEN = {
    "bad utf-8": b'{"prompt":"\xff\xfe"}',
    "gbk": '{"prompt":"你好"}'.encode("gbk"),
    "utf-16": json.dumps(GOOD).encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "not json": b"{:",
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "empty": b"",
    "blank": b" \n",
    "trailing": b'{"prompt":"a"} x',
    "two objects": b'{"prompt":"a"}{"prompt":"a"}',
    "nan": b'{"prompt":"a","temperature":NaN}',
    "infinity": b'{"prompt":"a","top_p":-Infinity}',
    "1e999": b'{"prompt":"a","temperature":1e999}',
    "nan in an ignored field": b'{"prompt":"a","foo":NaN}',
    "nan in a refused field": b'{"prompt":"a","logit_bias":{"5":NaN}}',
    "20k arrays": b'{"prompt":' + nested(20_000).encode() + b"}",
    "900 in metadata": b'{"prompt":"a","metadata":' + nested(900).encode() + b"}",
    "5000 digits": b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"prompt":"\\ud800"}',
    "half a pair as a name": b'{"prompt":"a","x":{"\\udc00":1}}',
}


def check_error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert 0 < len(body["error"]["message"]) < 300
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_broken_bodies(words: Path, path: str) -> None:
    async with serving(words) as api:
        for name, body in BROKEN.items():
            reply = await api.http.post(path, content=body, headers={"content-type": "application/json"})
            error = check_error(reply, 400)
            assert error["type"] == "invalid_request_error", name
            assert "[[[" not in error["message"]
            assert "999999" not in error["message"]
        assert api.service.requests == []
        assert (await api.http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(("path", "good"), [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)])
async def test_the_largest_integers_that_are_read(words: Path, path: str, good: dict[str, Any]) -> None:
    """4300 digits are the most that Python reads and prints: what is added to them cannot be printed."""
    digits = "9" * 4300
    names = ("max_tokens", "min_tokens", "n", "seed", "temperature", "min_p", "best_of", "stop_token_ids")
    async with serving(words) as api:
        for name in (*names, *(["max_completion_tokens"] if path.endswith("chat/completions") else [])):
            for value in (digits, f"-{digits}", f"[{digits}]"):
                body = json.dumps({**good, name: 0}).replace(f'"{name}": 0', f'"{name}":{value}')
                headers = {"content-type": "application/json"}
                error = check_error(await api.http.post(path, content=body, headers=headers), 400)
                assert "99999" not in error["message"]


async def test_nul_is_text(words: Path) -> None:
    async with serving(words) as api:
        reply = await api.http.post("/v1/completions", json={**GOOD, "prompt": "a\0b", "echo": True})
        assert reply.json()["choices"][0]["text"] == "a\0bab"


def test_depth_is_counted_exactly() -> None:
    parse_object(f'{{"x":{nested(MAX_DEPTH - 1)}}}'.encode())
    with pytest.raises(ApiError, match="nested more than 64 deep"):
        parse_object(f'{{"x":{nested(MAX_DEPTH)}}}'.encode())


def test_wide_is_not_deep() -> None:
    wide = {"prompt": [[1]] * 1000}
    assert parse_object(json.dumps(wide).encode()) == wide


def test_whole_surrogate_pairs_are_characters() -> None:
    assert parse_object(b'{"prompt":"\\ud83e\\udd99"}') == {"prompt": "\N{LLAMA}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_media_types(words: Path, headers: dict[str, str]) -> None:
    async with serving(words) as api:
        check_error(await api.http.post("/v1/completions", content=json.dumps(GOOD), headers=headers), 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'])
async def test_json_by_any_name(words: Path, kind: str) -> None:
    async with serving(words) as api:
        reply = await api.http.post(
            "/v1/completions", content=json.dumps(GOOD), headers={"content-type": kind}
        )
        assert reply.status_code == 200


async def test_too_large_by_its_header(words: Path) -> None:
    async with serving(words, max_body=1000) as api:
        fits = json.dumps({**GOOD, "pad": ""})
        fits = json.dumps({**GOOD, "pad": "x" * (1000 - len(fits))})
        assert len(fits) == 1000
        headers = {"content-type": "application/json"}
        assert (await api.http.post("/v1/completions", content=fits, headers=headers)).status_code == 200
        check_error(await api.http.post("/v1/completions", content=fits + " ", headers=headers), 413)


async def test_too_large_in_chunks(words: Path) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * 1000

    async with serving(words, max_body=5000) as api:
        headers = {"content-type": "application/json"}
        check_error(await api.http.post("/v1/completions", content=chunks(), headers=headers), 413)


async def test_a_body_that_drips(words: Path) -> None:
    """Each byte in time, and the whole never."""
    async with serving(words, body_seconds=0.3) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())
        begin = time.monotonic()
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.02)
            assert time.monotonic() - begin < 15
        assert (await answer).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - begin > 2.9
        writer.close()


async def test_fifty_megabytes_are_not_read(words: Path) -> None:
    """Refused by the header before a byte of the body; chunks, once more than the limit has come. Nothing of
    the rest is kept, and the client can read the refusal while it sends."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 2**20

    async with serving(words) as api:
        for extra in ({"content-length": str(50 * 2**20)}, {}):
            headers = {"content-type": "application/json", **extra}
            error = check_error(
                await api.http.post("/v1/completions", content=chunks(), headers=headers), 413
            )
            assert error["code"] == "body_too_large"
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {50 * 2**20}\r\n\r\n".encode())
        line = await asyncio.wait_for(reader.readline(), 5)
        assert line.startswith(b"HTTP/1.1 413 "), "before anything was sent"
        writer.close()
        assert (await api.http.get("/health")).status_code == 200


async def test_bodies_share_the_room(words: Path) -> None:
    """Two of three fit; what one took is free again once it is answered, refused, or left."""
    async with serving(words, max_bodies=300_000) as api:

        async def half(text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 300000\r\n\r\n".encode() + text)
            await writer.drain()
            await asyncio.sleep(0.1)
            return reader, writer

        large = {**GOOD, "pad": "x" * 200_000}
        held = [await half(b"{" + b" " * 200_000) for _ in range(2)]
        reply = await api.http.post("/v1/completions", json=large)
        assert check_error(reply, 503)["code"] == "too_many_bodies"
        assert reply.headers["retry-after"]
        assert (await api.http.post("/v1/completions", json=GOOD)).status_code == 200
        held[0][1].transport.abort()
        await asyncio.sleep(0.1)
        for _ in range(5):
            assert (await api.http.post("/v1/completions", json=large)).status_code == 200
            assert (await api.http.post("/v1/completions", json={"pad": "x" * 200_000})).status_code == 400
        held[1][1].write(b"?" * 99_999)
        assert (await held[1][0].readline()).startswith(b"HTTP/1.1 400 ")
        held[1][1].close()


async def test_small_bodies_need_no_room(words: Path) -> None:
    async with serving(words, max_bodies=0) as api:
        for size, status in ((60_000, 200), (70_000, 503)):
            reply = await api.http.post("/v1/completions", json={**GOOD, "pad": "x" * size})
            assert reply.status_code == status


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_room_is_held_until_it_is_prepared(
    words: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What waits to be tokenised is in memory as what is still read; once its client leaves it is not."""
    entered = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with serving(words, max_bodies=300_000) as api:
        large = {**GOOD, "pad": "x" * 300_000}
        monkeypatch.setattr(api.state.preparer, "tokenize", never)
        waiting = asyncio.create_task(api.http.post(path, json=large))
        await asyncio.wait_for(entered.wait(), 5)
        assert check_error(await api.http.post(path, json=large), 503)["code"] == "too_many_bodies"
        waiting.cancel()
        monkeypatch.undo()
        for _ in range(100):
            reply = await api.http.post(path, json=large)
            if reply.status_code == 200:
                break
            await asyncio.sleep(0.02)
        assert reply.status_code == 200


async def test_a_body_that_stops_coming(words: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await asyncio.sleep(0.6)
        yield b'"a"}'

    async with serving(words, body_seconds=0.2) as api:
        headers = {"content-type": "application/json"}
        check_error(await api.http.post("/v1/completions", content=chunks(), headers=headers), 408)
