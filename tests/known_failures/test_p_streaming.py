"""P1, P2, P7: what chunks look like, what usage says, and which choice a chunk belongs to."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.reference import load_reference_tokenizer
from tests.support.scripted import EOS, HELLO, NEWLINE, WORLD, Serve, chat, complete
from tests.support.server import Served
from tests.support.sse import DONE, Streamed, events

C, CC = "/v1/completions", "/v1/chat/completions"
P1 = (NEWLINE, HELLO, WORLD, EOS)

FINISHES: list[tuple[str, dict[str, Any], str, str, int]] = [
    ("an eos", {}, "Hello world", "stop", 3),
    ("an eos as the last token allowed", {"max_tokens": 3}, "Hello world", "stop", 3),
    ("a stop completed by the last token", {"max_tokens": 2, "stop": "rld"}, "Hello wo", "stop", 2),
    ("the limit", {"max_tokens": 2}, "Hello world", "length", 2),
    ("a limit of one", {"max_tokens": 1}, "Hello", "length", 1),
    ("held back at the limit", {"max_tokens": 2, "stop": "world!"}, "Hello world", "length", 2),
    ("held back at the eos", {"stop": ["worlds", "Hello world "]}, "Hello world", "stop", 3),
    ("an eos that is ignored", {"max_tokens": 3, "ignore_eos": True}, "Hello world", "length", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "text", "finish", "tokens"), [f[1:] for f in FINISHES], ids=[f[0] for f in FINISHES]
)
def test_p1_chunks_and_finish_reasons(
    serve: Serve, fields: dict[str, Any], text: str, finish: str, tokens: int
) -> None:
    server = serve(P1)
    for whole, streamed in (complete(server, [NEWLINE], **fields), chat(server, **fields)):
        assert (whole["text"], whole["finish"]) == (text, finish)
        assert whole["usage"]["completion_tokens"] == tokens
        check_chunks(streamed, whole)


def test_p1_an_eos_as_the_first_token(serve: Serve) -> None:
    """An empty answer is an empty string, not null."""
    for whole, streamed in (complete(serve((NEWLINE, EOS)), [NEWLINE]), chat(serve((NEWLINE, EOS)))):
        assert (whole["text"], whole["finish"]) == ("", "stop")
        assert whole["usage"]["completion_tokens"] == 1
        check_chunks(streamed, whole)


def check_chunks(streamed: Streamed, whole: dict[str, Any]) -> None:
    """One id, time and model; the role first and once; a finish reason in one chunk, null in the others."""
    *chunks, usage = streamed.chunks
    assert usage["choices"] == []
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in streamed.chunks}
    assert len(heads) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0] * len(choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish"]]
    if whole["object"] == "chat.completion":
        assert streamed.chunks[0]["object"] == "chat.completion.chunk"
        check_chat_deltas([choice["delta"] for choice in choices])
    else:
        assert streamed.chunks[0]["object"] == "text_completion"
        assert all(isinstance(choice["text"], str) for choice in choices)


def check_chat_deltas(deltas: list[dict[str, Any]]) -> None:
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert all(isinstance(delta["content"], str) for delta in deltas[:-1])
    assert deltas[-1] in ({}, {"content": ""})


def chunks_of(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with one [DONE]."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()
        *chunks, last = events(lines)
    assert last == DONE and DONE not in chunks
    return chunks


def by_index(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The choice objects of each index, in order; the first sight of an index is its opening."""
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]].append(choice)
    return dict(found)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"stop": "wor"}], ids=["eos", "limit", "stop"])
