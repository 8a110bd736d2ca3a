"""Builds the reports from the cache's books. Reads only; every pass is over arrays."""

from __future__ import annotations

import numpy as np

from cache.accounts import Account, fill_of
from cache.arrays import Int32, Int64
from cache.audit import audit
from cache.pool import KVPool
from cache.report import (
    Amount,
    BlockPage,
    CacheReport,
    PoolReport,
    RequestReport,
    States,
    VariantReport,
    mha_equivalent,
    saved_ratio,
)
from cache.state import CacheState, holding


def cache_report(state: CacheState, pool: KVPool, q_heads: int) -> CacheReport:
    """The whole cache at this moment; `q_heads` is the checkpoint's number of query heads."""
    layout = state.layout
    each = layout.block_bytes
    total, free, cached = state.store.total, state.store.free, state.index.cached
    live = total - free - cached
    variants = variant_reports(state, q_heads)
    return CacheReport(
        pool=PoolReport(
            bytes=total * each,
            blocks=total,
            block_bytes=each,
            block_size=layout.block_size,
            dtype=str(layout.dtype).removeprefix("torch."),
            device=str(pool.device),
        ),
        states=States(Amount(live, live * each), Amount(cached, cached * each), Amount(free, free * each)),
        tail_waste_bytes=sum(variant.tail_waste_bytes for variant in variants),
        variants=variants,
        requests=tuple(_request(state, a, q_heads) for _, a in state.accounts.numbered() if a.has_held),
        audit=audit(layout, pool),
    )


def block_page(state: CacheState, offset: int, limit: int) -> BlockPage:
    """Physical blocks `offset` to `offset + limit - 1`, as far as there are any."""
    store = state.store
    used = np.flatnonzero(store.heads).astype(np.int32)
    counts = store.heads[used]
    ids = store.ids_of(used)
    owner = np.full(store.total, -1, dtype=np.int32)  # physical id -> logical block
    owner[ids] = np.repeat(used, counts)
    head = np.zeros(store.total, dtype=np.int64)
    head[ids] = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)

    first = min(max(offset, 0), store.total)
    page = owner[first : first + max(limit, 0)]
    heads = head[first : first + len(page)]
    live, tokens, holders = state.live(), filled(state), _holders(state, page)
    taken = page >= 0
    return BlockPage(
        offset=first,
        total=store.total,
        state=tuple("free" if b < 0 else "live" if live[b] else "cached" for b in page),
        owners=tuple(holders.get(b, ()) for b in page.tolist()),
        variant=tuple(None if b < 0 else state.variants[store.variant[b]].name for b in page),
        kv_head=tuple(h if t else None for h, t in zip(heads.tolist(), taken.tolist(), strict=True)),
        refcount=tuple(np.where(taken, store.refs[page], 0).tolist()),
        tokens=tuple(np.where(taken, tokens[page], 0).tolist()),
    )


def filled(state: CacheState) -> Int64:
    """Tokens in each logical block, as far as anybody who holds it knows."""
    fill = np.where(state.index.serial > 0, state.layout.block_size, 0)
    for number, slot in state.open_slots():
        blocks = state.held(number, slot)  # distinct, so no two entries meet in one block
        fill[blocks] = np.maximum(fill[blocks], fill_of(slot.blocks, slot.tokens, state.layout.block_size))
    return fill


def variant_reports(state: CacheState, q_heads: int) -> tuple[VariantReport, ...]:
    """What each attention mode holds now, in the order of the cache's variants."""
    live = state.live()
    variant, fill = state.store.variant[live], filled(state)[live]
    reports = []
    for number, spec in enumerate(state.variants):
        ours = variant == number
        logical, held = int(np.count_nonzero(ours)), int(fill[ours].sum())
        nbytes = logical * spec.kv_heads * state.layout.block_bytes
        per_token = state.layout.bytes_per_token(spec.kv_heads)
        mha_bytes = mha_equivalent(nbytes, spec.kv_heads, q_heads)
        reports.append(
            VariantReport(
                name=spec.name,
                kv_heads=spec.kv_heads,
                bytes_per_token=per_token,
                live_tokens=held,
                live_blocks=logical * spec.kv_heads,
                live_bytes=nbytes,
                tail_waste_bytes=nbytes - held * per_token,
                mha_equivalent_bytes=mha_bytes,
                saved_ratio=saved_ratio(nbytes, mha_bytes),
            )
        )
    return tuple(reports)


def _request(state: CacheState, account: Account, q_heads: int) -> RequestReport:
    now = holding(state, account)
    each = state.layout.block_bytes
    # The peak is brought up to date when the engine asks for it; until then the present may be higher.
    blocks = max(account.peak_blocks, now.blocks)
    mha_bytes = mha_equivalent(blocks * each, account.heads, q_heads)
    return RequestReport(
        id=account.request_id,
        variant=state.variants[account.variant].name,
        sequences=len(account.slots),
        tokens=now.tokens,
        bytes_held=now.blocks * each,
        bytes_exclusive=now.exclusive * each,
        tail_waste_bytes=now.blocks * each - now.tokens * state.layout.bytes_per_token(account.heads),
        cached_tokens=account.cached_tokens,
        blocks=blocks,
        bytes_peak=blocks * each,
        mha_equivalent_bytes=mha_bytes,
        saved_ratio=saved_ratio(blocks * each, mha_bytes),
    )


def _holders(state: CacheState, page: Int32) -> dict[int, tuple[str, ...]]:
    """The ids of the requests that hold each logical block of a page."""
    shown = np.zeros(state.store.capacity, dtype=np.bool_)
    shown[page[page >= 0]] = True
    found: dict[int, dict[str, None]] = {}
    for number, slot in state.open_slots():
        blocks = state.held(number, slot)
        request_id = state.accounts[slot.account].request_id
        for block in blocks[shown[blocks]].tolist():
            found.setdefault(block, {})[request_id] = None
    return {block: tuple(ids) for block, ids in found.items()}
