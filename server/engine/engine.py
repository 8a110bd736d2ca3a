"""Steps 4 to 8 of a request's trip: plan, run, commit. Works without threads: whoever calls `step` is the engine."""

from __future__ import annotations

from cache.report import BlockPage, CacheReport
from server.engine.request import Request, TokenEvent
from server.engine.stats import EngineStats


class Engine:
    """Continuous batching over one decoder and one cache. Not thread-safe: one caller at a time."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises EngineDead; ValueError for an id in flight or a prompt no pool state can hold."""
        raise NotImplementedError

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice or all; takes effect at the start of the next step. Unknown ids are ignored."""
        raise NotImplementedError

    def step(self) -> list[TokenEvent]:
        """One step for everybody. Never raises for a fault of the model: see `dead`."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        raise NotImplementedError

    @property
    def dead(self) -> str | None:
        """Why the engine stopped for good, or None."""
        raise NotImplementedError

    def report(self, check: bool = False) -> CacheReport:
        raise NotImplementedError

    def blocks(self, offset: int, limit: int) -> BlockPage:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError
