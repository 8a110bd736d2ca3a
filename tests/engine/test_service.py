"""The engine's thread and the way to it: streams, refusals, leaving, stopping, the thread's own faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.heads import NativeHeads, RepeatHeads, Variant
from server.engine.engine import Engine
from server.engine.errors import ConfigError, Draining, EngineDead, MemoryFull, QueueFull
from server.engine.pace import Pace
from server.engine.request import FinishReason, Request, TokenEvent
from server.engine.service import EngineService
from server.engine.stats import Status
from server.engine.stream import TokenStream
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request
from tests.support.engines import manager_of, on_batches, prompt_of


def slow(engine: Engine, seconds: float = 0.01) -> Engine:
    on_batches(engine, lambda batch: time.sleep(seconds))
    return engine


@pytest.fixture
def engine(small: Path) -> Engine:
    return fp32_engine(small, kv_memory=1 << 20, max_num_seqs=4)[0]


@pytest.fixture
async def service(engine: Engine) -> AsyncIterator[EngineService]:
    service = EngineService(engine, max_queued=6)
    service.start()
    yield service
    await asyncio.wait_for(service.stop(), 10)
    assert not service._thread.is_alive()


async def collect(stream: TokenStream) -> list[TokenEvent]:
    return [event for events in [batch async for batch in stream] for event in events]


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.005)


async def live_blocks(service: EngineService) -> int:
    return (await service.report(check=True)).states.live.blocks


def long_request(i: int = 0, **fields: Any) -> Request:
    return greedy_request(prompt_of(10, 200 + i), 200, **fields)


async def test_a_stream_brings_every_token_in_order(service: EngineService, oracle: Oracle) -> None:
    requests = [greedy_request(prompt_of(10 + i, 210 + i), 12) for i in range(4)]
    streams = [await service.submit(request) for request in requests]
    for request, events in zip(requests, await asyncio.gather(*map(collect, streams)), strict=True):
        assert [event.token for event in events] == oracle.greedy(request.prompts[0], 12)
        assert [event.finish for event in events] == [None] * 11 + [FinishReason.LENGTH]
    assert await live_blocks(service) == 0


async def test_a_slow_reader_gets_longer_lists(service: EngineService) -> None:
    stream = await service.submit(greedy_request(prompt_of(10), 20))
    await until(lambda: service.stats().finished_length == 1)
    await asyncio.sleep(0.05)
    lists = [events async for events in stream]
    assert [len(events) for events in lists] == [20]


async def test_every_choice_ends_before_the_stream_does(service: EngineService) -> None:
    stream = await service.submit(greedy_request(prompt_of(20), 5, n=3))
    events = await collect(stream)
    assert sorted(event.index for event in events if event.finish) == [0, 1, 2]
    assert len(events) == 15
    assert [events async for events in stream] == [], "and it stays over"


async def test_abort_of_one_choice_and_of_all(engine: Engine, service: EngineService) -> None:
    slow(engine)
    request = long_request(n=2)
    stream = await service.submit(request)
    events = await anext(stream)
    service.abort(request.id, 1)
    while not any(event.finish for event in events):
        events = await anext(stream)
    assert [(e.index, e.token, e.finish) for e in events if e.finish] == [(1, None, FinishReason.ABORT)]
    service.abort(request.id)
    service.abort("nobody")
    rest = await collect(stream)
    assert (rest[-1].index, rest[-1].finish) == (0, FinishReason.ABORT)
    assert await live_blocks(service) == 0


@pytest.mark.parametrize("how", ["aclose", "async with", "cancel", "drop"])
async def test_whoever_leaves_frees_his_blocks(engine: Engine, service: EngineService, how: str) -> None:
    """P5: in the middle of a stream; then the same prompt again works."""
    slow(engine)
    held = []
    for i in range(3):
        stream = await service.submit(long_request(i))
        if how != "drop":
            held.append(stream)
        await anext(stream)
        if how == "aclose":
            await stream.aclose()
        elif how == "async with":
            async with stream:
                await anext(stream)
        elif how == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del stream
        await until(lambda: service.stats().running == 0 and not service._unfinished, seconds=2)
        assert await live_blocks(service) == 0
    assert service.stats().finished_abort == 3
    events = await collect(await service.submit(greedy_request(prompt_of(10, 200), 3)))
    assert len(events) == 3


async def test_leaving_after_the_end_aborts_nothing(service: EngineService) -> None:
    stream = await service.submit(greedy_request(prompt_of(10), 3))
    async with stream:
        await collect(stream)
    await service.report()
    assert service.stats().finished_abort == 0


async def test_a_full_queue_refuses(engine: Engine, service: EngineService) -> None:
    """Four run, six wait, the next is told when to come back; those who leave make room."""
    slow(engine)
    streams = [await service.submit(long_request(i)) for i in range(4)]
    await until(lambda: service.stats().running == 4)
    waiting = [await service.submit(long_request(4 + i)) for i in range(6)]
    assert service.queued == service.health().queued == 6
    with pytest.raises(QueueFull, match="the limit is 6") as refused:
        await service.submit(long_request(19))
    assert 1 <= refused.value.retry_after <= 60
    await waiting.pop().aclose()
    await until(lambda: service.queued == 5)
    waiting.append(await service.submit(long_request(19)))
    for stream in streams + waiting:
        await stream.aclose()
    await until(lambda: not service._unfinished)
    assert service.queued == 0


async def test_what_is_in_flight_may_hold_so_many_ids_and_scores(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request may hold all of it; with others there, no more than the rest."""
    monkeypatch.setattr("server.engine.service.MAX_WEIGHT", 1000)
    service = EngineService(slow(engine), max_queued=100)
    service.start()
    scored = long_request(0, logprobs=4)
    assert scored.weight == len(scored.prompts[0]) + 5 * scored.max_tokens
    heavy = replace(scored, id="heavy", logprobs=20, n=2)
    assert heavy.weight > 1000
    first = await service.submit(heavy)
    with pytest.raises(MemoryFull, match=f"hold {heavy.weight} prompt ids and log-probabilities.* 1000"):
        await service.submit(long_request(1))
    await first.aclose()
    await until(lambda: not service._weights)
    streams = [await service.submit(long_request(i)) for i in range(2, 6)]
    with pytest.raises(QueueFull):
        await service.submit(replace(long_request(6), prompt_logprobs=500))
    for stream in streams:
        await stream.aclose()
    await asyncio.wait_for(service.stop(), 10)
    assert service._weights == {}


