"""Which logical block owns which physical ids: the allocator, kept as arrays.

A **logical block** is `block_size` tokens of one sequence: one row of `Hkv` physical ids, one per KV
head. Everything here is per logical block, so an 8k prompt under 32 KV heads is 512 entries and not
16,384. Free ids and free logical blocks are stacks: taking is one slice off the top.
"""

from __future__ import annotations

import numpy as np

from cache.arrays import Int32
from cache.errors import CacheError


class BlockAllocator:
    """`total` physical ids, handed out in whole logical blocks of `heads` ids, or not at all.

    Columns, indexed by logical block: `ids [capacity, max_heads]` (the first `heads` count), `heads`
    (0 = not in use), `variant`, `refs` (sequences that hold it), `pins` (planned copies that still
    read it). `live [variants]` counts, by variant, the physical blocks that a sequence or a planned
    copy holds; `most_live` is the largest that their sum has been.
    """

    def __init__(self, total: int, *, max_heads: int, min_heads: int, variants: int) -> None:
        if min(max_heads, min_heads) < 1 or max_heads < min_heads:
            raise CacheError(f"KV heads must satisfy 1 <= min <= max, got {min_heads} and {max_heads}")
        self.total = total
        self.capacity = total // min_heads
        self.ids = np.zeros((self.capacity, max_heads), dtype=np.int32)
        self.heads = np.zeros(self.capacity, dtype=np.int32)
        self.variant = np.zeros(self.capacity, dtype=np.int32)
        self.refs = np.zeros(self.capacity, dtype=np.int32)
        self.pins = np.zeros(self.capacity, dtype=np.int32)
        # Reversed, so that low ids go out first and a small load stays in few pages.
        self._id_stack = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._block_stack = np.arange(self.capacity - 1, -1, -1, dtype=np.int32)
        self.free = total
        self.live = np.zeros(variants, dtype=np.int64)
        self.most_live = 0
        self._blocks_left = self.capacity

    def take(self, count: int, heads: int, variant: int) -> Int32:
        """`count` logical blocks of `heads` ids each, held once; the caller has checked `free`."""
        taken = count * heads
        if taken > self.free:
            raise CacheError(f"{taken} physical blocks asked of {self.free} free ones")
        blocks = self._block_stack[self._blocks_left - count : self._blocks_left][::-1].copy()
        ids = self._id_stack[self.free - taken : self.free][::-1]
        self._blocks_left -= count
        self.free -= taken
        self.live[variant] += taken
        self.most_live = max(self.most_live, int(self.live.sum()))
        self.ids[blocks, :heads] = ids.reshape(count, heads)
        self.heads[blocks] = heads
        self.variant[blocks] = variant
        self.refs[blocks] = 1
        return blocks

    def give_back(self, blocks: Int32) -> None:
        """Frees logical blocks that nobody holds."""
        count = len(blocks)
        if count == 0:
            return
        ids = self.ids_of(blocks)
        self._id_stack[self.free : self.free + len(ids)] = ids
        self._block_stack[self._blocks_left : self._blocks_left + count] = blocks
        self.free += len(ids)
        self._blocks_left += count
        self.heads[blocks] = 0

    def count_live(self, blocks: Int32, sign: int = 1) -> None:
        """Counts blocks in that are held again, or out (-1) those that have lost their last holder."""
        np.add.at(self.live, self.variant[blocks], sign * self.heads[blocks])
        self.most_live = max(self.most_live, int(self.live.sum()))

    def ids_of(self, blocks: Int32) -> Int32:
        """The physical ids of `blocks`, flat, block by block, heads inner."""
        heads = self.heads[blocks]
        widest = int(heads.max(initial=0))
        ids = self.ids[blocks, :widest]
        if int(heads.min(initial=widest)) == widest:
            return ids.reshape(-1)
        return ids[np.arange(widest) < heads[:, None]]

    def free_ids(self) -> Int32:
        """The free physical ids (a view, for checks and reports)."""
        return self._id_stack[: self.free]

    def free_blocks(self) -> Int32:
        """The unused logical blocks (a view, for checks)."""
        return self._block_stack[: self._blocks_left]
