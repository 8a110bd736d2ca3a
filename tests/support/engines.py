"""What engine tests ask again and again: prompts, invariants after every step, pools of so many blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cache.manager import CacheManager
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.request import Request
from server.engine.step_cost import StepCost
from tests.support.driving import Answer, fp32_engine, run

VOCAB = 512


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids, the same for the same seed."""
    dice = random.Random(f"{length}-{seed}")
    return tuple(dice.randrange(3, VOCAB) for _ in range(length))


def pool_of(folder: Path, blocks: int, **options: Any) -> tuple[Engine, EngineFacts]:
    """An engine whose pool holds `blocks` logical blocks of the first attention mode."""
    probe = fp32_facts(folder, **options)
    heads = probe.variants[0].kv_heads
    return fp32_engine(folder, kv_memory=blocks * heads * probe.block_bytes, **options)


def fp32_facts(folder: Path, **options: Any) -> EngineFacts:
    return fp32_engine(folder, **options)[1]


def manager_of(engine: Engine) -> CacheManager:
    return engine._manager


def checked(engine: Engine) -> Engine:
    """The same engine, whose every step ends with a recount of the cache and of what each sequence holds."""
    step = engine.step

    def checked_step() -> Any:
        events = step()
        manager = manager_of(engine)
        manager.check()
        for sequence in engine._scheduler.running:
            assert sequence.slot is not None
            held = manager.state.slots[sequence.slot]
            assert held is not None and held.tokens == sequence.computed
            assert held.blocks == -(-sequence.computed // manager.state.layout.block_size)
        return events

    engine.step = checked_step  # type: ignore[method-assign]
    return engine


def run_staggered(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> dict[str, list[Answer]]:
    """Add each request before the step of its number; the answers of each request."""
    answers = {r.id: [Answer() for _ in range(len(r.prompts) * r.n)] for _, r in arrivals}
    waiting = sorted(arrivals, key=lambda pair: pair[0])
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add(waiting.pop(0)[1])
        for event in engine.step():
            answers[event.request_id][event.index].take(event)
        step += 1
        assert step < 20_000
    return answers


def ids_of(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The ids of each request's first choice, all added at once."""
    return [answers[0].ids for answers in run(engine, requests)]


def on_batches(engine: Engine, hook: Callable[[Any], None]) -> None:
    """Calls `hook(batch)` before each run of the model; what it raises, the model raises."""
    runner = engine._runner
    forward = runner.run

    def hooked(batch: Any) -> Any:
        hook(batch)
        return forward(batch)

    runner.run = hooked  # type: ignore[method-assign]


class Flat(StepCost):
    """Rows are free."""

    def seconds(self, tokens: int) -> float:
        return 1.0


def rows_are_free(engine: Engine) -> Engine:
    """The same engine, which does not go by what its steps take on this machine."""
    assert engine._speculation is not None
    engine._speculation.cost = Flat()
    return engine
