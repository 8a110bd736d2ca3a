"""When a request must be over, however long it has waited or run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from server.api.errors import ApiError


class Deadline:
    """`seconds` from now, on the running loop; 0 is never.

    Before the engine has the request, `limit` ends what prepares it. Afterwards `then` aborts it: the engine
    answers with the end of each choice, as it does whoever aborts, and `passed` tells why.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time() + seconds if seconds > 0 else None
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancels what stands inside when the deadline passes, and raises `error()`."""
        try:
            async with asyncio.timeout_at(self._at) as timeout:
                yield
        except TimeoutError:
            if timeout.expired():
                raise self.error() from None
            raise

    def then(self, abort: Callable[[], None]) -> None:
        """Calls `abort` when the deadline passes, unless `stop` comes first."""
        if self._at is not None:
            self._timer = self._loop.call_at(self._at, self._pass, abort)

    def stop(self) -> None:
        """The request is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def error(self) -> ApiError:
        """What the client is told: 504, or in mid-stream the event of it."""
        return ApiError(
            504,
            f"The answer was not complete {self._seconds:g} s after the request came (--request-timeout).",
            code="deadline_exceeded",
        )

    def _pass(self, abort: Callable[[], None]) -> None:
        self.passed = True
        abort()
