"""The cache's books recounted: every number from its source, every invariant, a few array passes."""

from __future__ import annotations

import numpy as np

from cache.arrays import Bools, Int32
from cache.chain import ROOT_BYTES
from cache.errors import CacheError
from cache.state import CacheState, holding


def check_state(state: CacheState) -> None:
    """Raises `CacheError` at the first thing that does not add up; about 50 ns a block."""
    _check_slots(state)
    _check_tables(state)
    _check_ids(state)
    _check_holders(state)
    _check_published(state)
    _check_order(state)
    _check_accounts(state)


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise CacheError(f"the cache's books are wrong: {rule}")


def _check_slots(state: CacheState) -> None:
    taken = {number for number, _ in state.open_slots()}
    free = set(state.free_slots)
    _require(len(free) == len(state.free_slots), "a free slot is listed once")
    _require(taken | free == set(range(len(state.slots))) and not taken & free, "a slot is open or free")
    size = state.layout.block_size
    for number, slot in state.open_slots():
        _require(0 <= slot.tokens <= slot.blocks * size, f"slot {number} has blocks for its tokens")
        _require(slot.published <= slot.tokens // size, f"slot {number} publishes only full blocks")
        blocks = state.held(number, slot)
        _require((state.store.heads[blocks] == slot.heads).all(), f"slot {number}'s blocks fit its heads")
        _require((state.store.variant[blocks] == slot.variant).all(), f"slot {number} keeps its variant")
        published = state.index.serial[blocks[: slot.published]]
        _require((published > 0).all(), f"slot {number}'s published blocks are known")
        parents = state.index.parent[blocks[: slot.published]]
        _require((parents[1:] == published[:-1]).all(), f"slot {number} holds its blocks' ancestors")


def _check_tables(state: CacheState) -> None:
    """What attention reads on the device is what the sequences hold (unless an upload is due)."""
    if state.tables.outdated:
        return
    for number, slot in state.open_slots():
        first = state.tables.rows(number)
        sent = state.tables.device_table[first : first + slot.heads, : slot.blocks].numpy(force=True)
        ids = state.store.ids[state.held(number, slot), : slot.heads]
        _require((sent == ids.T).all(), f"slot {number}'s rows on the device are its blocks")


def _check_ids(state: CacheState) -> None:
    """Every physical id is free or in exactly one logical block; never the scratch block."""
    store = state.store
    used = np.flatnonzero(store.heads).astype(np.int32)
    ids = np.concatenate((store.ids_of(used), store.free_ids()))
    _require(len(ids) == store.total, "physical blocks in use and free ones make up the total")
    _require(((ids >= 0) & (ids < store.total)).all(), "a block id is in the pool")
    _require((np.bincount(ids, minlength=store.total) == 1).all(), "a physical block has one place")
    blocks = np.concatenate((used, store.free_blocks()))
    _require((np.bincount(blocks, minlength=store.capacity) == 1).all(), "a logical block is used or not")


def _check_holders(state: CacheState) -> None:
    """Reference counts and pins are what slots and planned copies say; every used block has a reason."""
    store, capacity = state.store, state.store.capacity
    held = [state.held(number, slot) for number, slot in state.open_slots()]
    flat = np.concatenate(held) if held else np.zeros(0, dtype=np.int32)
    _require((np.bincount(flat, minlength=capacity) == store.refs).all(), "refs count the open sequences")
    sources = np.array(list(state.copies.sources.values()), dtype=np.int32)
    _require((np.bincount(sources, minlength=capacity) == store.pins).all(), "pins count the planned copies")
    for destination in state.copies.sources:
        _require(store.refs[destination] > 0, "a copy goes into a block that is held")
    live, published, used = state.live(), state.index.serial > 0, store.heads > 0
    _require((used == (live | published)).all(), "a block in use is held or published")
    cached = published & ~live
    _require(int(store.heads[cached].sum()) == state.index.cached, "cached blocks are counted")
    _require(store.free + int(store.heads[used].sum()) == store.total, "live + cached + free = total")
    by_variant = np.bincount(store.variant[live], weights=store.heads[live], minlength=len(state.variants))
    _require((by_variant == store.live).all(), "live blocks are counted by variant")
    queued = state.index.lru.stamp >= 0
    _require((queued == cached).all(), "exactly the cached blocks wait for eviction")
    _require(len(state.index.lru.queued()) == int(cached.sum()), "a cached block waits once")


def _check_published(state: CacheState) -> None:
    """The digest table and the columns say the same."""
    index = state.index
    blocks = np.fromiter(index.by_digest.values(), dtype=np.int32, count=len(index.by_digest))
    _require(len(blocks) == np.count_nonzero(index.serial), "every published block has one digest")
    _require((index.serial[blocks] > 0).all(), "a digest leads to a published block")
    keys = np.frombuffer(b"".join(index.by_digest), dtype=np.uint8).reshape(-1, ROOT_BYTES)
    _require(bool((keys == index.digest[blocks]).all()), "a block is found by its own digest")


def _check_order(state: CacheState) -> None:
    """A published block's parent is published, of its variant, held with it and evicted after it."""
    index, store = state.index, state.store
    children = np.flatnonzero(index.parent * (index.serial > 0)).astype(np.int32)
    published = np.flatnonzero(index.serial).astype(np.int32)
    order = published[np.argsort(index.serial[published], kind="stable")]  # nearly sorted: linear
    serials = index.serial[order]
    _require((serials[1:] > serials[:-1]).all(), "a serial names one block")
    at = np.searchsorted(serials, index.parent[children])
    known: Bools = at < len(serials)
    known[known] = serials[at[known]] == index.parent[children][known]
    _require(known.all(), "a published block's parent is published")
    parents: Int32 = order[at]
    _require((store.variant[parents] == store.variant[children]).all(), "a parent is of its child's variant")
    _require((store.refs[parents] >= store.refs[children]).all(), "who holds a block holds its parent")
    waiting = index.lru.stamp[parents] >= 0
    later = index.lru.stamp[parents] > index.lru.stamp[children]
    _require((later | ~waiting).all(), "a leaf is evicted before its parent")


def _check_accounts(state: CacheState) -> None:
    """Each account's slots are its own, and its running totals are what a recount gives."""
    owners = {(slot.account, number) for number, slot in state.open_slots()}
    listed = set()
    for number, account in state.accounts.numbered():
        listed |= {(number, slot) for slot in account.slots}
        if not account.stale:
            now = holding(state, account)
            _require(account.blocks == now.blocks, f"account {number} knows its blocks")
            _require(account.tokens == now.tokens, f"account {number} knows its tokens")
    _require(owners == listed, "an account lists its open sequences")
