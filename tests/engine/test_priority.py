"""Priorities: lower goes first, nothing but the number and the arrival counts, and nobody's place changes.

The scheduler's part runs without a model (a logical block is 4 tokens, and 2 physical blocks of `native`);
the answers are compared with transformers'.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from server.engine.request import FinishReason
from tests.engine.conftest import Oracle
from tests.support.driving import greedy_request, run
from tests.support.engines import checked, manager_of, pool_of, prompt_of
from tests.support.scheduling import Line


def in_order(line: Line) -> list[str]:
    """Requests by the step in which they first ran."""
    return sorted(line.started, key=lambda name: line.started[name])


def test_lower_runs_first_among_those_that_wait() -> None:
    """One place, so requests run one after the other: by priority, then by arrival. The one that runs when
    the others come is not disturbed: there is room for it."""
    line = Line(200, seqs=1)
    first = line.add("native", 5, 5, priority=9)
    line.step()
    priorities = [3, 0, -1, 3, 2**31 - 1, -(2**31), 0]
    names = [line.add("native", 5, 5, priority=priority) for priority in priorities]
    line.run(400)
    right = [names[i] for i in sorted(range(len(names)), key=lambda i: (priorities[i], i))]
    assert in_order(line) == [first, *right]
    assert line.ended[first] == 4 and line.preempted == 0


def test_victims_are_the_last_in_priority_then_arrival() -> None:
    """Four sequences fill the pool and grow together; they are pushed out from the end of the order, and the
    first of it never is, whichever came first."""
    line = Line(24, prefix_cache=False)  # 12 logical blocks; four of 7 + 17 tokens want 24
    priorities = {line.add("native", 7, 17, priority=p): p for p in (5, -2, 0, 5)}
    order = [name for name, _ in sorted(priorities.items(), key=lambda pair: pair[1])]  # stable: by arrival
    line.step()
    assert [s.work.request.id for s in line.scheduler.running] == order, "all four run"
    victims: list[str] = []
    while line.works:
        before = [s.work.request.id for s in line.scheduler.running]
        line.step()
        now = {s.work.request.id for s in line.scheduler.running} | set(line.ended)
        victims += [name for name in reversed(before) if name not in now]
    assert victims[:2] == [order[3], order[2]]
    assert order[0] not in victims
    assert [line.ended[name] for name in order] == sorted(line.ended.values())
    assert line.ended[order[0]] == 16, "17 tokens in 17 steps: it never waited"


def test_waiting_changes_no_priority() -> None:
    """What has waited long still gives way to what came later with a lower number, as often as it comes: a
    steady flow of lower numbers holds back higher ones, and once it ends they run."""
    line = Line(200, seqs=2)
    low = line.add("native", 5, 4, priority=1)
    for _ in range(2):
        line.add("native", 5, 4)
    line.step()
    assert low not in line.started
    for _ in range(60):  # two requests come for every two places that open
        if len(line.scheduler.waiting) < 3:
            line.add("native", 5, 4)
        line.step()
    assert low not in line.started
    assert line.works[low].sequences[0].key[0] == 1
    line.run(40)
    assert in_order(line)[-1] == low


def test_the_preempted_keep_their_arrival() -> None:
    """Requests of the same priority that come after one was pushed out never run before it is back; nor do
    those of a higher number. One of a lower number does."""
    line = Line(24, seqs=8, prefix_cache=False)
    first, second = line.add("native", 10, 30), line.add("native", 10, 26)
    line.step()
    while not line.preempted:
        line.step()
    key = line.works[second].sequences[0].key
    later = [line.add("native", 3, 4, priority=p) for p in (0, 0, 7)]
    urgent = line.add("native", 3, 4, priority=-1)
    while line.works[second].sequences[0].slot is None:
        assert not set(later) & line.started.keys()
        line.add("native", 3, 4)
        line.step()
        assert urgent in line.started
    assert line.works[second].sequences[0].key == key
    while second in line.works:  # it is first in line now, and is not pushed out again
        line.step()
        assert second in line.ended or line.works[second].sequences[0].slot is not None
    assert line.ended[first] < line.ended[second]
    line.run(2000)
    assert urgent in line.ended and set(later) <= line.ended.keys()


@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_held_back_by_its_betters_only(seed: int) -> None:
    """Pushed out or not, each request ends within the tokens of those of its number or lower that came while
    it was in flight and before it, whatever crowd of higher numbers, or later ones of its own, there is:
    every step gives a token to the first in line, so no step is lost to anybody behind."""
    dice = random.Random(seed)
    line = Line(30, seqs=6, batch_tokens=64, prefix_cache=False)
    asked: dict[str, tuple[int, int, int, int]] = {}  # priority, arrival number, tokens, step
    for number in range(30):
        priority, prompt, output = dice.randint(0, 2), dice.randint(1, 12), dice.randint(1, 20)
        name = line.add("native", prompt, output, priority=priority)
        asked[name] = (priority, number, output + 1, line.step_number)
        line.step()
    line.run(5000)
    for name, (priority, number, _, step) in asked.items():
        before = [
            tokens
            for p, n, tokens, s in asked.values()
            if (p, n) <= (priority, number) and s <= line.ended[name]
        ]
        assert line.ended[name] - step <= sum(before)
    assert line.preempted > 0, "the pool was small enough"


def test_answers_do_not_depend_on_priorities(small: Path, oracle: Oracle) -> None:
    """Six of four blocks each in a pool of twelve: many are pushed out, each says what it says alone, and
    they end in the order of their numbers."""
    engine = checked(pool_of(small, 12)[0])
    prompts = [prompt_of(20, 90 + i) for i in range(6)]
    priorities = [2, -1, 2, 0, 1, -1]
    requests = [
        greedy_request(prompt, 44, priority=priority)
        for prompt, priority in zip(prompts, priorities, strict=True)
    ]
    ended: list[str] = []
    step = engine.step

    def watched() -> list[object]:
        events = step()
        ended.extend(event.request_id for event in events if event.finish)
        return list(events)

    engine.step = watched  # type: ignore[method-assign, assignment]
    for (answer,), prompt in zip(run(engine, requests), prompts, strict=True):
        assert (answer.ids, answer.finish) == (oracle.greedy(prompt, 44), FinishReason.LENGTH)
    right = sorted(range(6), key=lambda i: (priorities[i], i))
    assert [ended.index(requests[i].id) for i in right] == sorted(ended.index(r.id) for r in requests)
    assert engine.stats().preemptions > 0 and manager_of(engine).live_blocks == 0
