"""The blocks that SmolLM2-135M and a Llama-3-8B take, in each attention mode, through the books themselves.

SmolLM2 in bf16: 30 layers, head_dim 64: 7,680 bytes a token and KV head, 122,880 a block of 16.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.chain import TokenChain
from cache.layout import KVLayout, LayerGroup
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.recount import reconcile
from cache.state import VariantSpec
from tests.support.cache_harness import CPU, root_of

BLOCK = 122_880
MODES = (VariantSpec("mqa", 1), VariantSpec("native", 3), VariantSpec("mha", 9))


def smol(total: int) -> CacheManager:
    layout = KVLayout((LayerGroup(tuple(range(30)), 3, 64),), 16, torch.bfloat16)
    return CacheManager(
        layout, KVPool(layout, total, CPU),
        max_seqs=4, max_seq_len=256, max_kv_heads=9, variants=MODES, q_heads=9,
    )  # fmt: skip


def grow(manager: CacheManager, slot: int, chain: TokenChain, tokens: int) -> None:
    """As an engine does: the sequence's first `tokens` tokens are computed."""
    assert manager.extend(slot, tokens)
    manager.upload()
    manager.advance(slot, tokens, chain)


def opened(
    manager: CacheManager, mode: str, tokens: int = 128, root: str = ""
) -> tuple[int, int, TokenChain]:
    account = manager.open_account(f"{mode} {root}", mode)
    chain = TokenChain(root_of(root or mode), 16, np.arange(tokens))
    return account, manager.open(account, chain, tokens).slot, chain


@pytest.mark.parametrize(("mode", "blocks"), [("mqa", 8), ("native", 24), ("mha", 72)])
def test_a_request_that_ends_with_128_kv_tokens(mode: str, blocks: int) -> None:
    manager = smol(80)
    account, slot, chain = opened(manager, mode)
    for tokens in (100, *range(101, 129)):
        grow(manager, slot, chain, tokens)
    assert manager.live_blocks == blocks
    assert manager.live_bytes()[mode] == blocks * BLOCK
    peak = manager.peak(account)
    assert (peak.blocks, peak.exclusive, peak.tokens) == (blocks, blocks, 128)
    (request,) = manager.report().requests
    assert (request.bytes_held, request.tail_waste_bytes) == (blocks * BLOCK, 0)
    assert request.mha_equivalent_bytes == 72 * BLOCK
    manager.close(slot)
    assert (manager.live_blocks, manager.cached_blocks, manager.free_blocks) == (0, blocks, 80 - blocks)
    assert manager.live_bytes() == {"mqa": 0, "native": 0, "mha": 0}


@pytest.mark.parametrize(("mode", "heads"), [("mqa", 1), ("native", 3), ("mha", 9)])
def test_the_33rd_kv_token_takes_one_new_block_for_each_kv_head(mode: str, heads: int) -> None:
    manager = smol(80)
    _, slot, chain = opened(manager, mode)
    live = []
    for tokens in (31, 32, 33, 34, 48, 49):
        grow(manager, slot, chain, tokens)
        live.append(manager.live_blocks)
    assert live == [2 * heads, 2 * heads, 3 * heads, 3 * heads, 3 * heads, 4 * heads]
    entries = manager.row_tables[list(manager.table_rows(slot)), :4]
    assert len(set(entries.flatten().tolist())) == 4 * heads, "each head has blocks of its own"


def test_the_modes_side_by_side_hold_one_to_three_to_nine() -> None:
    manager = smol(120)
    for mode in ("mqa", "native", "mha"):
        _, slot, chain = opened(manager, mode, 100)
        grow(manager, slot, chain, 100)
    assert manager.live_bytes() == {"mqa": 7 * BLOCK, "native": 21 * BLOCK, "mha": 63 * BLOCK}
    report = manager.report()
    assert [v.live_bytes for v in report.variants] == [7 * BLOCK, 21 * BLOCK, 63 * BLOCK]
    assert [v.bytes_per_token for v in report.variants] == [7_680, 23_040, 69_120]
    assert [v.live_tokens for v in report.variants] == [100] * 3
    assert [v.tail_waste_bytes for v in report.variants] == [12 * 7_680, 12 * 23_040, 12 * 69_120]
    assert [v.mha_equivalent_bytes for v in report.variants] == [63 * BLOCK] * 3
    assert [round(v.saved_ratio, 9) for v in report.variants] == [0.888888889, 0.666666667, 0.0]
    assert report.states.live.bytes == sum(manager.live_bytes().values()) == 91 * BLOCK
    reconcile(manager)


def test_the_peak_counts_what_comes_back_from_the_prefix_index() -> None:
    """Two prompts of 8 logical blocks, native, one after the other: 24 physical at most. Then both at once
    find 7 of theirs, and before a token is computed 42 are live."""
    manager = smol(80)
    for root in ("one", "two"):
        _, slot, chain = opened(manager, "native", root=root)
        grow(manager, slot, chain, 128)
        manager.close(slot)
        assert manager.peak_live_bytes() == 24 * BLOCK
    for root in ("one", "two"):
        opened(manager, "native", root=root)
    assert manager.live_bytes()["native"] == manager.peak_live_bytes() == 42 * BLOCK
    reconcile(manager)


def test_llama_3_8b_a_user_with_8192_tokens() -> None:
    """The table of docs/cache.md: 32 layers, 32 query and 8 KV heads, head_dim 128; blocks of 256 KiB."""
    layout = KVLayout((LayerGroup(tuple(range(32)), 8, 128),), 16, torch.bfloat16)
    assert layout.block_bytes == 256 * 1024
    users = {8: 2**30, 32: 4 * 2**30, 1: 128 * 2**20}
    for heads, nbytes in users.items():
        assert layout.physical_blocks(8192, heads) * layout.block_bytes == nbytes
        assert 8192 * layout.bytes_per_token(heads) == nbytes
    assert [layout.bytes_per_token(heads) for heads in (8, 32, 1)] == [131_072, 524_288, 16_384]
