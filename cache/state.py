"""The cache's books: everything the manager changes and that checks and reports read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cache.accounts import AccountBook
from cache.arrays import Int32
from cache.blocks import BlockAllocator
from cache.copies import CopyPlan
from cache.layout import KVLayout
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
    free_slots: list[int] = field(default_factory=list)

    def open_slots(self) -> Iterator[tuple[int, Slot]]:
        """(slot number, slot) of every open sequence."""
        return ((number, slot) for number, slot in enumerate(self.slots) if slot is not None)

    def held(self, number: int, slot: Slot) -> Int32:
        """The logical blocks of an open slot, in token order (a view)."""
        return self.tables.blocks[number, : slot.blocks]
