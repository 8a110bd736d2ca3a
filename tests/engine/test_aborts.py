"""Whoever leaves, in whatever state, leaves nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from model.heads import NativeHeads, RepeatHeads, Variant
from server.engine.request import FinishReason, Request, SamplingParams
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, generate, greedy_request
from tests.support.engines import checked, manager_of, pool_of, prompt_of

BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def assert_idle(engine: object, total: int) -> None:
    manager = manager_of(engine)  # type: ignore[arg-type]
    manager.check()
    assert manager.live_blocks == 0
    assert manager.free_blocks + manager.cached_blocks == manager.total == total
    assert manager.report().requests == ()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 9])
def test_abort_in_every_state(small: Path, oracle: Oracle, steps: int) -> None:
    """Waiting (the last), in prefill, decoding, and forked siblings (the first has three choices)."""
    engine = checked(fp32_engine(small, max_batch_tokens=32, max_num_seqs=5, kv_memory=1 << 20)[0])
    requests = [
        greedy_request(prompt_of(20, 80), 30, n=3),
        greedy_request(prompt_of(90, 81), 30),
        greedy_request(prompt_of(30, 82), 30),
    ]
    survivor = greedy_request(prompt_of(25, 83), 20)
    for request in (*requests, survivor):
        engine.add(request)
    for _ in range(steps):
        engine.step()
    for request in requests:
        engine.abort(request.id)
        engine.abort(request.id, 0)  # twice is once
    engine.abort("nobody")
    events = engine.step()
    aborted = [(event.request_id, event.index) for event in events if event.finish is FinishReason.ABORT]
    assert sorted(aborted) == sorted(
        [
            (requests[0].id, 0),
            (requests[0].id, 1),
            (requests[0].id, 2),
            (requests[1].id, 0),
            (requests[2].id, 0),
        ]
    )
    assert all(event.token is None for event in events if event.finish is FinishReason.ABORT)
    ids = [event.token for event in events if event.request_id == survivor.id]
    while engine.has_work:
        ids += [event.token for event in engine.step()]
    assert ids[-10:] == oracle.greedy(survivor.prompts[0], 20)[-10:]
    assert_idle(engine, 256)


def test_abort_of_one_choice_frees_its_own_blocks_only(small: Path) -> None:
    engine = checked(fp32_engine(small, prefix_cache=False)[0])
    request = greedy_request(prompt_of(40, 84), 30, n=3)
    engine.add(request)
    for _ in range(3):
        engine.step()
    assert manager_of(engine).live_blocks == 2 * (2 + 3)
    engine.abort(request.id, 1)
    engine.step()
    assert manager_of(engine).live_blocks == 2 * (2 + 2)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(small: Path, oracle: Oracle, seed: int) -> None:
    """Arrivals, aborts, stops, choices, two attention modes, in a pool that is too small for them."""
    dice = random.Random(seed)
    engine = checked(pool_of(small, 20, variants=BOTH, max_batch_tokens=24, max_num_seqs=6)[0])
    total = manager_of(engine).total
    open_requests: dict[str, Request] = {}
    ended: dict[tuple[str, int], FinishReason] = {}
    expected = 0
    for step in range(400):
        if step < 150 and dice.random() < 0.3:
            request = greedy_request(
                prompt_of(dice.choice([1, 16, 17, 20, 33, 60]), dice.randrange(3)),
                dice.randrange(1, 40),
                n=dice.choice([1, 1, 1, 3]),
                variant=dice.choice(["native", "mha"]),
                priority=dice.choice([0, 0, 1]),
                stop_ids=dice.sample(range(512), 20),
                sampling=SamplingParams(temperature=dice.choice([0.0, 1.0]), seed=step),
            )
            engine.add(request)
            open_requests[request.id] = request
            expected += request.n
        if open_requests and dice.random() < 0.1:
            victim = dice.choice(sorted(open_requests))
            engine.abort(victim, dice.choice([None, 0, 1]))
        for event in engine.step():
            if event.finish is not None:
                assert (event.request_id, event.index) not in ended
                ended[event.request_id, event.index] = event.finish
        if step >= 150 and not engine.has_work:
            break
    assert not engine.has_work and len(ended) == expected > 20
    assert set(ended.values()) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert_idle(engine, total)
    assert generate(engine, prompt_of(33, 1), 10) == oracle.greedy(prompt_of(33, 1), 10)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_requests) == (0, 0, 0)
    assert engine._works == {}
