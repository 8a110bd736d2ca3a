"""Who may connect: as many as there are file descriptors for, and the idle give way to who comes.

uvicorn accepts whatever has come before it looks at any of it, until the process is out of descriptors, and
then connections are dropped unheard. Here they are accepted a few at a time, and counted. One too many is
told so in HTTP; where even that has no place left it waits in the kernel's queue, which is long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn

from server.api.errors import ApiError
from server.api.protocol import LINGER_SECONDS, BoundedHttp, raw_answer

IDLE_SECONDS = 1.0  # a connection that has waited so long for a next request gives way to a new one
SILENT_SECONDS = 5.0  # and one that has not sent its first
_BACKLOG = 2048  # that may wait in the kernel
_AT_ONCE = 16  # accepted between two looks at everything else
_REFUSING = 24  # connections beyond the limit that are being told so
_AGAIN_SECONDS = 0.1  # until the next try after a failed accept, or the next search for idle connections


class BoundedServer(uvicorn.Server):
    """uvicorn's server with at most `limit` connections (None: as many as come)."""

    def __init__(self, config: uvicorn.Config, limit: int | None = None) -> None:
        super().__init__(config)
        self._limit = limit

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens on `sockets`, and nowhere else."""
        await self.lifespan.startup()
        self.servers: list[Any] = [Listener(sock, self._protocol, self._limit) for sock in sockets or ()]
        self.started = True

    def _protocol(self) -> BoundedHttp:
        return BoundedHttp(self.config, self.server_state, self.lifespan.state)


class Listener:
    """One listening socket; has the part of `asyncio.Server` that uvicorn uses."""

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], BoundedHttp], limit: int | None
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._served: set[BoundedHttp] = set()
        self._refused: set[_Refusal] = set()
        self._arriving: set[asyncio.Task[None]] = set()
        self._idle: list[BoundedHttp] = []  # as of the last search, the longest idle at the end
        self._searched = float("-inf")
        self._again: asyncio.TimerHandle | None = None
        self._paused = False
        self._closed = False
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accepts nobody more; who is connected stays."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Until all who were accepted have arrived."""
        while self._arriving:
            await asyncio.wait(self._arriving)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            place = self._place()
            if place is None:  # until one of them goes
                self._pause()
                return
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors after all
                self._pause()
                self._again = self._loop.call_later(_AGAIN_SECONDS, self._resume)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._arrive(client, place()))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _place(self) -> Callable[[], BoundedHttp | _Refusal] | None:
        """What makes the protocol of the next connection; None: it has to wait."""
        if self._limit is None or len(self._served) < self._limit or self._one_gives_way():
            return self._serve
        return self._refuse if len(self._refused) < _REFUSING else None

    def _serve(self) -> BoundedHttp:
        protocol = self._protocol()
        protocol.lost = lambda: self._gone(self._served, protocol)
        self._served.add(protocol)
        return protocol

    def _refuse(self) -> _Refusal:
        protocol = _Refusal(lambda: self._gone(self._refused, protocol))
        self._refused.add(protocol)
        return protocol

    async def _arrive(self, client: socket.socket, protocol: BoundedHttp | _Refusal) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, client)
        except OSError:  # gone already
            client.close()
            protocol.lost()

    def _gone(self, those: set[Any], protocol: asyncio.Protocol) -> None:
        those.discard(protocol)
        self._resume()

    def _pause(self) -> None:
        self._paused = True
        self._loop.remove_reader(self._listener)

    def _resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._listener, self._accept)

    def _one_gives_way(self) -> bool:
        """Close the connection that has been idle longest, if one has been for long."""
        now = self._loop.time()
        if not self._idle and now >= self._searched + _AGAIN_SECONDS:
            self._searched = now
            found = [known for known in self._served if known.idle_since is not None]
            self._idle = sorted(found, key=lambda known: -(known.idle_since or now))
        while self._idle:
            known = self._idle.pop()
            since = known.idle_since
            patience = IDLE_SECONDS if known.was_served else SILENT_SECONDS
            if since is None or now - since < patience or known not in self._served:
                continue
            if not known.has_unread() and not known.transport.get_write_buffer_size():
                self._served.discard(known)
                known.transport.abort()
                return True
        return False


class _Refusal(asyncio.Protocol):
    """Tells a connection that there is no place for it, and throws away what it sends."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self.lost = lost
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answers before anything was asked: the client reads it when it has sent its request."""
        client = cast(asyncio.Transport, transport)
        message = "Too many connections are open; try again soon."
        client.write(raw_answer(ApiError(503, message, code="too_many_connections")))
        with contextlib.suppress(OSError, RuntimeError):
            client.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, client.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has read it, or will not."""
        if self._timer is not None:
            self._timer.cancel()
        self.lost()
