"""Least-recently-used order of the cached blocks, exact, without a linked list."""

from __future__ import annotations

import numpy as np

from cache.arrays import Int32
from cache.errors import CacheError

_SMALLEST_LOG = 1024  # entries; below this, compacting would cost more than it saves
_WINDOW = 64  # fewest log entries looked at in one go


class LruQueue:
    """A log of the blocks that lost their last holder, oldest first.

    A block's `stamp` is the position of its entry in the log (-1: not queued). Taking a block out
    only clears its stamp: an entry that its block's stamp does not point at is dead and is skipped.
    Every operation is a few array expressions, amortised O(1) for a block.
    """

    def __init__(self, capacity: int) -> None:
        self._log = np.zeros(max(2 * capacity, _SMALLEST_LOG), dtype=np.int32)
        self.stamp = np.full(capacity, -1, dtype=np.int64)
        self._head = 0
        self._tail = 0

    def push(self, blocks: Int32) -> None:
        """Queues distinct blocks that are not queued; the first is evicted first."""
        count = len(blocks)
        if self._tail + count > len(self._log):
            self._compact()
        stop = self._tail + count
        self._log[self._tail : stop] = blocks
        self.stamp[blocks] = np.arange(self._tail, stop)
        self._tail = stop

    def remove(self, blocks: Int32) -> None:
        """Takes blocks out, wherever they are."""
        self.stamp[blocks] = -1

    def pop(self, need: int, weight: Int32) -> Int32:
        """Takes out the oldest blocks until their `weight` (indexed by block) sums to `need` or more."""
        popped: list[Int32] = []
        while need > 0:
            if self._head == self._tail:
                raise CacheError(f"the cached blocks fall {need} physical blocks short of what they promised")
            stop = min(self._head + max(need, _WINDOW), self._tail)
            entries = self._log[self._head : stop]
            live = entries[self.stamp[entries] == np.arange(self._head, stop)]
            sums = np.cumsum(weight[live])
            enough = int(np.searchsorted(sums, need)) + 1
            if enough <= len(live):
                live = live[:enough]
                stop = int(self.stamp[live[-1]]) + 1
            if len(live):
                need -= int(sums[len(live) - 1])
                self.stamp[live] = -1
                popped.append(live)
            self._head = stop
        return np.concatenate(popped) if popped else np.zeros(0, dtype=np.int32)

    def queued(self) -> Int32:
        """Every queued block, oldest first (for checks and tests)."""
        entries = self._log[self._head : self._tail]
        live: Int32 = entries[self.stamp[entries] == np.arange(self._head, self._tail)]
        return live

    def _compact(self) -> None:
        """Drops dead entries; the live ones, at most half the log, keep their order."""
        live = self.queued()
        count = len(live)
        self._log[:count] = live
        self.stamp[self._log[:count]] = np.arange(count)
        self._head, self._tail = 0, count
