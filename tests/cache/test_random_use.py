"""The cache under random use equals a plain model, call by call, and every token reads back as itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, precondition, rule

from tests.support.cache_harness import Harness, make_manager

ROOTS = ("a", "b")
# Few tokens and a small block: prompts share prefixes, blocks get duplicates, the pool runs full.
PROMPTS = [
    [0] * 3,
    [0] * 4,
    [0] * 8,
    [0] * 9,
    [0, 0, 0, 1] * 3,
    [0] * 7 + [1],
    [1] * 5,
    [1, 0] * 6,
    [0] * 16,
    [0] * 13,
]


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls that an engine may make."""

    accounts = Bundle("accounts")

    @initialize(total=st.integers(6, 60), eager=st.booleans())
    def start(self, total: int, eager: bool) -> None:
        self.harness = Harness(make_manager(total, max_seqs=6, max_seq_len=24), eager_peaks=eager)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.open_)))

    @rule(target=accounts, variant=st.sampled_from(["native", "mqa", "mha"]))
    def account(self, variant: str) -> int:
        return self.harness.account(variant)

    @rule(account=accounts, root=st.sampled_from(ROOTS), prompt=st.sampled_from(PROMPTS))
    def open(self, account: int, root: str, prompt: list[int]) -> None:
        self.harness.open(account, root, prompt)

    @precondition(lambda self: self.harness.open_)
    @rule(data=st.data(), more=st.integers(0, 10), fill=st.integers(0, 1))
    def extend(self, data: st.DataObject, more: int, fill: int) -> None:
        slot = self.pick(data)
        self.harness.extend(slot, min(self.harness.open_[slot].computed + more, 24), fill)

    @precondition(lambda self: self.harness.open_)
    @rule(data=st.data(), back=st.integers(0, 9))
    def fork(self, data: st.DataObject, back: int) -> None:
        slot = self.pick(data)
        parent = self.harness.open_[slot]
        same = [number for number, variant in self.harness.accounts.items() if variant == parent.variant]
        account = data.draw(st.sampled_from([parent.account] * 3 + same))
        self.harness.fork(slot, max(parent.computed - back, 0), account)

    @precondition(lambda self: self.harness.open_)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.harness.close(self.pick(data))

    @rule(account=consumes(accounts))
    def close_account(self, account: int) -> None:
        self.harness.close_account(account)

    @rule()
    def run(self) -> None:
        self.harness.run()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for slot in list(self.harness.open_):
            self.harness.close(slot)
        assert self.harness.manager.live_blocks == 0


CacheMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


def drive(harness: Harness, operations: int, seed: int) -> None:
    """Random calls, weighted towards a busy, nearly full cache."""
    dice = random.Random(seed)
    for _ in range(operations):
        slots = sorted(harness.open_)
        call = dice.choices(["open", "extend", "run", "fork", "close", "end"], [4, 10, 6, 3, 3, 1])[0]
        if call == "run":
            harness.run()
        elif call == "open" or not slots:
            if not harness.accounts or (dice.random() < 0.5 and len(harness.accounts) < 12):
                harness.account(dice.choice(["native", "mqa", "mha"]))
            account = dice.choice(sorted(harness.accounts))
            length = dice.randint(1, 20)
            prompt = [0] * length if dice.random() < 0.5 else [dice.randint(0, 1) for _ in range(length)]
            harness.open(account, dice.choice(ROOTS), prompt)
        elif call == "extend":
            slot = dice.choice(slots)
            harness.extend(
                slot, min(harness.open_[slot].computed + dice.randint(0, 8), 32), dice.randint(0, 1)
            )
        elif call == "fork":
            slot = dice.choice(slots)
            parent = harness.open_[slot]
            harness.fork(slot, max(parent.computed - dice.randint(0, 5), 0), parent.account)
        elif call == "close":
            harness.close(dice.choice(slots))
        elif harness.accounts:
            harness.close_account(dice.choice(sorted(harness.accounts)))
    for account in sorted(harness.accounts):
        harness.close_account(account)
    harness.run()
    assert harness.manager.live_blocks == 0
    harness.manager.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_tight_pool_and_small_blocks(seed: int) -> None:
    harness = Harness(make_manager(20 + seed, block_size=2, max_seqs=6, max_seq_len=32), eager_peaks=False)
    drive(harness, 600, seed)


def test_without_the_prefix_index_every_closed_block_is_free() -> None:
    harness = Harness(make_manager(60, max_seq_len=32, prefix_cache=False), compare=False)
    drive(harness, 600, seed=5)
    assert harness.manager.free_blocks == harness.manager.total
