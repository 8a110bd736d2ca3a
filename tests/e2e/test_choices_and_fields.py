"""`n` choices share their prompt, whatever else is asked for, and each is the answer it would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Served, inside
from tests.support.sse import DONE, events

C, CC = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(100, 137))  # two whole blocks of 16 and a part of a third, which each choice copies
FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2, "frequency_penalty": 1},
    {"logit_bias": {"70": 100, "71": 99}},
    {"logprobs": 5},
    {"logprobs": 1, "echo": True},
    {"logprobs": 1, "echo": True, "max_tokens": 0},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"prompt_logprobs": 1, "logprobs": 2, "echo": True},
    {"stop": ["a", "e", "o"], "include_stop_str_in_output": True, "min_tokens": 5},
    {"stop_token_ids": list(range(90, 384)), "include_stop_str_in_output": True, "logprobs": 0},
    {"structured_outputs": {"regex": "[a-z]{12}"}, "logprobs": 3},
    {"priority": -3, "best_of": 3},
]


@pytest.fixture(scope="module")
def server(tiny_served: Path) -> Iterator[Served]:
    with inside(tiny_served, max_num_seqs=8) as served:
        yield served


def alike(one: Any, other: Any) -> bool:
    """Equal, and numbers to 1e-4: the shape of a batch moves the last digits."""
    match one, other:
        case (float(), float()):
            return abs(one - other) < 1e-4
        case (list(), list()):
            return len(one) == len(other) and all(map(alike, one, other))
        case (dict(), dict()):
            return list(one) == list(other) and all(alike(one[name], other[name]) for name in one)
    return bool(one == other)


def assert_same(choice: dict[str, Any], other: dict[str, Any]) -> None:
    """The same choice but for its number."""
    assert alike(choice | {"index": 0}, other | {"index": 0}), (choice, other)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_greedy_choices_are_the_one_answer(server: Served, fields: dict[str, Any]) -> None:
    """Whole and streamed; usage counts the prompt once and each choice's tokens."""
    body = {"prompt": [PROMPT, PROMPT[:20]], "temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
    singles = []
    for prompt in body["prompt"]:
        alone = {name: value for name, value in body.items() if name != "best_of"} | {"prompt": prompt}
        singles.append(server.http.post(C, json=alone).json())
    reply = server.http.post(C, json=body | {"n": 3})
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    for index, choice in enumerate(whole["choices"]):
        assert_same(choice, singles[index // 3]["choices"][0])
    assert whole["usage"]["prompt_tokens"] == len(PROMPT) + 20
    assert whole["usage"]["completion_tokens"] == 3 * sum(s["usage"]["completion_tokens"] for s in singles)
    if "prompt_logprobs" in fields:
        return
    texts, reasons = [""] * 6, [None] * 6
    with server.http.stream("POST", C, json=body | {"n": 3, "stream": True}) as response:
        for chunk in [event for event in events(response.iter_lines()) if event != DONE]:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    server.wait_idle(5)


@pytest.mark.parametrize("fields", FIELDS[:4], ids=lambda fields: "+".join(fields))
def test_the_prompt_is_held_once(server: Served, fields: dict[str, Any]) -> None:
    """Two whole blocks are shared by three choices, the third is copied: 2 + 3 logical blocks of 2 heads."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "n": 3} | fields
    usage = server.http.post(C, json=body).json()["usage"]
    assert usage["kv_cache"]["blocks"] == (2 + 3) * 2
    server.wait_idle(5)
    server.kv(check=True)


def test_drawn_choices_differ_and_repeat(server: Served) -> None:
    """With everything on at once; penalties count each choice's own output."""
    body = {
        "messages": [{"role": "user", "content": "Say it."}], "seed": 5, "n": 4, "temperature": 0.9,
        "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "presence_penalty": 1,
        "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"70": 2}, "ignore_eos": True,
        "prompt_logprobs": 1,
    }  # fmt: skip
    one, other = (server.http.post(CC, json=body).json()["choices"] for _ in range(2))
    for choice, again in zip(one, other, strict=True):
        assert_same(choice, again)
    assert len({choice["message"]["content"] for choice in one}) == 4
    single = server.http.post(CC, json=body | {"n": 1}).json()["choices"][0]
    assert_same(single, one[0])
