"""Clients that leave or do not read, answers that fail half-way, a service that takes nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from server.engine.errors import Draining, EngineDead, QueueFull
from server.engine.request import Request
from tests.api.test_answers import CC, C, asked, events, text_of
from tests.api.test_bodies import check_error
from tests.support.api import Api, serving
from tests.support.fake_service import FakeService


def raw_post(api: Api, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, whose reading is the test's business."""
    client = socket.create_connection(("127.0.0.1", api.port))
    data = json.dumps(body).encode()
    client.sendall(post_head(path, len(data)) + data)
    return client


def post_head(path: str, length: int) -> bytes:
    headers = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*headers, "\r\n"]).encode()


async def until_running(api: Api, choices: int = 1) -> None:
    for _ in range(500):
        if api.service.running >= choices:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{api.service.running} of {choices} run")


@pytest.mark.parametrize("path", [C, CC])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_frees_everything(words: Path, path: str, stream: bool) -> None:
    async with serving(words, FakeService(pace=0.01)) as api:
        for _ in range(5):
            client = raw_post(api, path, asked(path, max_tokens=3000, n=2, stream=stream))
            await until_running(api)
            await asyncio.sleep(0.05)
            client.close()
            await api.idle(2.0)
        await asyncio.sleep(0.05)
        assert 'headroom:requests_total{outcome="client_gone"} 5.0' in (await api.http.get("/metrics")).text
        assert (await api.http.post(path, json=asked(path))).status_code == 200


async def test_leaving_before_the_first_token(words: Path) -> None:
    async with serving(words, FakeService(pace=30.0)) as api:
        client = raw_post(api, C, asked(C, stream=True))
        await until_running(api)
        client.close()
        for _ in range(200):
            if api.service.aborted:
                break
            await asyncio.sleep(0.01)
        assert set(api.service.aborted) == {(api.service.requests[0].id, None)}
        for task in api.service._tasks:
            task.cancel()


async def test_a_client_that_reads_nothing(words: Path) -> None:
    """Its stream stops growing, and ends when it has taken nothing for a while; others do not notice."""
    service = FakeService()
    async with serving(words, service, stall_seconds=0.5) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", api.port))
        # 128 choices: enough bytes to fill the socket's buffers on both ends.
        data = json.dumps(asked(C, max_tokens=4000, n=128, stream=True)).encode()
        client.sendall(post_head(C, len(data)) + data)
        await until_running(api)
        assert (await api.http.post(C, json=asked(C))).status_code == 200
        await api.idle(8.0)
        assert (service.requests[0].id, None) in service.aborted
        client.close()


async def test_a_client_that_falls_too_far_behind(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded: its request ends, and once it reads it is told. Others do not notice."""
    monkeypatch.setattr("server.engine.stream.MAX_UNREAD", 20_000)
    service = FakeService()
    async with serving(words, service) as api:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", api.port))
        data = json.dumps(asked(C, max_tokens=4000, n=128, stream=True)).encode()
        client.sendall(post_head(C, len(data)) + data)
        await until_running(api)
        assert (await api.http.post(C, json=asked(C))).status_code == 200
        await api.idle(8.0)
        assert (service.requests[0].id, None) in service.aborted
        client.setblocking(False)
        told = b""
        while part := await asyncio.get_running_loop().sock_recv(client, 2**20):
            told = (told + part)[-5000:]
            if told.endswith(b"0\r\n\r\n"):
                break
        client.close()
        assert b'"code":"read_too_slowly"' in told and b"data: [DONE]" in told
        assert 'outcome="client_gone"} 1.0' in (await api.http.get("/metrics")).text


async def test_failure_in_mid_stream(words: Path) -> None:
    service = FakeService(fail_at=3, pace=0.01)
    async with serving(words, service) as api:
        for path in (C, CC):
            chunks = await events(api, path, asked(path, stream_options={"include_usage": True}))
            assert chunks[-1].keys() == {"error"}
            error = chunks[-1]["error"]
            assert (error["message"], error["code"]) == ("The step failed.", "generation_failed")
            assert (error["type"], error["param"]) == ("server_error", None)
            told = [chunk["choices"][0] for chunk in chunks[:-1]]
            assert "".join(text_of(choice) for choice in told) == "abc"
            assert all(choice["finish_reason"] is None for choice in told)
            error = check_error(await api.http.post(path, json=asked(path)), 500)
            assert error["message"] == "The step failed."
        assert 'headroom:requests_total{outcome="error"} 4.0' in (await api.http.get("/metrics")).text


async def test_failure_before_the_first_token(words: Path) -> None:
    async with serving(words, FakeService(fail_at=0)) as api:
        check_error(await api.http.post(C, json=asked(C, stream=True)), 500)


async def test_a_bug_in_mid_stream(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours is one error event that tells nothing of our insides; other streams go on."""

    def script(request: Request, index: int, position: int) -> int:
        return 67 + position

    async with serving(words, FakeService(script=script, pace=0.01)) as api:

        def broken(*args: object) -> dict[str, Any]:
            raise RuntimeError("secret")

        other = asyncio.ensure_future(events(api, C, asked(C)))
        monkeypatch.setattr("server.api.generation.ChatShape.delta", broken)
        chunks = await events(api, CC, asked(CC))
        assert chunks[-1]["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(chunks)
        assert "".join(text_of(chunk["choices"][0]) for chunk in await other) == "abcde"
        await api.idle(1.0)


async def test_cut_off_is_an_error_and_no_finish(words: Path) -> None:
    """What the server itself aborts (a shutdown) must not look complete."""
    async with serving(words, FakeService(pace=0.02)) as api:

        async def cut() -> None:
            await until_running(api)
            await asyncio.sleep(0.05)
            api.service.abort(api.service.requests[-1].id)

        for path in (C, CC):
            cutting = asyncio.ensure_future(cut())
            chunks = await events(api, path, asked(path, max_tokens=100))
            assert chunks[-1]["error"]["code"] == "aborted"
            assert all(not c["choices"][0]["finish_reason"] for c in chunks[:-1])
            await cutting
        cutting = asyncio.ensure_future(cut())
        check_error(await api.http.post(C, json=asked(C, max_tokens=100)), 503)
        await cutting


async def test_refusals_of_the_service(words: Path) -> None:
    refusals = [
        (QueueFull(256, 256, 7), 429, "queue_full", "7"),
        (Draining(), 503, "shutting_down", "5"),
        (EngineDead("out of memory"), 503, "engine_dead", "5"),
    ]
    async with serving(words) as api:
        for refusal, status, code, retry in refusals:
            api.service.error = refusal
            for path in (C, CC):
                for stream in (False, True):
                    reply = await api.http.post(path, json=asked(path, stream=stream))
                    assert check_error(reply, status)["code"] == code
                    assert reply.headers.get("retry-after") == retry
        text = (await api.http.get("/metrics")).text
        assert 'headroom:requests_total{outcome="queue_full"} 4.0' in text
        assert 'headroom:requests_total{outcome="unavailable"} 8.0' in text


async def test_headers_of_a_stream(words: Path) -> None:
    async with serving(words) as api:
        reply = await api.http.post(C, json=asked(C, stream=True))
        assert reply.headers["cache-control"] == "no-cache"
        assert "content-length" not in reply.headers
        assert reply.headers["x-request-id"].startswith("cmpl-")
