"""Requests that must be refused: sent plainly and streamed, each error looked at closely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx

from tests.support.scripted import HELLO
from tests.support.server import Served

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say it."}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [HELLO], "temperature": 0, "max_tokens": 4},
    CHATS: {"messages": MESSAGES, "temperature": 0, "max_tokens": 4},
}
VOCAB, CONTEXT = 49152, 8192


def check_error(reply: httpx.Response, status: int | Iterable[int] = 400) -> dict[str, Any]:
    """OpenAI's shape, in JSON, short: an error does not repeat what it was sent."""
    allowed = (status,) if isinstance(status, int) else tuple(status)
    assert reply.status_code in allowed, f"{reply.status_code}: {reply.text[:500]}"
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    return error


def refused(server: Served, path: str, fields: dict[str, Any], status: int | Iterable[int] = 400) -> Any:
    """The error that `fields`, on top of a good request, get with and without a stream."""
    errors = []
    for stream in (False, True):
        body = {**GOOD[path], **fields} | ({"stream": True} if stream else {})
        errors.append(check_error(server.http.post(path, json=body), status))
    assert errors[0] == errors[1]
    return errors[0]


def raw(server: Served, path: str, body: bytes, kind: str | None = "application/json") -> httpx.Response:
    headers = {} if kind is None else {"content-type": kind}
    return server.http.post(path, content=body, headers=headers)


def requests_run(server: Served) -> int:
    """Prompt tokens that the engine was given so far."""
    return server.metric("prompt_tokens_total")
