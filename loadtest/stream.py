"""Times one server-sent-event stream of the OpenAI shape, wherever its lines come from.

Knows neither locust nor sockets: it pulls lines and asks a clock, so that what is measured can be
tested by itself. Times are milliseconds since `started`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

# Why an answer may end and count as one; anything else ("error", "abort", none at all) is a failure.
FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter"})


class StreamError(Exception):
    """The stream broke a promise: an error event, no finish, no `[DONE]`, no usage, no JSON."""


@dataclass(slots=True)
class StreamTimes:
    """What one stream showed; `chunks` are the arrivals of non-empty text, in ms."""

    chunks: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finishes: dict[int, str | None] = field(default_factory=dict)  # of each choice
    usage: dict[str, Any] | None = None
    total: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Time to the first non-empty text; role and other empty chunks do not count."""
        return self.chunks[0] if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Time between one text and the next (ITL). A chunk may carry more than one token."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def output_tokens(self) -> int:
        """Tokens as the server counted them; chunks are never counted as tokens."""
        return int(self.usage["completion_tokens"]) if self.usage else 0

    @property
    def rate(self) -> float | None:
        """Output tokens a second after the first; None for a stream of one chunk."""
        if len(self.chunks) < 2 or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) * 1000.0 / (self.chunks[-1] - self.chunks[0])


def read_stream(lines: Iterable[bytes], clock: Callable[[], float], started: float) -> StreamTimes:
    """Read to `[DONE]`. Raises StreamError where the stream errs or ends early."""
    times = StreamTimes()
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        now = (clock() - started) * 1000.0
        if data == b"[DONE]":
            times.total = now
            _check_end(times)
            return times
        _take(times, data, now)
    raise StreamError("the stream ended without [DONE]")


def _check_end(times: StreamTimes) -> None:
    for index, finish in times.finishes.items():
        if finish is None:
            raise StreamError(f"choice {index} ended without a finish reason")
        if finish not in FINISHES:
            raise StreamError(f"choice {index} ended for the reason {finish!r}")
    if times.usage is None:
        raise StreamError("the stream ended without usage")


def _take(times: StreamTimes, data: bytes, now: float) -> None:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StreamError(f"an event is not JSON: {data[:80]!r}") from error
    if event.get("error"):
        raise StreamError(f"the stream sent an error: {event['error'].get('message', event['error'])}")
    if event.get("usage"):
        times.usage = event["usage"]
    for choice in event.get("choices", ()):
        index = choice.get("index", 0)
        times.finishes[index] = choice.get("finish_reason") or times.finishes.get(index)
    text = "".join(_text(choice) for choice in event.get("choices", ()))
    if text:
        times.chunks.append(now)
        times.text.append(text)


def _text(choice: dict[str, Any]) -> str:
    """The new text of a completion choice or of a chat choice."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
