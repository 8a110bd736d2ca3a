"""How a server ends: the first signal lets answers finish, the second cuts them off, the third is the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from typing import Protocol

_log = logging.getLogger("headroom")
_ECHO_SECONDS = 0.3  # `timeout` and `make` pass a signal on to a process that has had it already
_FORCE_SECONDS = 3.0  # from the second signal to the end of the process, whatever hangs


class Stoppable(Protocol):
    """The part of `EngineService` that ending needs."""

    async def stop(self, grace: float = 0.0) -> None:
        """Ends what is in flight within `grace` seconds, then the engine."""
        ...


class Exiting(Protocol):
    """The part of `uvicorn.Server` that ending needs."""

    should_exit: bool
    force_exit: bool


class Ending:
    """Handles SIGTERM and SIGINT on the running loop. `code` is the exit code once the server has ended."""

    def __init__(self, service: Stoppable, server: Exiting, grace: float) -> None:
        self.code = 0
        self._service = service
        self._server = server
        self._grace = grace
        self._signals = 0
        self._last: tuple[int, float] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled, number)

    def signalled(self, number: signal.Signals) -> None:
        """One more signal has come. The same one within moments is an echo of it, and counts once."""
        last, self._last = self._last, (number, time.monotonic())
        if last is not None and last[0] == number and self._last[1] - last[1] < _ECHO_SECONDS:
            return
        self._signals += 1
        if self._signals == 1:
            _log.info("%s: no new requests; running answers have %g s to finish", number.name, self._grace)
            self._drain(self._grace)
            return
        self.code = 128 + number
        if self._signals > 2:
            os._exit(self.code)
        _log.warning("%s again: running answers are cut off", number.name)
        timer = threading.Timer(_FORCE_SECONDS, os._exit, [self.code])
        timer.daemon = True
        timer.start()
        self._server.force_exit = True
        self._drain(0.0)

    def _drain(self, grace: float) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._stop(grace)))

    async def _stop(self, grace: float) -> None:
        try:
            await self._service.stop(grace)
        finally:
            self._server.should_exit = True
