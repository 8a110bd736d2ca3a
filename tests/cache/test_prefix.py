"""Reuse: exactly the right tokens, from exactly the right sequences, for as long as there is room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.chain import TokenChain
from cache.manager import CacheManager
from cache.state import VariantSpec
from tests.support.cache_harness import Harness, make_manager, root_of


def run(harness: Harness, tokens: list[int], root: str = "a", variant: str = "mqa") -> int:
    """A sequence whose prompt has run; returns its slot."""
    slot = harness.open(harness.account(variant), root, tokens)
    assert slot is not None and harness.extend(slot, len(tokens))
    harness.run()
    return slot


def found(harness: Harness, tokens: list[int], root: str = "a", variant: str = "mqa") -> int:
    chain = TokenChain(root_of(variant + root), harness.model.block_size, tokens)
    return harness.manager.probe(chain, len(tokens), variant)


@settings(max_examples=100, deadline=None)
@given(
    shared=st.integers(0, 30),
    first=st.integers(1, 20),
    second=st.integers(1, 20),
    block_size=st.integers(1, 5),
    closed=st.booleans(),
)
def test_a_hit_is_the_shared_whole_blocks_less_the_last_token(
    shared: int, first: int, second: int, block_size: int, closed: bool
) -> None:
    harness = Harness(make_manager(200, block_size=block_size))
    common = list(range(100, 100 + shared))
    slot = run(harness, common + [1] * first)
    if closed:
        harness.close(slot)
    prompt = common + [2] * second
    expected = block_size * min(shared // block_size, (len(prompt) - 1) // block_size)
    assert found(harness, prompt) == expected
    run(harness, prompt)  # checks the data, too


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 16])
def test_the_same_prompt_again_leaves_at_least_one_token_to_run(length: int) -> None:
    harness = Harness(make_manager(50))
    harness.close(run(harness, [3] * length))
    assert found(harness, [3] * length) == 4 * ((length - 1) // 4)
    run(harness, [3] * length)


def test_the_next_turn_finds_prompt_and_answer() -> None:
    harness = Harness(make_manager(50))
    slot = run(harness, [1] * 6)
    for total in range(7, 14):
        assert harness.extend(slot, total, fill=9)
        harness.run()
    harness.close(slot)
    assert found(harness, [1] * 6 + [9] * 7 + [2] * 5) == 12
    assert found(harness, [1] * 6 + [9] * 5 + [2] * 5) == 8


def test_nothing_is_found_before_it_has_run() -> None:
    harness = Harness(make_manager(50))
    slot = harness.open(harness.account("mqa"), "a", [1] * 12)
    assert slot is not None and harness.extend(slot, 12)
    assert found(harness, [1] * 12) == 0
    harness.run()
    assert found(harness, [1] * 12) == 8


def test_roots_and_variants_never_mix() -> None:
    harness = Harness(make_manager(100))
    harness.close(run(harness, [1] * 9, "a", "native"))
    assert found(harness, [1] * 9, "a", "native") == 8
    assert found(harness, [1] * 9, "b", "native") == 0
    assert found(harness, [1] * 9, "a", "mqa") == 0
    assert found(harness, [1] * 9, "a", "mha") == 0


def test_variants_do_not_mix_even_under_one_root() -> None:
    manager = make_manager(100)
    for variant, cached in (("native", 0), ("mqa", 0), ("native", 8)):
        chain = TokenChain(root_of("one for all"), 4, [1] * 9)
        account = manager.open_account(variant, variant)
        opened = manager.open(account, chain, 9)
        assert opened.cached_tokens == cached
        assert manager.extend(opened.slot, 9)
        manager.advance(opened.slot, 9, chain)
        manager.close(opened.slot)
        manager.check()


def test_a_duplicate_of_a_running_sequence_stays_private() -> None:
    harness = Harness(make_manager(50))
    account = harness.account("mqa")
    one, two = harness.open(account, "a", [1] * 9), harness.open(account, "a", [1] * 9)
    assert one is not None and two is not None
    assert harness.extend(one, 9) and harness.extend(two, 9)
    harness.run()
    assert harness.manager.live_blocks == 6
    assert len(harness.manager.state.index.by_digest) == 2
    harness.close(two)
    assert (harness.manager.live_blocks, harness.manager.cached_blocks) == (3, 0)
    harness.close(one)
    assert (harness.manager.live_blocks, harness.manager.cached_blocks) == (0, 2)


def test_a_duplicate_of_what_nobody_holds_takes_its_place() -> None:
    """A repeated prompt of whole blocks runs its last block anew: that one is kept, and so what follows."""
    harness = Harness(make_manager(50))
    harness.close(run(harness, [1] * 8))
    slot = run(harness, [1] * 8)
    assert harness.manager.cached_blocks == 0  # the old second block is free again
    assert harness.extend(slot, 12, fill=5)
    harness.run()
    harness.close(slot)
    assert harness.manager.cached_blocks == 3
    assert found(harness, [1] * 8 + [5] * 5) == 12


def blocks_left(harness: Harness, prompts: dict[str, list[int]]) -> dict[str, int]:
    return {root: found(harness, [*tokens, 0], root) // 4 for root, tokens in prompts.items()}


def evict_one(manager: CacheManager, slot: int) -> None:
    """Grows a sequence by one block; the pool is full, so that one cached block goes."""
    cached = manager.cached_blocks
    assert manager.free_blocks == 0
    tokens = manager.state.slots[slot].blocks * 4 + 1  # type: ignore[union-attr]
    assert manager.extend(slot, tokens)
    assert manager.cached_blocks == cached - 1


def test_the_least_recently_used_goes_first_and_a_leaf_before_its_parent() -> None:
    harness = Harness(make_manager(9))
    prompts = {"a": [1] * 12, "b": [2] * 12}
    for root, tokens in prompts.items():
        harness.close(run(harness, tokens, root))
    keeper = run(harness, [3] * 12, "keeper")
    seen = []
    for _ in range(6):
        seen.append(tuple(blocks_left(harness, prompts).values()))
        evict_one(harness.manager, keeper)
    assert seen == [(3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1)]
    assert not harness.manager.extend(keeper, 40)


def test_a_hit_makes_a_prefix_recent_but_not_what_follows_it() -> None:
    harness = Harness(make_manager(9))
    prompts = {"a": [1] * 12, "b": [2] * 12}
    for root, tokens in prompts.items():
        harness.close(run(harness, tokens, root))
    reader = harness.open(harness.account("mqa"), "a", [1] * 4 + [9])
    assert reader is not None and harness.open_[reader].computed == 4
    harness.close(reader)
    keeper = run(harness, [3] * 12, "keeper")
    seen = []
    for _ in range(6):
        seen.append(tuple(blocks_left(harness, prompts).values()))
        evict_one(harness.manager, keeper)
    assert seen == [(3, 3), (2, 3), (1, 3), (1, 2), (1, 1), (1, 0)]


def test_eviction_makes_room_across_modes() -> None:
    """Small blocks of one mode make room for a large one of another, whole logical blocks at a time."""
    harness = Harness(make_manager(10))
    harness.close(run(harness, [1] * 16, "a", "mqa"))  # 4 cached
    harness.close(run(harness, [1] * 12, "a", "native"))  # 6 more
    assert (harness.manager.free_blocks, harness.manager.cached_blocks) == (0, 10)
    slot = run(harness, [5] * 4, "a", "mha")  # 6: all four of mqa, then one native pair
    assert (harness.manager.free_blocks, harness.manager.cached_blocks) == (0, 4)
    assert found(harness, [1] * 13, "a", "native") == 8
    harness.close(slot)


def test_a_running_sequence_is_never_evicted() -> None:
    harness = Harness(make_manager(6))
    running = run(harness, [1] * 12, "a")
    other = run(harness, [2] * 8, "b")
    assert not harness.extend(other, 17)
    harness.close(running)
    assert harness.extend(other, 17)


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    variants = (VariantSpec("mqa", 1),)
    harness = Harness(make_manager(50, variants=variants, prefix_cache=False), compare=False)
    harness.close(run(harness, [1] * 12))
    assert found(harness, [1] * 12) == 0
    assert harness.manager.free_blocks == 50
