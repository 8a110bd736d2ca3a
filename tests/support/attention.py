"""A small stand-in for the pool and the batch builder: paged caches and `AttentionMeta` for any mix of rows.

Blocks are handed out in random order and every slot starts as NaN, so that a backend that reads a block
of another row, or a slot that nobody wrote, is caught.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.attention.base import AttentionMeta

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerCache:
    """One layer's arena, as `LayerKV` wants it: k, v `[N, B, D]`."""

    k: Tensor
    v: Tensor


@dataclass
class CachedSequence:
    """Rows `[row, row + kv_heads)` of the table, and how many tokens they hold."""

    row: int
    kv_heads: int
    length: int = 0


class CacheRig:
    """A paged cache for tests: sequences are opened, and `meta` grows them by a step."""

    def __init__(
        self,
        layers: int,
        query_heads: int,
        head_dim: int,
        block: int = 4,
        blocks: int = 512,
        max_rows: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        seed: int = 0,
    ) -> None:
        self.query_heads = query_heads
        self.block = block
        self.device = device
        shape = (blocks, block, head_dim)
        self.layers = [
            LayerCache(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"))
            for _ in range(layers)
        ]
        self._free = list(np.random.default_rng(seed).permutation(blocks))
        self.row_tables = torch.zeros((max_rows, blocks), dtype=torch.int32, device=device)
        self._rows = 0

    def open(self, kv_heads: int) -> CachedSequence:
        sequence = CachedSequence(self._rows, kv_heads)
        self._rows += kv_heads
        return sequence

    def release(self, sequence: CachedSequence) -> None:
        """Give the blocks back as they are: what they hold is now stale."""
        held = -(-sequence.length // self.block)
        for row in range(sequence.row, sequence.row + sequence.kv_heads):
            self._free += self.row_tables[row, :held].tolist()
            self.row_tables[row] = 0
        sequence.length = 0

    def meta(self, work: Sequence[tuple[CachedSequence, int]]) -> AttentionMeta:
        """The step in which each sequence brings that many tokens; blocks are taken, lengths grow."""
        heads = np.array([sequence.kv_heads for sequence, _ in work])
        tokens = np.array([count for _, count in work])
        for sequence, count in work:
            self._grow(sequence, sequence.length + count)
        lengths = np.array([sequence.length for sequence, _ in work])
        row_start = np.concatenate([[0], np.cumsum(heads)]).astype(np.int32)
        query_start = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        positions = [np.arange(end - count, end) for end, count in zip(lengths, tokens, strict=True)]
        rows = [np.arange(row_start[i], row_start[i + 1]) for i in range(len(work))]
        row_heads = np.repeat(heads, heads)
        kv_head = np.concatenate([np.arange(count) for count in heads])
        group = self.query_heads // row_heads
        return AttentionMeta(
            block_size=self.block,
            row_tables=self.row_tables,
            row_slot=self._put(
                np.concatenate([np.arange(s.row, s.row + s.kv_heads) for s, _ in work]), torch.int64
            ),
            row_len=self._put(np.repeat(lengths, heads), torch.int32),
            row_seq=self._put(np.repeat(np.arange(len(work)), heads), torch.int32),
            row_kv_head=self._put(kv_head, torch.int32),
            row_layer_group=self._put(np.zeros(len(kv_head)), torch.int32),
            row_q_head0=self._put(kv_head * group, torch.int32),
            row_q_heads=self._put(group, torch.int32),
            query_start=self._put(query_start, torch.int32),
            positions=self._put(np.concatenate(positions), torch.int64),
            kv_row=self._put(
                np.concatenate([np.tile(r, t) for r, t in zip(rows, tokens, strict=True)]), torch.int64
            ),
            kv_pos=self._put(
                np.concatenate([np.repeat(p, h) for p, h in zip(positions, heads, strict=True)]), torch.int64
            ),
            host_row_start=row_start,
            host_query_start=query_start,
            host_seq_len=lengths.astype(np.int32),
        )

    def _put(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=self.device, dtype=dtype)

    def _grow(self, sequence: CachedSequence, length: int) -> None:
        held, wanted = -(-sequence.length // self.block), -(-length // self.block)
        for row in range(sequence.row, sequence.row + sequence.kv_heads):
            for column in range(held, wanted):
                self.row_tables[row, column] = int(self._free.pop())
        sequence.length = length
