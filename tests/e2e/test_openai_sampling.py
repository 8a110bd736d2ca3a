"""The official client, sync and async, asks for everything that sampling offers; its models hold it all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.server import Served, inside

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "The old clockmaker mends seven small lanterns."}]
PROMPT = list(range(100, 120))
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(tiny_served: Path) -> Iterator[Served]:
    with inside(tiny_served, served_name=MODEL) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return server.openai()


def both(server: Served, kind: str, **fields: Any) -> list[Any]:
    """The same call by the sync and by the async client."""
    resource = {"chat": lambda c: c.chat.completions, "text": lambda c: c.completions}[kind]
    ours = {"model": MODEL} | fields

    async def later() -> Any:
        async with server.async_openai() as client:
            reply = await resource(client).create(**ours)
            return [chunk async for chunk in reply] if fields.get("stream") else reply

    reply = resource(server.openai()).create(**ours)
    return [list(reply) if fields.get("stream") else reply, asyncio.run(later())]


def right_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(load_reference(folder).logits(ids).to(torch.float64), -1)


def greedy(folder: Path, ids: list[int], tokens: int, **settings: Any) -> str:
    answer = load_reference(folder).generate(ids, tokens, **settings)
    return str(load_reference_tokenizer(folder).decode(answer, skip_special_tokens=True))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(server: Served, stream: bool) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4, "max_tokens": 9}
    for reply in both(server, "chat", temperature=0, stream=stream, **fields):
        if stream:
            choices = [chunk.choices[0] for chunk in reply]
            entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
            text = "".join(choice.delta.content or "" for choice in choices)
            assert choices[-1].logprobs is None
        else:
            entries, text = reply.choices[0].logprobs.content, reply.choices[0].message.content
            assert len(entries) == reply.usage.completion_tokens
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text
        for entry in entries:
            values = [top.logprob for top in entry.top_logprobs]
            assert len(values) == 4 and values == sorted(values, reverse=True)
            assert entry.logprob == values[0] <= 0  # greedy
            assert (entry.token, entry.bytes) == (entry.top_logprobs[0].token, entry.top_logprobs[0].bytes)


@pytest.mark.parametrize("tokens", [0, 6])
def test_completion_logprobs_with_echo(server: Served, tiny_served: Path, tokens: int) -> None:
    ids = [*PROMPT, *load_reference(tiny_served).greedy(PROMPT, tokens)]
    right = right_logprobs(tiny_served, ids)
    expected = [float(right[i - 1, token]) for i, token in enumerate(ids) if i]
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": tokens}
    fields |= {"echo": True, "logprobs": 2}
    for stream in (False, True):
        for reply in both(server, "text", **fields, stream=stream, extra_body={"ignore_eos": True}):
            choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
            told = [choice.logprobs for choice in choices if choice.logprobs is not None]
            values = [value for part in told for value in part.token_logprobs]
            tops = [top for part in told for top in part.top_logprobs]
            assert values[0] is tops[0] is None
            assert values[1:] == pytest.approx(expected, abs=TOLERANCE)
            assert all(2 <= len(top) <= 3 or len(top) == 1 for top in tops[1:])
            assert sum(len(part.tokens) for part in told) == len(ids)
            offsets = [offset for part in told for offset in part.text_offset]
            assert offsets[0] == 0 and offsets == sorted(offsets)


def test_prompt_logprobs(client: Any, tiny_served: Path) -> None:
    right = right_logprobs(tiny_served, PROMPT)
    reply = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, extra_body={"prompt_logprobs": 1}
    )
    first, *others = reply.choices[0].prompt_logprobs
    assert first is None
    for told, row, token in zip(others, right, PROMPT[1:], strict=False):
        assert told[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)


def test_penalties_and_biases(server: Served, tiny_served: Path) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    extra: dict[str, Any] = {"ignore_eos": True}
    for reply in both(server, "text", **fields, logit_bias={"70": 100}, extra_body=extra):
        assert reply.choices[0].text == "d" * 12
    pushed = fields | {"logit_bias": {"70": 100, "71": 98}, "extra_body": extra}
    for reply in both(server, "text", **pushed, presence_penalty=1.0, frequency_penalty=2.0):
        assert set(reply.choices[0].text) == {"d", "e"}
    expected = greedy(tiny_served, PROMPT, 12, repetition_penalty=1.4)
    for reply in both(server, "text", **fields, extra_body={**extra, "repetition_penalty": 1.4}):
        assert reply.choices[0].text == expected


def test_seeds_choices_and_stops(server: Served) -> None:
    extra = {"ignore_eos": True, "min_tokens": 3, "top_k": 40, "min_p": 0.01, "priority": 1}
    fields: dict[str, Any] = {
        "messages": MESSAGES, "seed": 11, "n": 3, "temperature": 1.1, "top_p": 0.95, "max_tokens": 16,
        "logprobs": True, "extra_body": extra,
    }  # fmt: skip
    one, other = both(server, "chat", **fields)
    texts = [[choice.message.content for choice in reply.choices] for reply in (one, other)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    stop = texts[0][1][6:8]
    assert stop
    for shown in (False, True):
        fields["extra_body"] = {**extra, "min_tokens": 0, "include_stop_str_in_output": shown}
        for reply in both(server, "chat", **fields, stop=[stop, "\ud7ff"]):
            choice = reply.choices[1]
            end = texts[0][1].index(stop) + (len(stop) if shown else 0)
            assert (choice.message.content, choice.finish_reason) == (texts[0][1][:end], "stop")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("text", {"logprobs": 6}, "logprobs"),
        ("text", {"logit_bias": {"384": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ("text", {"presence_penalty": 2.1}, "presence_penalty"),
        ("chat", {"frequency_penalty": -2.1}, "frequency_penalty"),
        ("text", {"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ("text", {"best_of": 3, "n": 2}, "best_of"),
        ("text", {"best_of": 1, "n": 2}, "best_of"),
        ("text", {"stop": ["x"] * 17}, "stop"),
    ],
)  # fmt: skip
def test_refusals_are_the_clients_own_error(
    client: Any, kind: str, fields: dict[str, Any], param: str
) -> None:
    import openai

    resource = client.chat.completions if kind == "chat" else client.completions
    what = {"messages": MESSAGES} if kind == "chat" else {"prompt": PROMPT}
    with pytest.raises(openai.BadRequestError) as caught:
        resource.create(model=MODEL, **what, **fields)
    assert caught.value.param == param


def test_best_of_that_asks_for_nothing(client: Any) -> None:
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}):
        reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, **fields)
        assert len(reply.choices) == fields.get("n", 1)
