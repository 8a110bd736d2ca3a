"""Server-sent events as a client reads them, and what they say once put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


def events(lines: Iterable[str]) -> Iterator[Any]:
    """The JSON of each `data:` line of a response, and DONE as it is."""
    for line in lines:
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            yield DONE if data == DONE else json.loads(data)


@dataclass
class Streamed:
    """One streamed answer with one choice: its deltas, how it ended, every chunk for closer looks."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def read_stream(lines: Iterable[str]) -> Streamed:
    """Put a stream of one choice together, chat or completion."""
    answer = Streamed()
    for event in events(lines):
        assert not answer.done, "something follows [DONE]"
        if event == DONE:
            answer.done = True
        elif "error" in event:
            answer.error = event["error"]
        else:
            answer.chunks.append(event)
            for choice in event["choices"]:
                text = choice["delta"].get("content") if "delta" in choice else choice["text"]
                answer.deltas.append(text or "")
                answer.finish = choice["finish_reason"] or answer.finish
    return answer
