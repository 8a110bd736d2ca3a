"""The device's copy of who reads which block: one persistent table, updated by difference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cache.arrays import Int32, Int64
from cache.blocks import BlockAllocator

_ID_BITS = 32


class RowTables:
    """`device_table [max_seqs * max_heads, max_blocks]` int32: block ids of each row, in token order.

    The rows of sequence slot `s` are `s * max_heads + head`. A step notes what it changed and
    `upload` sends just that, in one copy and one scatter, so the cost follows new blocks and never
    context. Entries start as 0; those past a row's length are never read, so a slot that is used
    again keeps its old ones there.
    """

    def __init__(self, max_seqs: int, max_heads: int, max_blocks: int, device: torch.device) -> None:
        self._max_heads = max_heads
        self._max_blocks = max_blocks
        # Host truth: the logical blocks of each slot, in token order.
        self.blocks = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        self._changed: list[tuple[int, int, int]] = []
        self.device_table: Tensor = torch.zeros(
            (max_seqs * max_heads, max_blocks), dtype=torch.int32, device=device
        )

    def put(self, slot: int, first: int, blocks: Int32) -> None:
        """Logical blocks `first`, `first + 1`, ... of a slot are now `blocks`."""
        last = first + len(blocks)
        self.blocks[slot, first:last] = blocks
        self._changed.append((slot, first, last))

    def rows(self, slot: int) -> int:
        """The first row of a slot."""
        return slot * self._max_heads

    @property
    def outdated(self) -> bool:
        """Whether something has changed since the last upload."""
        return bool(self._changed)

    def upload(self, store: BlockAllocator) -> int:
        """Sends what changed since the last upload; returns how many entries that was."""
        if not self._changed:
            return 0
        changed = np.array(self._changed, dtype=np.int64)
        self._changed.clear()
        counts = changed[:, 2] - changed[:, 1]
        ends = np.cumsum(counts)
        slots = np.repeat(changed[:, 0], counts)
        columns = np.arange(ends[-1]) - np.repeat(ends - counts - changed[:, 1], counts)
        # An entry noted twice is sent twice, but with one value: what the slot holds now.
        packed = self._packed(slots, columns, store)
        device = self.device_table.device
        sent = torch.from_numpy(packed).to(device=device, dtype=torch.int64)
        ids = (sent & ((1 << _ID_BITS) - 1)).to(dtype=torch.int32)
        self.device_table.view(-1).index_copy_(0, sent >> _ID_BITS, ids)
        return len(packed)

    def _packed(self, slots: Int64, columns: Int64, store: BlockAllocator) -> Int64:
        """Flat table index in the high 32 bits, physical id in the low ones, for each head of each entry."""
        blocks = self.blocks[slots, columns]
        heads = store.heads[blocks]
        parts = []
        for width in np.unique(heads).tolist():  # one pass per attention mode in the step
            same = heads == width
            row = slots[same, None] * self._max_heads + np.arange(width)
            flat = row * self._max_blocks + columns[same, None]
            parts.append(((flat << _ID_BITS) | store.ids[blocks[same], :width]).reshape(-1))
        return np.concatenate(parts)
