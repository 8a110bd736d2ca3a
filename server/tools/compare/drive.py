"""Drives an engine through work given by step index, and notes what each token and each step took."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from server.engine.engine import Engine
from server.engine.request import FinishReason, Request, SamplingParams
from server.tools.compare.work import Arrival

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Run:
    """What came of it. Times in seconds; `arrived` and `tokens` are moments of one clock, by user."""

    arrived: list[float] = field(default_factory=list)
    tokens: list[list[float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # how long each took
    trouble: str | None = None  # "preempted" or "waited": how the first user without room ended the run

    @property
    def output_tokens(self) -> int:
        """Tokens drawn, of all users."""
        return sum(len(moments) for moments in self.tokens)

    @property
    def first_tokens(self) -> list[float]:
        """What each user waited for the first token."""
        return [moments[0] - since for since, moments in zip(self.arrived, self.tokens, strict=True)]

    @property
    def gaps(self) -> list[float]:
        """The times between two tokens of one user, all users together."""
        return [later - earlier for moments in self.tokens for earlier, later in pairwise(moments)]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return sum(self.steps)


@dataclass(frozen=True, slots=True)
class Users:
    """Who asks: requests of one attention mode. A user's prompt is the same in every run of one `salt`, but
    for its length, and differs from everybody else's from the first block on; `vocab` bounds its ids."""

    variant: str
    vocab: int
    salt: str = ""

    def request(self, user: int, prompt: int, output: int) -> Request:
        """`user`'s request for `output` tokens after `prompt`; nothing else ends it."""
        draw = random.Random(f"compare {self.salt} {user}")
        return Request(
            id=f"user-{user}",
            variant=self.variant,
            prompts=(tuple(draw.randrange(self.vocab) for _ in range(prompt)),),
            n=1,
            max_tokens=output,
            sampling=_GREEDY,
            cache_root=bytes(32),
        )


def drive(
    engine: Engine,
    users: Users,
    work: Sequence[Arrival],
    *,
    first_user: int = 0,
    stop_at_trouble: bool = False,
    on_step: Callable[[], None] | None = None,
) -> Run:
    """Add each arrival before its step, as user `first_user`, the next, ..., and step until all are answered.

    With `stop_at_trouble` the first preemption ends the run, or the first user who waits though a whole step
    went by in which nobody read a prompt: only room can be wanting then. Everybody is sent away. A user who
    had to sit a step out ends nothing, as a preemption may follow; without one the trouble is that he waited.
    Raises RuntimeError if the engine fails.
    """
    run = Run(tokens=[[] for _ in work])
    requests = [users.request(first_user + i, a.prompt, a.output) for i, a in enumerate(work)]
    numbers = {request.id: i for i, request in enumerate(requests)}
    preemptions = engine.stats().preemptions
    decoding: set[int] = set()
    arrived = 0
    sat_out = False
    while arrived < len(work) or engine.has_work:
        begin = time.perf_counter()
        while arrived < len(work) and work[arrived].step <= len(run.steps):
            engine.add(requests[arrived])
            run.arrived.append(begin)
            arrived += 1
        before = engine.stats()
        nobody_reads = before.running == len(decoding)
        events = engine.step() if engine.has_work else []
        now = time.perf_counter()
        run.steps.append(now - begin)
        sat_out |= nobody_reads and len(events) < before.running
        for event in events:
            if event.finish is FinishReason.ERROR:
                raise RuntimeError(f"the engine failed: {event.error}")
            user = numbers[event.request_id]
            run.tokens[user].append(now)
            (decoding.add if event.finish is None else decoding.discard)(user)
        if stop_at_trouble:
            stats = engine.stats()
            if stats.preemptions > preemptions:
                run.trouble = "preempted"
            elif nobody_reads and 0 < before.waiting == stats.waiting:
                run.trouble = "waited"
            if run.trouble is not None:
                _send_away(engine, requests)
                return run
        if on_step is not None:
            on_step()
    if stop_at_trouble and sat_out:
        run.trouble = "waited"
    return run


def _send_away(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
