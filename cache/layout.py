"""The arithmetic of the paged KV cache: how many bytes a block, a token and an arena take.

A physical block holds `block_size` tokens of K and V of **one** KV head, in every layer of its
layer group. Everything that sizes, plans or reports the cache asks the functions here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block ids: same KV heads, head_dim and window (tokens; None = full attention)."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of the arena `[2 (K, V), L, num_blocks, B, D]`."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if len(self.groups) != 1:
            raise ValueError(f"KVLayout takes one layer group so far, got {len(self.groups)}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {self.block_size}")

    @property
    def num_layers(self) -> int:
        """Layers of all groups together (L)."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def head_dim(self) -> int:
        """Elements of one key or value vector (D)."""
        return self.groups[0].head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one physical block: 2 * L * B * D * itemsize."""
        return 2 * self.num_layers * self.block_size * self.head_dim * self.dtype.itemsize

    def bytes_per_token(self, kv_heads: int) -> int:
        """Bytes one token takes in a sequence of `kv_heads` KV heads: 2 * L * Hkv * D * itemsize."""
        return kv_heads * 2 * self.num_layers * self.head_dim * self.dtype.itemsize

    def logical_blocks(self, tokens: int) -> int:
        """Logical blocks (each `Hkv` physical ones) that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def physical_blocks(self, tokens: int, kv_heads: int) -> int:
        """Physical blocks that hold `tokens` tokens of `kv_heads` KV heads."""
        return self.logical_blocks(tokens) * kv_heads

    def total_blocks(self, kv_memory: int) -> int:
        """Physical blocks that `kv_memory` bytes hold, the scratch block not counted."""
        return kv_memory // self.block_bytes

    def arena_bytes(self, total: int) -> int:
        """Bytes of an arena of `total` blocks and the one scratch block for padding writes."""
        return (total + 1) * self.block_bytes

    def tokens_that_fit(self, total: int, kv_heads: int) -> int:
        """Tokens of one sequence of `kv_heads` heads that `total` physical blocks hold."""
        return total // kv_heads * self.block_size

    def sequence_bytes(self, tokens: int, kv_heads: int) -> int:
        """Bytes of the blocks that hold `tokens` tokens of one sequence of `kv_heads` KV heads."""
        return self.physical_blocks(tokens, kv_heads) * self.block_bytes

    def sequences_that_fit(self, total: int, tokens: int, kv_heads: int) -> int:
        """Sequences of `tokens` tokens (at least 1) and `kv_heads` heads that `total` blocks hold."""
        return total // self.physical_blocks(tokens, kv_heads)

    def expected_tail_bytes(self, kv_heads: int) -> int:
        """Bytes of empty slots in a sequence's last blocks, on average over lengths that fall anywhere in a
        block: 0 to B - 1 empty slots, each as likely as another. Whole, since a token's bytes are even."""
        return (self.block_size - 1) * self.bytes_per_token(kv_heads) // 2
