"""A request's ids are transformers' ids: alone, in a crowd, in chunks, after a hit or a preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine.request import FinishReason
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, generate, greedy_request, run
from tests.support.engines import checked, ids_of, manager_of, pool_of, prompt_of, run_staggered


def test_alone_beside_fifteen_others_and_arriving_late(small: Path, oracle: Oracle) -> None:
    subjects = [prompt_of(length, 1) for length in (1, 17, 40, 100, 63)]
    expected = [oracle.greedy(prompt, 24) for prompt in subjects]
    for prompt, ids in zip(subjects, expected, strict=True):
        assert generate(fp32_engine(small)[0], prompt, 24) == ids
    crowd = [greedy_request(prompt_of(5 + 9 * i, 2), 10 + 3 * i) for i in range(15)]
    own = [greedy_request(prompt, 24) for prompt in subjects]
    assert ids_of(checked(fp32_engine(small)[0]), [*crowd, *own])[15:] == expected
    late = [greedy_request(prompt, 24) for prompt in subjects]
    answers = run_staggered(
        checked(fp32_engine(small)[0]),
        [(0, r) for r in [greedy_request(prompt_of(5 + 9 * i, 2), 40) for i in range(15)]]
        + [(7 + 3 * i, r) for i, r in enumerate(late)],
    )
    assert [answers[r.id][0].ids for r in late] == expected


@pytest.mark.parametrize("budget", [1, 3, 16, 37, 512])
def test_chunks_of_any_size(small: Path, oracle: Oracle, budget: int) -> None:
    engine = checked(fp32_engine(small, max_batch_tokens=budget, max_num_seqs=1)[0])
    for length in (1, 17, 60):
        prompt = prompt_of(length, 3)
        assert generate(engine, prompt, 8) == oracle.greedy(prompt, 8), (budget, length)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_block_boundaries_and_full_hits(small: Path, oracle: Oracle, length: int) -> None:
    """Each prompt twice, across boundaries; a hit covers whole blocks and never the last token."""
    prompt = prompt_of(length, 4)
    expected = oracle.greedy(prompt, 40)
    engine = checked(fp32_engine(small)[0])
    for cached in (0, (length - 1) // 16 * 16):
        ((answer,),) = run(engine, [greedy_request(prompt, 40)])
        assert answer.ids == expected
        assert answer.finish is FinishReason.LENGTH
        assert answer.kv is not None and answer.kv.cached_tokens == cached
        tokens = length + 40 - 1
        assert (answer.kv.tokens, answer.kv.blocks) == (tokens, 2 * -(-tokens // 16))
    assert manager_of(engine).live_blocks == 0


def test_prefix_hits_do_not_change_ids(small: Path, oracle: Oracle) -> None:
    """One prompt four times; tails on a shared prefix; equal prompts at one moment; one during another's
    prefill; all with a cache that hits, and with one that is off."""
    prompt, shared = prompt_of(70, 5), prompt_of(40, 6)
    tails = [shared + prompt_of(5 + i, 7 + i) for i in range(4)]
    for prefix_cache in (True, False):
        engine = checked(fp32_engine(small, prefix_cache=prefix_cache, max_batch_tokens=64)[0])
        for _ in range(4):
            assert generate(engine, prompt, 12) == oracle.greedy(prompt, 12)
        for tail in tails:
            assert generate(engine, tail, 12) == oracle.greedy(tail, 12)
        assert (engine.stats().cached_tokens > 0) is prefix_cache
        fresh = prompt_of(70, 8 + prefix_cache)
        assert ids_of(engine, [greedy_request(fresh, 12) for _ in range(4)]) == [oracle.greedy(fresh, 12)] * 4
        slow = prompt_of(150, 9)
        pair = [greedy_request(slow, 12), greedy_request(slow, 12)]
        answers = run_staggered(engine, [(0, pair[0]), (1, pair[1])])
        assert [answers[r.id][0].ids for r in pair] == [oracle.greedy(slow, 12)] * 2


def test_different_roots_share_nothing(small: Path) -> None:
    engine = fp32_engine(small)[0]
    prompt = prompt_of(64, 10)
    for root in (b"a" * 32, b"b" * 32):
        ((answer,),) = run(engine, [greedy_request(prompt, 2, root=root)])
        assert answer.kv is not None and answer.kv.cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pool_too_small_for_the_load(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """12 blocks, six sequences that want four each: all finish, with the ids of a big pool."""
    requests = [greedy_request(prompt_of(20, 20 + i), 44) for i in range(6)]
    engine = checked(pool_of(small, 12, prefix_cache=prefix_cache)[0])
    answers = [answer for (answer,) in run(engine, requests)]
    assert [answer.ids for answer in answers] == [oracle.greedy(r.prompts[0], 44) for r in requests]
    assert [answer.kv.cached_tokens for answer in answers if answer.kv] == [0] * 6
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.steps < 6 * 50, "it makes no progress in bulk"
    assert (stats.prompt_tokens, stats.cached_tokens) == (120, 0), "recompute is neither"
    manager = manager_of(engine)
    assert manager.live_blocks == 0
    assert manager.free_blocks + manager.cached_blocks == manager.total == 24


def test_one_sequence_that_needs_the_whole_pool(small: Path, oracle: Oracle) -> None:
    """It alone is never pushed out, even with its own leftovers in the cache."""
    engine = checked(pool_of(small, 4)[0])
    for seed in range(2):
        prompt = prompt_of(20, 20 + seed)
        assert generate(engine, prompt, 44) == oracle.greedy(prompt, 44)
    assert engine.stats().preemptions == 0
