"""A stream that nobody reads: what waits is bounded, and the request behind it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine import stream as streams
from server.engine.errors import ReadTooSlowly
from server.engine.request import NOTHING_HELD, FinishReason, TokenEvent, TokenScore
from server.engine.service import EngineService
from server.engine.stream import TokenStream
from tests.support.driving import fp32_engine, greedy_request
from tests.support.engines import prompt_of


def event(number: int, finish: FinishReason | None = None, top: int | None = None) -> TokenEvent:
    score = None if top is None else TokenScore(-1.0, ((0, -1.0),) * top)
    return TokenEvent("r", 0, number, finish, NOTHING_HELD, score=score)


async def test_what_waits_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten may wait; the eleventh ends the request. What had come is given, then the reason, then no more."""
    monkeypatch.setattr(streams, "MAX_UNREAD", 10)
    aborted: list[str] = []
    stream = TokenStream(1, lambda: aborted.append("r"))
    stream.push([event(i) for i in range(10)])
    assert not aborted
    assert len(await anext(stream)) == 10
    stream.push([event(i) for i in range(6)])
    stream.push([event(i) for i in range(5)])
    assert aborted == ["r"]
    stream.push([event(99)])
    assert [e.token for e in await anext(stream)] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], "and nothing after"
    with pytest.raises(ReadTooSlowly, match="10 of its tokens and scores"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert aborted == ["r"]


async def test_scores_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD", 10)
    aborted: list[str] = []
    stream = TokenStream(1, lambda: aborted.append("r"))
    stream.push([event(0, top=4), event(1, top=4)])
    assert not aborted
    stream.push([event(2, top=0)])
    assert aborted == ["r"]


async def test_an_answer_that_has_ended_waits_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more will come, so there is nothing to end."""
    monkeypatch.setattr(streams, "MAX_UNREAD", 10)
    stream = TokenStream(1, lambda: pytest.fail("nothing runs any more"))
    stream.push([event(i) for i in range(10)])
    stream.push([event(10), event(11, finish=FinishReason.LENGTH)])
    assert [len(events) async for events in stream] == [12]


async def test_the_engine_goes_on_for_others(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD", 50)
    service = EngineService(fp32_engine(small)[0])
    service.start()
    try:
        unread = await service.submit(greedy_request(prompt_of(10), 200))
        read = await service.submit(greedy_request(prompt_of(11), 200))
        tokens = [e.token async for events in read for e in events]
        assert len(tokens) == 200
        assert service.stats().finished_abort == 1
        assert (await service.report(check=True)).states.live.blocks == 0
        assert 50 < len(await anext(unread)) <= 52
        with pytest.raises(ReadTooSlowly):
            await anext(unread)
    finally:
        await service.stop()
