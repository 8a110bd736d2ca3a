"""The device's tables: what a step sends, and that it is all attention needs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cache_harness import Harness, make_manager


def test_rows_of_a_slot_are_contiguous_and_padding_is_zero() -> None:
    harness = Harness(make_manager(60, max_seqs=3, max_seq_len=20))
    assert harness.manager.row_tables.shape == (3 * 6, 5)
    one = harness.open(harness.account("native"), "a", [1] * 9)
    two = harness.open(harness.account("mha"), "a", [1] * 5)
    assert one is not None and two is not None
    assert harness.extend(one, 9) and harness.extend(two, 5)
    assert not harness.manager.row_tables.any(), "nothing is sent before the upload"
    assert harness.manager.upload() == 3 * 2 + 2 * 6
    rows = harness.manager.table_rows(one)
    assert rows == range(one * 6, one * 6 + 2)
    assert harness.manager.table_rows(two) == range(two * 6, two * 6 + 6)
    table = harness.manager.row_tables.numpy()
    assert (table[rows.start : rows.stop, 3:] == 0).all()
    used = np.concatenate(
        (table[rows.start : rows.stop, :3].ravel(), table[two * 6 : two * 6 + 6, :2].ravel())
    )
    assert sorted(used) == list(range(18)), "every entry is a block of its own"


@pytest.mark.parametrize("context", [100, 3000])
def test_a_decode_step_sends_new_blocks_whatever_the_context(context: int) -> None:
    manager = make_manager(20_000, block_size=4, max_seq_len=4000)
    harness = Harness(manager, compare=False)
    slot = harness.open(harness.account("native"), "a", [at % 97 for at in range(context)])
    assert slot is not None and manager.extend(slot, context)
    assert manager.upload() == 2 * (context // 4)
    driven = harness.open_[slot]
    manager.advance(slot, context, driven.chain)
    sent = []
    for total in range(context + 1, context + 10):
        driven.chain.append(5)
        assert manager.extend(slot, total)
        sent.append(manager.upload())
        manager.advance(slot, total, driven.chain)
    assert sent == [2, 0, 0, 0, 2, 0, 0, 0, 2]
    manager.check()


def test_hits_and_copies_are_sent_too() -> None:
    harness = Harness(make_manager(60))
    account = harness.account("native")
    parent = harness.open(account, "a", [1] * 10)
    assert parent is not None and harness.extend(parent, 10)
    harness.run()
    child = harness.fork(parent, 10, account)
    assert child is not None
    assert harness.manager.upload() == 3 * 2, "the shared blocks, in the child's rows"
    assert harness.extend(child, 11)
    assert harness.manager.upload() == 2, "the copied tail"
    reader = harness.open(account, "a", [1] * 9)
    assert reader is not None
    assert harness.manager.upload() == 2 * 2


def test_changes_made_twice_or_undone_before_an_upload() -> None:
    """A slot that changes hands within one plan ends with its last holder's blocks."""
    harness = Harness(make_manager(60, max_seqs=2))
    for variant in ("mha", "native", "mqa", "native"):
        slot = harness.open(harness.account(variant), variant, [1] * 7)
        assert slot is not None and harness.extend(slot, 7)
        harness.close(slot)
    last = harness.open(harness.account("native"), "last", [1] * 11)
    assert last is not None and harness.extend(last, 11)
    harness.run()
    assert harness.manager.upload() == 0
    harness.manager.check()
