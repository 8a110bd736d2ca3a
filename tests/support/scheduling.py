"""A scheduler and a cache without a model: every entry of a plan is taken as computed, every draw as token 0.

What must hold after any step is checked after each of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from cache.recount import reconcile
from cache.state import VariantSpec
from server.engine.request import FinishReason, Request, SamplingParams
from server.engine.scheduler import Limits, Plan, Scheduler
from server.engine.sequence import Sequence, Work
from server.engine.stats import Counters
from tests.support.cache_harness import make_manager, root_of

MODES = (VariantSpec("mha", 6), VariantSpec("native", 2), VariantSpec("mqa", 1))
HEADS = {mode.name: mode.kv_heads for mode in MODES}
BLOCK = 4


@dataclass
class Line:
    """One server's line of requests over a pool of `total` physical blocks of 4 tokens."""

    total: int
    batch_tokens: int = 64
    seqs: int = 8
    prefix_cache: bool = True
    step_number: int = 0
    started: dict[str, int] = field(default_factory=dict)  # request -> the step that ran it first
    ended: dict[str, int] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    preempted: int = 0

    def __post_init__(self) -> None:
        self.manager = make_manager(
            self.total, block_size=BLOCK, variants=MODES, max_seqs=self.seqs,
            max_seq_len=BLOCK * self.total, prefix_cache=self.prefix_cache,
        )  # fmt: skip
        limits = Limits(self.batch_tokens, self.seqs)
        self.scheduler = Scheduler(self.manager, limits, HEADS, BLOCK, Counters())
        self._arrivals = itertools.count()

    def add(
        self, mode: str, prompt: int, output: int, *, n: int = 1, priority: int = 0, seed: int = -1
    ) -> str:
        """A request of `n` choices; with a `seed` of its own nobody shares its prompt."""
        assert -(-(prompt + output) // BLOCK) * HEADS[mode] <= self.total, "it must fit alone"
        number = next(self._arrivals)
        name = f"line-{number}"
        root = root_of(mode + (name if seed < 0 else str(seed)))
        request = Request(
            id=name, variant=mode, prompts=((1,) * prompt,), n=n, max_tokens=output,
            sampling=SamplingParams(temperature=0.0), cache_root=root, priority=priority,
        )  # fmt: skip
        account = self.manager.open_account(name, mode)
        work = Work(request, number, account, BLOCK)
        self.works[name] = work
        self.scheduler.add(work)
        return name

    def abort(self, name: str) -> None:
        """Ends a request that is in flight."""
        for sequence in self.works[name].sequences:
            if sequence.finish is None:
                self._end(sequence, FinishReason.ABORT)

    def step(self) -> Plan:
        """Plan, run, commit; the rules of the order are checked on the way."""
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        plan = self.scheduler.plan()
        assert not plan.refused
        self._check_order(plan, running, waiting)
        self.preempted += plan.preempted
        self.manager.take_copies()
        self.manager.upload()
        for entry in plan.entries:
            sequence = entry.sequence
            assert sequence.slot is not None and entry.start == sequence.computed and entry.count > 0
            self.started.setdefault(sequence.work.request.id, self.step_number)
            sequence.computed += entry.count
            self.manager.advance(sequence.slot, sequence.computed, sequence.chain)
        for entry in plan.entries:
            if entry.sequence.pending == 0:
                self._draw(entry.sequence)
        reconcile(self.manager)
        self.step_number += 1
        return plan

    def run(self, most: int) -> int:
        """Steps until nothing is left, at most so many; how many it took."""
        for count in range(most + 1):
            if not self.works:
                return count
            self.step()
        raise AssertionError(f"there is still work after {most} steps")

    def _check_order(self, plan: Plan, running: list[Sequence], waiting: list[Sequence]) -> None:
        scheduled = {id(entry.sequence) for entry in plan.entries}
        tokens = sum(entry.count for entry in plan.entries)
        assert tokens <= self.batch_tokens and len(self.scheduler.running) <= self.seqs
        now = self.scheduler.running
        assert now == sorted(now, key=lambda s: s.key), "running is in order"
        assert self.scheduler.waiting == sorted(self.scheduler.waiting, key=lambda s: s.key)
        if running:
            assert running[0] in now and id(running[0]) in scheduled, "the first in line progresses"
        gone = [sequence for sequence in running if sequence.slot is None]
        assert gone == running[len(running) - len(gone) :], (
            "victims are the last in line, whatever their mode"
        )
        fresh = [sequence for sequence in waiting if sequence.slot is not None]
        assert fresh == waiting[: len(fresh)], "nobody in the queue is skipped"
        assert not (gone and fresh), "nobody comes in on a place that was taken from another"

    def _draw(self, sequence: Sequence) -> None:
        sequence.append(0)
        if sequence.output >= sequence.work.request.max_tokens:
            self._end(sequence, FinishReason.LENGTH)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        work = sequence.work
        sequence.finish = reason
        self.scheduler.release(sequence)
        work.unfinished -= 1
        if work.unfinished == 0:
            self.scheduler.forget(work)
            self.manager.close_account(work.account)
            del self.works[work.request.id]
            self.ended[work.request.id] = self.step_number
