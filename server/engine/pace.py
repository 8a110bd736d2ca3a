"""How fast requests end, for Retry-After."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_SECONDS = 60
_WEIGHT = 0.2  # of the newest interval


class Pace:
    """A running mean of the seconds between two ends, while there is something to end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._seconds: float | None = None

    def request_ended(self, *, idle: bool) -> None:
        """`idle`: nothing else was in flight, so the time to the next end will say nothing."""
        now = self._clock()
        if self._last is not None:
            interval = now - self._last
            self._seconds = interval if self._seconds is None else self._seconds
            self._seconds += _WEIGHT * (interval - self._seconds)
        self._last = None if idle else now

    def seconds_for_one(self) -> int:
        """Until one more request has ended: whole seconds, at least 1 and at most a minute."""
        return min(max(math.ceil(self._seconds or 0.0), 1), MAX_SECONDS)
