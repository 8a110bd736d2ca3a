"""Who runs when: order, priorities, budgets, room, and requests that cannot run at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.heads import NativeHeads, RepeatHeads, Variant
from server.engine.engine import Engine
from server.engine.request import Request
from server.engine.scheduler import Limits
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import checked, manager_of, on_batches, pool_of, prompt_of

BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def first_steps(engine: Engine, requests: list[Request]) -> dict[str, int]:
    """The step in which each request gave its first token."""
    for request in requests:
        engine.add(request)
    first: dict[str, int] = {}
    step = 0
    while engine.has_work:
        for event in engine.step():
            first.setdefault(event.request_id, step)
        step += 1
        assert step < 5000
    return first


def test_arrival_decides_within_a_priority_and_priority_before_it(small: Path) -> None:
    engine = checked(fp32_engine(small, max_num_seqs=1)[0])
    order = [("a", 1), ("b", 0), ("c", 1), ("d", -5), ("e", 0)]
    requests = {
        name: greedy_request(prompt_of(10, i), 3, priority=priority)
        for i, (name, priority) in enumerate(order)
    }
    first = first_steps(engine, list(requests.values()))
    assert sorted(requests, key=lambda name: first[requests[name].id]) == ["d", "b", "e", "a", "c"]


def test_every_running_decode_gets_a_token_while_others_prefill(small: Path) -> None:
    """Two sequences decode; a 100-token prompt comes in with 6 tokens a step left for it."""
    engine = checked(fp32_engine(small, max_batch_tokens=8, max_num_seqs=4)[0])
    running = [greedy_request(prompt_of(4, i), 60) for i in range(2)]
    for request in running:
        engine.add(request)
    engine.step()
    engine.step()
    late = greedy_request(prompt_of(100, 3), 2)
    engine.add(late)
    sizes: list[tuple[int, int]] = []
    on_batches(engine, lambda batch: sizes.append((len(batch.ids), len(batch.drawn))))
    for step in range(17):  # 100 tokens at 6 a step
        events = engine.step()
        assert {event.request_id for event in events} >= {request.id for request in running}
        assert (late.id in {event.request_id for event in events}) is (step == 16)
    assert sizes == [(8, 2)] * 16 + [(2 + 100 - 16 * 6, 3)]


def test_prefills_take_the_budget_in_order(small: Path) -> None:
    engine = checked(fp32_engine(small, max_batch_tokens=16, max_num_seqs=4)[0])
    requests = [greedy_request(prompt_of(length, length), 1) for length in (10, 10, 20)]
    sizes: list[list[int]] = []
    on_batches(engine, lambda batch: sizes.append(batch.meta.host_query_start.tolist()))
    first = first_steps(engine, requests)
    assert sizes == [[0, 10, 16], [0, 4, 16], [0, 8]]
    assert [first[request.id] for request in requests] == [0, 1, 2]


def test_the_head_of_the_queue_is_not_skipped(small: Path) -> None:
    """A large mha request arrives while small ones keep coming; it runs before all who came after it."""
    engine = checked(pool_of(small, 24, variants=BOTH)[0])  # 48 physical blocks
    small_ones = [greedy_request(prompt_of(20, i), 12) for i in range(40)]
    for request in small_ones[:12]:
        engine.add(request)
    engine.step()
    large = greedy_request(prompt_of(100, 1), 8, variant="mha")  # 7 logical blocks of 4: 28 of the 48
    engine.add(large)
    first: dict[str, int] = {}
    later = iter(small_ones[12:])
    for step in range(2000):
        if (request := next(later, None)) is not None:
            engine.add(request)
        for event in engine.step():
            first.setdefault(event.request_id, step)
        if not engine.has_work and step > 40:
            break
    after = [first[request.id] for request in small_ones[12:]]
    assert first[large.id] <= min(after)
    assert first[large.id] > 5, "it had to wait for room, which the later ones did not need"
    assert len(first) == 41


def test_a_prompt_comes_in_only_as_a_whole(small: Path) -> None:
    """Two prompts of 8 blocks in a pool of 12, in small chunks: the second waits until the first is done,
    though its first chunk would fit."""
    engine = checked(pool_of(small, 12, max_batch_tokens=16, max_num_seqs=4)[0])
    first, second = (greedy_request(prompt_of(120, i), 3) for i in range(2))
    run(engine, [first, second])
    assert engine.stats().preemptions == 0


def test_head_room_is_left_for_running_decodes(small: Path) -> None:
    """One decodes at the end of its block; a prompt that would take all the rest waits for it to finish."""
    engine = checked(pool_of(small, 4)[0])
    first = greedy_request(prompt_of(15, 1), 10)
    engine.add(first)
    engine.step()
    second = greedy_request(prompt_of(40, 2), 5)
    engine.add(second)
    done: list[str] = []
    while engine.has_work:
        done += [event.request_id for event in engine.step() if event.finish]
    assert done == [first.id, second.id]
    assert engine.stats().preemptions == 0


def test_a_new_request_of_better_priority_pushes_the_last_out_when_it_needs_room(small: Path) -> None:
    """It is admitted as soon as its prompt fits, and when it grows, the last of the others gives way."""
    engine = checked(pool_of(small, 6, max_num_seqs=4)[0])
    first, second = (greedy_request(prompt_of(14, 60 + i), 40) for i in range(2))
    engine.add(first)
    engine.add(second)
    engine.step()
    urgent = greedy_request(prompt_of(14, 62), 60, priority=-1)
    engine.add(urgent)
    done: list[str] = []
    while engine.has_work:
        done += [event.request_id for event in engine.step() if event.finish]
    assert done.index(first.id) < done.index(second.id)
    assert engine.stats().preemptions > 0


def test_wide_requests_in_a_pool_that_they_fill(small: Path) -> None:
    engine = checked(pool_of(small, 16, variants=BOTH)[0])  # mha sequences of up to 8 logical blocks
    requests = [greedy_request(prompt_of(40, i), 60, variant=("mha", "native")[i % 2]) for i in range(8)]
    answers = run(engine, requests)
    assert all(len(answer.ids) == 60 for (answer,) in answers)
    assert manager_of(engine).live_blocks == 0


def test_limits_are_checked(small: Path) -> None:
    with pytest.raises(ValueError, match="max_batch_tokens"):
        Limits(max_batch_tokens=4, max_num_seqs=8)
    engine = fp32_engine(small)[0]
    with pytest.raises(ValueError, match="no attention mode 'mqa'"):
        engine.add(greedy_request([1], 1, variant="mqa"))
    request = greedy_request([1], 1)
    engine.add(request)
    with pytest.raises(ValueError, match="in flight already"):
        engine.add(request)


def test_a_step_never_walks_the_queue(small: Path) -> None:
    """Requests wait by the thousand: steps, numbers, arrivals and aborts cost the same as without them."""

    class Line(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("somebody walks the queue")

        index = remove = count = __contains__ = __iter__  # type: ignore[assignment]

    class Books(dict):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("somebody walks the requests")

        items = values = keys = __iter__  # type: ignore[assignment]

    engine = fp32_engine(small, max_num_seqs=2)[0]
    engine._scheduler.waiting, engine._works = Line(), Books()
    engine._commit._works = engine._works
    requests = [greedy_request(prompt_of(6, i % 50), 3) for i in range(300)]
    for number, request in enumerate(requests):
        engine.add(request)
        assert engine.stats().waiting_requests == number + 1
    engine.abort(requests[200].id)
    for _ in range(20):
        engine.step()
    assert engine.stats().waiting_requests == engine.stats().waiting < 290
    assert engine.stats().finished_abort == 1
