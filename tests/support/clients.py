"""Many clients at once, from one event loop: each reads its stream to the end, or says how it broke."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.server import Served
from tests.support.sse import Streamed, read_stream


@dataclass(frozen=True, slots=True)
class Told:
    """What one client was told: a status, and a stream (status 200) or an error; `at` is when it ended
    (monotonic, s)."""

    status: int
    stream: Streamed
    error: dict[str, Any] | None
    at: float


async def read_one(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Told:
    """One stream read to its end, which the server makes."""
    async with http.stream("POST", path, json=body | {"stream": True}) as reply:
        if reply.status_code != 200:
            content = await reply.aread()
            error = httpx.Response(reply.status_code, content=content).json()["error"]
            return Told(reply.status_code, Streamed(), error, time.monotonic())
        lines = [line async for line in reply.aiter_lines()]
    answer = read_stream(lines)
    return Told(200, answer, answer.error, time.monotonic())


def read_all(
    server: Served, asked: Sequence[tuple[str, dict[str, Any]]], seconds: float = 60.0
) -> list[Told]:
    """All at once, in `seconds` or TimeoutError."""

    async def everybody() -> list[Told]:
        async with server.async_http(timeout=seconds) as http, asyncio.timeout(seconds):
            return list(await asyncio.gather(*(read_one(http, path, body) for path, body in asked)))

    return asyncio.run(everybody())