def test_p1_each_of_several_choices_opens_and_ends_once(serve: Serve, fields: dict[str, Any]) -> None:
    """A sibling of the case: with n, every index has its own opening, its own end, and no word after it."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "n": 3,
        "temperature": 0,
        "max_tokens": 9,
    } | fields
    server = serve(P1)
    whole = server.http.post(CC, json=body).json()["choices"]
    choices = by_index(chunks_of(server, CC, body))
    assert sorted(choices) == [0, 1, 2]
    for index, own in choices.items():
        check_chat_deltas([choice["delta"] for choice in own])
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + [whole[index]["finish_reason"]]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole[index]["message"]["content"]


ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", CC, {"messages": [{"role": "user", "content": "x"}]}),
    ("chat of two choices", CC, {"messages": [{"role": "user", "content": "x"}], "n": 2}),
    ("chat to a stop", CC, {"messages": [{"role": "user", "content": "x"}], "stop": "wor"}),
    ("text", C, {"prompt": [NEWLINE]}),
    ("two choices", C, {"prompt": [NEWLINE], "n": 2}),
    ("several prompts", C, {"prompt": ["one\n", "and two\n", "three more than that\n"]}),
    ("several prompts and choices", C, {"prompt": ["one\n", "and two\n"], "n": 3}),
    ("a stop string", C, {"prompt": [NEWLINE], "stop": ["wor"]}),
    ("an eos at once", C, {"prompt": [WORLD]}),
    ("an echo", C, {"prompt": "one\n", "echo": True}),
    ("an echo alone", C, {"prompt": "one\n", "echo": True, "max_tokens": 0}),
    ("nothing", C, {"prompt": "one\n", "max_tokens": 0}),
]


@pytest.mark.parametrize(("path", "fields"), [a[1:] for a in ASKED], ids=[a[0] for a in ASKED])
def test_p2_usage_whole_and_streamed(serve: Serve, smol: Path, path: str, fields: dict[str, Any]) -> None:
    """One chunk before [DONE] has it, where it was asked for; then the others say null, else nothing."""
    server, body = serve(P1), {"temperature": 0, "max_tokens": 9, **fields}
    usage = server.http.post(path, json=body).json()["usage"]
    count = prompt_tokens(smol, fields)
    assert usage["prompt_tokens"] == count
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    *told, last = chunks_of(server, path, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in told)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in names] == [usage[name] for name in names]
    for options in ({}, {"stream_options": None}, {"stream_options": {}},
                    {"stream_options": {"include_usage": False}},
                    {"stream_options": {"include_usage": None}}):  # fmt: skip
        chunks = chunks_of(server, path, body | options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks), options


def prompt_tokens(folder: Path, fields: dict[str, Any]) -> int:
    """What transformers counts: each prompt once, however many answers it gets."""
    tokenizer = load_reference_tokenizer(folder)
    if "messages" in fields:
        rendered = tokenizer.apply_chat_template(
            fields["messages"], tokenize=True, add_generation_prompt=True
        )
        return len(
            rendered["input_ids"] if isinstance(rendered, dict) or hasattr(rendered, "keys") else rendered
        )
    prompt = fields["prompt"]
    if isinstance(prompt, str):
        return len(tokenizer(prompt).input_ids)
    if isinstance(prompt[0], str):
        return sum(len(tokenizer(text).input_ids) for text in prompt)
    return len(prompt)


def test_p2_completion_tokens_are_those_that_were_generated(serve: Serve) -> None:
    """Hello, " world", eos: each answer takes three, and one that a stop ends the two up to it."""
    server = serve(P1)
    asked: list[tuple[dict[str, Any], int]] = [
        ({}, 3),
        ({"n": 2}, 6),
        ({"prompt": [[NEWLINE], [HELLO]]}, 5),
        ({"stop": "wor"}, 2),
        ({"prompt": [[NEWLINE]] * 2, "n": 2, "max_tokens": 1}, 4),
    ]
    for fields, tokens in asked:
        body = {"prompt": [NEWLINE], "temperature": 0, "max_tokens": 9, **fields}
        assert server.http.post(C, json=body).json()["usage"]["completion_tokens"] == tokens, fields
        *_, last = chunks_of(server, C, body | {"stream_options": {"include_usage": True}})
        assert last["usage"]["completion_tokens"] == tokens, fields


def test_p2_cached_prompt_tokens_are_still_prompt_tokens(serve: Serve) -> None:
    """40 ids are two full blocks of 16 and some; the second time those two come out of the cache."""
    server = serve(P1)
    body = {"prompt": [*range(5000, 5039), NEWLINE], "temperature": 0, "max_tokens": 9}
    told = []
    for _ in range(2):
        usage = server.http.post(C, json=body).json()["usage"]
        told.append((usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == 32
    *_, last = chunks_of(server, C, body | {"stream_options": {"include_usage": True}})
    usage = last["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32
    assert [*told, (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])] == [
        (40, 3, 43)
    ] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_p7_the_index_of_several_prompts_and_choices(rand_served: Served, n: int, temperature: float) -> None:
    """index = prompt * n + choice; the echo shows whose answer it is; every index finishes once."""
    body = {"prompt": ["AAA", "BBB"], "n": n, "echo": True, "max_tokens": 3, "temperature": temperature,
            "seed": 5, "ignore_eos": True}  # fmt: skip
    whole = rand_served.http.post(C, json=body).json()["choices"]
    assert [choice["index"] for choice in whole] == list(range(2 * n))
    assert [choice["text"][:3] for choice in whole] == ["AAA"] * n + ["BBB"] * n
    if temperature:
        assert len({choice["text"] for choice in whole}) == 2 * n, (
            "with one seed, each choice is its own draw"
        )
    else:
        assert len({choice["text"] for choice in whole}) == 2
    choices = by_index(chunks_of(rand_served, C, body))
    assert sorted(choices) == list(range(2 * n))
    for index, own in choices.items():
        assert "".join(choice["text"] for choice in own) == whole[index]["text"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_p7_choices_that_end_at_different_times(serve: Serve) -> None:
    """One is at its end at once, one after a token, one is cut: each ends under its own number."""
    server = serve(P1)
    body = {"prompt": [[WORLD], [NEWLINE], [HELLO], [WORLD]], "n": 2, "temperature": 0, "max_tokens": 2}
    expected = (
        [("", "stop")] * 2 + [("Hello world", "length")] * 2 + [(" world", "stop")] * 2 + [("", "stop")] * 2
    )
    whole = server.http.post(C, json=body).json()["choices"]
    assert [(choice["text"], choice["finish_reason"]) for choice in whole] == expected
    choices = by_index(chunks_of(server, C, body))
    for index, (text, finish) in enumerate(expected):
        assert "".join(choice["text"] for choice in choices[index]) == text
        assert [c["finish_reason"] for c in choices[index]] == [None] * (len(choices[index]) - 1) + [finish]
