"""S5, S10: log-probabilities in their shapes and values, and the edges of `max_tokens` and `echo`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.asking import choice_of, decode
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.refusals import CHATS, GOOD, check_error, refused
from tests.support.scripted import EOS, HELLO, IM_START, LLAMA, NEWLINE, WORLD, Serve
from tests.support.server import Served
from tests.support.sse import DONE, events
from tests.support.standing import Known

C = "/v1/completions"
PROMPT = [11, *range(700, 740)]
TOKENS = 8
TOLERANCE = 1e-3
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": TOKENS}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 4},
    {"temperature": 1, "top_k": 1},
    {"temperature": 0, "logit_bias": {"77": -100, "4000": 100}},
    {"temperature": 1, "seed": 5, "logit_bias": {str(i): -100 for i in range(1000)}, "top_p": 0.9},
    {"temperature": 0, "presence_penalty": 2, "repetition_penalty": 1.3, "min_tokens": 3},
]


def right_logprobs(folder: Path, ids: Sequence[int]) -> Tensor:
    """`[T, V]` fp64: transformers' log_softmax of the raw logits after each of `ids`."""
    return torch.log_softmax(load_reference(folder).logits(ids).to(torch.float64), -1)


def chat_ids(folder: Path) -> list[int]:
    tokenizer = load_reference_tokenizer(folder)
    rendered = tokenizer.apply_chat_template(CHAT["messages"], tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False).input_ids
    return ids


def check_entries(content: list[dict[str, Any]], folder: Path, prompt: list[int], top: int) -> None:
    """Every number of a chat's list, the drawn ids being found by their values."""
    tokenizer = load_reference_tokenizer(folder)
    text = list(prompt)
    for entry in content:
        right = right_logprobs(folder, text)[-1]
        values, ids = torch.sort(right, descending=True, stable=True)
        token = token_of(folder, right, entry)
        assert entry["token"] == tokenizer.decode([token])
        assert len(entry["top_logprobs"]) == top
        shown = [other["logprob"] for other in entry["top_logprobs"]]
        assert shown == sorted(shown, reverse=True)
        assert shown == pytest.approx(values[:top].tolist(), abs=TOLERANCE)
        assert [other["token"] for other in entry["top_logprobs"]] == [
            tokenizer.decode([int(i)]) for i in ids[:top]
        ]
        text.append(token)


def token_of(folder: Path, right: Tensor, entry: dict[str, Any]) -> int:
    """The id whose bytes and log-probability the entry has."""
    near = torch.nonzero((right - entry["logprob"]).abs() < TOLERANCE)[:, 0].tolist()
    named = [token for token in near if load_reference_tokenizer(folder).decode([token]) == entry["token"]]
    assert named, f"no token is spelled {entry['token']!r} and has {entry['logprob']}"
    return int(named[0])


