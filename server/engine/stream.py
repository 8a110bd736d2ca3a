"""What a caller holds of a running request: an async stream of its token events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from server.engine.errors import ReadTooSlowly
from server.engine.request import TokenEvent

MAX_UNREAD = 2**17
"""Tokens, and likely tokens told beside them, that may wait for one reader: at most 40 MB."""


class TokenStream:
    """The events of one request: `async for events in stream`, one non-empty list per hand-over.

    It ends after every choice has had an event with a `finish`. A slow consumer gets longer lists; one that
    lets more than MAX_UNREAD wait has its request aborted, and gets ReadTooSlowly after what had come.
    Leaving early (`aclose()`, the end of `async with`, a cancelled `async for`, or dropping the last
    reference) aborts what still runs. One consumer at a time.
    """

    def __init__(self, choices: int, on_leave: Callable[[], None]) -> None:
        """`on_leave` is called at most once, if the consumer leaves before the end; it may not block."""
        self._unfinished = choices
        self._on_leave = on_leave
        self._left = False
        self._overrun = False
        self._buffer: list[TokenEvent] = []
        self._unread = 0  # what the buffer holds, as MAX_UNREAD counts
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._buffer:
            if self._overrun:
                self._overrun = False
                raise ReadTooSlowly(MAX_UNREAD)
            if self._left or self._unfinished <= 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._leave()
                raise
            finally:
                self._waiter = None
        events, self._buffer, self._unread = self._buffer, [], 0
        return events

    async def aclose(self) -> None:
        """Abort what still runs; does nothing after the end, and may be called twice."""
        self._buffer = []
        self._overrun = False
        self._leave()
        self._wake()

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
        for event in events:
            # Scores of a prompt are not counted: they come once, and the prompt bounds them.
            self._unread += 1 if event.score is None else 1 + len(event.score.top)
            if event.finish is not None:
                self._unfinished -= 1
        if self._left:
            return
        self._buffer += events
        if self._unread > MAX_UNREAD and self._unfinished > 0:
            self._overrun = True
            self._leave()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self) -> None:
        if not self._left and self._unfinished > 0:
            self._left = True
            self._on_leave()
        self._left = True
