"""The cache as the engine sees it: sequences open, grow, fork and close; blocks follow.

A step is plan -> run -> commit. While planning, `open` and `extend` find blocks; then `take_copies`
(run by the pool) and `upload` bring the device up to date; the model runs; `advance` says what was
written. Nothing here touches K or V.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cache.accounts import Peak
from cache.arrays import Int32
from cache.chain import TokenChain
from cache.check import check_state
from cache.copies import BlockCopies
from cache.errors import CacheError
from cache.layout import KVLayout
from cache.lifetime import (
    add_blocks,
    copy_tail,
    end,
    hold,
    make_room,
    publish,
    release,
    shared_tail,
    take_from_index,
    trim,
)
from cache.pool import KVPool
from cache.report import BlockPage, CacheReport
from cache.snapshot import block_page, cache_report
from cache.state import Opened, Slot, VariantSpec, new_state, settle


class CacheManager:
    """Per-KV-head paged cache: which blocks hold whose tokens.

    `max_seqs` sequences can be open at once, of at most `max_seq_len` tokens and `max_kv_heads` KV
    heads each; `variants` are the attention modes that share the pool, and `q_heads` the checkpoint's
    query heads (for the MHA equivalent in reports). Calls that break the rules raise `CacheError`; a
    call that fails, for want of room or otherwise, changes nothing. Used by one thread.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: KVPool,
        *,
        max_seqs: int,
        max_seq_len: int,
        max_kv_heads: int,
        variants: Sequence[VariantSpec],
        q_heads: int,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self._q_heads = q_heads
        self._block_size = layout.block_size
        self._max_blocks = layout.logical_blocks(max_seq_len)
        self._variant_number = {variant.name: number for number, variant in enumerate(variants)}
        self.state = new_state(
            layout, pool, variants, max_seqs=max_seqs, max_heads=max_kv_heads, max_blocks=self._max_blocks
        )

    # ---- how full the pool is, in physical blocks; live + cached + free == total ----

    @property
    def total(self) -> int:
        """Physical blocks of the pool, the scratch block not counted."""
        return self.state.store.total

    @property
    def free_blocks(self) -> int:
        """Held by nobody and unknown to the prefix index."""
        return self.state.store.free

    @property
    def cached_blocks(self) -> int:
        """Held by nobody, known to the prefix index, reclaimable."""
        return self.state.index.cached

    @property
    def live_blocks(self) -> int:
        """Held by an open sequence, or (within a plan) by a planned copy."""
        return self.total - self.free_blocks - self.cached_blocks

    def live_bytes(self) -> dict[str, int]:
        """Bytes held by open sequences, by variant; O(variants)."""
        each, live = self.state.layout.block_bytes, self.state.store.live.tolist()
        return {name: live[number] * each for name, number in self._variant_number.items()}

    def peak_live_bytes(self) -> int:
        """The most bytes that open sequences have held at one moment so far, within a step included."""
        return self.state.store.most_live * self.state.layout.block_bytes

    # ---- accounts ----

    def open_account(self, request_id: str, variant: str) -> int:
        """An account for one request of `variant`; all its sequences are opened under it."""
        number = self._variant(variant)
        return self.state.accounts.open(request_id, number, self.state.variants[number].kv_heads)

    def close_account(self, account: int) -> None:
        """Ends an account whose sequences are all closed."""
        self.state.accounts.close(account)

    def peak(self, account: int) -> Peak:
        """The account at the most blocks it has held so far; O(1) while its structure stands still."""
        owner = self.state.accounts[account]
        settle(self.state, owner)
        return owner.peak

    # ---- before a sequence is admitted ----

    def probe(self, chain: TokenChain, num_tokens: int, variant: str) -> int:
        """Tokens of the first `num_tokens` of `chain` that `open` would find cached; changes nothing."""
        return len(self._hits(chain, num_tokens, self._variant(variant))) * self._block_size

    def admissible(
        self, chain: TokenChain, num_tokens: int, variant: str, reserve: int, opened: int | None = None
    ) -> bool:
        """Whether `num_tokens` tokens, of which `open` is to be told `opened` (default: all), would fit now
        and leave `reserve` physical blocks to take; what it would reuse is not counted as room again."""
        number = self._variant(variant)
        heads = self.state.variants[number].kv_heads
        hits = self._hits(chain, num_tokens if opened is None else opened, number)
        reused = int(np.count_nonzero(self.state.index.lru.stamp[hits] >= 0)) * heads
        need = (self.state.layout.logical_blocks(num_tokens) - len(hits)) * heads
        return need + reserve <= self.free_blocks + self.cached_blocks - reused

    # ---- a sequence's life ----

    def open(self, account: int, chain: TokenChain, num_tokens: int, *, recompute: bool = False) -> Opened:
        """Takes a slot for a sequence whose first `num_tokens` tokens are to be run.

        Holds the blocks of the longest cached prefix, at most B * floor((num_tokens - 1) / B) tokens,
        so that the last token is run and never rewritten in a shared block. `recompute` says that the
        sequence was open before: what it finds then is not counted as the request's cache hit.
        """
        owner = self.state.accounts[account]
        self._must_fit_table(num_tokens)
        hits = self._hits(chain, num_tokens, owner.variant)
        tokens = len(hits) * self._block_size
        number = self._take_slot(Slot(account, owner.heads, owner.variant, len(hits), tokens, len(hits)))
        if len(hits):
            hold(self.state, hits)
            self.state.tables.put(number, 0, hits)
            owner.stale = True
            self.state.accounts.epoch += 1
        if not recompute:
            owner.cached_tokens += tokens
        return Opened(number, tokens)

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Gives the sequence blocks of its own for its tokens up to `num_tokens`, or changes nothing.

        Takes free blocks, then the least recently used cached ones. A shared block that the next
        token would be written into is replaced by a copy (see `take_copies`). False: no room.
        """
        sequence = self._slot(slot)
        fresh = max(self.state.layout.logical_blocks(num_tokens) - sequence.blocks, 0)
        shared = shared_tail(self.state, slot, sequence) if num_tokens > sequence.tokens else -1
        if fresh == 0 and shared < 0:
            return True
        self._must_fit_table(num_tokens)
        if not make_room(self.state, (fresh + (shared >= 0)) * sequence.heads):
            if shared < 0 or not take_from_index(self.state, shared, fresh * sequence.heads):
                return False
            shared = -1  # nobody else reads it any more
        if shared >= 0:
            copy_tail(self.state, slot, sequence, shared)
        if fresh:
            add_blocks(self.state, slot, sequence, fresh)
        return True

    def advance(self, slot: int, num_tokens: int, chain: TokenChain) -> None:
        """After the run: the sequence's first `num_tokens` tokens, `chain`'s, are written.

        Blocks that became full are published to the prefix index.
        """
        sequence = self._slot(slot)
        before = sequence.tokens
        if not before <= num_tokens <= sequence.blocks * self._block_size or num_tokens > len(chain):
            raise CacheError(
                f"slot {slot} advanced from {before} to {num_tokens} tokens with "
                f"{sequence.blocks} blocks and a chain of {len(chain)}"
            )
        sequence.tokens = num_tokens
        self.state.accounts[sequence.account].tokens += num_tokens - before
        full = num_tokens // self._block_size
        if self.prefix_cache and full > before // self._block_size:
            publish(self.state, self.state.held(slot, sequence)[:full], sequence, chain)

    def trim(self, slot: int) -> None:
        """After `advance`: gives back what the sequence took with `extend` and has no token in."""
        trim(self.state, slot, self._slot(slot))

    def fork(self, slot: int, num_tokens: int, account: int) -> int:
        """A new sequence that shares the blocks of the first `num_tokens` written tokens of `slot`."""
        parent = self._slot(slot)
        owner = self.state.accounts[account]
        if num_tokens > parent.tokens or owner.variant != parent.variant:
            raise CacheError(
                f"slot {slot} has {parent.tokens} tokens of variant {parent.variant}; "
                f"cannot fork {num_tokens} of variant {owner.variant}"
            )
        count = self.state.layout.logical_blocks(num_tokens)
        published = min(parent.published, num_tokens // self._block_size)
        number = self._take_slot(Slot(account, parent.heads, parent.variant, count, num_tokens, published))
        if count:
            blocks = self.state.tables.blocks[slot, :count]
            self.state.store.refs[blocks] += 1
            self.state.tables.put(number, 0, blocks)
            self.state.accounts.epoch += 1
        owner.stale = True
        return number

    def close(self, slot: int) -> None:
        """Ends a sequence. Its published blocks become cached, its others free, unless someone else
        holds them. Preemption, abort and a normal end all come here."""
        end(self.state, slot, self._slot(slot))

    # ---- what the device must do before the step's writes ----

    def take_copies(self) -> BlockCopies:
        """The copies planned since the last call; the pool runs them before the step's writes.

        Their sources are held until this call, so call it once planning is over.
        """
        copies, sources = self.state.copies.take()
        if len(sources):
            release(self.state, sources)
        return copies

    @property
    def row_tables(self) -> Tensor:
        """`[max_seqs * max_kv_heads, max_blocks]` int32 on the device; current after `upload`."""
        return self.state.tables.device_table

    def upload(self) -> int:
        """Brings `row_tables` up to date; returns how many entries were sent."""
        return self.state.tables.upload(self.state.store)

    def table_rows(self, slot: int) -> range:
        """The rows of `row_tables` that are the slot's, one per KV head, in head order."""
        first = self.state.tables.rows(slot)
        return range(first, first + self._slot(slot).heads)

    # ---- what it looks like from outside ----

    def report(self) -> CacheReport:
        """The whole cache in numbers."""
        return cache_report(self.state, self.pool, self._q_heads)

    def blocks(self, offset: int, limit: int) -> BlockPage:
        """Physical blocks `offset` to `offset + limit - 1`, column by column."""
        return block_page(self.state, offset, limit)

    def check(self) -> None:
        """Recounts everything and raises `CacheError` on the first disagreement."""
        check_state(self.state)

    # ---- inside ----

    def _variant(self, name: str) -> int:
        number = self._variant_number.get(name)
        if number is None:
            raise CacheError(f"no variant {name!r} in this cache; it has {sorted(self._variant_number)}")
        return number

    def _slot(self, number: int) -> Slot:
        slot = self.state.slots[number] if 0 <= number < len(self.state.slots) else None
        if slot is None:
            raise CacheError(f"slot {number} is not open")
        return slot

    def _take_slot(self, slot: Slot) -> int:
        if not self.state.free_slots:
            raise CacheError(f"all {len(self.state.slots)} sequence slots are taken")
        number = self.state.free_slots.pop()
        self.state.slots[number] = slot
        self.state.accounts[slot.account].slots.add(number)
        return number

    def _must_fit_table(self, num_tokens: int) -> None:
        if num_tokens > self._max_blocks * self._block_size:
            raise CacheError(f"{num_tokens} tokens exceed the {self._max_blocks} blocks of a table row")

    def _hits(self, chain: TokenChain, num_tokens: int, variant: int) -> Int32:
        if not self.prefix_cache:
            return np.zeros(0, dtype=np.int32)
        return self.state.index.find(chain, max(num_tokens - 1, 0) // self._block_size, variant)
