"""How much of the memory may hold bodies from their first byte until the engine's request is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from server.api.errors import ApiError

FREE = 64 * 2**10
"""Bytes of each body that are not counted: small requests pass however many large ones are held."""


class Bodies:
    """Counts the bytes of all large bodies at once; at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        """What one body takes is given back at the end."""
        room = Room(self)
        try:
            yield room
        finally:
            self._taken -= room.taken

    def take(self, count: int) -> None:
        """Raises ApiError 503 if there is no room for `count` bytes more."""
        if self._taken + count > self._limit:
            raise ApiError(
                503, "Too many large requests are being prepared; try again soon.", code="too_many_bodies"
            )
        self._taken += count


class Room:
    """What one body has taken so far, in bytes beyond those that are free."""

    def __init__(self, bodies: Bodies) -> None:
        self.taken = 0
        self._size = 0
        self._bodies = bodies

    def take(self, count: int) -> None:
        """`count` bytes more of the body; ApiError 503 if they do not fit."""
        self._size += count
        more = max(0, self._size - FREE) - self.taken
        self._bodies.take(more)
        self.taken += more
