"""What a request holds, and the most it held: unique blocks over its choices, measured rarely."""

from __future__ import annotations

import pytest

from cache import state as state_module
from cache.accounts import Holding, measure
from tests.support.cache_harness import Harness, make_manager


def grown(harness: Harness, slot: int, total: int, fill: int = 9) -> None:
    assert harness.extend(slot, total, fill=fill)
    harness.run()


def started(harness: Harness, account: int, tokens: list[int], root: str = "a") -> int:
    slot = harness.open(account, root, tokens)
    assert slot is not None
    grown(harness, slot, len(tokens))
    return slot


def test_one_sequence() -> None:
    harness = Harness(make_manager(60))
    account = harness.account("native")
    slot = started(harness, account, [1] * 6)
    assert harness.manager.peak(account) == (4, 4, 6, 0)
    grown(harness, slot, 8)
    assert harness.manager.peak(account) == (4, 4, 8, 0)
    grown(harness, slot, 9)
    assert harness.manager.peak(account) == (6, 6, 9, 0)
    harness.close(slot)
    assert harness.manager.peak(account) == (6, 6, 9, 0), "the peak stays"


def test_choices_share_their_prompt_and_it_counts_once() -> None:
    harness = Harness(make_manager(60))
    account = harness.account("native")
    parent = started(harness, account, [1] * 10)
    children = [harness.fork(parent, 9, account) for _ in range(2)]
    assert harness.manager.peak(account) == (6, 6, 10, 0)
    for fill, slot in enumerate([parent, *children]):
        assert slot is not None
        assert harness.extend(slot, 11, fill=20 + fill)
    harness.run()
    # 2 shared logical blocks, 3 tails of 3 tokens; 2 KV heads
    assert harness.manager.peak(account) == (10, 10, 8 + 9, 0)
    harness.close(parent)
    assert harness.manager.peak(account) == (10, 10, 17, 0)
    now = harness.manager.report().requests[0]
    assert (now.bytes_held, now.bytes_exclusive) == (8 * 128, 8 * 128)
    assert now.tokens == 8 + 6


def test_exclusive_is_what_nobody_else_held_at_the_peak() -> None:
    harness = Harness(make_manager(60))
    first, second = harness.account("native"), harness.account("native")
    one = started(harness, first, [1] * 9)
    two = started(harness, second, [1] * 9)
    assert harness.manager.peak(second) == (6, 2, 9, 8)
    assert harness.manager.peak(first) == (6, 6, 9, 0), "when it got there, nobody else was"
    grown(harness, one, 13)
    assert harness.manager.peak(first) == (8, 4, 13, 0)
    harness.close(two)
    assert harness.manager.peak(first) == (8, 4, 13, 0)
    grown(harness, one, 17)
    assert harness.manager.peak(first) == (10, 10, 17, 0)


def test_a_fork_into_another_account_shares_with_it() -> None:
    harness = Harness(make_manager(60))
    first, second = harness.account("native"), harness.account("native")
    one = started(harness, first, [1] * 9)
    assert harness.manager.peak(first) == (6, 6, 9, 0)
    assert harness.fork(one, 8, second) is not None
    assert harness.manager.peak(second) == (4, 0, 8, 0)
    grown(harness, one, 13)
    assert harness.manager.peak(first) == (8, 4, 13, 0)


def test_hits_count_at_the_first_admission_only() -> None:
    harness = Harness(make_manager(60), compare=False)
    harness.close(started(harness, harness.account("mqa"), [1] * 9))
    account = harness.account("mqa")
    slot = started(harness, account, [1] * 9)
    assert harness.manager.peak(account).cached_tokens == 8
    chain = harness.open_[slot].chain
    harness.close(slot)
    opened = harness.manager.open(account, chain, 9, recompute=True)
    assert opened.cached_tokens == 8
    assert harness.manager.peak(account).cached_tokens == 8
    harness.manager.open(account, chain, 9)  # another prompt of the same request
    assert harness.manager.peak(account).cached_tokens == 16


def test_steady_decoding_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """O(1) a step: totals are kept, not counted, as long as no sharing changes anywhere."""
    calls = []

    def counted(*args: object) -> Holding:
        calls.append(1)
        return measure(*args)  # type: ignore[arg-type]

    harness = Harness(make_manager(200, max_seq_len=64), compare=False)
    account = harness.account("native")
    slot = started(harness, account, [1] * 9)
    alone = harness.account("mqa")
    other = started(harness, alone, [2] * 9, "b")
    for number in (account, alone):
        harness.manager.peak(number)
    monkeypatch.setattr(state_module, "measure", counted)
    driven, two = harness.open_[slot], harness.open_[other]
    for total in range(10, 60):
        for number, sequence, chain in ((account, slot, driven.chain), (alone, other, two.chain)):
            chain.append(5)
            assert harness.manager.extend(sequence, total)
            harness.manager.advance(sequence, total, chain)
            harness.manager.peak(number)
    assert calls == []
    assert harness.manager.peak(account) == (30, 30, 59, 0)
