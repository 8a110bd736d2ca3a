"""P9: two live requests that their clients call by one name are two requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.scripted import BETA, HELLO, NEWLINE, WORLD
from tests.support.server import Served
from tests.support.sockets import port_of
from tests.support.standing import Known

C, CC = "/v1/completions", "/v1/chat/completions"
GAMMA = 16439
LOOPS = ((HELLO, WORLD, HELLO), (BETA, GAMMA, BETA), (NEWLINE, HELLO))
SAME = {"x-request-id": "same"}


@pytest.fixture
def server(served: Callable[..., Served], chain: Callable[..., Path]) -> Served:
    return served(chain(*LOOPS), Known([HELLO], " worldHello", 2), max_model_len=1024)


def asked(first: int, tokens: int = 60, **fields: Any) -> dict[str, Any]:
    return {"prompt": [first], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "request_id": "same", **fields}  # fmt: skip


TEXTS = {HELLO: " worldHello" * 30, BETA: " gammabeta" * 30}


def assert_gauges(text: str) -> None:
    for line in text.splitlines():
        if not line.startswith("#"):
            assert float(line.rsplit(" ", 1)[1]) >= 0, line


@pytest.mark.parametrize("stream", [False, True])
def test_p9_each_of_two_gets_its_own_answer(server: Served, stream: bool) -> None:
    """Different prompts under one name at one moment; then a third, when the first has been left."""

    async def everybody() -> tuple[list[httpx.Response], httpx.Response]:
        async with server.async_http() as http:
            both = [http.post(C, json=asked(first, stream=stream), headers=SAME) for first in (HELLO, BETA)]
            left = asyncio.create_task(http.post(C, json=asked(HELLO, 900), headers=SAME))
            replies = await asyncio.gather(*both)
            left.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await left
            third = await http.post(C, json=asked(BETA), headers=SAME)
            assert_gauges((await http.get("/metrics")).text)
            return list(replies), third

    replies, third = asyncio.run(everybody())
    ids = set()
    for reply, text in zip([*replies, third], [TEXTS[HELLO], TEXTS[BETA], TEXTS[BETA]], strict=True):
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == "same"
        if reply.headers["content-type"].startswith("application/json"):
            assert reply.json()["choices"][0]["text"] == text
            ids.add(reply.json()["id"])
        else:
            assert reply.text.count('"finish_reason":"length"') == 1
            assert reply.text.count("Hello" if "Hello" in text else "beta") == 30
            ids.add(reply.text.split('"id":"')[1].split('"')[0])
    assert len(ids) == 3 and not any("same" in request_id for request_id in ids)


def test_p9_two_chats(server: Served) -> None:
    """The case as it is told: two CC at once, header and body alike, other messages."""
    body = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "request_id": "same"}

    async def both() -> list[httpx.Response]:
        async with server.async_http() as http:
            texts = ("one", "another, and longer")
            bodies = [body | {"messages": [{"role": "user", "content": text}]} for text in texts]
            return list(await asyncio.gather(*(http.post(CC, json=one, headers=SAME) for one in bodies)))

    one, other = (reply.json() for reply in asyncio.run(both()))
    assert one["id"] != other["id"]
    assert one["usage"]["prompt_tokens"] < other["usage"]["prompt_tokens"]
    for answer in (one, other):
        assert answer["choices"][0]["message"]["content"] == "Hello" + " worldHello" * 14 + " world"


@pytest.mark.parametrize(
    "value",
    [b"", b"x" * 129, b"a b", b"a,b", b"a\tb", "caf\u00e9".encode(), b"\xff\xfe", b"../etc/passwd", b"{}",
     b"x" * 20_000],
    ids=["empty", "129 letters", "two words", "a comma", "a tab", "UTF-8", "no UTF-8", "a path",
         "braces", "20 kB"],
)  # fmt: skip
def test_p9_what_is_no_name_is_not_taken(server: Served, value: bytes) -> None:
    """The request is served under the server's own id; nothing of the value comes back."""
    reply = server.http.post(C, json=asked(HELLO, 2), headers=[(b"x-request-id", value)])
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == reply.json()["id"]
    assert reply.json()["choices"][0]["text"] == " worldHello"


def test_p9_names_that_come_twice_or_at_their_longest(server: Served) -> None:
    longest = "a" * 64 + "Z9._-" + "b" * 59
    reply = server.http.post(C, json=asked(HELLO, 2), headers={"x-request-id": longest})
    assert reply.headers["x-request-id"] == longest
    twice = [("x-request-id", "one"), ("x-request-id", "two")]
    reply = server.http.post(C, json=asked(HELLO, 2), headers=twice)
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == reply.json()["id"]


def test_p9_a_megabyte_of_a_name(server: Served) -> None:
    """Refused by the size of the head, and the connection is over; or reset before we had sent it all."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"x" * 2**20 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as client:
        said = b""
        try:
            client.sendall(head)
            while piece := client.recv(65536):
                said += piece
        except ConnectionError:
            pass
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    assert b"xxxx" not in said
