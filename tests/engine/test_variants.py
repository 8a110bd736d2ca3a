"""Attention modes side by side: one pool, one forward pass, the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.heads import NativeHeads, RepeatHeads, Variant
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import checked, manager_of, on_batches, pool_of, prompt_of

BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def test_modes_share_every_step(small: Path, oracle: Oracle) -> None:
    engine = checked(fp32_engine(small, variants=BOTH, max_batch_tokens=512)[0])
    batches: list[Any] = []
    on_batches(engine, batches.append)
    prompts = [prompt_of(10 + 11 * i, 90 + i) for i in range(8)]
    requests = [greedy_request(p, 15, variant=("native", "mha")[i % 2]) for i, p in enumerate(prompts)]
    answers = run(engine, requests)
    for (answer,), prompt in zip(answers, prompts, strict=True):
        assert answer.ids == oracle.greedy(prompt, 15)
    assert len(batches) == engine.stats().steps == 15, "one forward a step, for both modes together"
    for batch in batches:
        assert [(s.head_map.kv_heads, s.start) for s in batch.segments] == [
            (4, 0),
            (2, batch.segments[0].stop),
        ], "the tokens of a mode stand together"
        assert len(batch.meta.row_slot) == 4 * 2 + 4 * 4


def test_blocks_follow_the_heads(small: Path) -> None:
    engine = checked(fp32_engine(small, variants=BOTH, prefix_cache=False)[0])
    peaks = {}
    for variant in ("native", "mha"):
        ((answer,),) = run(engine, [greedy_request(prompt_of(40, 91), 10, variant=variant)])
        assert answer.kv is not None
        peaks[variant] = (answer.kv.blocks, answer.kv.tokens)
    assert peaks == {"native": (2 * 4, 49), "mha": (4 * 4, 49)}


def test_modes_never_share_a_cached_block(small: Path, oracle: Oracle) -> None:
    """Even under one root, which the words never give to two modes."""
    engine = checked(fp32_engine(small, variants=BOTH)[0])
    prompt = prompt_of(40, 92)
    for variant, cached in (("native", 0), ("mha", 0), ("native", 32), ("mha", 0)):
        ((answer,),) = run(engine, [greedy_request(prompt, 3, variant=variant)])
        assert answer.ids == oracle.greedy(prompt, 3)
        assert answer.kv is not None and answer.kv.cached_tokens == cached


@pytest.mark.parametrize("blocks", [16, 20])
def test_modes_push_each_other_out(small: Path, oracle: Oracle, blocks: int) -> None:
    engine = checked(pool_of(small, blocks, variants=BOTH)[0])
    prompts = [prompt_of(20, 93 + i) for i in range(6)]
    requests = [greedy_request(p, 44, variant=("mha", "native")[i % 2]) for i, p in enumerate(prompts)]
    answers = run(engine, requests)
    assert [answer.ids for (answer,) in answers] == [oracle.greedy(prompt, 44) for prompt in prompts]
    assert engine.stats().preemptions > 0
    assert manager_of(engine).live_blocks == 0


def test_two_engines_in_one_process(small: Path, oracle: Oracle) -> None:
    """Step by step in turn, of different dtypes and modes; neither notices the other."""
    one = checked(fp32_engine(small)[0])
    two = checked(fp32_engine(small, dtype="bfloat16", variants=BOTH)[0])
    prompt = prompt_of(30, 94)
    one.add(greedy_request(prompt, 12))
    two.add(greedy_request(prompt, 12, variant="mha"))
    ids = []
    while one.has_work or two.has_work:
        ids += [event.token for event in one.step()]
        two.step()
    assert ids == oracle.greedy(prompt, 12)
    assert torch.get_default_dtype() is torch.float32
