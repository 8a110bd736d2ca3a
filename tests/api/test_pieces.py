"""Large answers: the same JSON as in one go, and no pause for anybody else."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from server.api.pieces import large_response

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
