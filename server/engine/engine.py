"""Steps 4 to 8 of a request's trip: plan, run, commit. It has no thread: whoever calls `step` lends one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from cache.manager import CacheManager
from cache.recount import checked_report
from cache.report import BlockPage, CacheReport
from server.engine.attempts import Attempts, Outcome, complaint, name_of
from server.engine.batch import Shape
from server.engine.commit import Commit
from server.engine.constraint import Matcher, MatcherSource
from server.engine.errors import EngineDead
from server.engine.reconcile import reconcile
from server.engine.request import FinishReason, Request, TokenEvent, failed
from server.engine.runner import ModelRunner
from server.engine.scheduler import Limits, Plan, Scheduler
from server.engine.sequence import Work
from server.engine.speculation import Speculation
from server.engine.stats import Counters, EngineStats

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one decoder and one cache. One caller at a time.

    `capacity` maps each variant to the most tokens (prompt and output) that a sequence of it may have.
    `debug`: every step ends with a recount of all that is counted; a counter that is wrong ends the engine.
    `matchers` makes what keeps answers within a grammar; without it, requests have none. `speculation`
    drafts what sequences may say next; without it every token takes a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: CacheManager,
        shape: Shape,
        limits: Limits,
        capacity: Mapping[str, int],
        debug: bool = False,
        matchers: MatcherSource | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._matchers = matchers
        self._runner = runner
        self._manager = manager
        self._shape = shape
        self._capacity = dict(capacity)
        self._debug = debug
        self._counters = Counters()
        self._attempts = Attempts(runner, manager, shape, self._counters)
        self._scheduler = Scheduler(
            manager,
            limits,
            {name: variant.kv_heads for name, variant in shape.variants.items()},
            shape.block_size,
            self._counters,
            speculation,
        )
        self._speculation = speculation
        self._works: dict[str, Work] = {}
        self._commit = Commit(manager, self._scheduler, self._works, self._counters, speculation)
        self._arrivals = 0
        self._aborts: list[tuple[str, int | None, FinishReason]] = []
        self._stumbled = False  # the last plan failed
        self._dead: str | None = None

    # ---- what comes in ----

    def check(self, request: Request) -> None:
        """Raises ValueError if the request can never run. Reads nothing that changes: safe on any thread."""
        capacity = self._capacity.get(request.variant)
        if capacity is None:
            raise ValueError(f"no attention mode {request.variant!r}; served are {', '.join(self._capacity)}")
        longest = max(len(prompt) for prompt in request.prompts)
        if longest > capacity:
            raise ValueError(
                f"a prompt of {longest} tokens exceeds the {capacity} that a sequence of "
                f"{request.variant!r} can hold here"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises EngineDead; ValueError if it can never run or its id is in flight."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        self.check(request)
        if request.id in self._works:
            raise ValueError(f"request id {request.id!r} is in flight already")
        matcher = self._matcher(request)
        account = self._manager.open_account(request.id, request.variant)
        capacity = self._capacity[request.variant]
        work = Work(request, self._arrivals, account, self._shape.block_size, matcher, capacity)
        self._arrivals += 1
        self._works[request.id] = work
        self._scheduler.add(work)

    def _matcher(self, request: Request) -> Matcher | None:
        if request.constraint is None:
            return None
        if self._matchers is None:
            raise ValueError("this engine was built without grammars")
        return self._matchers.matcher(request.constraint)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """End one choice, or all, at the start of the next step. What is unknown or over is ignored."""
        if request_id in self._works:
            self._aborts.append((request_id, index, reason))

    # ---- the step ----

    def step(self) -> list[TokenEvent]:
        """One step for everybody: decide, compute, take the results in.

        A fault ends the sequences that cause it with FinishReason.ERROR and nobody else. A fault of the
        engine itself ends all of them and sets `dead`. Neither is raised.
        """
        events: list[TokenEvent] = []
        if self._dead is not None:
            return events
        try:
            self._carry_out_aborts(events)
            plan = self._plan(events)
            outcomes = self._run(plan)
            self._commit.step(plan, outcomes, events)
            if self._debug and not self._stumbled:
                reconcile(self._manager, self._scheduler, self._works)
        except Exception as error:
            self._die(error, events)
        if not self._works:
            self._attempts.forget()
        self._counters.steps += 1
        return events

    def _carry_out_aborts(self, events: list[TokenEvent]) -> None:
        aborts, self._aborts = self._aborts, []
        for request_id, index, reason in aborts:
            work = self._works.get(request_id)
            if work is None:
                continue
            for sequence in work.sequences if index is None else work.sequences[index : index + 1]:
                if sequence.finish is None:
                    self._commit.end(sequence, reason, events)

    def _plan(self, events: list[TokenEvent]) -> Plan:
        """A plan that leads somewhere; a failed one is tried again in the next step, and then it is fatal."""
        try:
            plan = self._scheduler.plan()
            if self._works and not (plan.entries or plan.refused or plan.preempted):
                raise RuntimeError("no sequence can run, and none will: the scheduler is stuck")
        except Exception:
            if self._stumbled:
                raise
            self._stumbled = True
            logger.exception("planning a step failed; trying once more")
            return Plan((), (), 0)
        self._stumbled = False
        for sequence, error in plan.refused:
            logger.error("admitting %s failed", name_of(sequence), exc_info=error)
            self._manager.check()  # if the cache's books are wrong, this is not the request's fault
            self._commit.end(sequence, FinishReason.ERROR, events, complaint(error))
        return plan

    def _run(self, plan: Plan) -> list[Outcome | Exception]:
        """What each entry of the plan came to."""
        if not plan.entries:
            return []
        self._runner.copy(self._manager.take_copies())
        self._manager.upload()
        begin = time.perf_counter()
        outcomes = self._attempts.run(plan.entries)
        if self._speculation is not None and self._counters.steps > 0:  # the first one only warms up
            self._speculation.cost.note(
                sum(entry.tokens for entry in plan.entries), time.perf_counter() - begin
            )
        return outcomes

    def _die(self, error: Exception, events: list[TokenEvent]) -> None:
        """The engine cannot go on, and everybody learns it at once. Nobody uses the cache after this."""
        logger.critical("the engine stops: %s", error, exc_info=error)
        self._dead = f"{type(error).__name__}: {error}"
        message = f"the engine has stopped ({type(error).__name__})"
        for work in self._works.values():
            for sequence in work.sequences:
                if sequence.finish is None:
                    sequence.finish = FinishReason.ERROR
                    self._counters.finished[FinishReason.ERROR] += 1
                    events.append(failed(work.request.id, sequence.index, message))
        self._works.clear()
        self._aborts.clear()
        self._scheduler.clear()

    # ---- what can be asked ----

    @property
    def has_work(self) -> bool:
        """Whether any choice is in flight."""
        return bool(self._works)

    @property
    def dead(self) -> str | None:
        """Why the engine stopped for good, or None."""
        return self._dead

    def report(self, check: bool = False) -> CacheReport:
        """The cache now; `check` reconciles every block and the arena's size first (CacheError if wrong)."""
        return checked_report(self._manager) if check else self._manager.report()

    def live_bytes(self) -> dict[str, int]:
        """Bytes of cache that each variant's sequences hold, as of the last step; O(variants)."""
        return self._manager.live_bytes()

    def peak_live_bytes(self) -> int:
        """The most bytes of cache that sequences have held at one moment, within a step included."""
        return self._manager.peak_live_bytes()

    def device_bytes(self) -> int | None:
        """Bytes that the device, or the system, says the arena takes; None where it cannot be asked."""
        return self._manager.pool.device_bytes()

    def blocks(self, offset: int, limit: int) -> BlockPage:
        """Part of the block table, as it is now."""
        return self._manager.blocks(offset, limit)

    def stats(self) -> EngineStats:
        """Numbers as of the last step; O(1), however many wait."""
        return self._counters.snapshot(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            waiting_requests=len(self._scheduler.unstarted),
        )
