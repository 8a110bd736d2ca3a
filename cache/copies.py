"""Copy-on-write, planned: which blocks are copied before the step's writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cache.arrays import Int32
from cache.blocks import BlockAllocator

_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Physical blocks to copy, `src[i]` to `dst[i]`, all read before any is written."""

    src: Int32
    dst: Int32

    def __len__(self) -> int:
        return len(self.src)


class CopyPlan:
    """Logical blocks that are to be copied: destination -> source, a few a step.

    A source is pinned until the plan is taken, so that it is neither freed nor evicted nor handed
    out within the plan that reads it.
    """

    def __init__(self, store: BlockAllocator) -> None:
        self._store = store
        self.sources: dict[int, int] = {}

    def add(self, source: int, destination: int) -> None:
        """Plans one copy. A source that is itself still to be filled is read where its data is now."""
        source = self.sources.get(source, source)
        self.sources[destination] = source
        self._store.pins[source] += 1

    def cancel(self, destinations: Int32) -> Int32:
        """Forgets the copies into blocks that are being freed; returns the sources they no longer pin."""
        if not self.sources:
            return _NOTHING
        dropped = [self.sources.pop(block) for block in destinations.tolist() if block in self.sources]
        return self._unpin(dropped)

    def take(self) -> tuple[BlockCopies, Int32]:
        """The plan in physical ids, and the sources it no longer pins; the plan is empty afterwards."""
        if not self.sources:
            return BlockCopies(_NOTHING, _NOTHING), _NOTHING
        sources = np.array(list(self.sources.values()), dtype=np.int32)
        destinations = np.array(list(self.sources), dtype=np.int32)
        self.sources.clear()
        copies = BlockCopies(self._store.ids_of(sources), self._store.ids_of(destinations))
        return copies, self._unpin(sources.tolist())

    def _unpin(self, sources: list[int]) -> Int32:
        blocks = np.array(sources, dtype=np.int32)
        np.subtract.at(self._store.pins, blocks, 1)  # siblings may share a source
        return np.unique(blocks)
