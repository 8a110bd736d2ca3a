"""One answer for all who ask the same at once, so that a crowd of askers costs no more than two."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Calls `ask` for whoever comes. Who comes while one call runs shares the next with all others who do:
    never an answer that may be older than his question."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._running: asyncio.Future[T] | None = None
        self._next: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """What `ask` returns or raises; one that leaves takes nothing from the others."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._ask())
            self._running.add_done_callback(_seen)
            return await asyncio.shield(self._running)
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._running))
            self._next.add_done_callback(_seen)
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Future[T]) -> T:
        await asyncio.wait({before})
        self._running, self._next = self._next, None
        return await self._ask()


def _seen(task: asyncio.Future[T]) -> None:
    """Whoever waits is told; if all have left, nobody need be."""
    if not task.cancelled():
        task.exception()
