"""Forks: shared while read, copied when written, and nobody ever sees another's tokens.

The harness writes markers through the device tables and reads all of them back at every step.
"""

from __future__ import annotations

import pytest

from tests.support.cache_harness import Harness, make_manager


def parent_of(harness: Harness, length: int, variant: str = "native") -> tuple[int, int]:
    """(account, slot) of a sequence that has run `length` tokens."""
    account = harness.account(variant)
    slot = harness.open(account, "a", list(range(1, length + 1)))
    assert slot is not None and harness.extend(slot, length)
    harness.run()
    return account, slot


def forked(harness: Harness, slot: int, tokens: int, account: int) -> int:
    child = harness.fork(slot, tokens, account)
    assert child is not None
    return child


@pytest.mark.parametrize("last", ["parent", "first child", "last child"])
@pytest.mark.parametrize("length", [10, 11, 12, 13])
def test_parent_and_siblings_all_grow_in_one_step(length: int, last: str) -> None:
    """Whoever comes last keeps the shared block, the others get copies: none is left over."""
    harness = Harness(make_manager(100))
    account, parent = parent_of(harness, length)
    children = [forked(harness, parent, length - 1, account) for _ in range(4)]
    assert harness.manager.live_blocks == 2 * -(-length // 4), "a fork takes nothing"
    order = [parent, *children]
    order.append(order.pop(0 if last == "parent" else 1 if last == "first child" else 4))
    for fill, slot in enumerate(order):
        more = 2 if slot == parent else 1
        assert harness.extend(slot, harness.open_[slot].computed + more, fill=50 + fill)
    harness.run()
    whole = (length - 1) // 4  # blocks that nobody writes into
    ends = [harness.open_[slot].computed for slot in order]
    assert harness.manager.live_blocks == 2 * (whole + sum(-(-end // 4) - whole for end in ends))
    for fill, slot in enumerate(order):
        assert harness.extend(slot, harness.open_[slot].computed + 5, fill=60 + fill)
    harness.run()
    for slot in order:
        harness.close(slot)
    assert harness.manager.live_blocks == 0


def test_only_a_written_tail_is_copied_and_all_its_heads_are() -> None:
    harness = Harness(make_manager(100))
    account, parent = parent_of(harness, 10, "mha")
    child = forked(harness, parent, 10, account)
    assert harness.extend(child, 10)
    assert len(harness.manager.take_copies()) == 0, "nothing to write, nothing to copy"
    harness.model.take_copies()
    assert harness.extend(child, 11)
    copies = harness.manager.take_copies()
    harness.manager.pool.copy_blocks(copies.src, copies.dst)
    harness.model.take_copies()
    assert len(copies) == 6
    parent_tail = harness.manager.state.store.ids_of(harness.manager.state.tables.blocks[parent, 2:3])
    assert copies.src.tolist() == parent_tail.tolist()
    whole = forked(harness, parent, 8, account)
    assert harness.extend(whole, 9)
    assert len(harness.manager.take_copies()) == 0, "a tail that is full is not written into"
    harness.model.take_copies()
    harness.run()


def test_a_fork_at_no_tokens_shares_nothing() -> None:
    harness = Harness(make_manager(20))
    account, parent = parent_of(harness, 1)
    child = forked(harness, parent, 0, account)
    assert harness.extend(child, 1, fill=7)
    harness.run()
    assert harness.manager.live_blocks == 4


def test_a_published_tail_is_copied_although_nobody_else_holds_it() -> None:
    """The prefix index reads it: the child must not write into it, even after the parent is gone."""
    harness = Harness(make_manager(40))
    account, parent = parent_of(harness, 8)
    child = forked(harness, parent, 7, account)
    harness.close(parent)
    assert harness.extend(child, 8, fill=99)
    harness.run()
    assert harness.manager.cached_blocks == 2
    again = harness.open(account, "a", [*range(1, 9), 5])
    assert again is not None and harness.open_[again].computed == 8
    harness.run()


@pytest.mark.parametrize("length", [8, 12])
def test_without_room_for_a_copy_the_last_holder_writes_in_place(length: int) -> None:
    """The pool holds exactly what the child needs: it must not wait for room that never comes."""
    harness = Harness(make_manager(length // 4))
    account, parent = parent_of(harness, length, "mqa")
    child = forked(harness, parent, 7, account)
    harness.close(parent)
    assert harness.extend(child, length, fill=99)
    assert harness.manager.cached_blocks == 0
    harness.run()
    harness.close(child)
    assert harness.manager.cached_blocks == length // 4


def test_a_copy_without_room_is_refused_while_someone_else_reads() -> None:
    harness = Harness(make_manager(3))
    account, parent = parent_of(harness, 10, "mqa")
    child = forked(harness, parent, 9, account)
    assert not harness.extend(child, 10)
    assert not harness.extend(parent, 11)
    harness.close(parent)
    assert harness.extend(child, 10, fill=5)
    harness.run()


def test_a_source_outlives_its_holders_until_the_plan_is_taken() -> None:
    harness = Harness(make_manager(5))
    account, parent = parent_of(harness, 10, "mqa")
    child = forked(harness, parent, 10, account)
    assert harness.extend(child, 11, fill=5)
    harness.close(parent)  # pushed out within the plan
    assert harness.manager.live_blocks == 4, "two shared, the copy, and its source"
    other = harness.open(account, "b", [7] * 8)
    assert other is not None
    assert not harness.extend(other, 8), "the source is not handed out"
    assert harness.extend(other, 4)
    harness.run()
    assert harness.manager.live_blocks == 4
    assert harness.extend(other, 8)
    harness.run()


def test_a_copy_for_a_sequence_that_is_gone_is_off() -> None:
    """Its block goes to another copy of the same plan: one destination, one source."""
    harness = Harness(make_manager(4))
    account, parent = parent_of(harness, 10, "mqa")
    first, second = (forked(harness, parent, tokens, account) for tokens in (10, 9))
    assert harness.extend(first, 11, fill=5)
    harness.close(first)
    assert harness.extend(second, 10, fill=6)
    assert len(harness.manager.state.copies.sources) == 1
    harness.run()


def test_a_fork_of_a_sequence_whose_copy_is_still_planned() -> None:
    """The grandchild's data lies where the child's will come from."""
    harness = Harness(make_manager(30))
    account, parent = parent_of(harness, 10)
    child = forked(harness, parent, 10, account)
    assert harness.extend(child, 11, fill=5)
    grandchild = forked(harness, child, 9, account)
    assert harness.extend(grandchild, 11, fill=6)
    copies = harness.manager.state.copies.sources
    assert len(copies) == 2 and len(set(copies.values())) == 1
    harness.close(parent)
    harness.run()
    harness.close(child)
    harness.run()
    harness.close(grandchild)
    assert harness.manager.live_blocks == 0


def test_equal_answers_are_published_once() -> None:
    """Two greedy choices write the same tokens; one of them becomes the prefix, the other stays private."""
    harness = Harness(make_manager(60))
    account, parent = parent_of(harness, 6, "mqa")
    child = forked(harness, parent, 5, account)
    for total in range(6, 14):
        for slot in (parent, child):
            if total > harness.open_[slot].computed:
                assert harness.extend(slot, total, fill=6 if total == 6 else 9)
        harness.run()
    assert len(harness.manager.state.index.by_digest) == 3
    harness.close(parent)
    assert (harness.manager.live_blocks, harness.manager.cached_blocks) == (4, 2)
    harness.close(child)
    assert (harness.manager.live_blocks, harness.manager.cached_blocks) == (0, 3)
