"""A pool too small for the load: everybody is served, nobody hangs, the answers are those of a big pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Served, inside

BLOCK_BYTES = 2 * 2 * 16 * 16 * 4  # RAND: 2 layers, blocks of 16 tokens, head_dim 16, fp32; two KV heads
TOKENS = 44


@pytest.fixture(scope="module")
def big(rand: Path) -> Iterator[Served]:
    with inside(rand, kv_memory=64 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def small(rand: Path) -> Iterator[Served]:
    """12 logical blocks of 16 tokens."""
    with inside(rand, kv_memory=12 * 2 * BLOCK_BYTES) as server:
        yield server


def body(ids: list[int], tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return {"prompt": ids, "temperature": 0, "max_tokens": tokens, "ignore_eos": True} | fields


async def ask_all(server: Served, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """All at once; the texts of each."""
    async with server.async_http() as http:
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(http.post("/v1/completions", json=one) for one in bodies))
    for reply in replies:
        assert reply.status_code == 200, reply.text
    return [[choice["text"] for choice in reply.json()["choices"]] for reply in replies]


LOADS: dict[str, list[dict[str, Any]]] = {
    # four blocks each, twice what the pool holds
    "six equal ones": [body([50 + i, *range(100, 119)]) for i in range(6)],
    # lengths that end on, before and after a block's end
    "block ends": [body([200 + n, *range(300, 300 + n)], 40) for n in (1, 14, 15, 16, 30, 31, 32, 47) * 2],
    # copies share their prompt's blocks until they part
    "copies": [body([9, *range(400, 430)], 30, n=4, temperature=1.0, seed=5), body([8, 9], 60, n=3)],
    # one needs nearly everything, the others come before and after it
    "one large among small": [
        body([1, 2, 3], 20), body(list(range(600, 700)), 90), *[body([4, i], 30) for i in range(10)],
    ],
    # the same beginning, which the pool can hold once and reclaim
    "a shared beginning": [body([*range(700, 748), i], 20) for i in range(12)],
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS)
def test_everything_finishes_with_a_big_pools_texts(big: Served, small: Served, load: str) -> None:
    bodies = LOADS[load]
    expected = asyncio.run(ask_all(big, bodies))
    assert all(text for texts in expected for text in texts)
    before = small.preemptions()
    assert asyncio.run(ask_all(small, bodies)) == expected
    print(f"{small.preemptions() - before} preemptions")
    small.wait_idle(2.0)
    kv = small.kv(check=True)
    assert kv["states"]["live"]["blocks"] == 0
    assert sum(state["blocks"] for state in kv["states"].values()) == kv["pool"]["blocks"] == 24


def test_one_that_fills_the_whole_pool(big: Served, small: Served) -> None:
    """192 tokens of K and V, to the last slot, and then again: the pool is as good as before."""
    assert small.preemptions() > 0, "nothing above was too much for the pool"
    exact = [body([3, *range(800, 899)], 92), body([4, *range(800, 899)], 92)]
    assert asyncio.run(ask_all(small, exact)) == asyncio.run(ask_all(big, exact))
