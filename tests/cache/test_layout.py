"""The arithmetic that everything else is judged by, on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from cache.layout import KVLayout, LayerGroup


def layout_of(layers: int, kv_heads: int, head_dim: int, block_size: int = 16) -> KVLayout:
    group = LayerGroup(layers=tuple(range(layers)), kv_heads=kv_heads, head_dim=head_dim)
    return KVLayout((group,), block_size, torch.bfloat16)


def test_smollm2_in_bf16() -> None:
    """30 layers, 9 query and 3 KV heads, head_dim 64: 2 * 30 * 64 * 2 bytes a token and KV head."""
    layout = layout_of(30, 3, 64)
    assert layout.bytes_per_token(1) == 7_680
    assert layout.block_bytes == 122_880
    assert [layout.physical_blocks(128, heads) for heads in (1, 3, 9)] == [8, 24, 72]
    assert layout.logical_blocks(128) == 8
    assert [layout.logical_blocks(tokens) for tokens in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_llama_3_8b_in_bf16() -> None:
    """32 layers, 32 query and 8 KV heads, head_dim 128."""
    layout = layout_of(32, 8, 128)
    assert [layout.bytes_per_token(heads) for heads in (8, 32, 1)] == [131_072, 524_288, 16_384]


def test_the_pool_is_whole_blocks_and_the_arena_one_more() -> None:
    layout = layout_of(30, 3, 64)
    total = layout.total_blocks(2 * 1024**3)
    assert total == 17_476
    assert total * 122_880 <= 2 * 1024**3 < (total + 1) * 122_880
    assert layout.arena_bytes(total) == 17_477 * 122_880
    assert layout.tokens_that_fit(total, 3) == 5_825 * 16
    assert layout.tokens_that_fit(2, 3) == 0


def test_sequences_in_a_pool() -> None:
    """SmolLM2: 8,192 tokens are 512 blocks a KV head; 2 GiB are 17,476 of them."""
    layout = layout_of(30, 3, 64)
    assert layout.sequence_bytes(8192, 3) == 8192 * 23_040 == 188_743_680
    assert layout.sequence_bytes(33, 3) == 3 * 3 * 122_880
    assert [layout.sequences_that_fit(17_476, 8192, heads) for heads in (1, 3, 9)] == [34, 11, 3]
    assert layout.sequences_that_fit(511, 8192, 1) == 0


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128])
def test_the_expected_tail_is_the_mean_over_all_lengths(block_size: int) -> None:
    layout = layout_of(30, 3, 64, block_size)
    lengths = range(1, 4 * block_size + 1)
    empty = [layout.sequence_bytes(n, 3) - n * layout.bytes_per_token(3) for n in lengths]
    assert layout.expected_tail_bytes(3) * len(lengths) == sum(empty)


def test_what_a_layout_cannot_be() -> None:
    group = LayerGroup(layers=(0,), kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match="one layer group"):
        KVLayout((group, group), 16, torch.float32)
    with pytest.raises(ValueError, match="block_size"):
        KVLayout((group,), 0, torch.float32)
