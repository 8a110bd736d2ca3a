"""Small mqa requests cannot starve a large mha one: who starts when, who gives way, and when all is done.

No model runs here; the arithmetic of each test is in its words. A logical block is 4 tokens, and 1 (mqa), 2
(native) or 6 (mha) physical blocks.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scheduling import BLOCK, HEADS, Line


def steady(line: Line, steps: int, mode: str = "mqa", prompt: int = 7, output: int = 16) -> list[str]:
    """One small request before each step."""
    names = []
    for _ in range(steps):
        names.append(line.add(mode, prompt, output))
        line.step()
    return names


def test_a_large_mha_among_a_steady_stream_of_mqa() -> None:
    """A small request takes 16 steps (7 + 16 tokens: 6 blocks), so with one a step 16 run at once and hold at
    most 96 of the 120 blocks. The large one's prompt of 60 tokens is 15 logical blocks, 90 physical: it must
    wait, and while it does nobody behind it comes in. The youngest of those before it came one step ago, and
    all are done 15 steps later; then it starts, at the latest, and takes 10 steps, whoever comes
    in behind it."""
    line = Line(120, seqs=32)
    steady(line, 40)
    assert len(line.scheduler.waiting) == 0 and len(line.scheduler.running) == 15
    arrival = line.step_number
    large = line.add("mha", 60, 10)
    later = steady(line, 60)
    assert arrival < line.started[large] <= arrival + 15
    assert line.ended[large] == line.started[large] + 9, "a token in every step from its first on"
    assert line.started[large] <= min(line.started[name] for name in later if name in line.started)


@pytest.mark.parametrize("seqs", [4, 8])
def test_places_do_not_go_to_the_small_ones_either(seqs: int) -> None:
    """All places are taken and a backlog stands: the large one gets the first place after those before it.
    Each place serves a request in 16 steps, so `backlog` of them and those running are through in
    16 * ceil((backlog + seqs) / seqs) steps."""
    line = Line(2000, seqs=seqs)
    backlog = [line.add("mqa", 7, 16) for _ in range(20)]
    line.step()
    large = line.add("mha", 60, 10)
    later = steady(line, 16 * -(-20 // seqs) + 20)
    assert line.started[large] <= 16 * -(-20 // seqs)
    assert all(line.started[name] <= line.started[large] for name in backlog)
    assert all(line.started.get(name, 10**6) >= line.started[large] for name in later)
    assert large in line.ended


def test_a_large_mha_that_grows_takes_from_those_behind_it() -> None:
    """It runs first and grows from 10 to 19 logical blocks, 114 of the 120; mqa requests fill the rest and
    give way, the last first; it never waits: 36 tokens in 36 steps."""
    line = Line(120, seqs=32)
    large = line.add("mha", 40, 36)
    steady(line, 35)
    line.step()
    assert (line.started[large], line.ended[large]) == (0, 35)
    assert line.preempted > 0
    line.run(2000)


def test_an_mha_that_was_pushed_out_comes_back_before_its_juniors() -> None:
    """Two large ones do not fit together: the second gives way, keeps its place in the order, and nobody of
    the stream that followed it starts before it is back."""
    line = Line(60, seqs=16, prefix_cache=False)
    first, second = line.add("mha", 12, 28), line.add("mha", 12, 24)
    line.step()
    small = [line.add("mqa", 7, 16) for _ in range(5)]
    while not line.preempted:
        line.step()
    back: list[str] = []
    while second not in line.ended:
        late = line.add("mqa", 7, 16)
        plan = line.step()
        back += [entry.sequence.work.request.id for entry in plan.entries]
        assert late not in back
    assert line.ended[first] < line.ended[second]
    line.run(2000)
    assert all(name in line.ended for name in small)


@pytest.mark.parametrize(
    "order", [("mqa", "mha", "native"), ("native", "mqa", "mha"), ("mha", "native", "mqa")]
)
def test_the_victim_is_the_last_whatever_its_mode(order: tuple[str, str, str]) -> None:
    """Equal lengths, one of each mode, in a pool that holds their prompts and not their answers."""
    line = Line(30, prefix_cache=False)
    names = [line.add(mode, 7, 13) for mode in order]
    line.step()
    assert [s.work.request.id for s in line.scheduler.running] == names, "all three run"
    while not line.preempted:
        line.step()
    assert [s.work.request.id for s in line.scheduler.waiting] == names[-1:]
    line.run(200)
    assert line.ended[names[0]] <= line.ended[names[1]]


def test_priority_comes_before_arrival_in_both_directions() -> None:
    """A better priority goes first in the queue and gives way last; mode and size count for nothing."""
    line = Line(30, prefix_cache=False)
    ordinary = [line.add("mqa", 7, 13), line.add("mha", 7, 13)]
    urgent = line.add("mha", 7, 13, priority=-1)
    line.step()
    assert line.started == {urgent: 0, ordinary[0]: 0}, "the second mha found no room"
    line.run(200)
    assert line.ended[urgent] == 12
    assert line.ended[ordinary[0]] <= line.ended[ordinary[1]]


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, str, int, int, int, int]]:
    """(step of arrival, mode, prompt, output, n, seed) of up to 14 requests for a pool of 36 blocks."""
    made = []
    for _ in range(draw(st.integers(2, 14))):
        mode = draw(st.sampled_from(sorted(HEADS)))
        most = 36 // HEADS[mode] * BLOCK
        prompt = draw(st.integers(1, min(most - 1, 40)))
        output = draw(st.integers(1, min(most - prompt, 30)))
        arrival, n, seed = draw(st.integers(0, 30)), draw(st.integers(1, 3)), draw(st.integers(-1, 1))
        made.append((arrival, mode, prompt, output, n, seed))
    return sorted(made)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    made=requests(),
    seqs=st.integers(1, 6),
    batch_tokens=st.integers(6, 40),
    prefix_cache=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
def test_any_mixture_is_served_in_order_and_to_the_end(
    made: list[tuple[int, str, int, int, int, int]],
    seqs: int,
    batch_tokens: int,
    prefix_cache: bool,
    dice: random.Random,
) -> None:
    """The first in line progresses by a token a step at least and is never pushed out, so with one priority
    there are no more steps than tokens. Rules of order and every counter are checked after each step."""
    line = Line(36, batch_tokens=batch_tokens, seqs=seqs, prefix_cache=prefix_cache)
    tokens = max(arrival for arrival, *_ in made) + sum(n * (p + o) for _, _, p, o, n, _ in made)
    waiting = list(made)
    while waiting or line.works:
        while waiting and waiting[0][0] <= line.step_number:
            _, mode, prompt, output, n, seed = waiting.pop(0)
            line.add(mode, prompt, output, n=n, seed=seed)
        if line.works and dice.random() < 0.02:
            line.abort(dice.choice(list(line.works)))
        if line.works:
            plan = line.step()
            assert plan.entries, "a step with work in it does some"
        else:
            line.step_number += 1
        assert line.step_number <= tokens
    assert line.manager.live_blocks == 0 and set(line.manager.live_bytes().values()) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_mixed_priorities_end_too(seed: int) -> None:
    """Now a late request may go first; still everybody ends, in at most so many steps: whoever is first among
    those running progresses, and each arrival can push each of the others out once more."""
    dice = random.Random(seed)
    line = Line(36, batch_tokens=20, seqs=5)
    for _ in range(40):
        mode = dice.choice(sorted(HEADS))
        prompt = dice.randint(1, 12)
        line.add(
            mode, prompt, dice.randint(1, 24 - prompt), priority=dice.randint(-1, 1), n=dice.randint(1, 2)
        )
        for _ in range(dice.randint(0, 6)):
            if line.works:
                line.step()
    line.run(40 * 2 * 24 * 5)
    assert len(line.ended) == 40
