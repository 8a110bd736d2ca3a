"""More connections than there are places for: who is served, who gives way, who is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.api import connections
from tests.api.test_answers import C, asked
from tests.api.test_protocol import answer_to, get, post
from tests.api.test_streams import until_running
from tests.support.api import Api, serving
from tests.support.fake_service import FakeService

ONCE = get("/version").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@contextlib.asynccontextmanager
async def silent(api: Api, count: int, *pieces: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that say `pieces` and nothing more."""
    opened = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(count)]
    for _, writer in opened:
        writer.writelines(pieces)
    await asyncio.sleep(0.1)
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.transport.abort()


def check_refused(reply: bytes) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 5\r\n" in head + b"\r\n" and b"\r\nx-request-id: req-" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"


async def test_one_too_many_is_told(words: Path) -> None:
    """Whatever it sends, before or after; those that are open go on; one that leaves makes room."""
    async with serving(words, FakeService(pace=0.1), connections=2) as api:
        long = asyncio.ensure_future(answer_to(api.port, post(asked(C, max_tokens=20))[:-1], pause=0.3))
        async with silent(api, 1, b"POST / HT"):
            for pieces in ((), (ONCE,), (ONCE[:20], ONCE[20:]), (post({"pad": "x" * 500_000}),)):
                check_refused(await answer_to(api.port, *pieces))
        for _ in range(100):
            if b" 200 OK" in (reply := await answer_to(api.port, ONCE)):
                break
            await asyncio.sleep(0.02)
        assert b" 200 OK" in reply
        long.cancel()


async def test_answers_that_run_are_not_disturbed(words: Path) -> None:
    async with serving(words, FakeService(pace=0.02), connections=3) as api:
        bodies = [post(asked(C, max_tokens=100, stream=stream)) for stream in (True, False, True)]
        last = [body.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) for body in bodies]
        running = [asyncio.ensure_future(answer_to(api.port, body)) for body in last]
        await until_running(api, 3)
        for reply in await asyncio.gather(*(answer_to(api.port, ONCE) for _ in range(60))):
            check_refused(reply)  # most had to wait until one before it was told
        for task in running:
            assert b'"finish_reason":"length"' in await task


async def test_the_idle_give_way(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections, halves of heads, and those that wait for a next request: the longest idle first."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.5)
    monkeypatch.setattr(connections, "SILENT_SECONDS", 1.5)
    async with (
        serving(words, connections=6) as api,
        silent(api, 2) as first,
        silent(api, 2, b"GET / HT") as second,
        silent(api, 2, get("/version")),
    ):
        check_refused(await answer_to(api.port, ONCE))  # nobody has been idle for long
        await asyncio.sleep(1.5)
        assert b" 200 OK" in await answer_to(api.port, ONCE)
        assert await asyncio.wait_for(first[0].read(), 1) == b""
        assert not second[0].at_eof()
        async with silent(api, 6, get("/version")) as crowd:
            for reader in crowd:
                assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 1)


async def test_a_flood_is_answered_to_the_last(words: Path) -> None:
    async with serving(words, connections=20) as api:
        begin = time.monotonic()
        async with silent(api, 10, b"GET"):
            replies = await asyncio.gather(*(answer_to(api.port, ONCE) for _ in range(200)))
        kinds = [reply[9:12] for reply in replies]
        assert set(kinds) <= {b"200", b"503"} and kinds.count(b"200") >= 10
        assert time.monotonic() - begin < 10
        assert (await api.http.get("/health")).status_code == 200


@pytest.mark.parametrize("served", [True, False])
async def test_a_first_request_has_more_time(
    words: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Than a next one, whose client knows that he may have to send it again."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    async with serving(words, connections=1) as api, silent(api, 1, *[get("/version")] * served):
        await asyncio.sleep(0.4)
        reply = await answer_to(api.port, ONCE)
        assert reply.startswith(b"HTTP/1.1 200 OK") if served else b" 503 " in reply


async def test_an_answer_that_is_still_on_its_way_is_not_cut_off(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application has ended, its client has not read all yet: such a connection is not idle."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with serving(words, connections=1) as api:
        client.connect(("127.0.0.1", api.port))
        reader, writer = await asyncio.open_connection(sock=client)
        large = {"prompt": [[67] * 4000] * 15, "echo": True, "max_tokens": 0, "logprobs": 5}
        writer.write(post(large))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        assert length > 4 * 2**20, "more than the kernel holds for a client that reads nothing"
        await asyncio.sleep(0.3)
        check_refused(await answer_to(api.port, ONCE))
        assert len(await reader.readexactly(length)) == length
        await asyncio.sleep(0.3)
        assert b" 200 OK" in await answer_to(api.port, ONCE)
        writer.transport.abort()