# ---- S5: shape, order, values ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING, ids=range(len(SAMPLING)))
def test_s5_a_chats_values_are_those_of_the_raw_logits(
    rand_served: Served, rand: Path, sampling: dict[str, Any]
) -> None:
    """Whatever is done to the logits before the draw: temperature, filters, biases, penalties, bans."""
    prompt = chat_ids(rand)
    for top in (None, 0, 3, 20):
        body = {**CHAT, **sampling, "logprobs": True, "top_logprobs": top, "ignore_eos": True}
        reply = rand_served.http.post(CHATS, json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == reply.json()["usage"]["completion_tokens"] == TOKENS
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
        check_entries(content, rand, prompt, top or 0)


@pytest.mark.parametrize("best", [0, 1, 5])
def test_s5_a_completions_lists(rand_served: Served, rand: Path, best: int) -> None:
    ids = load_reference(rand).greedy(PROMPT, TOKENS)
    right = right_logprobs(rand, [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    choice = choice_of(rand_served, prompt=PROMPT, temperature=0, max_tokens=TOKENS, logprobs=best)
    told, pieces = choice["logprobs"], [decode(rand, [token]) for token in ids]
    assert told["tokens"] == pieces and choice["text"] == "".join(pieces)
    values = [float(row[token]) for row, token in zip(right, ids, strict=True)]
    assert told["token_logprobs"] == pytest.approx(values, abs=TOLERANCE)
    assert told["text_offset"] == [0, *itertools.accumulate(map(len, pieces))][:-1]
    for top, row in zip(told["top_logprobs"], right, strict=True):
        values, order = row.topk(max(1, best))  # greedy: the token itself is the likeliest
        for name, token in zip(top, order.tolist(), strict=True):  # a part of a character has no name
            text = decode(rand, [token])
            assert name.startswith("bytes:") if "\ufffd" in text else name == text
        assert list(top.values()) == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_s5_refusals(rand_served: Served) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
        (CHATS, {"top_logprobs": 3}, "top_logprobs"),
        (CHATS, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHATS, {"logprobs": 5}, "logprobs"),
        (C, {"logprobs": 6}, "logprobs"),
        (C, {"logprobs": 10**9}, "logprobs"),
        (C, {"logprobs": -1}, "logprobs"),
        (C, {"logprobs": True}, "logprobs"),
    ]
    for path, fields, param in cases:
        assert refused(rand_served, path, fields)["param"] == param, fields
    for path, value in itertools.product((C, CHATS), (21, -1, True, "1")):
        reply = rand_served.http.post(path, json={**GOOD[path], "prompt_logprobs": value})
        assert check_error(reply)["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", [C, CHATS])
def test_s5_streams_say_the_same(serve: Serve, path: str) -> None:
    """Parts of a character have their bytes, marks their names, a cut-off stop its tokens; all is JSON."""
    server = serve((NEWLINE, HELLO, WORLD, *LLAMA, IM_START, 17565, EOS))
    wish: dict[str, Any] = {"logprobs": 5} if path == C else {"logprobs": True, "top_logprobs": 20}
    what = {"prompt": [NEWLINE]} if path == C else {"messages": CHAT["messages"]}
    for fields, text, count in (({}, "Hello world🦙beta", 8), ({"stop": "world🦙"}, "Hello ", 5)):
        body = {**what, **wish, **fields, "temperature": 0, "max_tokens": 20}
        reply = server.http.post(path, json=body)
        whole = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        (choice,) = whole["choices"]
        assert (choice["text"] if path == C else choice["message"]["content"]) == text
        assert whole["usage"]["completion_tokens"] == count
        told = choice["logprobs"]
        names = told["tokens"] if path == C else [entry["token"] for entry in told["content"]]
        spelled = [r"bytes:\xf0\x9f", r"bytes:\xa6", r"bytes:\x99"]
        parts = spelled if path == C else ["\ufffd"] * 3
        assert names == ["Hello", " world", *parts, "<|im_start|>", "beta", "<|im_end|>"][:count]
        if path == CHATS:
            joined = b"".join(bytes(entry["bytes"]) for entry in told["content"]).decode()
            assert joined.startswith(text)
        pieces: dict[str, list[Any]] = {}
        with server.http.stream("POST", path, json={**body, "stream": True}) as response:
            for chunk in [event for event in events(response.iter_lines()) if event != DONE]:
                part = chunk["choices"][0]["logprobs"] or {}
                for name, values in part.items():
                    pieces.setdefault(name, []).extend(values or [])
        assert pieces == {name: values or [] for name, values in told.items()}


def test_s5_rows_beyond_the_tokenizer(served: Callable[..., Served], chain: Callable[..., Path]) -> None:
    """Such an id has no text, and an entry of its own like any other."""
    folder = chain((HELLO, 49200, WORLD, EOS), vocab=49280)
    server = served(folder, Known([HELLO], " world", 4))
    choice = choice_of(server, prompt=[HELLO], temperature=0, max_tokens=3, logprobs=5, ignore_eos=False)
    assert (choice["text"], choice["finish_reason"]) == (" world", "stop")
    assert choice["logprobs"]["tokens"] == ["", " world", "<|im_end|>"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([0, 0, 0], abs=1e-6)
    assert choice["logprobs"]["text_offset"] == [0, 0, 6]


# ---- S10: max_tokens and echo ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", [[HELLO, WORLD, 17565], PROMPT, [HELLO]], ids=len)
def test_s10_echo_with_logprobs(rand_served: Served, rand: Path, prompt: list[int], tokens: int) -> None:
    """As many entries as the text has tokens, the first null, the rest transformers'; asked twice, and plain
    before, so that the prompt is in the prefix cache."""
    ids = [*prompt, *load_reference(rand).greedy(prompt, tokens)]
    right = right_logprobs(rand, ids)
    expected = [float(right[i - 1, token]) for i, token in enumerate(ids) if i]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    rand_served.http.post(C, json=body)
    for _ in range(2):
        reply = rand_served.http.post(C, json={**body, "echo": True, "logprobs": 1}).json()
        (choice,) = reply["choices"]
        assert (choice["text"], choice["finish_reason"]) == (decode(rand, ids), "length")
        assert reply["usage"]["completion_tokens"] == tokens
        assert reply["usage"]["prompt_tokens"] == len(prompt)
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None and others == pytest.approx(expected, abs=TOLERANCE)
        none, *tops = choice["logprobs"]["top_logprobs"]
        assert none is None and len(tops) == len(others)
        for top, row in zip(tops, right, strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=TOLERANCE)
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(ids)


def test_s10_prompt_logprobs(rand_served: Served, rand: Path) -> None:
    """vLLM's field, of completions and chats; the same by id."""
    for path, what, ids in ((C, {"prompt": PROMPT}, PROMPT), (CHATS, CHAT, chat_ids(rand))):
        right = right_logprobs(rand, ids)
        for best, tokens in itertools.product((0, 3), (0, 2) if path == C else (2,)):
            body = {**what, "temperature": 0, "max_tokens": tokens, "prompt_logprobs": best, "n": 2}
            for choice in rand_served.http.post(path, json=body).json()["choices"]:
                first, *others = choice["prompt_logprobs"]
                assert first is None and len(others) == len(ids) - 1
                for entries, row, token in zip(others, right, ids[1:], strict=False):
                    wanted = [token, *row.topk(best).indices.tolist()]
                    assert set(entries) == {str(t) for t in wanted}
                    for t, entry in entries.items():
                        assert entry["logprob"] == pytest.approx(float(row[int(t)]), abs=TOLERANCE)
                        assert entry["decoded_token"] == load_reference_tokenizer(rand).decode([int(t)])
                    ranks = {e["rank"]: int(t) for t, e in entries.items() if e["rank"] is not None}
                    assert [ranks[r] for r in range(1, best + 1)] == row.topk(best).indices.tolist()


def test_s10_max_tokens(serve: Serve) -> None:
    server = serve((NEWLINE, HELLO, WORLD, *LLAMA, 17565, EOS))
    ids = {"prompt": [NEWLINE], "temperature": 0}
    for path in (C, CHATS):
        for value in (-1, -(10**18), 1.0, "1", True):
            assert refused(server, path, {"max_tokens": value})["param"] == "max_tokens"
    reply = server.http.post(C, json={**ids, "max_tokens": 0}).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert reply["usage"]["completion_tokens"] == 0
    reply = server.http.post(C, json={**ids, "max_tokens": 0, "echo": True}).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("\n", "length")
    reply = server.http.post(C, json={**ids, "max_tokens": 1, "echo": True}).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("\nHello", "length")
    for absent in ({}, {"max_tokens": None}):
        reply = server.http.post(C, json={**ids, **absent, "ignore_eos": True}).json()
        assert reply["usage"]["completion_tokens"] == 16
        reply = server.http.post(CHATS, json={**GOOD[CHATS], "max_tokens": None, **absent}).json()
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == 7
    reply = server.http.post(CHATS, json={**GOOD[CHATS], "max_tokens": None, "ignore_eos": True}).json()
    assert reply["usage"]["total_tokens"] == 256  # all the room there is


def test_s10_the_two_names_of_a_chats_limit(serve: Serve) -> None:
    """The newer name wins."""
    server = serve((NEWLINE, HELLO, WORLD, *LLAMA, 17565, EOS))
    for fields, tokens in (
        ({"max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3),
        ({"max_completion_tokens": 5, "max_tokens": 3}, 5),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2),
    ):
        body = {**GOOD[CHATS], "max_tokens": None, **fields}
        assert server.http.post(CHATS, json=body).json()["usage"]["completion_tokens"] == tokens
    for fields in ({"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_completion_tokens": -1}):
        error = check_error(server.http.post(CHATS, json={**GOOD[CHATS], "max_tokens": None, **fields}))
        assert error["param"] in fields
