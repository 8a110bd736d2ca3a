"""Reports in the fixed terms, on numbers that can be worked out by hand."""

from __future__ import annotations

import json

import pytest
import torch

from cache.accounts import Peak
from cache.layout import KVLayout, LayerGroup
from cache.report import usage
from tests.support.cache_harness import Harness, make_manager

BLOCK = 2 * 2 * 4 * 1 * 8  # K and V, 2 layers, 4 tokens, head_dim 1, int64


def busy() -> tuple[Harness, dict[str, int]]:
    """6 query heads; native has 2 KV heads, mqa 1, mha 6. One request of each, one with two choices."""
    harness = Harness(make_manager(60))
    slots = {}
    for variant, length in (("native", 10), ("mqa", 5), ("mha", 4)):
        account = harness.account(variant)
        slot = harness.open(account, "a", [1] * length)
        assert slot is not None and harness.extend(slot, length)
        slots[variant] = slot
        harness.run()
    child = harness.fork(slots["native"], 9, harness.open_[slots["native"]].account)
    assert child is not None and harness.extend(child, 10)
    harness.run()
    closed = harness.open(harness.account("mqa"), "b", [1] * 9)
    assert closed is not None and harness.extend(closed, 9)
    harness.run()
    harness.close(closed)
    return harness, slots


