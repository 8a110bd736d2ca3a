"""Server-sent events to a client that may leave, or stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import ClientGone
from server.api.identity import identity_of

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


async def until_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`; if the client leaves first, `work` is cancelled and ClientGone raised.

    The body must have been read whole: from then on `receive` tells only of the end of the connection.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, watching)


class EventStream(Response):
    """Sends `events` as they come, one `send` each, which waits while the client's buffers are full.

    So nothing piles up here: a client that is slow slows its own stream, and one that takes nothing for
    `stall_seconds` (or leaves) has its stream closed, which frees what ran for it; `left` is called then.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        stall_seconds: float,
        left: Callable[[], None],
    ) -> None:
        # Proxies must pass each event on at once.
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stall_seconds = stall_seconds
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the events end, or the client leaves or stops reading."""
        try:
            await until_gone(receive, self._pump(send))
        except ClientGone:
            self._left()
        except TimeoutError:
            who = identity_of(scope)
            _log.info("%s: the client took nothing for %g s; its stream is closed", who, self._stall_seconds)
            self._left()
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
