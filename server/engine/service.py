"""Step 3 of a request's trip: the engine's thread, and the only way to it from the event loop.

Commands go in through a queue that the thread sleeps on when it has nothing to do; events come out once per
step, in one call on the loop. Each side keeps its own books, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from cache.report import BlockPage, CacheReport
from server.engine.engine import Engine
from server.engine.errors import ConfigError, Draining, EngineDead, MemoryFull, QueueFull
from server.engine.inbox import Abort, Ask, Command, Inbox, Stop, Submit, refuse_asks, take
from server.engine.pace import Pace
from server.engine.request import FinishReason, Request, TokenEvent, failed
from server.engine.sharing import Shared
from server.engine.stats import EngineStats, Health, Status
from server.engine.stream import TokenStream

_QUESTIONS = 4  # answered between two steps

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WEIGHT = 2**24
"""Ids and log-probabilities of all requests in flight: a gigabyte or two of memory, in the worst case."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the thread last said about itself; `accepted` counts the submits it has taken in so far."""

    stats: EngineStats
    live_bytes: Mapping[str, int]
    accepted: int


class EngineService:
    """Runs one `Engine` on one thread and hands its events to one event loop, once per step."""

    def __init__(self, engine: Engine, *, max_queued: int = 256, seats: int = 0) -> None:
        """`max_queued`: requests that may wait for their first step, beside those that run (ConfigError).

        `seats`: sequences of a step. Those that are free while nobody waits take requests too, or a burst to
        an idle engine would be refused before it has run anything.
        """
        if max_queued < 1:
            raise ConfigError(f"--max-queued {max_queued}: must be at least 1, or nothing can be submitted")
        self._engine = engine
        self._max_queued = max_queued
        self._seats = seats
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Written by the engine's thread and read by the loop, each replaced whole.
        self._snapshot = self._look(0)
        self._dead: str | None = None  # why it failed
        self._gone: str | None = None  # why it no longer answers: it failed, or was shut down
        # The loop's own.
        self._unfinished: dict[str, set[int]] = {}  # choices that have not ended, of each request
        self._weights: dict[str, int] = {}  # of the same requests
        self._streams: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()
        self._submitted = 0
        self._pace = Pace()
        self._deadline: float | None = None  # set when it stops: when the rest is aborted (monotonic, s)
        self._changed = asyncio.Event()
        self._reports = Shared(lambda: self._ask(lambda engine: engine.report(False)))

    # ---- the loop's side ----

    def start(self) -> None:
        """Starts the thread; called once, on the running event loop that every other call comes from."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, request: Request) -> TokenStream:
        """Queues the request. Raises QueueFull (429), Draining or EngineDead (503); ValueError if it can
        never run or its id is in flight."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._deadline is not None:
            raise Draining()
        if self.queued >= self._max_queued + self._free_seats():
            raise QueueFull(self.queued, self._max_queued, self._pace.seconds_for_one())
        weight, held = request.weight, sum(self._weights.values())
        if held and held + weight > MAX_WEIGHT:
            raise MemoryFull(held, MAX_WEIGHT, self._pace.seconds_for_one())
        self._engine.check(request)
        if request.id in self._unfinished:
            raise ValueError(f"request id {request.id!r} is in flight already")
        choices = len(request.prompts) * request.n
        # The stream gets a part of the queue and nothing of the service: safe in a destructor.
        stream = TokenStream(choices, partial(self._inbox.put, Abort(request.id)))
        self._unfinished[request.id] = set(range(choices))
        self._weights[request.id] = weight
        self._streams[request.id] = stream
        self._submitted += 1
        self._inbox.put(Submit(request))
        return stream

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """Ends one choice, or all: an event with `reason` follows for each that was not over. What is unknown
        or over is ignored. Blocks are free at the next step boundary."""
        self._inbox.put(Abort(request_id, index, reason))

    async def report(self, check: bool = False) -> CacheReport:
        """The cache as it is between two steps; `check` reconciles every block first (CacheError if the
        books are wrong). Raises EngineDead."""
        return await (self._ask(lambda engine: engine.report(True)) if check else self._reports.get())

    async def blocks(self, offset: int, limit: int) -> BlockPage:
        """A page of the block table, as it is between two steps. Raises EngineDead."""
        return await self._ask(lambda engine: engine.blocks(offset, limit))

    def health(self) -> Health:
        """Answers at once and never waits for the engine."""
        status, detail = self._status()
        return Health(status, detail, self.queued, self._snapshot.stats.running)

    def _status(self) -> tuple[Status, str]:
        if self._dead is not None:
            return Status.DEAD, f"the engine has stopped: {self._dead}"
        if self._loop is None:
            return Status.STARTING, "the engine is not running yet"
        if self._deadline is None:
            return Status.OK, ""
        if self._gone is None:
            return Status.DRAINING, "the server is shutting down"
        return Status.STOPPED, "the engine was shut down"

    def stats(self) -> EngineStats:
        """The numbers as of the last step; answers at once."""
        return self._snapshot.stats

    def live_bytes(self) -> Mapping[str, int]:
        """Bytes of cache that each variant's sequences hold, as of the last step; answers at once."""
        return self._snapshot.live_bytes

    @property
    def queued(self) -> int:
        """Requests that wait: none of their choices has run yet."""
        if self._dead is not None:
            return 0
        snapshot = self._snapshot
        return snapshot.stats.waiting_requests + self._submitted - snapshot.accepted

    def _free_seats(self) -> int:
        """Seats that the next step gives away, for all that is known: if somebody waits beside runners, the
        cache may be full."""
        stats = self._snapshot.stats
        if stats.running and stats.waiting_requests:
            return 0
        return max(0, self._seats - stats.running)

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new work (Draining), lets what is in flight finish for `grace` seconds, aborts the rest,
        and ends the thread. Another call with less grace shortens the first."""
        deadline = time.monotonic() + grace
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._changed.set()
        if self._loop is None:
            return
        while self._unfinished and self._gone is None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                for request_id in self._unfinished:
                    self.abort(request_id)
                left = 1.0
            await self._change(left)
        self._inbox.put(Stop())
        await asyncio.to_thread(self._thread.join)

    async def _change(self, seconds: float) -> None:
        """Until something ends, or `seconds` have passed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _ask(self, question: Callable[[Engine], T]) -> T:
        answer: Future[T] = Future()
        self._inbox.put(Ask(question, answer))
        if self._gone is not None:  # then nobody else looks into the inbox any more
            refuse_asks(self._inbox, self._gone)
        return await asyncio.wrap_future(answer)

    def _deliver(self, events: list[TokenEvent]) -> None:
        """One step's events, to the streams they belong to."""
        by_request: dict[str, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            unfinished = self._unfinished.get(request_id)
            if unfinished is None:
                continue
            unfinished.difference_update([event.index for event in own if event.finish is not None])
            if not unfinished:
                del self._unfinished[request_id], self._weights[request_id]
                self._pace.request_ended(idle=not self._unfinished)
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.push(own)
        self._changed.set()

    def _fail_everything(self) -> None:
        """The engine is dead: whatever has not ended ends now."""
        message = str(EngineDead(self._dead or ""))
        self._deliver(
            [
                failed(request_id, index, message)
                for request_id, unfinished in self._unfinished.items()
                for index in sorted(unfinished)
            ]
        )

    # ---- the thread's side ----
    # The loop sends a step's tokens while the next computes without the interpreter's lock. Its switch
    # interval stays at 5 ms, longer than a plan takes: with less the loop would come between, and delay it.

    def _run(self) -> None:
        engine = self._engine
        try:
            while engine.dead is None and self._take_commands():
                if engine.has_work:
                    events = engine.step()
                    self._dead = _told(engine.dead)  # known before anybody is told
                    self._snapshot = self._look(self._snapshot.accepted)
                    if events:
                        self._post(self._deliver, events)
        except BaseException as error:  # nothing may end this thread unnoticed
            logger.critical("the engine's thread ends", exc_info=True)
            self._dead = _told(f"{type(error).__name__}: {error}")
        finally:
            self._gone = self._dead or "it was shut down"
            refuse_asks(self._inbox, self._gone)
            if self._dead is not None:
                # Nothing runs or waits any more, wherever the last step was broken off.
                idle = replace(self._snapshot.stats, running=0, waiting=0, waiting_requests=0)
                self._snapshot = replace(self._snapshot, stats=idle)
                self._post(self._fail_everything)

    def _look(self, accepted: int) -> _Snapshot:
        return _Snapshot(self._engine.stats(), self._engine.live_bytes(), accepted)

    def _take_commands(self) -> bool:
        """Does what the inbox says; sleeps there while there is nothing to do. False: it says stop. Questions
        are answered a few at a time: those who ask must not keep those who wait for tokens."""
        wait = not self._engine.has_work
        asked = 0
        while asked < _QUESTIONS and (command := take(self._inbox, wait=wait)) is not None:
            if isinstance(command, Stop):
                return False
            self._obey(command)
            wait = False
            asked += isinstance(command, Ask)
        return True

    def _obey(self, command: Command) -> None:
        if isinstance(command, Ask):
            command.put_to(self._engine)
        elif isinstance(command, Abort):
            self._engine.abort(command.request_id, command.index, command.reason)
        elif isinstance(command, Submit):
            self._take_in(command.request)
            self._snapshot = self._look(self._snapshot.accepted + 1)

    def _take_in(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            logger.exception("request %r was not taken in", request.id)
            choices = range(len(request.prompts) * request.n)
            self._post(self._deliver, [failed(request.id, i, str(error)) for i in choices])

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            if not self._loop.is_closed():
                raise


def _told(reason: str | None) -> str | None:
    """What clients may know of a death: the kind of error. Its words may hold paths and more; the log has
    them."""
    return None if reason is None else f"{reason.partition(':')[0]}, see the server's log"