async def test_a_burst_to_an_idle_engine_gets_the_free_seats_and_the_queue(engine: Engine) -> None:
    """4 seats and 2 places to wait, all asked for before the first step; then no seat is free any more."""
    service = EngineService(slow(engine), max_queued=2, seats=4)
    service.start()
    streams = [await service.submit(long_request(i)) for i in range(6)]
    with pytest.raises(QueueFull, match="the limit is 2"):
        await service.submit(long_request(6))
    await until(lambda: service.stats().running == 4)
    with pytest.raises(QueueFull):
        await service.submit(long_request(7))
    for stream in streams:
        await stream.aclose()
    await asyncio.wait_for(service.stop(), 10)


async def test_queued_counts_what_the_thread_has_not_seen_yet(engine: Engine, service: EngineService) -> None:
    slow(engine, 0.3)
    streams = [await service.submit(long_request())]
    await until(lambda: service.stats().running == 1)
    streams += [await service.submit(long_request(1 + i)) for i in range(6)]
    assert service.queued == 6
    with pytest.raises(QueueFull):
        await service.submit(long_request(9))
    del streams


async def test_what_can_never_run_is_refused_at_once(service: EngineService) -> None:
    with pytest.raises(ValueError, match="exceeds the 256"):
        await service.submit(greedy_request(prompt_of(300), 5))
    request = long_request()
    stream = await service.submit(request)
    with pytest.raises(ValueError, match="in flight already"):
        await service.submit(request)
    await stream.aclose()
    await until(lambda: not service._unfinished)
    await (await service.submit(request)).aclose()


