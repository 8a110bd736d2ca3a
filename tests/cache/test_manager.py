"""Opening, growing and closing: how many blocks, and that a failed call leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.chain import TokenChain
from cache.errors import CacheError
from cache.layout import KVLayout, LayerGroup
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.recount import reconcile
from cache.state import VariantSpec
from tests.support.cache_harness import CPU, assert_same_books, books, make_manager, root_of

SMOLLM2 = (VariantSpec("native", 3), VariantSpec("mha", 9), VariantSpec("mqa", 1))


def smollm2_manager(total: int = 500) -> CacheManager:
    """The default model's cache, 30 layers of head_dim 64 in bf16, three attention modes in one pool."""
    group = LayerGroup(layers=tuple(range(30)), kv_heads=3, head_dim=64)
    layout = KVLayout((group,), 16, torch.bfloat16)
    return CacheManager(
        layout,
        KVPool(layout, total, CPU),
        max_seqs=8,
        max_seq_len=512,
        max_kv_heads=9,
        variants=SMOLLM2,
        q_heads=9,
    )


def started(manager: CacheManager, variant: str, tokens: list[int]) -> tuple[int, int, TokenChain]:
    """(account, slot, chain) of a sequence whose prompt has run."""
    chain = TokenChain(root_of(variant), manager.state.layout.block_size, tokens)
    account = manager.open_account(f"{variant}-{len(tokens)}", variant)
    slot = manager.open(account, chain, len(tokens)).slot
    assert manager.extend(slot, len(tokens))
    manager.upload()
    manager.advance(slot, len(tokens), chain)
    return account, slot, chain


@pytest.mark.parametrize(("variant", "blocks"), [("mqa", 8), ("native", 24), ("mha", 72)])
def test_128_tokens_of_each_mode(variant: str, blocks: int) -> None:
    manager = smollm2_manager()
    account, _, _ = started(manager, variant, list(range(128)))
    assert manager.live_blocks == blocks
    assert manager.peak(account) == (blocks, blocks, 128, 0)


@pytest.mark.parametrize("variant", ["mqa", "native", "mha"])
def test_the_33rd_token_takes_one_block_for_each_kv_head(variant: str) -> None:
    manager = smollm2_manager()
    heads = {spec.name: spec.kv_heads for spec in SMOLLM2}[variant]
    _, slot, chain = started(manager, variant, list(range(32)))
    assert manager.live_blocks == 2 * heads
    chain.append(5)
    assert manager.extend(slot, 33)
    assert manager.live_blocks == 3 * heads
    rows = manager.table_rows(slot)
    manager.upload()
    assert len(rows) == heads
    ids = manager.row_tables[rows.start : rows.stop, :3]
    assert len(ids.unique()) == 3 * heads, "every head has blocks of its own"


