"""Who waits is told that he is not forgotten, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.test_answers import CC, C, asked, events, text_of
from tests.api.test_bodies import check_error
from tests.api.test_streams import raw_post, until_running
from tests.support.api import Api, serving
from tests.support.fake_service import FakeService

COMMENT = ": keep-alive"


async def frames(api: Api, path: str, **fields: Any) -> list[str]:
    """What a stream says, comments and events apart, with [DONE] at its end."""
    reply = await api.http.post(path, json=asked(path, stream=True, **fields))
    assert reply.status_code == 200, reply.text
    *parts, done, nothing = reply.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return parts


@pytest.mark.parametrize("path", [C, CC])
async def test_comments_before_and_between_tokens(words: Path, path: str) -> None:
    async with serving(words, FakeService(pace=0.5), keep_alive_seconds=0.1) as api:
        told = await frames(api, path, max_tokens=2)
        assert told[:2] == [COMMENT] * 2, "while the first token is awaited"
        kinds = [part == COMMENT for part in told]
        first = kinds.index(False)
        assert any(kinds[first:]), "and while the next one is"
        chunks = [json.loads(part.removeprefix("data: ")) for part in told if part != COMMENT]
        assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == "ab"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_no_comments_where_tokens_come(words: Path) -> None:
    async with serving(words, FakeService(pace=0.02), keep_alive_seconds=1.0) as api:
        assert COMMENT not in await frames(api, C, max_tokens=60)  # 1.2 s at least


@pytest.mark.parametrize("path", [C, CC])
async def test_what_fails_early_is_an_http_error_and_later_an_event(words: Path, path: str) -> None:
    async with serving(words, FakeService(pace=0.2, fail_at=0), keep_alive_seconds=5.0) as api:
        check_error(await api.http.post(path, json=asked(path, stream=True)), 500)
    async with serving(words, FakeService(pace=0.2, fail_at=0), keep_alive_seconds=0.05) as api:
        *comments, event = await frames(api, path)
        assert set(comments) == {COMMENT}
        error = json.loads(event.removeprefix("data: "))["error"]
        assert (error["message"], error["code"]) == ("The step failed.", "generation_failed")
        await api.idle(1.0)


async def test_leaving_among_comments(words: Path) -> None:
    service = FakeService(pace=0.4)
    async with serving(words, service, keep_alive_seconds=0.05) as api:
        for _ in range(3):
            client = raw_post(api, C, asked(C, stream=True, max_tokens=50))
            await until_running(api)
            await asyncio.sleep(0.15)
            client.close()
            await api.idle(1.0)
        assert [(request.id, None) for request in service.requests] == list(dict.fromkeys(service.aborted))
        assert 'headroom:requests_total{outcome="client_gone"} 3.0' in (await api.http.get("/metrics")).text


@pytest.mark.parametrize("path", [C, CC])
async def test_the_openai_client_skips_comments(words: Path, path: str) -> None:
    async with serving(words, FakeService(pace=0.12), keep_alive_seconds=0.05) as api:
        base = f"http://127.0.0.1:{api.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            if path == C:
                pieces = await client.completions.create(model="tiny", prompt="x", max_tokens=4, stream=True)
                text = "".join([piece.choices[0].text async for piece in pieces])
            else:
                chat = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=4, stream=True
                )
                text = "".join([piece.choices[0].delta.content or "" async for piece in chat])
        assert text == "abcd"


@pytest.mark.parametrize("path", [C, CC])
async def test_the_deadline_of_a_whole_answer(words: Path, path: str) -> None:
    service = FakeService(pace=0.02)
    async with serving(words, service, request_seconds=1.0) as api:
        assert (await api.http.post(path, json=asked(path))).status_code == 200
        assert service.aborted == []
        begin = time.monotonic()
        error = check_error(await api.http.post(path, json=asked(path, max_tokens=1000)), 504)
        assert 1.0 <= time.monotonic() - begin < 8
        assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
        assert "1 s" in error["message"] and "--request-timeout" in error["message"]
        assert service.aborted[0] == (service.requests[-1].id, None) and service.running == 0
        assert 'headroom:requests_total{outcome="timeout"} 1.0' in (await api.http.get("/metrics")).text


async def test_the_deadline_of_a_stream(words: Path) -> None:
    """In mid-stream an event; before anything was said an HTTP error; among comments an event again."""
    service = FakeService(pace=0.02)
    async with serving(words, service, request_seconds=0.6, keep_alive_seconds=0.2) as api:
        chunks = await events(api, C, asked(C, max_tokens=1000))
        assert chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        assert len(chunks) > 3 and service.running == 0
        service.pace = 0.9
        *comments, last = await frames(api, C)
        assert set(comments) == {COMMENT}
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    async with serving(words, FakeService(pace=0.9), request_seconds=0.6) as api:
        error = check_error(await api.http.post(C, json=asked(C, stream=True)), 504)
        assert error["code"] == "deadline_exceeded"
        assert 'headroom:requests_total{outcome="timeout"} 1.0' in (await api.http.get("/metrics")).text


async def test_the_deadline_counts_from_the_arrival(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a body that drips nor a prompt that is dear to prepare comes for nothing."""

    async def drips() -> AsyncIterator[bytes]:
        for byte in json.dumps(asked(C)).encode():
            yield bytes([byte])
            await asyncio.sleep(0.05)

    async with serving(words, request_seconds=0.3) as api:
        headers = {"content-type": "application/json"}
        reply = await api.http.post(C, content=drips(), headers=headers)
        assert check_error(reply, 504)["code"] == "deadline_exceeded"

        async def slow(*args: object) -> None:
            with contextlib.suppress(TimeoutError):  # of its own, which is not the deadline's
                await asyncio.wait_for(asyncio.Event().wait(), 0.05)
            await asyncio.sleep(5)

        monkeypatch.setattr(api.state.preparer, "completion", slow)
        begin = time.monotonic()
        check_error(await api.http.post(C, json=asked(C)), 504)
        assert time.monotonic() - begin < 4
        assert api.service.requests == []


async def test_no_deadline(words: Path) -> None:
    async with serving(words, FakeService(pace=0.1), request_seconds=0.0) as api:
        reply = await api.http.post(C, json=asked(C, max_tokens=8))
        assert reply.json()["choices"][0]["text"] == "abcdefgh"


@pytest.mark.parametrize("path", [C, CC])
async def test_leaving_before_the_engine_has_the_request(
    words: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whoever has left is not prepared any further, and so does not keep others waiting."""
    entered, left = asyncio.Event(), asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(words) as api:
        monkeypatch.setattr(api.state.preparer, "_encode", never)
        client = raw_post(api, path, asked(path))
        await asyncio.wait_for(entered.wait(), 5)
        client.close()
        await asyncio.wait_for(left.wait(), 2)
        assert api.service.requests == []
        told = (await api.http.get("/metrics")).text
        assert 'headroom:requests_total{outcome="client_gone"} 1.0' in told
