"""Step 3 of a request's trip: the engine's thread, and the only way to it from the event loop."""

from __future__ import annotations

from cache.report import BlockPage, CacheReport
from server.engine.engine import Engine
from server.engine.request import Request
from server.engine.stats import EngineStats, Health
from server.engine.stream import TokenStream

__all__ = ["EngineService", "TokenStream"]


class EngineService:
    """Runs one `Engine` on one thread and hands its events to one event loop, once per step."""

    def __init__(self, engine: Engine, *, max_queued: int = 256) -> None: ...

    def start(self) -> None:
        """Starts the thread; called once, on the running event loop that every other call will come from."""
        raise NotImplementedError

    async def submit(self, request: Request) -> TokenStream:
        """Queues the request. Raises QueueFull (429), Draining or EngineDead (503); ValueError if the id is in
        flight already or a prompt can never fit the pool."""
        raise NotImplementedError

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice, or all of them: an event with FinishReason.ABORT follows for each that was not over.
        Unknown and ended ids are ignored. Blocks are free at the next step boundary."""
        raise NotImplementedError

    async def report(self, check: bool = False) -> CacheReport:
        """The cache as it is between two steps; `check` reconciles every block first (CacheError if it fails).
        Raises EngineDead."""
        raise NotImplementedError

    async def blocks(self, offset: int, limit: int) -> BlockPage:
        """A page of the block table, as it is between two steps. Raises EngineDead."""
        raise NotImplementedError

    def health(self) -> Health:
        """Answers at once and never waits for the engine."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """The numbers as of the last step; answers at once."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Requests that wait: none of their choices has run yet."""
        raise NotImplementedError

    async def stop(self, grace: float = 0.0) -> None:
        """Refuses new work (Draining), lets what is in flight finish for `grace` seconds, aborts the rest, and
        ends the thread. A second call, with a shorter grace, shortens the first."""
        raise NotImplementedError
