"""K6, K7 and preemption by priority: a full pool is shared in order, and gives everything back."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine.engine import Engine
from server.engine.request import FinishReason, Request
from tests.cache.test_random_use import drive
from tests.engine.conftest import Oracle
from tests.support.cache_harness import Harness, make_manager
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import checked, ids_of, manager_of, pool_of, prompt_of
from tests.support.scheduling import Line

SIX = [(prompt_of(20, 20 + i), 44) for i in range(6)]  # four blocks of 16 each, 24 where the pool has 12


def six() -> list[Request]:
    return [greedy_request(prompt, tokens) for prompt, tokens in SIX]


def drain(engine: Engine, most: int) -> dict[str, int]:
    """Steps until nothing is left, in at most so many; the step in which each request ended. The first in
    order gets a token in every step, if it is past its prefill."""
    ended: dict[str, int] = {}
    for step in range(most + 1):
        if not engine.has_work:
            return ended
        first = engine._scheduler.running[0] if engine._scheduler.running else None
        before = None if first is None else first.output
        for event in engine.step():
            if event.finish is not None:
                ended[event.request_id] = step
        if first is not None and first.pending <= 1:
            assert first.output == (before or 0) + 1 or first.finish is not None, "the oldest stood still"
    raise AssertionError(f"there is still work after {most} steps")


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache on", "cache off"])
def test_k6_six_that_want_twice_the_pool(small: Path, oracle: Oracle, prefix_cache: bool) -> None:
    """All finish with the ids of a big pool; recompute is neither a prompt nor a hit."""
    requests = six()
    engine = checked(pool_of(small, 12, prefix_cache=prefix_cache)[0])
    answers = [answer for (answer,) in run(engine, requests)]
    assert [answer.ids for answer in answers] == [oracle.greedy(prompt, tokens) for prompt, tokens in SIX]
    assert [answer.kv.cached_tokens for answer in answers if answer.kv] == [0] * 6
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.steps < 6 * 50, "it makes no progress in bulk"
    assert (stats.prompt_tokens, stats.cached_tokens) == (120, 0)
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    manager = manager_of(engine)
    manager.check()
    assert manager.live_blocks == 0
    assert manager.free_blocks + manager.cached_blocks == manager.total
    assert engine.report(check=True).requests == ()


def test_k6_the_oldest_goes_on_and_they_end_in_order(small: Path) -> None:
    """A token for the first in every step, and who was preempted is back before those behind it."""
    engine = checked(pool_of(small, 12)[0])
    requests = six()
    for request in requests:
        engine.add(request)
    ended = drain(engine, 300)
    assert engine.stats().preemptions > 0
    assert [ended[request.id] for request in requests] == sorted(ended.values())


def test_k6_arrivals_while_the_pool_is_full(small: Path, oracle: Oracle) -> None:
    """A newcomer before every step: none of them starts before one that was preempted is back, and the
    first six end in order, as if nobody had come."""
    engine = checked(pool_of(small, 12)[0])
    first, late = six(), [greedy_request(prompt_of(20, 100 + i), 4) for i in range(60)]
    answers = {request.id: Answer() for request in [*first, *late]}
    for request in first:
        engine.add(request)
    ended: list[str] = []
    step = 0
    while engine.has_work:
        if step < len(late):
            engine.add(late[step])
        waiting = {sequence.work.request.id for sequence in engine._scheduler.waiting}
        pushed_out = [r.id for r in first if r.id in waiting and answers[r.id].ids]
        started = {r.id for r in late if answers[r.id].ids}
        for event in engine.step():
            answers[event.request_id].take(event)
            if event.finish is not None:
                ended.append(event.request_id)
        if pushed_out:
            assert {r.id for r in late if answers[r.id].ids} == started, "somebody came in before it"
        step += 1
        assert step < 1000
    assert engine.stats().preemptions > 0
    assert [request_id for request_id in ended if request_id in {r.id for r in first}] == [
        r.id for r in first
    ]
    for request in [*first, *late]:
        assert answers[request.id].ids == oracle.greedy(request.prompts[0], request.max_tokens)
    assert_idle(engine)


@pytest.mark.parametrize("budget", [None, 16])
def test_k6_one_alone_that_needs_the_whole_pool(small: Path, oracle: Oracle, budget: int | None) -> None:
    """It never pushes itself out, even with its own leftovers in the cache and nothing free."""
    engine = checked(pool_of(small, 4, max_batch_tokens=budget, max_num_seqs=4)[0])
    for seed in (0, 1, 0):
        prompt = prompt_of(20, 20 + seed)
        ((answer,),) = run(engine, [greedy_request(prompt, 44)], max_steps=60)
        assert answer.ids == oracle.greedy(prompt, 44)
    assert engine.stats().preemptions == 0
    assert_idle(engine)


def test_k6_copies_that_want_more_than_the_pool(small: Path, oracle: Oracle) -> None:
    """A sibling: eight answers to one prompt push each other out, and all come to their ends."""
    engine = checked(pool_of(small, 12)[0])
    prompt = prompt_of(20, 20)
    (answers,) = run(engine, [greedy_request(prompt, 44, n=8)], max_steps=500)
    assert [answer.ids for answer in answers] == [oracle.greedy(prompt, 44)] * 8
    assert_idle(engine)


def test_k6_prompts_that_fill_the_pool_in_chunks(small: Path, oracle: Oracle) -> None:
    """A sibling: long prompts in small steps, each too large beside another, none half in for ever."""
    engine = checked(pool_of(small, 9, max_batch_tokens=16, max_num_seqs=4)[0])
    requests = [greedy_request(prompt_of(100 + i, 40 + i), 20) for i in range(4)]
    for request, ids in zip(requests, ids_of(engine, requests), strict=True):
        assert ids == oracle.greedy(request.prompts[0], 20)
    assert_idle(engine)


@pytest.mark.parametrize("newcomers", [0, 1])
def test_also_seen_priority_does_not_starve_the_preempted(newcomers: int) -> None:
    """A logical block is 4 tokens and, as mqa, one physical. Two of priority 0 run in 8 blocks, 6 each at
    their ends; the second is pushed out, and a new request of its priority comes before every step: it keeps
    its arrival, so it is back before any of them."""
    line = Line(8, prefix_cache=False)
    first, second = line.add("mqa", 4, 20, priority=0), line.add("mqa", 4, 20, priority=0)
    late: list[str] = []
    back: list[str] = []
    for _ in range(200):
        late += [line.add("mqa", 4, 4, priority=0) for _ in range(newcomers)] if len(late) < 30 else []
        pushed_out = (
            line.preempted > 0 and second in line.works and line.works[second].sequences[0].slot is None
        )
        plan = line.step()
        ran = [entry.sequence.work.request.id for entry in plan.entries]
        if pushed_out and second not in ran:
            back += [name for name in ran if name in late]
        if not line.works:
            break
    assert line.preempted > 0
    assert line.ended[first] < line.ended[second]
    assert back == [], "none of those behind it ran while it waited"
    assert all(name in line.ended for name in late)


def test_also_seen_priority_pushes_out_the_last_and_lets_it_back() -> None:
    """A better priority takes room from a worse one when it grows; when it is done, the worse one goes on
    from its place, before others of its priority that came later."""
    line = Line(8, prefix_cache=False)
    worse = line.add("mqa", 8, 20, priority=5)
    line.step()
    better = line.add("mqa", 4, 24, priority=-5)
    late = [line.add("mqa", 4, 8, priority=5) for _ in range(3)]
    line.run(200)
    assert line.preempted > 0
    assert line.ended[better] < line.ended[worse] < min(line.ended[name] for name in late)


def test_k7_two_hundred_requests_leave_nothing(small: Path) -> None:
    """Distinct short requests; what stays is cached, not live, and the gauges add up under load."""
    engine = fp32_engine(small, kv_memory=1 << 20, max_num_seqs=16)[0]
    for i in range(200):
        engine.add(greedy_request(prompt_of(18, 1000 + i), 3))
    manager = manager_of(engine)
    while engine.has_work:
        engine.step()
        assert manager.free_blocks + manager.cached_blocks + manager.live_blocks == manager.total
        assert min(manager.free_blocks, manager.cached_blocks, manager.live_blocks) >= 0
    assert_idle(engine)
    assert manager.cached_blocks > 0
    assert engine.stats().finished_length == 200
    assert engine.stats().finished_abort == 0


@pytest.mark.parametrize("fails", ["open", "extend", "fork", "advance"])
def test_k7_an_allocation_that_raises_leaks_nothing(small: Path, oracle: Oracle, fails: str) -> None:
    """A fault on purpose in the middle of the cache's work, with hits held and copies planned: the request it
    hits gets the error (or, in `advance`, the engine says that it is dead), no block stays behind."""
    engine = fp32_engine(small, max_batch_tokens=64, max_num_seqs=8)[0]
    manager = manager_of(engine)
    prompt = prompt_of(70, 5)
    run(engine, [greedy_request(prompt, 4)])
    before = (manager.free_blocks + manager.cached_blocks, manager.live_blocks)
    method, calls = getattr(manager, fails), [0]

    def failing(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("a fault on purpose")
        return method(*args, **kwargs)

    setattr(manager, fails, failing)
    answers = run(engine, [greedy_request(prompt, 6, n=3), greedy_request(prompt_of(30, 1), 6)])
    setattr(manager, fails, method)
    assert calls[0] >= 2
    if fails == "advance":
        assert engine.dead is not None
        assert all(answer.finish is FinishReason.ERROR for choices in answers for answer in choices)
        return
    assert engine.dead is None
    manager.check()
    assert (manager.free_blocks + manager.cached_blocks, manager.live_blocks) == before
    assert run(engine, [greedy_request(prompt, 6)])[0][0].ids == oracle.greedy(prompt, 6)


def test_k7_a_failed_suffix_leaves_the_hits_as_they_were() -> None:
    """A prefix is matched and held, then its suffix finds no room: no reference count has moved."""
    harness = Harness(make_manager(6, block_size=4))
    account = harness.account("mqa")
    first = harness.open(account, "a", [1] * 8)
    assert first is not None and harness.extend(first, 8)
    harness.run()
    harness.close(first)
    other = harness.open(account, "b", [2] * 8)
    assert other is not None and harness.extend(other, 8)
    again = harness.open(account, "a", [1] * 20)
    assert again is not None and harness.open_[again].computed == 8
    refs = harness.manager.state.store.refs.copy()
    assert not harness.extend(again, 20)  # 3 more, of 2
    assert (harness.manager.state.store.refs == refs).all()
    assert harness.extend(again, 16)
    harness.close(again)
    assert harness.manager.cached_blocks == 2 and harness.manager.live_blocks == 2


def test_k7_ten_thousand_random_calls_equal_the_model() -> None:
    """Takes, releases, forks, ends in any order; after each call the books are those of a plain model."""
    drive(Harness(make_manager(90, max_seqs=8, max_seq_len=32)), 10_000, seed=1)
