"""The cache's books: everything the manager changes and that checks and reports read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.accounts import Account, AccountBook, Holding, measure
from cache.arrays import Bools, Int32
from cache.blocks import BlockAllocator
from cache.copies import CopyPlan
from cache.errors import CacheError
from cache.layout import KVLayout
from cache.pool import KVPool
from cache.prefix import PrefixIndex
from cache.tables import RowTables


@dataclass(frozen=True, slots=True)
class VariantSpec:
    """One attention mode of the checkpoint, as the cache knows it."""

    name: str
    kv_heads: int


@dataclass(slots=True)
class Slot:
    """One open sequence: `blocks` logical blocks, the first `published` of them in the prefix index,
    `tokens` written."""

    account: int
    heads: int
    variant: int
    blocks: int = 0
    tokens: int = 0
    published: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A new sequence's slot, and how many of its tokens are in the cache already."""

    slot: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CacheState:
    """Mutable inside, one per manager."""

    layout: KVLayout
    variants: tuple[VariantSpec, ...]
    store: BlockAllocator
    index: PrefixIndex
    tables: RowTables
    copies: CopyPlan
    accounts: AccountBook
    slots: list[Slot | None]
    free_slots: list[int]

    def open_slots(self) -> Iterator[tuple[int, Slot]]:
        """(slot number, slot) of every open sequence."""
        return ((number, slot) for number, slot in enumerate(self.slots) if slot is not None)

    def held(self, number: int, slot: Slot) -> Int32:
        """The logical blocks of an open slot, in token order (a view)."""
        return self.tables.blocks[number, : slot.blocks]

    def live(self) -> Bools:
        """Which logical blocks a sequence or a planned copy holds, `[capacity]`."""
        live: Bools = (self.store.refs > 0) | (self.store.pins > 0)
        return live


def new_state(
    layout: KVLayout,
    pool: KVPool,
    variants: Sequence[VariantSpec],
    *,
    max_seqs: int,
    max_heads: int,
    max_blocks: int,
) -> CacheState:
    """The books of an empty cache over `pool`'s blocks, for `max_seqs` sequences of at most
    `max_blocks` logical blocks; `CacheError` if a variant has more than `max_heads` KV heads."""
    heads = [variant.kv_heads for variant in variants]
    if not heads or max(heads) > max_heads:
        raise CacheError(f"variants with {heads} KV heads do not fit max_kv_heads {max_heads}")
    store = BlockAllocator(pool.total, max_heads=max_heads, min_heads=min(heads), variants=len(variants))
    return CacheState(
        layout=layout,
        variants=tuple(variants),
        store=store,
        index=PrefixIndex(store, layout.block_size),
        tables=RowTables(max_seqs, max_heads, max_blocks, pool.device),
        copies=CopyPlan(store),
        accounts=AccountBook(),
        slots=[None] * max_seqs,
        free_slots=list(range(max_seqs - 1, -1, -1)),
    )


def settle(state: CacheState, owner: Account) -> None:
    """Brings an account's totals and peak up to date; O(1) unless what it shares has changed."""
    epoch = state.accounts.epoch
    if owner.stale or (owner.blocks > owner.peak_blocks and owner.epoch != epoch):
        now = holding(state, owner)
        owner.blocks, owner.exclusive, owner.tokens = now
        owner.stale, owner.epoch = False, epoch
    owner.raise_peak()


def holding(state: CacheState, owner: Account) -> Holding:
    """What an account holds now, counted from its sequences."""
    open_slots = [(number, slot) for number in owner.slots if (slot := state.slots[number]) is not None]
    held = [state.held(number, slot) for number, slot in open_slots]
    tokens = [slot.tokens for _, slot in open_slots]
    return measure(held, tokens, state.store.refs, owner.heads, state.layout.block_size)