def test_modes_in_one_pool_add_up_and_leave_nothing() -> None:
    manager = smollm2_manager()
    lengths = {"native": [1, 16, 17, 200], "mqa": [33, 100], "mha": [16, 31]}
    slots = [
        started(manager, variant, [1000 * length + at for at in range(length)])[1]
        for variant, all_ in lengths.items()
        for length in all_
    ]
    heads = {spec.name: spec.kv_heads for spec in SMOLLM2}
    expected = sum(heads[v] * -(-length // 16) for v, all_ in lengths.items() for length in all_)
    assert manager.live_blocks == expected
    assert manager.live_blocks + manager.cached_blocks + manager.free_blocks == manager.total
    manager.check()
    for slot in slots:
        manager.close(slot)
    assert manager.live_blocks == 0
    full = sum(heads[v] * (length // 16) for v, all_ in lengths.items() for length in all_)
    assert manager.cached_blocks == full
    manager.check()


def test_growing_by_chunks_takes_what_growing_at_once_takes() -> None:
    manager = smollm2_manager()
    chain = TokenChain(root_of("x"), 16, list(range(300)))
    account = manager.open_account("chunks", "native")
    slot = manager.open(account, chain, 300).slot
    for end in (1, 5, 16, 50, 64, 65, 300):
        assert manager.extend(slot, end)
        assert manager.live_blocks == 3 * -(-end // 16)
        manager.advance(slot, end, chain)
        assert manager.extend(slot, end - 1), "it has those already"
    manager.check()


def test_a_pool_too_full_refuses_and_changes_nothing() -> None:
    manager = make_manager(10, block_size=4)
    _, slot, chain = started(manager, "native", [1] * 12)  # 3 of 5 logical blocks
    before = books(manager)
    assert not manager.extend(slot, 21)
    assert_same_books(before, books(manager))
    for token in range(8):
        chain.append(token)
    assert manager.extend(slot, 20)
    assert manager.free_blocks == 0


def test_no_slot_left_is_an_error_without_a_trace() -> None:
    manager = make_manager(100)
    account = manager.open_account("many", "mqa")
    chain = TokenChain(root_of("x"), 4, [1, 2, 3])
    slots = [manager.open(account, chain, 3).slot for _ in range(8)]
    assert sorted(slots) == list(range(8))
    before = books(manager)
    with pytest.raises(CacheError, match="all 8 sequence slots"):
        manager.open(account, chain, 3)
    with pytest.raises(CacheError, match="all 8 sequence slots"):
        manager.fork(slots[0], 0, account)
    assert_same_books(before, books(manager))
    manager.check()


def test_misuse_is_named() -> None:
    manager = make_manager(100, max_seq_len=16)
    account, slot, chain = started(manager, "native", [1] * 6)
    other = manager.open_account("other", "mqa")
    before = books(manager)
    with pytest.raises(CacheError, match="no variant 'gqa3'"):
        manager.open_account("x", "gqa3")
    with pytest.raises(CacheError, match="slot 7 is not open"):
        manager.extend(7, 1)
    with pytest.raises(CacheError, match="17 tokens exceed"):
        manager.extend(slot, 17)
    with pytest.raises(CacheError, match="advanced from 6 to 9"):
        manager.advance(slot, 9, chain)  # no blocks for them
    with pytest.raises(CacheError, match="advanced from 6 to 5"):
        manager.advance(slot, 5, chain)
    with pytest.raises(CacheError, match="cannot fork 7"):
        manager.fork(slot, 7, account)
    with pytest.raises(CacheError, match="cannot fork"):
        manager.fork(slot, 3, other)  # another mode's account
    with pytest.raises(CacheError, match="1 open sequences"):
        manager.close_account(account)
    with pytest.raises(CacheError, match="account 9"):
        manager.peak(9)
    assert_same_books(before, books(manager))
    manager.close(slot)
    with pytest.raises(CacheError, match="not open"):
        manager.close(slot)
    manager.close_account(account)
    with pytest.raises(CacheError, match="not open"):
        manager.close_account(account)


def test_admissible_counts_hits_and_counts_room_once() -> None:
    manager = make_manager(10, block_size=4)
    _, slot, chain = started(manager, "mqa", [1] * 16)
    manager.close(slot)  # 4 cached, 6 free
    fresh = TokenChain(root_of("other"), 4, [2] * 60)
    assert manager.admissible(fresh, 40, "mqa", 0)  # everything cached would go
    assert not manager.admissible(fresh, 41, "mqa", 0)
    assert manager.admissible(fresh, 32, "mqa", 2)
    assert not manager.admissible(fresh, 32, "mqa", 3)
    same = TokenChain(root_of("mqa"), 4, [1] * 60)
    # 3 hits stay cached no longer: 40 tokens take 7 more, of 6 free and 1 other cached one.
    assert manager.admissible(same, 40, "mqa", 0)
    assert not manager.admissible(same, 40, "mqa", 1)
    _, _, _ = started(manager, "mqa", [1] * 16)  # holds the hits: they cost nothing now
    assert manager.admissible(same, 40, "mqa", 0)
    assert not manager.admissible(same, 44, "mqa", 0)
    # Who may open no more than 4 or no tokens of it needs the other blocks again: 7 for 28 tokens, 6 free.
    assert manager.admissible(same, 28, "mqa", 0, opened=5)
    assert not manager.admissible(same, 28, "mqa", 0, opened=4)
    assert manager.admissible(same, 24, "mqa", 0, opened=1)
    assert manager.probe(chain, 16, "mqa") == 12


def test_what_admissible_promises_extend_keeps() -> None:
    manager = make_manager(12, block_size=4)
    for name in ("a", "b", "c"):
        account = manager.open_account(name, "native")
        chain = TokenChain(root_of(name), 4, [1] * 8)
        slot = manager.open(account, chain, 8).slot
        assert manager.extend(slot, 8)
        manager.advance(slot, 8, chain)
        manager.close(slot)
    chain = TokenChain(root_of("a"), 4, [1] * 24)
    largest = max(n for n in range(25) if manager.admissible(chain, n, "native", 0))
    assert largest == 24
    slot = manager.open(manager.open_account("d", "native"), chain, largest).slot
    assert manager.extend(slot, largest)
    manager.check()


def test_two_managers_know_nothing_of_each_other() -> None:
    one, two = make_manager(20), make_manager(20)
    started(one, "native", [1] * 9)
    assert (two.live_blocks, two.free_blocks) == (0, 20)
    assert not np.shares_memory(one.state.store.ids, two.state.store.ids)


def test_blocks_taken_for_tokens_that_did_not_come_go_back() -> None:
    """8 of 11 tokens come: the third block goes back, and only the pool's peak has seen it."""
    manager = make_manager(20)
    account, slot, chain = started(manager, "native", list(range(5)))
    manager.extend(slot, 11)
    assert manager.live_blocks == 3 * 2
    for token in range(3):
        chain.append(token)
    manager.advance(slot, 8, chain)
    manager.trim(slot)
    manager.check()
    reconcile(manager)
    assert manager.live_blocks == 2 * 2 and manager.free_blocks == 16
    assert manager.peak(account) == (4, 4, 8, 0)
    assert manager.peak_live_bytes() == 6 * manager.state.layout.block_bytes
    manager.trim(slot)
    assert manager.live_blocks == 2 * 2, "there is nothing more to give"
    assert manager.extend(slot, 12)
    manager.upload()
    manager.check()
    manager.close(slot)
    assert manager.live_blocks == 0


def test_trimming_beside_a_fork_leaves_the_others_blocks() -> None:
    manager = make_manager(20)
    account, slot, chain = started(manager, "native", list(range(6)))
    child = manager.fork(slot, 5, account)
    manager.extend(slot, 13)
    manager.extend(child, 13)
    manager.take_copies()
    manager.upload()
    chain.append(1)
    manager.advance(slot, 7, chain)
    manager.trim(slot)
    manager.trim(child)
    manager.check()
    reconcile(manager)
    assert manager.live_blocks == 3 * 2, "the first block is both's, the second each one's own"
    assert manager.peak(account).blocks == 3 * 2