def test_states_and_variants() -> None:
    harness, _ = busy()
    report = harness.manager.report()
    assert (report.pool.bytes, report.pool.blocks, report.pool.block_bytes) == (60 * BLOCK, 60, BLOCK)
    assert (report.pool.block_size, report.pool.dtype, report.pool.device) == (4, "int64", "cpu")
    states = report.states
    # native: 2 shared logical blocks and 2 tails, times 2; mqa 2; mha 6. Cached: 2 of the closed one.
    assert (states.live.blocks, states.cached.blocks, states.free.blocks) == (8 + 2 + 6, 2, 42)
    assert states.live.bytes + states.cached.bytes + states.free.bytes == report.pool.bytes
    native, mqa, mha = report.variants
    assert (native.name, native.kv_heads, native.bytes_per_token) == ("native", 2, 2 * BLOCK // 4)
    assert (native.live_tokens, native.live_blocks, native.live_bytes) == (8 + 2 + 2, 8, 8 * BLOCK)
    assert native.tail_waste_bytes == 4 * 2 * BLOCK // 4  # two free token slots in each of two tails
    assert (native.mha_equivalent_bytes, native.saved_ratio) == (24 * BLOCK, pytest.approx(2 / 3))
    assert (mqa.live_tokens, mqa.live_blocks, mqa.tail_waste_bytes) == (5, 2, 3 * BLOCK // 4)
    assert (mqa.mha_equivalent_bytes, mqa.saved_ratio) == (12 * BLOCK, pytest.approx(5 / 6))
    assert (mha.live_tokens, mha.live_blocks, mha.tail_waste_bytes) == (4, 6, 0)
    assert (mha.mha_equivalent_bytes, mha.saved_ratio) == (mha.live_bytes, 0.0)
    assert report.tail_waste_bytes == native.tail_waste_bytes + mqa.tail_waste_bytes
    audit = report.audit
    assert audit.predicted_bytes == audit.arena_bytes == 61 * BLOCK
    assert audit.device_bytes is not None and 0 <= audit.device_bytes - audit.arena_bytes < 4096
    json.dumps(report.to_dict())


def test_requests() -> None:
    harness, slots = busy()
    account = harness.manager.open_account("reader", "native")
    harness.manager.open(account, harness.open_[slots["native"]].chain, 10)
    native, _, _, closed, reader = harness.manager.report().requests
    assert (native.id, native.variant, native.sequences, native.tokens) == ("request-0", "native", 2, 12)
    assert (native.bytes_held, native.bytes_exclusive) == (8 * BLOCK, 4 * BLOCK)
    assert (native.blocks, native.bytes_peak, native.mha_equivalent_bytes) == (8, 8 * BLOCK, 24 * BLOCK)
    assert native.tail_waste_bytes == 2 * BLOCK
    assert (closed.bytes_held, closed.bytes_exclusive, closed.blocks, closed.sequences) == (0, 0, 3, 0)
    assert (reader.bytes_held, reader.bytes_exclusive, reader.cached_tokens) == (4 * BLOCK, 0, 8)
    assert (reader.blocks, reader.bytes_peak) == (4, 4 * BLOCK), "nobody has asked for its peak yet"


def test_a_request_that_waits_for_its_first_step_is_not_listed() -> None:
    harness, _ = busy()
    before = harness.manager.report().requests
    account = harness.manager.open_account("waits", "native")
    assert harness.manager.report().requests == before
    harness.manager.close_account(account)


def test_an_empty_cache() -> None:
    report = make_manager(10).report()
    assert report.states.free.blocks == 10 and report.states.live.bytes == 0
    assert report.requests == ()
    assert [variant.saved_ratio for variant in report.variants] == [0.0, 0.0, 0.0]


def test_the_block_table() -> None:
    harness, slots = busy()
    manager = harness.manager
    page = manager.blocks(0, 1000)
    assert (page.offset, page.total, len(page.state)) == (0, 60, 60)
    assert [page.state.count(state) for state in ("live", "cached", "free")] == [16, 2, 42]
    native = manager.state.slots[slots["native"]]
    assert native is not None
    logical = manager.state.held(slots["native"], native)
    ids = manager.state.store.ids[logical, :2]
    assert [page.kv_head[i] for i in ids.ravel()] == [0, 1] * 3
    assert {page.owners[i] for i in ids.ravel()} == {("request-0",)}
    assert [page.refcount[i] for i in ids.ravel()] == [2, 2, 2, 2, 1, 1]
    assert [page.tokens[i] for i in ids.ravel()] == [4, 4, 4, 4, 2, 2]
    assert {page.variant[i] for i in ids.ravel()} == {"native"}
    free = page.state.index("free")
    row = (page.owners[free], page.variant[free], page.kv_head[free], page.refcount[free], page.tokens[free])
    assert row == ((), None, None, 0, 0)
    cached = page.state.index("cached")
    assert (page.owners[cached], page.refcount[cached], page.tokens[cached]) == ((), 0, 4)
    json.dumps(page.to_dict())


@pytest.mark.parametrize(("offset", "limit"), [(0, 7), (5, 20), (55, 100), (60, 5), (1000, 5), (3, 0)])
def test_pages_are_slices_of_the_table(offset: int, limit: int) -> None:
    manager = busy()[0].manager
    whole, page = manager.blocks(0, 60), manager.blocks(offset, limit)
    for name in ("state", "owners", "variant", "kv_head", "refcount", "tokens"):
        assert getattr(page, name) == getattr(whole, name)[offset : offset + limit]


def test_usage_of_a_request_of_the_default_model() -> None:
    """SmolLM2-135M in bf16: 30 layers, 9 query and 3 KV heads of 64; 100 tokens, 64 of them cached."""
    group = LayerGroup(layers=tuple(range(30)), kv_heads=3, head_dim=64)
    layout = KVLayout((group,), 16, torch.bfloat16)
    native = usage(Peak(blocks=21, exclusive=9, tokens=100, cached_tokens=64), layout, 3, 9)
    assert native.to_dict() == {
        "bytes_per_token": 23_040,
        "blocks": 21,
        "bytes_peak": 21 * 122_880,
        "bytes_exclusive": 9 * 122_880,
        "tail_waste_bytes": 12 * 23_040,
        "cached_tokens": 64,
        "mha_equivalent_bytes": 63 * 122_880,
        "saved_ratio": pytest.approx(2 / 3),
    }
    assert usage(Peak(63, 63, 100, 0), layout, 9, 9).saved_ratio == 0.0
    assert usage(Peak(0, 0, 0, 0), layout, 3, 9).saved_ratio == 0.0
