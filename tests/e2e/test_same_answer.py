"""One question, one answer: alone or in a crowd, whole or streamed, preempted or not, cached or not.

RAND makes this strict: each of its tokens depends on the whole text before it, and fp32 leaves no near ties.
The right answers come from transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import on_batches
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.server import Served, inside
from tests.support.sse import read_stream

TOKENS = 40
CONTEXT = 256  # tokens that RAND can hold
QUESTIONS = [
    [7 + i, *range(100 + 10 * i, 100 + 10 * i + length)] for i, length in enumerate((3, 15, 30, 63, 120))
]
CROWD = [[1000 + 7 * i, *range(2000, 2000 + 9 * i)] for i in range(15)]


@pytest.fixture(scope="module")
def answers(rand: Path) -> list[str]:
    """What transformers says to each of QUESTIONS."""
    tokenizer = load_reference_tokenizer(rand)
    return [text_of(tokenizer, load_reference(rand).greedy(ids, TOKENS)) for ids in QUESTIONS]


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def server(rand: Path) -> Iterator[Served]:
    with inside(rand, kv_memory=32 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def small(rand: Path) -> Iterator[Served]:
    """A pool of 28 logical blocks of 16 tokens: every question fits alone, all of them do not."""
    with inside(rand, kv_memory=28 * 2 * 4096) as server:
        yield server


def body(ids: list[int], salt: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "prompt": ids, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "cache_salt": salt,
    } | fields  # fmt: skip


def ask(server: Served, ids: list[int], salt: str = "") -> tuple[str, int]:
    """The text, and how many prompt tokens came out of the cache."""
    reply = server.http.post("/v1/completions", json=body(ids, salt))
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    return reply.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


async def ask_many(server: Served, bodies: list[dict[str, Any]]) -> list[str]:
    async with server.async_http() as http:
        replies = await asyncio.gather(*(http.post("/v1/completions", json=one) for one in bodies))
    assert {reply.status_code for reply in replies} == {200}
    return [reply.json()["choices"][0]["text"] for reply in replies]


def test_n1_alone(server: Served, answers: list[str]) -> None:
    assert [ask(server, ids, "alone") for ids in QUESTIONS] == [(text, 0) for text in answers]


def test_streamed(server: Served, answers: list[str]) -> None:
    for ids, text in zip(QUESTIONS, answers, strict=True):
        with server.http.stream("POST", "/v1/completions", json=body(ids, "streamed", stream=True)) as reply:
            streamed = read_stream(reply.iter_lines())
        assert streamed.text == text
        assert streamed.finish == "length"


@pytest.mark.parametrize("place", [0, 15])
def test_n1_beside_fifteen_others(server: Served, answers: list[str], place: int) -> None:
    """First and last of sixteen that arrive together, the others of other lengths."""
    for ids, text in zip(QUESTIONS, answers, strict=True):
        bodies = [body(other, f"crowd{place}") for other in CROWD]
        bodies.insert(place, body(ids, f"crowd{place}"))
        assert asyncio.run(ask_many(server, bodies))[place] == text


def test_n1_arriving_while_others_run(
    server: Served, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifteen are decoding, some sampled, when the questions come in one by one."""
    forward = server.engine._runner.run
    monkeypatch.setattr(server.engine._runner, "run", forward)  # put back at the end
    on_batches(server.engine, lambda batch: time.sleep(0.005))

    async def late() -> list[str]:
        others = [body(ids, "late", max_tokens=CONTEXT - len(ids)) for ids in CROWD]
        for other in others[::2]:
            other |= {"temperature": 1.4, "top_k": 50, "seed": 3}
        crowd = asyncio.create_task(ask_many(server, others))
        asked = []
        for ids in QUESTIONS:
            await asyncio.sleep(0.05)
            asked.append(asyncio.create_task(ask_many(server, [body(ids, "late")])))
        texts = [await one for one in asked[:-1]]
        assert not crowd.done(), "the questions were answered alone"
        texts.append(await asked[-1])
        await crowd
        return [text for (text,) in texts]

    assert asyncio.run(late()) == answers


def test_with_a_prefix_hit(server: Served, answers: list[str]) -> None:
    """The second time whole blocks come from the cache, never the last token, and nothing changes."""
    for ids, text in zip(QUESTIONS, answers, strict=True):
        assert ask(server, ids, "prefix") == (text, 0)
        assert ask(server, ids, "prefix") == (text, (len(ids) - 1) // 16 * 16)


def test_a_shared_beginning(server: Served, rand: Path) -> None:
    """40 ids in common, other endings: 32 of them are a hit, and each goes on in its own way."""
    reference, tokenizer = load_reference(rand), load_reference_tokenizer(rand)
    beginning = list(range(500, 540))
    for i, ending in enumerate(([1], [2], [3, 4, 5], list(range(30)))):
        text = text_of(tokenizer, reference.greedy(beginning + ending, TOKENS))
        assert ask(server, beginning + ending, "shared") == (text, 32 if i else 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_lengths_around_a_block(server: Served, rand: Path, length: int) -> None:
    """Prompts that end before, on and after a block's end, each twice, with an answer over two blocks."""
    ids = [900 + length, *range(3000, 2999 + length)]
    text = text_of(load_reference_tokenizer(rand), load_reference(rand).greedy(ids, TOKENS))
    assert ask(server, ids, "ends") == (text, 0)
    assert ask(server, ids, "ends") == (text, (length - 1) // 16 * 16)


def test_four_equal_questions_at_once(server: Served, answers: list[str]) -> None:
    """Equal prompts in one batch, where the first is not in the cache yet when the others begin."""
    for ids, text in zip(QUESTIONS, answers, strict=True):
        assert asyncio.run(ask_many(server, [body(ids, "equal")] * 4)) == [text] * 4


def test_after_preemption(small: Served, answers: list[str]) -> None:
    """More work than the pool holds: some are thrown out and start again, and no answer shows it."""
    bodies = [body(ids, f"{i}") for i in range(3) for ids in QUESTIONS]
    before = small.preemptions()
    assert asyncio.run(ask_many(small, bodies)) == answers * 3
    assert small.preemptions() > before, "nothing was preempted, so nothing was shown"
    small.wait_idle(2.0)
    small.kv(check=True)


def test_sampled_answers_too(server: Served, small: Served) -> None:
    """A seed's answer does not depend on slot, batch, preemption or cache.

    RAND spreads its bets so thin that two of its 49,152 candidates often differ by less than a rounding;
    among the best 20 they do not.
    """
    fields = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 7}
    bodies = [body(ids, **fields) for ids in QUESTIONS]
    alone = [asyncio.run(ask_many(server, [one]))[0] for one in bodies]
    assert alone != [asyncio.run(ask_many(server, [one | {"seed": 8}]))[0] for one in bodies]
    assert asyncio.run(ask_many(server, bodies)) == alone
    assert asyncio.run(ask_many(small, bodies * 3)) == alone * 3
