"""`check()` finds books that are wrong, in each of their columns, and is quick about it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from cache.chain import TokenChain
from cache.errors import CacheError
from cache.manager import CacheManager
from cache.state import CacheState, VariantSpec
from tests.support.cache_harness import Harness, make_manager, root_of


def busy() -> Harness:
    """Slots 0 (12 tokens) and 1 (its fork, a copy planned), and 2 cached blocks of a third."""
    harness = Harness(make_manager(60))
    account = harness.account("native")
    done = harness.open(account, "b", [1] * 9)
    assert done == 0 and harness.extend(done, 9)
    harness.run()
    harness.close(done)
    slot = harness.open(account, "a", [1] * 11)
    assert slot == 0 and harness.extend(slot, 11)
    harness.run()
    child = harness.fork(slot, 10, account)
    assert child == 1 and harness.extend(child, 11)
    harness.manager.upload()
    harness.manager.peak(account)
    harness.manager.check()
    return harness


def held(state: CacheState, position: int) -> int:
    return int(state.tables.blocks[0, position])


def cached(state: CacheState) -> int:
    return int(state.index.lru.queued()[0])


def same_id_twice(state: CacheState) -> None:
    state.store.ids[held(state, 0), 1] = state.store.ids[held(state, 1), 1]


def device_table(state: CacheState) -> None:
    state.tables.device_table[0, 1] += 1


def entry_missing(state: CacheState) -> None:
    del state.index.by_digest[state.index.digest[held(state, 0)].tobytes()]


def digests_swapped(state: CacheState) -> None:
    one, two = (state.index.digest[held(state, at)].tobytes() for at in (0, 1))
    table = state.index.by_digest
    table[one], table[two] = table[two], table[one]


def wrong_tokens(state: CacheState) -> None:
    state.accounts[0].tokens += 1


def wrong_order(state: CacheState) -> None:
    stamps = state.index.lru.stamp
    one, two = state.index.lru.queued()[:2]
    stamps[one], stamps[two] = stamps[two], stamps[one]
    state.index.lru._log[[stamps[one], stamps[two]]] = one, two


WRONGS: dict[str, Callable[[CacheState], object]] = {
    "a reference too many": lambda s: np.add.at(s.store.refs, held(s, 1), 1),
    "a reference too few": lambda s: np.add.at(s.store.refs, held(s, 0), -1),
    "a pin too many": lambda s: np.add.at(s.store.pins, held(s, 0), 1),
    "a block of other heads": lambda s: s.store.heads.__setitem__(held(s, 2), 1),
    "a block of another variant": lambda s: s.store.variant.__setitem__(held(s, 2), 1),
    "an id in two places": same_id_twice,
    "the scratch block handed out": lambda s: s.store.ids.__setitem__((held(s, 0), 0), s.store.total),
    "a leaked id": lambda s: setattr(s.store, "free", s.store.free - 1),
    "live blocks of a variant miscounted": lambda s: s.store.live.__setitem__(0, 9),
    "live blocks of another variant": lambda s: np.add.at(s.store.live, [0, 1], [-2, 2]),
    "cached blocks miscounted": lambda s: setattr(s.index, "cached", s.index.cached + 1),
    "a cached block that does not wait": lambda s: s.index.lru.stamp.__setitem__(cached(s), -1),
    "a parent that goes before its child": wrong_order,
    "a digest that leads nowhere": entry_missing,
    "digests mixed up": digests_swapped,
    "a parent that is not known": lambda s: s.index.parent.__setitem__(held(s, 1), 999),
    "a serial used twice": lambda s: s.index.serial.__setitem__(held(s, 1), s.index.serial[held(s, 0)]),
    "more tokens than blocks": lambda s: setattr(s.slots[0], "tokens", 13),
    "an unfilled block published": lambda s: setattr(s.slots[0], "published", 3),
    "a slot free and open": lambda s: s.free_slots.append(0),
    "a slot lost": lambda s: s.free_slots.pop(),
    "another block in a slot's list": lambda s: s.tables.blocks.__setitem__((0, 0), held(s, 1)),
    "another block on the device": device_table,
    "an account that miscounts tokens": wrong_tokens,
    "an account without its sequence": lambda s: s.accounts[0].slots.discard(1),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_it_finds(wrong: str) -> None:
    harness = busy()
    WRONGS[wrong](harness.manager.state)
    with pytest.raises(CacheError, match="books are wrong"):
        harness.manager.check()


def full_manager(heads: int, total: int) -> CacheManager:
    """A pool of `total` blocks, all in use: half live, half cached."""
    manager = make_manager(
        total, block_size=16, variants=(VariantSpec("only", heads),), max_seqs=64, max_seq_len=16 * 5000
    )
    share = total // heads // 20
    for number in range(20):
        chain = TokenChain(root_of(str(number)), 16, np.full(share * 16, number))
        slot = manager.open(manager.open_account(str(number), "only"), chain, len(chain)).slot
        assert manager.extend(slot, len(chain))
        manager.upload()
        manager.advance(slot, len(chain), chain)
        if number % 2:
            manager.close(slot)
    assert manager.free_blocks < heads * 20
    return manager


def test_300_000_blocks_take_50_milliseconds() -> None:
    """Measured at 12 ms. In processor time, which other programs' load does not stretch as much."""
    manager = full_manager(heads=3, total=300_000)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        manager.check()
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.050
