"""Server-sent events to a client that may leave, or stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from time import monotonic
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import ClientGone
from server.api.guard import DIRECT
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
        self._since = 0.0  # when a send began or ended the last time (monotonic, s)
        self._sending = 0  # sends that run: an event may begin while a comment does

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the events end, or the client leaves or stops reading."""
        try:
            await until_gone(receive, self._pump(send, scope.get(DIRECT, send)))
        except ClientGone:
            self._left()
        except TimeoutError:
            who = identity_of(scope)
            _log.info("%s: the client took nothing for %g s; its stream is closed", who, self._stall_seconds)
            self._left()
        finally:
            await self._events.aclose()
            await self._over()

    async def _pump(self, begin: Send, send: Send) -> None:
        """`begin` takes the head past all that adds to it on the way, `send` the rest right to the server."""
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._since = monotonic()
        async with asyncio.timeout(None) as patience:
            watching = asyncio.ensure_future(self._watch(send, patience))
            try:
                async for event in self._events:
                    await self._send(send, event)
                await self._send(send, b"", more=False)
            finally:
                await end(watching)

    async def _send(self, send: Send, event: bytes, more: bool = True) -> None:
        self._since = monotonic()
        self._sending += 1
        try:
            await send({"type": "http.response.body", "body": event, "more_body": more})
        finally:
            self._since = monotonic()
            self._sending -= 1

    async def _watch(self, send: Send, patience: asyncio.Timeout) -> None:
        """One task that sleeps, instead of clocks for each event. It sends the comments, and ends the
        patience with who takes nothing. What it looks for may begin while it sleeps, which it therefore never
        does for longer than that has to last."""
        stall, keep_alive = self._stall_seconds, self._keep_alive_seconds
        while True:
            left = self._since + (stall if self._sending else keep_alive) - monotonic()
            if left > 0:
                await asyncio.sleep(min(left, stall, keep_alive))
            elif self._sending or not await self._comment(send):
                patience.reschedule(asyncio.get_running_loop().time())
                return

    async def _comment(self, send: Send) -> bool:
        """Whether the client took it; not so if his buffers are still full of what came before."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send(send, KEEP_ALIVE)
        except TimeoutError:
            return False
        return True


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
