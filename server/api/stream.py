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
from server.api.state import ApiSettings

KEEP_ALIVE = b": keep-alive\n\n"  # a comment to every reader of server-sent events

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
        await end(working, watching)


class EventStream(Response):
    """Sends `events` as they come, one `send` each, which waits while the client's buffers are full.

    So nothing piles up here: a client that is slow slows its own stream, and one that takes nothing for
    `stall_seconds` (or leaves) has its stream closed; `left` is called then, and `over` in every case, which
    frees what ran for it. Who has heard nothing for `keep_alive_seconds` gets a comment, which clients skip:
    proxies take a connection for dead on which nothing moves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        settings: ApiSettings,
        left: Callable[[], None],
        over: Callable[[], Awaitable[None]],
    ) -> None:
        # Proxies must pass each event on at once.
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stall_seconds = settings.stall_seconds
        self._keep_alive_seconds = settings.keep_alive_seconds
        self._left = left
        self._over = over
        self._sending = False
        self._sent = 0.0  # when the last event was taken (the loop's time)

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
            await self._over()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent = asyncio.get_running_loop().time()
        comments = asyncio.ensure_future(self._comment(send))
        try:
            async for event in self._events:
                await self._send(send, event)
        finally:
            await end(comments)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending = True
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            self._sending = False
            self._sent = asyncio.get_running_loop().time()

    async def _comment(self, send: Send) -> None:
        """One task that sleeps, instead of a clock for each event. Who does not take what is being sent needs
        no comment."""
        clock = asyncio.get_running_loop().time
        while True:
            left = self._sent + self._keep_alive_seconds - clock()
            if left <= 0 and not self._sending:
                await self._send(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(left if left > 0 else self._keep_alive_seconds)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels and waits; what they return or raise is dropped."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
