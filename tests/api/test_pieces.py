"""Large answers: the same JSON as in one go, and no pause for anybody else."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.api.logprobs import Scored, scored
from server.api.pieces import large_json, large_response
from server.text.generate import ChoiceDelta
from server.text.prepare import Prepared
from server.text.tokenizer import Tokenizer
from tests.api.test_answers import C, events
from tests.support.api import serving

ENTRY = {"token": " world", "logprob": -0.123456789, "bytes": list(b" world")}
BODIES: list[dict[str, Any]] = [
    {},
    {"a": 1, "b": None, "c": '\u2028 \\ " \n 🦙', "d": [], "e": {}, "f": [[]], "g": [{}]},
    {"choices": [{"logprobs": {"content": [ENTRY | {"top": [ENTRY] * 3}] * 5, "refusal": None}}] * 2},
    {"choices": [{"logprobs": {"tokens": ["a", "b"], "top": [None, {"a": -1.5}], "deep": [[[[[1, []]]]]]}}]},
]


@pytest.mark.parametrize("body", BODIES)
def test_the_same_as_in_one_go(body: dict[str, Any]) -> None:
    right = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    assert large_response(body).body.decode() == right
    assert json.loads(right) == body
    assert large_json(body, ascii_only=True) == json.dumps(body, separators=(",", ":"))


def test_iterators_are_lists() -> None:
    body = {"a": iter([1, 2]), "b": {"c": (n for n in ())}, "d": [iter("xy")], "e": [[[[[iter([7])]]]]]}
    assert json.loads(large_response(body).body) == {
        "a": [1, 2], "b": {"c": []}, "d": [["x", "y"]], "e": [[[[[[7]]]]]]
    }  # fmt: skip


def test_no_number_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="JSON"):
        large_response({"a": [float("nan")]})


async def test_the_loop_goes_on() -> None:
    """200,000 entries on another thread take seconds; the longest pause is a small part of that."""
    entries = ({**ENTRY, "top_logprobs": [ENTRY] * 20} for _ in range(10_000))
    begin = last = time.perf_counter()
    longest = 0.0
    work = asyncio.ensure_future(asyncio.to_thread(large_response, {"choices": [{"content": entries}]}))
    while not work.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert len((await work).body) > 10**7
    assert longest < (last - begin) / 3


async def test_scores_of_a_prompt_go_into_a_stream_from_a_thread(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 131,072 tokens of a long context take four seconds; those of an answer come one by one."""
    places: set[tuple[bool, bool]] = set()

    def noted(prepared: Prepared, tokenizer: Tokenizer, news: ChoiceDelta) -> Iterator[Scored] | None:
        on_the_loop = threading.current_thread() is threading.main_thread()
        places.add((news.prompt_scores is not None, on_the_loop))
        return scored(prepared, tokenizer, news)

    monkeypatch.setattr("server.api.answer.scored", noted)
    async with serving(words) as api:
        body = {"prompt": "abc\u2028", "echo": True, "max_tokens": 3, "logprobs": 1}
        chunks = [chunk["choices"][0] for chunk in await events(api, C, body)]
    assert "".join(chunk["text"] for chunk in chunks) == "abc\u2028abc"
    assert places == {(True, False), (False, True)}
