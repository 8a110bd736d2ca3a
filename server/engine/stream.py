"""What a caller holds of a running request: an async stream of its token events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from server.engine.request import TokenEvent


class TokenStream:
    """The events of one request: `async for events in stream`, one non-empty list per hand-over.

    It ends after every choice has had an event with a `finish`. A consumer that is slow gets longer lists; what
    waits for it is bounded by the request's max_tokens. Leaving early (`aclose()`, the end of `async with`, a
    cancelled `async for`, or dropping the last reference) aborts what still runs. One consumer at a time.
    """

    def __init__(self, choices: int, on_leave: Callable[[], None]) -> None:
        """`on_leave` is called at most once, on the loop's thread, if the consumer leaves before the end."""
        self._open = choices
        self._on_leave: Callable[[], None] | None = on_leave
        self._buffer: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        if not self._buffer:
            if self._open == 0 or self._on_leave is None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._leave()
                raise
            finally:
                self._waiter = None
            if not self._buffer:  # closed while it waited
                raise StopAsyncIteration
        events, self._buffer = self._buffer, []
        return events

    async def aclose(self) -> None:
        """Abort what still runs; nothing after the end, and safe to call twice."""
        self._buffer = []
        self._leave()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()

    def push(self, events: list[TokenEvent]) -> None:
        """Called by the service, on the loop's thread."""
        self._buffer.extend(events)
        self._open -= sum(event.finish is not None for event in events)
        if self._open <= 0:
            self._on_leave = self._on_leave and _nothing
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self) -> None:
        leave, self._on_leave = self._on_leave, None
        if leave is not None and self._open > 0:
            leave()
        self._wake()


def _nothing() -> None:
    """Stands for `on_leave` once every choice has ended."""
