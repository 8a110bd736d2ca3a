"""The cache counted again in plain Python, from what the sequences hold, to judge the counters that are kept.

For debugging: it shares no arithmetic with what it judges, and takes about 2 µs for each logical block held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cache.accounts import Account
from cache.audit import verify
from cache.errors import CacheError
from cache.manager import CacheManager
from cache.report import CacheReport
from cache.snapshot import variant_reports
from cache.state import CacheState

Counts = Iterator[tuple[str, int, int]]  # what is counted, as kept, as counted again


@dataclass(slots=True)
class _Block:
    """A logical block that is held, by how many sequences, and the tokens in it."""

    heads: int
    variant: int
    tokens: int
    holders: int = 0


@dataclass(slots=True)
class _Recount:
    """What the open sequences hold: blocks by number, and by account how many of its sequences hold each of
    its blocks and the most tokens that one of them knows there."""

    blocks: dict[int, _Block] = field(default_factory=dict)
    accounts: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)


def reconcile(manager: CacheManager) -> None:
    """Raises `CacheError` that names the first counter that is not what a recount gives, with both numbers;
    then checks every invariant of the books (`CacheManager.check`). For use between two steps."""
    recount = _count(manager.state)
    _compare(_totals(manager, recount))
    _compare(_by_variant(manager, recount))
    for number, account in manager.state.accounts.numbered():
        _compare(_by_request(manager.state, number, account, recount))
    manager.check()


def checked_report(manager: CacheManager) -> CacheReport:
    """The report after a check of every invariant, its audit verified; `CacheError` if something is wrong."""
    manager.check()
    report = manager.report()
    verify(report.audit)
    return report


def _compare(counts: Counts) -> None:
    for name, kept, counted in counts:
        if kept != counted:
            raise CacheError(
                f"the cache's books are wrong: {name} should be {counted}, and the counter says {kept}"
            )


def _count(state: CacheState) -> _Recount:
    store, size = state.store, state.layout.block_size
    recount = _Recount()
    for number, slot in state.open_slots():
        own = recount.accounts.setdefault(slot.account, {})
        for position, block in enumerate(state.held(number, slot).tolist()):
            tokens = max(min(slot.tokens - position * size, size), 0)
            seen = recount.blocks.get(block)
            if seen is None:
                full = size if state.index.serial[block] else 0
                seen = _Block(int(store.heads[block]), int(store.variant[block]), full)
                recount.blocks[block] = seen
            seen.holders += 1
            seen.tokens = max(seen.tokens, tokens)
            holders, known = own.get(block, (0, 0))
            own[block] = (holders + 1, max(known, tokens))
    return recount


def _totals(manager: CacheManager, recount: _Recount) -> Counts:
    heads = manager.state.store.heads.tolist()
    used = sum(heads)
    live = sum(heads[block] for block in recount.blocks)
    yield "free blocks", manager.free_blocks, manager.total - used
    yield "cached blocks", manager.cached_blocks, used - live
    yield "live blocks", manager.live_blocks, live
    peak = manager.state.store.most_live
    yield "peak live blocks", peak, max(peak, live)


def _by_variant(manager: CacheManager, recount: _Recount) -> Counts:
    each, live_bytes = manager.state.layout.block_bytes, manager.live_bytes()
    # Only counts are read, which do not depend on the number of query heads.
    for number, variant in enumerate(variant_reports(manager.state, q_heads=1)):
        own = [block for block in recount.blocks.values() if block.variant == number]
        blocks = sum(block.heads for block in own)
        yield f"live bytes of {variant.name}", live_bytes[variant.name], blocks * each
        yield f"live blocks of {variant.name}", variant.live_blocks, blocks
        yield f"live tokens of {variant.name}", variant.live_tokens, sum(block.tokens for block in own)


def _by_request(state: CacheState, number: int, account: Account, recount: _Recount) -> Counts:
    if account.stale:
        return  # it is counted anew before it is read
    own, blocks = recount.accounts.get(number, {}), recount.blocks
    name = f"of request {account.request_id!r}"
    yield f"blocks {name}", account.blocks, sum(blocks[block].heads for block in own)
    yield f"tokens {name}", account.tokens, sum(tokens for _, tokens in own.values())
    if account.epoch == state.accounts.epoch:  # what is shared has not changed since it was counted
        alone = [block for block, (holders, _) in own.items() if holders == blocks[block].holders]
        yield f"exclusive blocks {name}", account.exclusive, sum(blocks[block].heads for block in alone)
