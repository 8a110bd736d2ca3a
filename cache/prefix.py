"""Which cached tokens can be reused: the prefix index.

A **published** block is a full block whose tokens have been written. It is found by the chained
digest of its tokens, and a find is believed only when the tokens, the variant and the parent are
equal too: an equal digest alone never makes a hit.
"""

from __future__ import annotations

import numpy as np

from cache.arrays import Bools, Int32
from cache.blocks import BlockAllocator
from cache.chain import ROOT_BYTES, TokenChain
from cache.lru import LruQueue


class PrefixIndex:
    """Published blocks by digest, and the order in which the unheld ones are given up.

    Columns, indexed by logical block: `serial` (0 = not published; else a number never used for
    other content), `parent` (the parent's serial, 0 for a first block), `tokens [capacity, B]`,
    `digest`, and `root` (first blocks only).

    Whoever holds a published block holds all its ancestors, the same physical ones. So among unheld
    blocks a parent always left its last holder with, or after, its children; a sequence queues its
    blocks from the tail, and thus a leaf is evicted before its parent.
    """

    def __init__(self, store: BlockAllocator, block_size: int) -> None:
        self._store = store
        self._block_size = block_size
        # The one Python entry per cached logical block: a hash table over 32-byte keys is what the
        # search needs, and CPython's is faster than any we could lay over arrays.
        self.by_digest: dict[bytes, int] = {}
        self.serial = np.zeros(store.capacity, dtype=np.int64)
        self.parent = np.zeros(store.capacity, dtype=np.int64)
        self.tokens = np.zeros((store.capacity, block_size), dtype=np.int32)
        self.digest = np.zeros((store.capacity, ROOT_BYTES), dtype=np.uint8)
        self.root = np.zeros((store.capacity, ROOT_BYTES), dtype=np.uint8)
        self.lru = LruQueue(store.capacity)
        self.cached = 0  # physical blocks that are queued in `lru`
        self._next_serial = 1

    def find(self, chain: TokenChain, count: int, variant: int) -> Int32:
        """The published blocks of the chain's longest known prefix, at most `count` of them."""
        hits: list[int] = []
        for digest in chain.digests(0, count):
            block = self.by_digest.get(digest)
            if block is None:
                break
            hits.append(block)
        blocks = np.array(hits, dtype=np.int32)
        if not hits:
            return blocks
        exact = self._exact(blocks, chain, 0, 0, variant)
        return blocks if exact.all() else blocks[: int(exact.argmin())]

    def publish(self, blocks: Int32, chain: TokenChain, first: int, parent: int) -> int:
        """Publishes blocks `first`, `first + 1`, ... of a chain; `parent` is the serial before them.

        Stops where another block has the digest. Returns how many blocks it passed.
        """
        count = 0
        digests = chain.digests(first, first + len(blocks))
        for digest, block in zip(digests, blocks.tolist(), strict=True):
            if self.by_digest.setdefault(digest, block) != block:
                break
            count += 1
        if count == 0:
            return 0
        blocks = blocks[:count]
        # A fork may find its parent's blocks published already; their serials must not change.
        fresh = blocks[self.serial[blocks] == 0]
        self.serial[fresh] = np.arange(self._next_serial, self._next_serial + len(fresh))
        self._next_serial += len(fresh)
        self.parent[blocks[0]] = parent
        self.parent[blocks[1:]] = self.serial[blocks[:-1]]
        size = self._block_size
        self.tokens[blocks] = chain.tokens[first * size : (first + count) * size].reshape(count, size)
        self.digest[blocks] = np.frombuffer(b"".join(digests[:count]), dtype=np.uint8).reshape(count, -1)
        if first == 0:
            self.root[blocks[0]] = np.frombuffer(chain.root, dtype=np.uint8)
        return count

    def rival(self, chain: TokenChain, position: int, parent: int, variant: int) -> int | None:
        """The published block with exactly the content of the chain's block `position`, if any."""
        block = self.by_digest.get(chain.digests(position, position + 1)[0])
        if block is None:
            return None
        blocks = np.array([block], dtype=np.int32)
        return block if self._exact(blocks, chain, position, parent, variant)[0] else None

    def replace(self, old: int, new: int) -> None:
        """Lets `new`, which holds the same tokens, stand where the unheld block `old` stood.

        The serial moves too, so children of `old` are now children of `new`. `old` is unpublished.
        """
        for column in (self.serial, self.parent, self.tokens, self.digest, self.root):
            column[new] = column[old]
        self.by_digest[self.digest[new].tobytes()] = new
        self.serial[old] = 0
        self.unqueue(np.array([old], dtype=np.int32))

    def queue(self, blocks: Int32) -> None:
        """Published blocks that lost their last holder become reclaimable; the first goes first."""
        self.lru.push(blocks)
        self.cached += int(self._store.heads[blocks].sum())

    def unqueue(self, blocks: Int32) -> None:
        """Queued blocks that are held again."""
        self.lru.remove(blocks)
        self.cached -= int(self._store.heads[blocks].sum())

    def evict(self, need: int) -> Int32:
        """Unpublishes the least recently used blocks until they make `need` physical blocks or more."""
        blocks = self.lru.pop(need, self._store.heads)
        self.cached -= int(self._store.heads[blocks].sum())
        self.forget(blocks)
        return blocks

    def forget(self, blocks: Int32) -> None:
        """Unpublishes blocks."""
        keys = self.digest[blocks].tobytes()
        for at in range(0, len(keys), ROOT_BYTES):
            del self.by_digest[keys[at : at + ROOT_BYTES]]
        self.serial[blocks] = 0

    def _exact(self, blocks: Int32, chain: TokenChain, first: int, parent: int, variant: int) -> Bools:
        """Which of `blocks` hold exactly the chain's blocks from `first` on, each a child of the last."""
        size = self._block_size
        count = len(blocks)
        wanted = chain.tokens[first * size : (first + count) * size].reshape(count, size)
        parents = np.concatenate(([parent], self.serial[blocks[:-1]]))
        exact: Bools = (self.tokens[blocks] == wanted).all(axis=1)
        exact &= self.parent[blocks] == parents
        exact &= self._store.variant[blocks] == variant
        if first == 0:
            exact[0] &= self.root[blocks[0]].tobytes() == chain.root
        return exact
