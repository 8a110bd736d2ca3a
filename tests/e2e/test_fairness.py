"""A large mha request among a stream of small mqa ones, on a pool that holds few: it starts, and it ends.

RAND in fp32: a block of one KV head is 2 * 2 * 16 * 16 * 4 = 4,096 bytes; mha has 4 heads, native 2, mqa 1.
`tests/engine/test_fairness.py` has the rules one by one; here the whole engine runs, and debug mode recounts
every step.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from model.heads import MeanHeads, NativeHeads, RepeatHeads, Variant
from tests.support.driving import fp32_engine, generate, greedy_request
from tests.support.engines import prompt_of
from tests.support.reference import load_reference
from tests.support.server import inside

BLOCK_BYTES = 4096
THREE = (
    Variant("native", NativeHeads(2)),
    Variant("mha", RepeatHeads(4)),
    Variant("mqa", MeanHeads(1)),
)


@pytest.mark.parametrize("stream", ["mqa", "native"])
def test_it_starts_when_those_before_it_are_done(rand: Path, stream: str) -> None:
    """48 blocks. A small request has 20 + 12 tokens: 12 steps, 2 logical blocks. The large one has 100 + 8: 7
    logical blocks, 28 physical, and must leave room for those that run. One small request comes in a step;
    the youngest before it needs 12 steps at most, and nobody behind it starts first."""
    options: dict[str, Any] = {"variants": THREE, "kv_memory": 48 * BLOCK_BYTES, "debug": True}
    engine = fp32_engine(rand, **options)[0]
    first: dict[str, int] = {}
    ids: dict[str, list[int]] = {}
    arrival = 30
    large = greedy_request(prompt_of(100, 1), 8, variant="mha")
    small = [greedy_request(prompt_of(20, i), 12, variant=stream) for i in range(60)]
    waiting_before = 0
    for step in range(60):
        if step == arrival:
            waiting_before = engine.stats().waiting
            engine.add(large)
        engine.add(small[step])
        for event in engine.step():
            first.setdefault(event.request_id, step)
            assert event.token is not None
            ids.setdefault(event.request_id, []).append(event.token)
    while engine.has_work:
        for event in engine.step():
            assert event.token is not None
            ids.setdefault(event.request_id, []).append(event.token)
        step += 1
        first.update({name: step for name in ids if name not in first})
    assert engine.dead is None
    # Those that waited come in at least two at a time: 48 blocks hold more than 4 of them with their reserve.
    assert arrival < first[large.id] <= arrival + 12 * (1 + -(-waiting_before // 2))
    assert first[large.id] <= min(first[request.id] for request in small[arrival:])
    assert ids[large.id] == load_reference(rand).greedy(large.prompts[0], 8)
    alone = fp32_engine(rand, variants=THREE, prefix_cache=False)[0]
    for request in small[arrival - 3 : arrival + 3]:
        assert ids[request.id] == generate(alone, request.prompts[0], 12, variant=stream)


async def test_over_http_it_ends_while_the_stream_goes_on(rand: Path) -> None:
    """Eight clients ask mqa without a pause, for answers of different lengths, on 30 blocks: beside one of
    them the 28 of the large mha request find no room. From its sending to its end it lives through what
    each of them had in flight and what may have come in first: it is done before they have got 60 answers,
    of 400 that they would ask for."""
    body = {"model": "rand@mqa", "temperature": 0, "ignore_eos": True}
    large = body | {"model": "rand@mha", "prompt": list(range(300, 400)), "max_tokens": 8}
    options = {"attention": ("native", "mha", "mqa"), "head_map": "mean", "debug": True, "max_num_seqs": 16}
    answered, busy, enough = [0], asyncio.Event(), asyncio.Event()

    async def client(http: Any, number: int) -> None:
        for turn in range(400 // 8):
            if enough.is_set():
                return
            prompt = [20 + number, 90 + turn, *range(600, 618)]
            reply = await http.post(
                "/v1/completions", json=body | {"prompt": prompt, "max_tokens": 8 + 3 * number}
            )
            assert reply.status_code == 200, reply.text
            answered[0] += 1
            if answered[0] == 12:
                busy.set()

    with inside(rand, served_name="rand", kv_memory=30 * BLOCK_BYTES, **options) as server:
        async with server.async_http() as http:
            clients = [asyncio.ensure_future(client(http, number)) for number in range(8)]
            await busy.wait()
            before = answered[0]
            reply = await http.post("/v1/completions", json=large)
            lived_through = answered[0] - before
            enough.set()
            await asyncio.gather(*clients)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 8
        assert lived_through < 60
        server.kv(check=True)
