"""Drives a CacheManager as an engine would, and compares it with the plain model after every call.

The arena holds markers instead of K and V: a function of everything up to and including the token, of
the layer and of the head, as K and V are. What is read back through the device tables must be that.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from cache.chain import TokenChain
from cache.layout import KVLayout, LayerGroup
from cache.manager import CacheManager
from cache.pool import KVPool
from cache.recount import reconcile
from cache.state import VariantSpec
from tests.support.cache_model import CacheModel

CPU = torch.device("cpu")
VARIANTS = (VariantSpec("native", 2), VariantSpec("mqa", 1), VariantSpec("mha", 6))


def make_layout(
    block_size: int = 4,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 1,
    dtype: torch.dtype = torch.int64,
) -> KVLayout:
    group = LayerGroup(layers=tuple(range(layers)), kv_heads=kv_heads, head_dim=head_dim)
    return KVLayout((group,), block_size, dtype)


def make_manager(
    total: int,
    *,
    block_size: int = 4,
    variants: tuple[VariantSpec, ...] = VARIANTS,
    max_seqs: int = 8,
    max_seq_len: int = 64,
    prefix_cache: bool = True,
) -> CacheManager:
    layout = make_layout(block_size)
    return CacheManager(
        layout,
        KVPool(layout, total, CPU),
        max_seqs=max_seqs,
        max_seq_len=max_seq_len,
        max_kv_heads=max(variant.kv_heads for variant in variants),
        variants=variants,
        q_heads=6,
        prefix_cache=prefix_cache,
    )


def root_of(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")


@dataclass
class Driven:
    """One open sequence, as its driver knows it."""

    account: int
    variant: str
    root: bytes
    chain: TokenChain
    tokens: list[int]
    computed: int
    target: int  # tokens it has blocks for; what is beyond `computed` is written by the next run


@dataclass
class Harness:
    manager: CacheManager
    compare: bool = True  # with the plain model
    eager_peaks: bool = True  # ask for every account's peak after every call
    open_: dict[int, Driven] = field(default_factory=dict)
    accounts: dict[int, str] = field(default_factory=dict)  # number -> variant

    def __post_init__(self) -> None:
        heads = {variant.name: variant.kv_heads for variant in self.manager.state.variants}
        self.model = CacheModel(self.manager.total, self.manager.state.layout.block_size, heads)

    # ---- the calls ----

    def account(self, variant: str) -> int:
        number = self.manager.open_account(f"request-{len(self.accounts)}", variant)
        self.accounts[number] = variant
        return number

    def open(self, account: int, root: str, tokens: list[int]) -> int | None:
        """A new sequence with these tokens as its prompt, or None if there is no slot. Its root is made
        of the variant and `root`, as a server's is of the variant and a salt."""
        if not self.manager.state.free_slots:
            return None
        variant = self.accounts[account]
        root = root_of(variant + root)
        chain = TokenChain(root, self.model.block_size, tokens)
        probed = self.manager.probe(chain, len(tokens), variant)
        opened = self.manager.open(account, chain, len(tokens))
        assert opened.cached_tokens == probed
        if self.compare:
            cached = self.model.open(opened.slot, account, variant, root, tokens, len(tokens))
            assert opened.cached_tokens == cached
        self.open_[opened.slot] = Driven(
            account, variant, root, chain, list(tokens), opened.cached_tokens, opened.cached_tokens
        )
        self.verify()
        return opened.slot

    def extend(self, slot: int, num_tokens: int, fill: int = 0) -> bool:
        """Blocks for `num_tokens` tokens; those the sequence does not know yet are `fill`."""
        driven = self.open_[slot]
        while len(driven.tokens) < num_tokens:
            driven.tokens.append(fill)
            driven.chain.append(fill)
        before = books(self.manager)
        done = self.manager.extend(slot, num_tokens)
        if self.compare:
            assert done == self.model.extend(slot, num_tokens)
        if done:
            driven.target = max(driven.target, num_tokens)
        else:
            assert_same_books(before, books(self.manager))
        self.verify()
        return done

    def fork(self, slot: int, num_tokens: int, account: int) -> int | None:
        if not self.manager.state.free_slots:
            return None
        parent = self.open_[slot]
        child = self.manager.fork(slot, num_tokens, account)
        if self.compare:
            self.model.fork(slot, child, num_tokens, account)
        tokens = parent.tokens[:num_tokens]
        chain = TokenChain(parent.root, self.model.block_size, tokens)
        self.open_[child] = Driven(
            account, parent.variant, parent.root, chain, tokens, num_tokens, num_tokens
        )
        self.verify()
        return child

    def close(self, slot: int) -> None:
        self.manager.close(slot)
        if self.compare:
            self.model.close(slot)
        del self.open_[slot]
        self.verify()

    def close_account(self, account: int) -> None:
        for slot in [slot for slot, driven in self.open_.items() if driven.account == account]:
            self.close(slot)
        if self.compare:
            self.verify_peak(account)
        self.manager.close_account(account)
        del self.accounts[account]
        self.model.peaks.pop(account, None)

    def run(self) -> None:
        """Copies, upload, the step's writes, and `advance` for every sequence that got blocks."""
        copies = self.manager.take_copies()
        self.manager.pool.copy_blocks(copies.src, copies.dst)
        if self.compare:
            assert len(copies) == sum(source.heads for source, _ in self.model.take_copies())
        self.manager.upload()
        self.verify_data()
        for slot, driven in self.open_.items():
            if driven.target > driven.computed:
                self.write(slot, driven.computed, driven.target)
        for slot, driven in self.open_.items():
            if driven.target > driven.computed:
                self.manager.advance(slot, driven.target, driven.chain)
                if self.compare:
                    self.model.advance(slot, driven.target, driven.tokens)
                driven.computed = driven.target
        self.verify()
        reconcile(self.manager)
        self.verify_data()

    # ---- markers ----

    def markers(self, slot: int, first: int, last: int) -> np.ndarray:
        """[2, L, heads, last - first] int64: what K and V of these tokens must be."""
        driven = self.open_[slot]
        shape = (2, self.manager.state.layout.num_layers, self.model.heads[driven.variant])
        seen = driven.root + driven.variant.encode()
        base = [
            zlib.crc32(seen + np.array(driven.tokens[: at + 1], dtype=np.int64).tobytes()) * 1000 + 1
            for at in range(first, last)
        ]
        place = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        return place[..., None] + np.array(base, dtype=np.int64)

    def places(self, slot: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids [heads, n] from the device table, and offsets [n], of tokens `first` to `last - 1`."""
        rows = self.manager.table_rows(slot)
        at = torch.arange(first, last, device=CPU, dtype=torch.int64)
        table = self.manager.row_tables[rows.start : rows.stop].to(torch.int64)
        return table[:, at // self.model.block_size], at % self.model.block_size

    def write(self, slot: int, first: int, last: int) -> None:
        blocks, offsets = self.places(slot, first, last)
        self.manager.pool.arena[:, :, blocks, offsets, 0] = torch.from_numpy(self.markers(slot, first, last))

    def verify_data(self) -> None:
        """Every written token of every open sequence reads back as itself."""
        for slot, driven in self.open_.items():
            blocks, offsets = self.places(slot, 0, driven.computed)
            found = self.manager.pool.arena[:, :, blocks, offsets, 0].numpy()
            assert (found == self.markers(slot, 0, driven.computed)).all(), f"slot {slot} reads others' data"

    # ---- comparisons ----

    def verify(self) -> None:
        manager, model = self.manager, self.model
        manager.check()
        assert manager.live_blocks + manager.cached_blocks + manager.free_blocks == manager.total
        if not self.compare:
            return
        assert (manager.free_blocks, manager.cached_blocks) == (model.free, model.cached)
        assert set(self.open_) == set(model.sequences)
        seen: dict[int, object] = {}
        for slot, sequence in model.sequences.items():
            real = manager.state.slots[slot]
            assert real is not None
            assert (real.tokens, real.published) == (sequence.tokens, sequence.published)
            for block, index in zip(sequence.blocks, manager.state.held(slot, real).tolist(), strict=True):
                block.index = index if block.index is None else block.index
                assert block.index == index, "a sequence holds the blocks it should"
                assert seen.setdefault(index, block) is block, "different blocks are different"
                assert manager.state.store.refs[index] == block.refs
                assert (manager.state.index.serial[index] > 0) == (block.key is not None)
        assert manager.state.index.lru.queued().tolist() == [block.index for block in model.lru]
        model.note_peaks()
        if self.eager_peaks:
            for account in model.peaks:
                self.verify_peak(account)

    def verify_peak(self, account: int) -> None:
        peak, expected = self.manager.peak(account), self.model.peaks.get(account)
        if expected is None:
            return
        assert (peak.blocks, peak.tokens) == (expected.blocks, expected.tokens)
        assert peak.cached_tokens == expected.cached_tokens
        if self.eager_peaks:  # asked for later, it is measured later
            assert peak.exclusive == expected.exclusive


def books(manager: CacheManager) -> dict[str, object]:
    """Everything the manager knows, copied, but for what only unused blocks hold."""
    state = manager.state
    used = state.store.heads > 0
    columns = {
        name: getattr(owner, name)[used].copy()
        for owner, names in (
            (state.store, ("ids", "heads", "variant", "refs", "pins")),
            (state.index, ("serial", "parent", "tokens", "digest")),
        )
        for name in names
    }
    return {
        **columns,
        "used": used.copy(),
        "free": sorted(state.store.free_ids().tolist()),
        "cached": state.index.cached,
        "lru": state.index.lru.queued().tolist(),
        "digests": dict(state.index.by_digest),
        "copies": dict(state.copies.sources),
        "slots": [repr(slot) for slot in state.slots],
        "free_slots": list(state.free_slots),
        "tables": [state.held(number, slot).tolist() for number, slot in state.open_slots()],
    }


def assert_same_books(before: dict[str, object], after: dict[str, object]) -> None:
    for name, value in before.items():
        np.testing.assert_equal(after[name], value, err_msg=name)
