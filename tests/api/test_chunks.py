"""Chunks as bytes: what is written once for a whole stream is the same JSON that each chunk would be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.chunks import Chunks, event
from server.api.logprobs import Scored
from server.api.shapes import ChatShape, CompletionShape, Shape
from server.text.tokenizer import TokenText

HEAD = {"id": "cmpl-1", "created": 5, "model": 'a "?" ],"choices":[] \u2028', "system_fingerprint": "fp"}
TEXTS = [
    "",
    "a",
    '"',
    "?",
    '"?"',
    "\\",
    "\x00\x1f\x7f",
    "é\u0085\u2028\u2029",
    "🦙",
    "</script>",
    '{"a":[1]}',
]


def right(shape: Shape, choice: dict[str, Any], usage: bool) -> bytes:
    """One chunk, written by the library alone."""
    body = {**HEAD, "object": shape.chunk_object, "choices": [choice]} | ({"usage": None} if usage else {})
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("shape", [CompletionShape(), ChatShape()])
def test_every_chunk_is_what_the_library_writes(shape: Shape, usage: bool) -> None:
    chunks = Chunks(HEAD, shape, usage)
    for index in (0, 1, 127, 0):
        for text in TEXTS:
            assert chunks.text(index, text) == right(shape, shape.delta(index, text, None), usage)
        assert chunks.ending(index, "stop") == right(shape, shape.ending(index, "stop"), usage)
        opening = shape.opening(index)
        assert chunks.opening(index) == (b"" if opening is None else right(shape, opening, usage))


@pytest.mark.parametrize("shape", [CompletionShape(), ChatShape()])
def test_scores_are_written_both_ways_alike(shape: Shape) -> None:
    word = TokenText("🦙", "🦙".encode())
    tokens = [Scored(word, -0.25, ((word, -0.25), (TokenText("b", b"b"), -1.5)), 0)] * 3
    told = json.loads(json.dumps(shape.delta(2, "x", tokens), default=list))
    chunks = Chunks(HEAD, shape, True)
    assert chunks.scored(2, "x", tokens) == right(shape, told, True)
    assert chunks.large(2, "x", tokens) == right(shape, told, True)


def test_the_usage_takes_the_place_of_null() -> None:
    chunk = json.loads(Chunks(HEAD, ChatShape(), True).usage({"total_tokens": 3}).removeprefix(b"data: "))
    assert chunk == {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}}


def test_no_number_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="JSON"):
        event({"a": float("inf")})
