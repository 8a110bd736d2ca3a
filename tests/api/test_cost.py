"""What a streamed token costs between the engine's thread and the socket, counted in calls and not in time,
so that the answer is the same on any machine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from starlette.requests import Request as HttpRequest

from server.api.answer import Answer
from server.api.call import Call
from server.api.deadline import Deadline
from server.api.identity import identify
from server.api.shapes import ChatShape, CompletionShape, Shape
from server.engine.engine import Engine
from server.engine.request import NOTHING_HELD, FinishReason, TokenEvent
from server.engine.service import EngineService
from server.engine.stats import EngineStats
from server.text.asks import CompletionAsk, SamplingAsk
from tests.support.api import make_state
from tests.support.fake_service import FIRST_LETTER, FakeService

STREAMS = 8
MOST = 90  # calls of Python and of C functions, the event loop's among them


class Idle:
    """An engine that is only asked; its events are the test's."""

    def check(self, request: object) -> None:
        """Everything can run."""

    def stats(self) -> EngineStats:
        """Nothing ran."""
        return EngineStats()

    def live_bytes(self) -> dict[str, int]:
        """Nothing is held."""
        return {}


class Calls:
    """Counts them while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, of: object) -> None:
        self.count += event in ("call", "c_call")


@pytest.mark.parametrize("shape", [CompletionShape(), ChatShape()])
async def test_calls_for_a_token(words: Path, shape: Shape) -> None:
    service = EngineService(cast(Engine, Idle()))
    state = make_state(words, cast(FakeService, service))
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def answered(name: str) -> None:
        scope = {"type": "http", "headers": []}
        ask = CompletionAsk(name, "x", max_tokens=1000, sampling=SamplingAsk())
        call = Call(identify(scope), state.metrics.clock(), Deadline(0.0))
        answer = Answer(state, await state.preparer.completion(ask), shape, call)
        response = await answer.stream(HttpRequest(scope, receive), include_usage=True)
        await response(scope, receive, send)

    async def step(finish: FinishReason | None = None) -> int:
        """One token for each; the calls that it took until all were sent."""
        before = len(sent)
        with Calls() as calls:
            service._deliver([TokenEvent(name, 0, FIRST_LETTER, finish, NOTHING_HELD) for name in names])
            while len(sent) < before + STREAMS:  # noqa: ASYNC110 (an event would be counted)
                await asyncio.sleep(0)
        return calls.count

    names = [f"r{number}" for number in range(STREAMS)]
    streams = [asyncio.ensure_future(answered(name)) for name in names]
    while len(service._unfinished) < STREAMS:  # noqa: ASYNC110 (there is no event)
        await asyncio.sleep(0.001)
    for _ in range(3):  # the first has the opening, and what is kept for the others is made
        await step()
    costs = [await step() / STREAMS for _ in range(5)]
    await step(FinishReason.LENGTH)
    await asyncio.gather(*streams)
    await state.preparer.close()
    assert b'"text":"a"' in sent[STREAMS * 3] or b'"content":"a"' in sent[STREAMS * 3]
    assert sum(b"[DONE]" in part for part in sent) == STREAMS
    assert min(costs) <= MOST, f"{costs} calls a token"