async def test_an_idle_service_answers_and_burns_nothing(service: EngineService) -> None:
    await service.report()
    begin, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - cpu < 0.1
    begin = time.monotonic()
    assert (await service.blocks(0, 10)).state is not None
    assert time.monotonic() - begin < 0.2
    assert service.health().ok


async def test_reports_come_while_others_stream(engine: Engine, service: EngineService) -> None:
    slow(engine)
    stream = await service.submit(long_request())
    await anext(stream)
    report = await service.report(check=True)
    assert report.states.live.blocks > 0 and len(report.requests) == 1
    await stream.aclose()


async def test_askers_do_not_keep_those_who_wait_for_tokens(engine: Engine, service: EngineService) -> None:
    """Questions that come as fast as they are answered, and dear ones: every step still comes after four at
    most, and a hundred who want the report at once cost two of them."""
    reports = 0
    report = engine.report

    def counted(check: bool = False) -> Any:
        nonlocal reports
        reports += 1
        return report(check)

    engine.report = counted  # type: ignore[method-assign]
    asked = 0

    async def pesters() -> None:
        nonlocal asked
        while True:
            await service.blocks(0, 10)
            asked += 1

    pests = [asyncio.ensure_future(pesters()) for _ in range(50)]
    await until(lambda: asked > 100)
    stream = await service.submit(greedy_request(prompt_of(10), 30))
    asked = 0
    tokens = await asyncio.wait_for(collect(stream), 20)
    assert len(tokens) == 30 and 0 < asked <= 30 * 4 + 60
    for pest in pests:
        pest.cancel()
    got = await asyncio.gather(*(service.report() for _ in range(100)))
    assert reports == 2 and len({id(one) for one in got}) == 2


async def test_a_shared_report_is_never_older_than_its_question(
    engine: Engine, service: EngineService
) -> None:
    slow(engine)
    early = asyncio.ensure_future(service.report())
    await asyncio.sleep(0)
    stream = await service.submit(long_request())
    await anext(stream)
    assert (await service.report()).states.live.blocks > 0
    await stream.aclose()
    await until(lambda: service.health().running == 0)
    assert (await service.report()).states.live.blocks == 0
    await early


async def test_a_failing_question_harms_nobody(engine: Engine, service: EngineService) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a fault on purpose")

    engine.blocks = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on purpose"):
        await service.blocks(0, 1)
    assert service.health().ok


async def test_stop_lets_running_streams_finish(engine: Engine, service: EngineService) -> None:
    slow(engine)
    stream = await service.submit(greedy_request(prompt_of(10), 15))
    reading = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(service.stop(grace=10))
    await asyncio.sleep(0)
    assert service.health().status is Status.DRAINING
    with pytest.raises(Draining):
        await service.submit(long_request())
    await stopping
    assert len(await reading) == 15
    assert service.health().status is Status.STOPPED
    with pytest.raises(EngineDead):
        await service.report()


async def test_stop_aborts_what_outlives_the_grace(engine: Engine, service: EngineService) -> None:
    slow(engine)
    stream = await service.submit(long_request())
    reading = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.05)
    begin = time.monotonic()
    first = asyncio.create_task(service.stop(grace=60))
    await asyncio.sleep(0.05)
    await service.stop(grace=0.1)  # a second signal shortens the first
    await first
    assert time.monotonic() - begin < 5
    assert (await reading)[-1].finish is FinishReason.ABORT


