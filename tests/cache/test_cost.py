"""What bookkeeping may cost: bounds several times what is measured on one slow core."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cache.chain import TokenChain
from cache.state import VariantSpec
from tests.support.cache_harness import make_manager, root_of


def quickest(call: Callable[[int], object], times: int) -> float:
    """The least processor seconds that one of `times` calls took."""
    seconds = []
    for number in range(times):
        start = time.process_time()
        call(number)
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_an_8k_prompt_under_32_heads() -> None:
    """16,384 physical blocks through a whole life; measured at 0.6 ms."""
    manager = make_manager(
        40_000, block_size=16, variants=(VariantSpec("mha", 32),), max_seqs=4, max_seq_len=8192
    )
    prompts = [np.random.default_rng(seed).integers(0, 50_000, 8192) for seed in range(10)]

    def life(number: int) -> None:
        chain = TokenChain(root_of("x"), 16, prompts[number])
        account = manager.open_account("x", "mha")
        slot = manager.open(account, chain, 8192).slot
        assert manager.extend(slot, 8192)
        assert manager.upload() == 16_384
        manager.advance(slot, 8192, chain)
        manager.peak(account)
        manager.close(slot)
        manager.close_account(account)

    assert quickest(life, 10) < 0.005
    manager.check()


def test_a_decode_step_of_64_sequences() -> None:
    """Growing, tables, and committing with peaks; measured at 0.06, 0.03 and 0.09 ms."""
    manager = make_manager(
        64 * 3 * 40, block_size=16, variants=(VariantSpec("native", 3),), max_seqs=64, max_seq_len=600
    )
    sequences = []
    for number in range(64):
        chain = TokenChain(root_of(str(number)), 16, np.full(500 + number % 16, number))
        account = manager.open_account(str(number), "native")
        slot = manager.open(account, chain, len(chain)).slot
        assert manager.extend(slot, len(chain))
        manager.advance(slot, len(chain), chain)
        sequences.append((slot, chain, account))
    manager.upload()

    def plan(step: int) -> None:
        for slot, chain, _ in sequences:
            assert manager.extend(slot, len(chain))
        manager.take_copies()
        manager.upload()

    def commit(step: int) -> None:
        for slot, chain, account in sequences:
            manager.advance(slot, len(chain), chain)
            manager.peak(account)

    plans, commits = [], []
    for step in range(30):
        for _, chain, _ in sequences:
            chain.append(step)
        plans.append(quickest(plan, 1))
        commits.append(quickest(commit, 1))
    assert sorted(plans)[15] < 0.0005
    assert sorted(commits)[15] < 0.001
    manager.check()
