"""`X-Request-Id`: the client's name comes back on every answer; everything else is the server's own."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import HTMLResponse

from server.api.guard import Guard
from server.api.state import ApiSettings
from server.engine.errors import QueueFull
from tests.api.test_answers import CC, C, asked, events, text_of
from tests.api.test_protocol import answer_to
from tests.support.api import serving
from tests.support.fake_service import FakeService

GOOD = ["a", "same", "trace-1.2_3", "A" * 128, "-", "0"]
BAD: list[Any] = [
    "",
    "A" * 129,
    "x" * 20_000,
    "with space",
    "semi;colon",
    "a,b",
    "\u00e9",
    "\u65e5",
    "a/b",
    "tab\tb",
]
OWN = re.compile(r"(req|cmpl|chatcmpl)-[0-9a-f]{32}")


def named(value: str) -> dict[str, bytes]:
    return {"x-request-id": value.encode("utf-8")}


@pytest.mark.parametrize("path", [C, CC])
async def test_a_name_comes_back_and_the_id_is_the_servers_own(words: Path, path: str) -> None:
    async with serving(words) as api:
        for value in GOOD:
            for stream in (False, True):
                reply = await api.http.post(path, json=asked(path, stream=stream), headers=named(value))
                assert reply.headers.get_list("x-request-id") == [value]
                body = json.loads(reply.text.split("\n")[0].removeprefix("data: "))
                assert OWN.fullmatch(body["id"])
                assert body["id"] == api.service.requests[-1].id, "the engine never sees the client's name"


async def test_anything_else_is_ignored(words: Path) -> None:
    async with serving(words) as api:
        for value in BAD:
            reply = await api.http.post(C, json=asked(C), headers=named(value))
            assert reply.status_code == 200
            assert reply.headers.get_list("x-request-id") == [reply.json()["id"]], value
            reply = await api.http.get("/version", headers=named(value))
            assert OWN.fullmatch(reply.headers["x-request-id"]), value
        twice = [("x-request-id", "a"), ("x-request-id", "a")]
        reply = await api.http.post(C, json=asked(C), headers=twice)
        assert reply.headers.get_list("x-request-id") == [reply.json()["id"]]
        huge = await answer_to(
            api.port, b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"a" * 2**20
        )
        assert huge.startswith(b"HTTP/1.1 431 ")
        assert re.search(rb"\r\nx-request-id: req-[0-9a-f]{32}\r\n", huge)


async def test_every_answer_has_one(words: Path) -> None:
    """Every route and every refusal, by whomever; with a name it is the name, without one never the same."""
    async with serving(words, api_keys=("k",), max_body=1000, cors_origins=("https://a.example",)) as api:
        key = {"authorization": "Bearer k"}
        asks: list[tuple[int, str, str, dict[str, Any]]] = [
            (200, "GET", "/health", {}),
            (200, "GET", "/version", {"headers": key}),
            (200, "GET", "/metrics", {"headers": key}),
            (200, "GET", "/v1/models", {"headers": key}),
            (200, "GET", "/v1/kv", {"headers": key}),
            (200, "GET", "/openapi.json", {"headers": key}),
            (200, "POST", "/tokenize", {"headers": key, "json": {"prompt": "a"}}),
            (200, "POST", C, {"headers": key, "json": asked(C)}),
            (204, "OPTIONS", C, {"headers": {"origin": "https://a.example"}}),
            (400, "POST", C, {"headers": key, "json": {}}),
            (400, "GET", "/v1/kv?check=x", {"headers": key}),
            (401, "GET", "/version", {}),
            (403, "GET", "/health", {"headers": {"host": "evil.example"}}),
            (404, "GET", "/nothing", {"headers": key}),
            (404, "POST", C, {"headers": key, "json": asked(C, model="x")}),
            (405, "DELETE", "/health", {"headers": key}),
            (413, "POST", C, {"headers": key, "json": {"pad": "x" * 1000}}),
            (415, "POST", C, {"headers": key, "content": b"{}"}),
        ]
        seen: set[str] = set()
        for status, method, path, rest in asks:
            for value in (None, "mine"):
                headers = {**rest.get("headers", {}), **({} if value is None else {"x-request-id": value})}
                reply = await api.http.request(method, path, **{**rest, "headers": headers})
                assert reply.status_code == status, (path, reply.text)
                (found,) = reply.headers.get_list("x-request-id")
                assert found == value or (value is None and OWN.fullmatch(found)), (status, path)
                assert value or found not in seen
                seen.add(found)
                assert reply.headers["x-content-type-options"] == "nosniff"
        api.service.error = QueueFull(1, 1, 1)
        reply = await api.http.post(C, json=asked(C), headers={**key, "x-request-id": "mine"})
        assert (reply.status_code, reply.headers["x-request-id"]) == (429, "mine")


async def test_two_live_requests_of_one_name(words: Path) -> None:
    """P9: each gets its own full answer, and so does a third after the first has left."""
    async with serving(words, FakeService(pace=0.01)) as api:
        body = asked(CC, max_tokens=20, request_id="same")
        headers = named("same")
        both = [api.http.post(CC, json=body, headers=headers) for _ in range(2)]
        replies = await asyncio.gather(*both)
        texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
        assert texts == ["abcdefghijklmnopqrst"] * 2
        assert len({reply.json()["id"] for reply in replies}) == 2
        async with api.http.stream(
            "POST", C, json=asked(C, max_tokens=3000, stream=True), headers=headers
        ) as gone:
            assert gone.headers["x-request-id"] == "same"
            await anext(gone.aiter_lines())
        await api.idle(2.0)
        assert "".join(text_of(chunk["choices"][0]) for chunk in await events(api, C, asked(C))) == "abcde"


async def test_the_log_has_both(
    words: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> dict[str, Any]:
        raise RuntimeError("secret")

    async with serving(words) as api:
        monkeypatch.setattr("server.api.generation.ChatShape.delta", broken)
        with caplog.at_level(logging.ERROR, "server.api"):
            await events(api, CC, asked(CC))
            await api.http.post(CC, json=asked(CC, stream=True), headers=named("mine"))
            monkeypatch.setattr("server.api.generation.ChatShape.whole", broken)
            await api.http.post(CC, json=asked(CC), headers=named("mine-too"))
        ids = [request.id for request in api.service.requests]
        told = [record.getMessage() for record in caplog.records]
        assert [ids[0] in told[0], "x-request-id" in told[0]] == [True, False]
        assert f"{ids[1]} (x-request-id mine)" in told[1]
        assert f"{ids[2]} (x-request-id mine-too)" in told[2]


async def test_a_page_may_load_nothing_from_elsewhere() -> None:
    """What is HTML has the headers of a page, whatever serves it; what is not has no need of them."""
    application = Guard(HTMLResponse("<p>"), ApiSettings())
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        page = (await http.get("/")).headers
        assert page["content-security-policy"].split("; ")[0] == "default-src 'self'"
        assert (page["x-content-type-options"], page["referrer-policy"]) == ("nosniff", "no-referrer")
        refusal = (await http.get("/", headers={"host": "evil.example"})).headers
        assert "content-security-policy" not in refusal and refusal["x-content-type-options"] == "nosniff"
