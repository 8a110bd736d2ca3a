"""The events of one answer as bytes. Most of them differ from each other by a few characters of text: what
stands around it is written as JSON once for each choice, and not again for each token.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted  # as `json.dumps` writes a string
from typing import Any

from server.api.pieces import large_json
from server.api.shapes import Shape, Tokens

DONE = b"data: [DONE]\n\n"

_SOME_TEXT = "?"  # to be cut out of a choice object again: nothing else in it is the same


class Chunks:
    """Writes the chunks of one answer; ASCII only, as some clients take U+2028 or U+0085 for the end of a
    line."""

    def __init__(self, head: dict[str, Any], shape: Shape, include_usage: bool) -> None:
        """`head`: what they have in common (id, model, time). `include_usage`: each says that the usage is
        not known yet, until `usage` tells it."""
        head = {**head, "object": shape.chunk_object}
        self._frame = head | {"choices": []} | ({"usage": None} if include_usage else {})
        # No string in it can hold this: the quotes would be escaped.
        self._before, name, self._after = event(self._frame).decode().partition('"choices":[')
        self._before += name
        self._shape = shape
        self._around: dict[int, tuple[str, str]] = {}  # the text of each choice that has had one

    def opening(self, index: int) -> bytes:
        """What comes before the first text of a choice; nothing, where nothing does."""
        choice = self._shape.opening(index)
        return b"" if choice is None else self._chunk(choice)

    def text(self, index: int, text: str) -> bytes:
        """The next piece of a choice's text, with nothing told of its tokens."""
        around = self._around.get(index)
        if around is None:
            chunk = self._chunk(self._shape.delta(index, _SOME_TEXT, None)).decode()
            before, _, after = chunk.rpartition(quoted(_SOME_TEXT))
            around = self._around[index] = before, after
        return f"{around[0]}{quoted(text)}{around[1]}".encode("ascii")

    def scored(self, index: int, text: str, tokens: Tokens) -> bytes:
        """The same with what is told of the tokens."""
        return self._chunk(self._shape.delta(index, text, tokens))

    def large(self, index: int, text: str, tokens: Tokens) -> bytes:
        """The same of a great many tokens, written so that no other thread is held up."""
        body = {**self._frame, "choices": [self._shape.delta(index, text, tokens)]}
        return f"data: {large_json(body, ascii_only=True)}\n\n".encode("ascii")

    def ending(self, index: int, finish: str) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(self._shape.ending(index, finish))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk of all."""
        return event({**self._frame, "usage": usage})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f"{self._before}{_json(choice)}{self._after}".encode("ascii")


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_json(body)}\n\n".encode("ascii")


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, allow_nan=False, separators=(",", ":"), default=list)  # of iterators
