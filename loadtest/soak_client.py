"""A small asyncio client: an answer, whole or streamed, and the ways of not waiting for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

ANSWER_SECONDS = 1200.0  # the last in the order waits until there is room for him


class Refused(Exception):
    """No answer: a status other than 200, an error in mid-stream, or a stream without its end."""


@dataclass(slots=True)
class Heard:
    """What an answer comes to, however it was sent: for each choice its text, reason and scores."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Add a chunk of a stream, or a whole answer."""
        for choice in event.get("choices", ()):
            index = choice["index"]
            words = choice.get("message") or choice.get("delta")
            text = choice.get("text") if words is None else words.get("content")
            self.texts[index] = self.texts.get(index, "") + (text or "")
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
            self.scores.setdefault(index, []).extend(_scores(choice))
        usage = event.get("usage")
        if usage:
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _scores(choice: Mapping[str, Any]) -> list[float]:
    """The logprobs of a choice's tokens, in either shape, and of its prompt's, whose first has none."""
    found = choice.get("logprobs") or {}
    scores = [entry["logprob"] for entry in found.get("content") or ()]
    scores += [value for value in found.get("token_logprobs") or () if value is not None]
    for token in choice.get("prompt_logprobs") or ():
        scores += sorted(entry["logprob"] for entry in (token or {}).values())
    return scores


async def ask(port: int, path: str, body: Mapping[str, Any], stream: bool) -> Heard:
    """The answer to `body`. Raises Refused."""
    heard = Heard()
    async with asyncio.timeout(ANSWER_SECONDS):
        if stream:
            async for event in events(port, path, body):
                heard.take(event)
        else:
            async with _sent(port, path, dict(body)) as (status, reader, _):
                content = await reader.read()
            if status != 200:
                raise Refused(f"{status} {content[:300].decode(errors='replace')}")
            heard.take(json.loads(content))
    return heard


async def events(port: int, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, as they come; leaving early closes the connection. Raises Refused."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with _sent(port, path, asked) as (status, reader, chunked):
        if status != 200:
            raise Refused(f"{status} {(await reader.read())[:300].decode(errors='replace')}")
        async for line in _lines(reader, chunked):
            if not line.startswith(b"data: "):
                continue
            if line[6:] == b"[DONE]":
                return
            event = json.loads(line[6:])
            if "error" in event:
                raise Refused(f"in mid-stream: {event['error']}")
            yield event
    raise Refused("a stream without [DONE]")


async def leave(port: int, path: str, body: Mapping[str, Any], seconds: float, read: int) -> str:
    """Ask, then go: after `seconds` of waiting or after `read` events, whichever is first; which it was."""
    seen = 0
    try:
        async with asyncio.timeout(seconds):
            stream = events(port, path, body)
            try:
                async for _ in stream:
                    seen += 1
                    if seen > read:
                        return "in mid-stream"
            finally:
                await stream.aclose()
    except TimeoutError:
        return "in mid-stream" if seen else "while waiting"
    return "too late"


@asynccontextmanager
async def _sent(
    port: int, path: str, body: Mapping[str, Any]
) -> AsyncIterator[tuple[int, asyncio.StreamReader, bool]]:
    """The request on a connection of its own: status, what reads its body, and whether that is in chunks."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    except OSError as error:
        raise Refused(f"no connection: {error}") from None
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        yield int(answer.split(" ", 2)[1]), reader, "transfer-encoding: chunked" in answer
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Refused(f"the connection broke: {error}") from None
    finally:
        writer.transport.abort()


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Lines of a body, without their ends."""
    rest = b""
    while True:
        if chunked:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
