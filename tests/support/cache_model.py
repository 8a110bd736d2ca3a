"""The cache in plain Python, as simple as it can be: what CacheManager must equal, block by block.

One object a block, whole token prefixes as keys, lists for order; no hashing, no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Key = tuple[str, bytes, tuple[int, ...]]  # variant, root, every token up to the block's last


@dataclass(eq=False)
class ModelBlock:
    heads: int
    refs: int = 1
    pins: int = 0
    key: Key | None = None  # set while published
    index: int | None = None  # the manager's logical block that it was found to be


@dataclass(eq=False)
class ModelSequence:
    account: int
    variant: str
    root: bytes
    blocks: list[ModelBlock]
    tokens: int
    published: int


@dataclass
class ModelPeak:
    blocks: int = 0
    exclusive: int = 0
    tokens: int = 0
    cached_tokens: int = 0


@dataclass
class CacheModel:
    total: int
    block_size: int
    heads: dict[str, int]
    free: int = 0
    published: dict[Key, ModelBlock] = field(default_factory=dict)
    lru: list[ModelBlock] = field(default_factory=list)  # oldest first
    copies: list[tuple[ModelBlock, ModelBlock]] = field(default_factory=list)  # source, destination
    sequences: dict[int, ModelSequence] = field(default_factory=dict)
    peaks: dict[int, ModelPeak] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = self.total

    @property
    def cached(self) -> int:
        return sum(block.heads for block in self.lru)

    def hits(self, variant: str, root: bytes, tokens: list[int], num_tokens: int) -> list[ModelBlock]:
        found = []
        for end in range(self.block_size, num_tokens, self.block_size):
            block = self.published.get((variant, root, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def open(
        self, slot: int, account: int, variant: str, root: bytes, tokens: list[int], num_tokens: int
    ) -> int:
        blocks = self.hits(variant, root, tokens, num_tokens)
        for block in blocks:
            block.refs += 1
            if block in self.lru:
                self.lru.remove(block)
        cached = len(blocks) * self.block_size
        self.sequences[slot] = ModelSequence(account, variant, root, blocks, cached, len(blocks))
        self.peaks.setdefault(account, ModelPeak()).cached_tokens += cached
        return cached

    def extend(self, slot: int, num_tokens: int) -> bool:
        sequence = self.sequences[slot]
        heads = self.heads[sequence.variant]
        fresh = max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))
        position = sequence.tokens // self.block_size
        shared = None
        if num_tokens > sequence.tokens and position < len(sequence.blocks):
            tail = sequence.blocks[position]
            if tail.refs > 1 or tail.key is not None:
                shared = tail
        room = self.free + self.cached
        if (fresh + (shared is not None)) * heads > room:
            if shared is None or shared.refs > 1 or fresh * heads > room:
                return False
            self._evict(room)
            assert shared.key is not None
            del self.published[shared.key]
            shared.key = shared = None
        self._evict((fresh + (shared is not None)) * heads)
        if shared is not None:
            copy = ModelBlock(heads)
            self.free -= heads
            source = next((s for s, d in self.copies if d is shared), shared)
            self.copies.append((source, copy))
            source.pins += 1
            sequence.blocks[position] = copy
            shared.refs -= 1
            self._release([shared])
        for _ in range(fresh):
            self.free -= heads
            sequence.blocks.append(ModelBlock(heads))
        return True

    def advance(self, slot: int, num_tokens: int, tokens: list[int]) -> None:
        sequence = self.sequences[slot]
        crossed = num_tokens // self.block_size > sequence.tokens // self.block_size
        sequence.tokens = num_tokens
        while crossed and sequence.published < num_tokens // self.block_size:
            block = sequence.blocks[sequence.published]
            end = (sequence.published + 1) * self.block_size
            key = (sequence.variant, sequence.root, tuple(tokens[:end]))
            other = self.published.get(key)
            if other is not None and other is not block:
                if other not in self.lru:
                    break
                self.lru.remove(other)
                other.key = None
                self.free += other.heads
            block.key = key
            self.published[key] = block
            sequence.published += 1

    def fork(self, slot: int, child: int, num_tokens: int, account: int) -> None:
        parent = self.sequences[slot]
        blocks = parent.blocks[: -(-num_tokens // self.block_size)]
        for block in blocks:
            block.refs += 1
        published = min(parent.published, num_tokens // self.block_size)
        self.sequences[child] = ModelSequence(
            account, parent.variant, parent.root, list(blocks), num_tokens, published
        )
        self.peaks.setdefault(account, ModelPeak())

    def close(self, slot: int) -> None:
        sequence = self.sequences.pop(slot)
        for block in sequence.blocks:
            block.refs -= 1
        self._release(sequence.blocks[::-1])

    def take_copies(self) -> list[tuple[ModelBlock, ModelBlock]]:
        copies, self.copies = self.copies, []
        sources = list(dict.fromkeys(source for source, _ in copies))
        for source, _ in copies:
            source.pins -= 1
        self._release(sorted(sources, key=lambda block: block.index or 0))
        return copies

    def note_peaks(self) -> None:
        """To be called after every operation: the highest moment of each account."""
        for account, peak in self.peaks.items():
            blocks, exclusive, tokens = self.holding(account)
            if blocks > peak.blocks:
                peak.blocks, peak.exclusive, peak.tokens = blocks, exclusive, tokens
            elif blocks == peak.blocks:
                peak.tokens = max(peak.tokens, tokens)

    def holding(self, account: int) -> tuple[int, int, int]:
        """Physical blocks, those nobody else holds, and tokens, of an account now."""
        fill: dict[ModelBlock, int] = {}
        refs: dict[ModelBlock, int] = {}
        for sequence in self.sequences.values():
            if sequence.account != account:
                continue
            for position, block in enumerate(sequence.blocks):
                here = min(max(sequence.tokens - position * self.block_size, 0), self.block_size)
                fill[block] = max(fill.get(block, 0), here)
                refs[block] = refs.get(block, 0) + 1
        alone = sum(block.heads for block, count in refs.items() if block.refs == count)
        return sum(block.heads for block in fill), alone, sum(fill.values())

    def _evict(self, need: int) -> None:
        while self.free < need:
            block = self.lru.pop(0)
            assert block.key is not None
            del self.published[block.key]
            block.key = None
            self.free += block.heads

    def _release(self, blocks: list[ModelBlock]) -> None:
        gone = [block for block in blocks if block.refs == 0 and block.pins == 0]
        for block in gone:
            if block.key is not None:
                continue
            self.free += block.heads
            for source, destination in list(self.copies):
                if destination is block:
                    self.copies.remove((source, destination))
                    source.pins -= 1
                    self._release([source])
        self.lru += [block for block in gone if block.key is not None]
