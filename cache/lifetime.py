"""When a block changes hands: made room for, copied before a write, published, let go."""

from __future__ import annotations

import numpy as np

from cache.arrays import Int32
from cache.chain import TokenChain
from cache.state import CacheState, Slot, settle


def make_room(state: CacheState, need: int) -> bool:
    """Evicts until `need` physical blocks are free; False, and nothing done, where they cannot be."""
    short = need - state.store.free
    if short > state.index.cached:
        return False
    if short > 0:
        state.store.give_back(state.index.evict(short))
    return True


def take_from_index(state: CacheState, block: int, need: int) -> bool:
    """For a block that only one sequence and the index hold, where a copy of it finds no room.

    Takes it out of the index, so that the sequence may write into it, if then `need` physical blocks
    can be made free. Its published descendants are held by nobody, and go with it: all cached blocks
    do, of which there are fewer than a copy would take. False, and nothing done, otherwise.
    """
    reclaimable = state.store.free + state.index.cached
    if state.store.refs[block] > 1 or need > reclaimable:
        return False
    make_room(state, reclaimable)
    state.index.forget(np.array([block], dtype=np.int32))
    return True


def add_blocks(state: CacheState, number: int, sequence: Slot, count: int) -> None:
    """`count` free logical blocks more, for tokens to come."""
    blocks = state.store.take(count, sequence.heads, sequence.variant)
    state.tables.put(number, sequence.blocks, blocks)
    sequence.blocks += count
    state.accounts[sequence.account].grow(count * sequence.heads)


def shared_tail(state: CacheState, number: int, sequence: Slot) -> int:
    """The block that the sequence's next token goes into, if a sequence or the prefix index reads it
    too, else -1. Only its last block can be: what follows a fork is a sequence's own."""
    position = sequence.tokens // state.layout.block_size
    if position >= sequence.blocks:
        return -1
    block = int(state.tables.blocks[number, position])
    if state.store.refs[block] > 1 or state.index.serial[block]:
        return block
    return -1


def copy_tail(state: CacheState, number: int, sequence: Slot, shared: int) -> None:
    """Replaces the shared tail by a fresh block, and plans the copy that fills it."""
    fresh = state.store.take(1, sequence.heads, sequence.variant)
    state.tables.put(number, sequence.tokens // state.layout.block_size, fresh)
    state.copies.add(shared, int(fresh[0]))
    state.accounts.epoch += 1
    state.accounts[sequence.account].stale = True
    state.store.refs[shared] -= 1
    release(state, np.array([shared], dtype=np.int32))  # the copy's source is pinned, and so stays


def hold(state: CacheState, blocks: Int32) -> None:
    """One more sequence holds these published blocks; those that nobody held are cached no longer."""
    index, store = state.index, state.store
    found = blocks[index.lru.stamp[blocks] >= 0]
    index.unqueue(found)
    store.count_live(found)
    store.refs[blocks] += 1


def publish(state: CacheState, blocks: Int32, sequence: Slot, chain: TokenChain) -> None:
    """Publishes a sequence's full blocks, from the first that is not published yet.

    Where an equal block is published already: if nobody holds that one, this one takes its place and
    frees it; if somebody does, this one stays private, and so does all that follows, until a later
    try (whoever holds a published block holds its ancestors: see `PrefixIndex`).
    """
    index = state.index
    while (at := sequence.published) < len(blocks):
        parent = int(index.serial[blocks[at - 1]]) if at else 0
        passed = index.publish(blocks[at:], chain, at, parent)
        sequence.published += passed
        if passed:
            continue
        rival = index.rival(chain, at, parent, sequence.variant)
        if rival is None or index.lru.stamp[rival] < 0:
            return
        index.replace(rival, int(blocks[at]))
        state.store.give_back(np.array([rival], dtype=np.int32))
        sequence.published += 1


def trim(state: CacheState, number: int, sequence: Slot) -> None:
    """Gives back the blocks past those that hold the sequence's tokens. It took them itself, in this step,
    so nobody else holds or knows them; and what was held for the length of a step is in no account's peak."""
    kept = state.layout.logical_blocks(sequence.tokens)
    if kept >= sequence.blocks:
        return
    blocks = state.held(number, sequence)[kept:][::-1].copy()
    sequence.blocks = kept
    state.accounts[sequence.account].grow(-len(blocks) * sequence.heads)
    state.store.refs[blocks] -= 1
    release(state, blocks)


def end(state: CacheState, number: int, sequence: Slot) -> None:
    """Takes a sequence's slot away, and lets go of all its blocks."""
    owner = state.accounts[sequence.account]
    settle(state, owner)  # the peak must be known before anything is let go
    blocks = state.held(number, sequence)[::-1].copy()  # leaves first
    state.slots[number] = None
    state.free_slots.append(number)
    owner.slots.discard(number)
    state.store.refs[blocks] -= 1
    if state.store.refs[blocks].any():
        state.accounts.epoch += 1
    owner.stale = True
    release(state, blocks)


def release(state: CacheState, blocks: Int32) -> None:
    """The one place where blocks are let go, leaves first: those that no sequence and no planned copy
    holds become cached if the prefix index knows them, else free."""
    store, index = state.store, state.index
    gone = blocks[(store.refs[blocks] == 0) & (store.pins[blocks] == 0)]
    store.count_live(gone, -1)
    published = index.serial[gone] != 0
    freed = gone[~published]
    store.give_back(freed)
    # A copy into a freed block is off. Its source, a leaf of what is queued here, has to go before.
    sources = state.copies.cancel(freed)
    if len(sources):
        release(state, sources)
    index.queue(gone[published])
