"""A crowd of unlike clients on a small pool: some stream, some wait, some leave; nobody gets another's words.

Each answer that is read to its end is the one that a client alone gets; who leaves got its beginning.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import Served, inside
from tests.support.sse import read_stream

BLOCKS = 12  # logical ones of 16 tokens; the largest question with its answer takes ten
CLIENTS = 25


@pytest.fixture(scope="module")
def big(rand: Path) -> Iterator[Served]:
    with inside(rand, kv_memory=64 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def small(rand: Path) -> Iterator[Served]:
    with inside(rand, kv_memory=BLOCKS * 2 * 4096, max_batch_tokens=64, max_num_seqs=8) as server:
        yield server


def question(chance: random.Random) -> dict[str, Any]:
    """Prompts that share beginnings now and then, of any length that fits, with every kind of ending."""
    start = chance.choice([100, 100, 200, 300])
    prompt = [*range(start, start + chance.choice([1, 15, 16, 40, 64, 90])), *range(chance.randrange(9))]
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": chance.randrange(1, 60), "ignore_eos": chance.random() < 0.7,
        "temperature": chance.choice([0, 0, 1.2]), "top_k": 20, "seed": chance.randrange(99),
    }  # fmt: skip
    if chance.random() < 0.3:
        body["stop"] = chance.choice(["e", "the", ["on", "zz"], "no such thing"])
    if chance.random() < 0.2:
        body["n"] = chance.randrange(2, 4)
    return body


def long_answer(number: int) -> dict[str, Any]:
    """Begins with one block and grows to nine: any two of these in one pool, and one is preempted."""
    return {"prompt": [400 + number], "max_tokens": 140, "ignore_eos": True, "temperature": 0}


def whole(reply: dict[str, Any]) -> list[tuple[str, str]]:
    return [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]]


async def waits(http: httpx.AsyncClient, body: dict[str, Any], right: list[tuple[str, str]]) -> None:
    assert whole((await http.post("/v1/completions", json=body)).json()) == right


async def streams(http: httpx.AsyncClient, body: dict[str, Any], right: list[tuple[str, str]]) -> None:
    async with http.stream("POST", "/v1/completions", json=body | {"n": 1, "stream": True}) as reply:
        answer = read_stream([line async for line in reply.aiter_lines()])
    assert ((answer.text, answer.finish), answer.done) == (right[0], True)


async def leaves(http: httpx.AsyncClient, body: dict[str, Any], right: list[tuple[str, str]]) -> None:
    """After a few lines, or before the first."""
    lines = []
    async with http.stream("POST", "/v1/completions", json=body | {"n": 1, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            lines.append(line)
            if len(lines) > body["seed"] % 8:
                break
    answer = read_stream(lines)
    assert right[0][0].startswith(answer.text)


async def gives_up(http: httpx.AsyncClient, body: dict[str, Any], right: list[tuple[str, str]]) -> None:
    try:
        await http.post("/v1/completions", json=body, timeout=0.05 + body["seed"] / 300)
    except httpx.TimeoutException:
        return


@pytest.mark.parametrize("seed", range(2))
def test_everybody_gets_an_answer_of_their_own(big: Served, small: Served, seed: int) -> None:
    chance = random.Random(seed)
    bodies = [*map(long_answer, range(3)), *(question(chance) for _ in range(CLIENTS))]
    right = [whole(big.http.post("/v1/completions", json=body).json()) for body in bodies]
    drawn = [chance.choice([waits, streams, leaves, gives_up]) for _ in range(CLIENTS)]
    kinds = [waits, streams, waits, *drawn]

    async def everybody() -> None:
        async with small.async_http() as http, asyncio.TaskGroup() as group:
            for kind, body, answer in zip(kinds, bodies, right, strict=True):
                group.create_task(kind(http, body, answer))
                await asyncio.sleep(chance.random() * 0.02)

    asyncio.run(everybody())
    small.wait_idle(2.0)
    kv = small.kv(check=True)
    assert sum(state["blocks"] for state in kv["states"].values()) == kv["pool"]["blocks"] == BLOCKS * 2
    assert kv["requests"] == []
    assert small.preemptions() > 0
