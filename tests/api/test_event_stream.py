"""The clock of a stream: one task that sleeps sees whoever takes nothing, and says the comments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import groupby
from typing import Any

import pytest

from server.api.identity import identify
from server.api.state import ApiSettings
from server.api.stream import KEEP_ALIVE, EventStream

STALL = 1.5


class Client:
    """What a stream sends to; takes everything until it has had `appetite` bodies, then nothing."""

    def __init__(self, appetite: int, seconds: float = 0.0) -> None:
        self.appetite = appetite
        self.seconds = seconds  # to take one
        self.took: list[bytes] = []
        self.told: list[str] = []

    async def send(self, message: Any) -> None:
        """As ASGI has it."""
        if message["type"] == "http.response.body":
            if len(self.took) == self.appetite:
                await asyncio.Event().wait()
            await asyncio.sleep(self.seconds)
            self.took.append(message["body"])

    async def receive(self) -> Any:
        """It never leaves."""
        await asyncio.Event().wait()

    async def served(self, events: AsyncGenerator[bytes, None], keep_alive: float) -> float:
        """Seconds until its stream was over."""
        settings = ApiSettings(stall_seconds=STALL, keep_alive_seconds=keep_alive)
        stream = EventStream(events, settings, lambda: self.told.append("left"), self._over)
        scope = {"type": "http", "headers": []}
        identify(scope)
        begin = time.monotonic()
        async with asyncio.timeout(20):
            await stream(scope, self.receive, self.send)
        return time.monotonic() - begin

    async def _over(self) -> None:
        self.told.append("over")


async def spoken(count: int, pause: float) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        await asyncio.sleep(pause)
        yield b"%d" % number


@pytest.mark.parametrize("keep_alive", [0.05, 10.0])
async def test_an_event_that_nobody_takes(keep_alive: float) -> None:
    client = Client(appetite=2)
    assert STALL <= await client.served(spoken(9, 0.0), keep_alive) < STALL + 2
    assert (client.took, client.told) == ([b"0", b"1"], ["left", "over"])


async def test_a_comment_that_nobody_takes() -> None:
    client = Client(appetite=1)
    assert STALL <= await client.served(spoken(2, 60.0), 0.05) < STALL + 2
    assert (client.took, client.told) == ([KEEP_ALIVE], ["left", "over"])


async def test_an_end_that_nobody_takes() -> None:
    client = Client(appetite=3)
    assert STALL <= await client.served(spoken(3, 0.0), 10.0) < STALL + 2
    assert (client.took, client.told) == ([b"0", b"1", b"2"], ["left", "over"])


async def test_an_event_that_nobody_takes_beside_a_comment() -> None:
    """The comment is taken after a while, the event that began meanwhile is not: its time still counts."""

    class Picky(Client):
        async def send(self, message: Any) -> None:
            if message.get("body", KEEP_ALIVE) != KEEP_ALIVE:
                await asyncio.Event().wait()
            await super().send(message)

    client = Picky(appetite=99, seconds=0.6)
    # A comment from 0.4 s to 1.0 s, an event at 0.8 s: over a stall after the comment, which was taken.
    assert 1.0 + STALL <= await client.served(spoken(1, 0.8), 0.4) < 1.0 + STALL + 2
    assert (client.took, client.told) == ([KEEP_ALIVE], ["left", "over"])


async def test_a_slow_client_is_not_one_that_takes_nothing() -> None:
    """Each event takes a fifth of the patience, all of them more than the whole."""
    client = Client(appetite=99, seconds=STALL / 5)
    assert await client.served(spoken(7, 0.0), 10.0) > STALL
    assert client.took == [*(b"%d" % number for number in range(7)), b""]
    assert client.told == ["over"]


async def test_comments_are_counted_from_the_last_event() -> None:
    client = Client(appetite=99)
    await client.served(spoken(18, 0.1), 1.5)  # longer than one takes, with pauses far shorter
    assert KEEP_ALIVE not in client.took
    client = Client(appetite=99)
    await client.served(spoken(2, 0.5), 0.2)
    assert [event for event, _ in groupby(client.took)] == [KEEP_ALIVE, b"0", KEEP_ALIVE, b"1", b""]