async def test_a_dead_engine_tells_everybody_at_once(
    engine: Engine, service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L4: in flight, waiting, and whoever comes later."""

    def hook(batch: Any) -> None:
        time.sleep(0.02)
        if engine.stats().steps >= 3:
            raise RuntimeError("a fault on purpose")

    post, told = service._post, []

    def noted(callback: Callable[..., None], *args: list[TokenEvent]) -> None:
        if any(event.finish is FinishReason.ERROR for events in args for event in events):
            told.append(service.health().status)
        post(callback, *args)

    monkeypatch.setattr(service, "_post", noted)
    on_batches(engine, hook)
    streams = [await service.submit(long_request(i)) for i in range(6)]
    for events in await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 5):
        assert events[-1].finish is FinishReason.ERROR and events[-1].error
    assert service.health().status is Status.DEAD
    assert told == [Status.DEAD]  # known before anybody heard of it
    assert not service.health().ok and "RuntimeError, see the server" in service.health().detail
    for call in (lambda: service.submit(long_request()), service.report, lambda: service.blocks(0, 1)):
        with pytest.raises(EngineDead):
            await asyncio.wait_for(call(), 1)
    assert service.queued == 0


async def test_a_killed_thread_is_noticed(engine: Engine, service: EngineService) -> None:
    """Even by what no handler catches; questions that were on their way are answered too."""

    def hook(batch: Any) -> None:
        time.sleep(0.2)
        raise SystemExit("killed on purpose")

    on_batches(engine, hook)
    stream = await service.submit(long_request())
    await asyncio.sleep(0.05)
    question = asyncio.create_task(service.report())
    late = await service.submit(long_request(1))
    for events in await asyncio.wait_for(asyncio.gather(collect(stream), collect(late)), 5):
        assert [event.finish for event in events] == [FinishReason.ERROR]
    with pytest.raises(EngineDead):
        await asyncio.wait_for(question, 1)
    assert service.health().status is Status.DEAD


async def test_two_services_in_one_process(small: Path, oracle: Oracle) -> None:
    services = [EngineService(fp32_engine(small, kv_memory=1 << 20)[0]) for _ in range(2)]
    for service in services:
        assert service.health().status is Status.STARTING
        service.start()
    requests = [greedy_request(prompt_of(20, 220 + i), 15) for i in range(4)]
    streams = [await services[i % 2].submit(request) for i, request in enumerate(requests)]
    for request, events in zip(requests, await asyncio.gather(*map(collect, streams)), strict=True):
        assert [event.token for event in events] == oracle.greedy(request.prompts[0], 15)
    await services[0].stop()
    assert services[1].health().ok and not services[0].health().ok
    await services[1].stop()


async def test_books_are_empty_when_idle(engine: Engine, service: EngineService) -> None:
    """L6: per-request maps do not grow."""
    for i in range(20):
        stream = await service.submit(greedy_request(prompt_of(5, 230 + i), 2))
        if i % 4:
            await collect(stream)
        else:
            await stream.aclose()
    del stream
    await until(lambda: not service._unfinished)
    assert engine._works == {} and len(service._streams) == 0
    assert manager_of(engine).live_blocks == 0


def test_a_queue_of_nothing_is_a_mistake(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="--max-queued 0"):
        EngineService(engine, max_queued=0)


def test_pace() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.seconds_for_one() == 1
    for _ in range(50):
        pace.request_ended(idle=False)
        now[0] += 7.0
    assert pace.seconds_for_one() in (7, 8)
    pace.request_ended(idle=True)
    now[0] += 10_000  # nobody was there: this says nothing
    pace.request_ended(idle=False)
    assert pace.seconds_for_one() in (7, 8)
    for _ in range(50):
        now[0] += 500
        pace.request_ended(idle=False)
    assert pace.seconds_for_one() == 60


async def test_live_bytes_follow_the_sequences_and_need_no_answer_from_the_thread(small: Path) -> None:
    """2 layers, head_dim 16, fp32, blocks of 16: 4,096 bytes a block. 10 prompt tokens and a few more are one
    logical block: 2 KV heads as native, 4 as mha."""
    variants = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))
    engine = slow(fp32_engine(small, kv_memory=1 << 20, variants=variants)[0])
    service = EngineService(engine)
    assert service.live_bytes() == {"native": 0, "mha": 0}
    service.start()
    streams = [
        await service.submit(greedy_request(prompt_of(10, 230), 6, variant=v)) for v in ("native", "mha")
    ]
    await until(lambda: service.live_bytes() == {"native": 2 * 4096, "mha": 4 * 4096})
    report = await service.report(check=True)
    assert {v.name: v.live_bytes for v in report.variants} == service.live_bytes()
    for stream in streams:
        await collect(stream)
    assert service.live_bytes() == {"native": 0, "mha": 0}
    await asyncio.wait_for(service.stop(), 10)
