"""Where drafts come from, how far they are trusted, and what a step is thought to take."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from server.engine.drafting import Drafting
from server.engine.errors import ConfigError
from server.engine.ngrams import LENGTHS, NGrams
from server.engine.request import Constraint, Request, SamplingParams
from server.engine.sequence import Sequence, Work
from server.engine.speculation import LONGEST, Speculation, choose_speculation, draftable, rows_each
from server.engine.step_cost import StepCost


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def by_hand(ids: list[int], count: int) -> list[int]:
    """The definition: the last place where the longest n-gram stood before, and what came after it; where
    that runs into the end, the text goes on as it went on before."""
    for length in LENGTHS:
        for at in range(len(ids) - 1, length - 1, -1):
            if ids[at - length : at] == ids[-length:]:
                grown = list(ids)
                for _ in range(count):
                    grown.append(grown[len(grown) - (len(ids) - at)])
                return grown[len(ids) :]
    return []


@pytest.mark.parametrize("kinds", [2, 5, 40])
def test_what_followed_last_time(kinds: int) -> None:
    """A table that is large for the text loses nothing here; the text is seen as it grows, in any steps."""
    right = asked = 0
    for seed in range(6):
        dice = random.Random(f"{kinds}-{seed}")
        text = [dice.randrange(kinds) for _ in range(200)]
        grams, at = NGrams(), 1
        while at < len(text):
            expected = by_hand(text[:at], 6)
            found = grams.follow(array(text[:at]), 6)
            right, asked = right + (found == expected), asked + 1
            assert found == expected or not found or len(found) == 6
            at += dice.choice([1, 1, 2, 7, 50])
    assert right >= 0.9 * asked, "a lost n-gram is an exception: two in one place"


def test_a_text_noted_at_once_and_id_by_id_gives_the_same() -> None:
    dice = random.Random(1)
    text = [dice.randrange(2**31) for _ in range(60)]
    growing, whole = NGrams(), NGrams()
    for at in range(33, len(text) + 1):
        growing.follow(array(text[:at]), 4)
    whole.follow(array(text), 4)
    for one, other in zip(growing._tables, whole._tables, strict=True):
        assert np.count_nonzero(one) > 40 and (one == other).all()


def test_short_texts_and_large_ids() -> None:
    top = 2**31 - 1
    grams = NGrams()
    assert grams.follow(array([5]), 4) == [] and grams.follow(array([5, 5]), 4) == []
    assert grams.follow(array([5, 5, 5]), 4) == [5, 5, 5, 5], "two of them stood there before"
    assert NGrams().follow(array([top, top - 1, 3, top, top - 1]), 2) == [3, top]


def test_memory_is_a_few_bytes_an_id() -> None:
    text = array(list(np.random.default_rng(0).integers(0, 50_000, 100_000)))
    tracemalloc.start()
    grams = NGrams()
    grams.follow(text, 4)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 16 * 4 * len(LENGTHS) * len(text) + 4096


def test_a_rate_follows_what_becomes_of_drafts() -> None:
    drafting = Drafting(NGrams())
    start = drafting.rate
    drafting.learn(4, 4)
    assert start < drafting.rate < 1
    for _ in range(60):
        drafting.learn(8, 8)
    assert drafting.rate > 0.99
    for _ in range(40):
        drafting.learn(8, 0)
    assert drafting.rate < 0.01
    drafting.waited = 7
    drafting.learn(1, 1)
    assert drafting.waited == 0 and drafting.rate > 0.1


def flat_then_proportional(tokens: int) -> float:
    """SmolLM2-135M on two cores: memory-bound to 14 tokens, 0.62 ms each after that."""
    return max(9e-3, 0.62e-3 * tokens)


def test_what_a_step_takes_is_learnt_from_steps() -> None:
    cost = StepCost()
    assert cost.seconds(2) == cost.seconds(1) < cost.seconds(64) == pytest.approx(8 * cost.seconds(8))
    for _ in range(60):
        for tokens in (1, 2, 3, 6, 9, 16, 31, 40, 64, 200):
            cost.note(tokens, flat_then_proportional(tokens))
    for tokens in (1, 4, 8, 16, 32, 64, 128):
        assert cost.seconds(tokens) == pytest.approx(flat_then_proportional(tokens), rel=0.2), tokens
    assert cost.seconds(4096) == pytest.approx(0.62e-3 * 4096, rel=0.2), "beyond what was seen: in proportion"


def test_the_first_step_sets_the_scale() -> None:
    cost = StepCost()
    cost.note(40, 0.02)
    assert cost.seconds(40) == pytest.approx(0.02)
    assert cost.seconds(1) == pytest.approx(0.02 / 5) and cost.seconds(80) == pytest.approx(0.04)


def test_what_was_not_seen_lies_between_what_was() -> None:
    cost = StepCost()
    cost.note(8, 1.0)
    cost.note(128, 4.0)
    assert cost.seconds(8) == 1 and cost.seconds(128) == 4
    line = [cost.seconds(tokens) for tokens in range(1, 300)]
    assert line == sorted(line)
    assert cost.seconds(64) == pytest.approx(1 + 3 * 56 / 120)


def test_one_slow_step_is_no_news() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.note(1, 0.01)
    cost.note(1, 5.0)
    assert cost.seconds(1) < 0.0125


def test_whatever_is_noted_steps_take_time_and_longer_ones_no_less() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        cost = StepCost()
        for _ in range(300):
            cost.note(
                dice.choice([1, 2, 3, 7, 9, 13, 24, 33, 120, 300_000]), dice.choice([0.0, 1e-9, 1e-3, 50.0])
            )
            line = [cost.seconds(tokens) for tokens in (1, 2, 3, 4, 6, 9, 16, 25, 64, 99, 2**17, 2**20)]
            assert line[0] > 0 and line == sorted(line)


def test_a_hiccup_that_was_noted_first_is_soon_undone() -> None:
    cost = StepCost()
    cost.note(2, 3.0)
    cost.note(1, 0.01)
    assert cost.seconds(2) == pytest.approx(0.02), "twice the tokens, at most twice the time"
    for _ in range(5):
        cost.note(2, 0.011)
    assert cost.seconds(2) == pytest.approx(0.011, rel=0.05)


class Told:
    """A source with one answer."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def follow(self, tokens: np.ndarray, count: int) -> list[int]:
        return self.ids[:count]


def sequence(rate: float, *ids: int, **fields: object) -> Sequence:
    settings = {"max_tokens": 100, "sampling": SamplingParams(temperature=0.0)} | fields
    request = Request(id="r", variant="native", prompts=((1, 2, 3),), n=1, cache_root=bytes(32), **settings)  # type: ignore[arg-type]
    made = Work(request, 0, 0, 16, capacity=64).sequences[0]
    made.drafting = Drafting(Told(*ids))
    made.drafting.rate = rate
    return made


class Line(StepCost):
    """Free up to so many tokens, then each as much as a whole free step."""

    def __init__(self, free: int) -> None:
        self._free = free

    def seconds(self, tokens: int) -> float:
        return float(max(1, tokens - self._free + 1))


def test_the_likeliest_drafts_share_the_rows_that_are_free() -> None:
    sure, doubtful, hopeless = sequence(0.95, *range(9)), sequence(0.88, *range(9)), sequence(0.05, *range(9))
    drafted = Speculation(Line(8)).propose([sure, doubtful, hopeless], 3, 100)
    counts = {id(s): len(drafts) for s, drafts in drafted}
    assert sum(counts.values()) == 5 and id(hopeless) not in counts
    assert counts[id(sure)] == 4 and counts[id(doubtful)] == 1, "0.95, 0.90, 0.88, 0.86, 0.81"
    assert Speculation(Line(8)).propose([sure], 8, 100) == [], "no row is free"
    assert [len(d) for _, d in Speculation(Line(99)).propose([sure], 1, 3)] == [3], "there is room for 3"
    assert [len(d) for _, d in Speculation(Line(99)).propose([sure], 1, 100)] == [LONGEST]


def test_drafts_end_before_a_stop_and_before_the_longest_answer() -> None:
    cost = Line(99)
    assert Speculation(cost).propose([sequence(0.9, 7, 8, 9, stop_ids=frozenset({9}))], 1, 9)[0][1] == [7, 8]
    assert Speculation(cost).propose([sequence(0.9, 9, 8, stop_ids=frozenset({9}))], 1, 9) == []
    assert Speculation(cost).propose([sequence(0.9, 7, 8, 9, max_tokens=3)], 1, 9)[0][1] == [7, 8]
    assert draftable(sequence(0.9, max_tokens=100)) == 64 - 3 - 1, "a prompt of 3 in room for 64"
    assert draftable(sequence(0.9, constraint=Constraint(b""))) == 0
    assert draftable(sequence(0.9, min_tokens=2)) > 0, "without stop ids there is nothing to forbid"


def test_who_is_not_worth_a_row_is_tried_again_after_a_pause() -> None:
    tried = sequence(0.001, 5, 6, 7)
    speculation = Speculation(Line(99))
    waits = 0
    while not (drafted := speculation.propose([tried], 1, 9)):
        waits += 1
        assert waits < 100
    assert waits > 20 and drafted[0][1] == [5]
    speculation.learn(tried, 1, 0)
    assert speculation.propose([tried], 1, 9) == []


def test_a_slow_start_does_not_settle_what_a_row_costs() -> None:
    """The first step was slow, and steps of one token, which are not, say nothing of steps of two."""
    speculation = Speculation()
    speculation.cost.note(3, 5.0)
    speculation.cost.note(1, 0.01)
    alone = sequence(0.9, 7, 8, 9)
    trials = 0
    for _ in range(400):
        drafted = speculation.propose([alone], 1, 9)
        tokens = 1 + sum(len(drafts) for _, drafts in drafted)
        trials += tokens == 2
        speculation.cost.note(tokens, 0.01)
    assert tokens > 2 and trials >= 1, "one trial, and drafts pay"


def test_no_trial_where_a_row_usually_costs() -> None:
    crowd = [sequence(0.9, 7, 8, 9) for _ in range(12)]
    speculation = Speculation(Line(1))
    assert not any(speculation.propose(crowd, 12, 99) for _ in range(100))


def test_the_option() -> None:
    assert (rows_each("off"), rows_each("ngram")) == (1, 1 + LONGEST)
    assert choose_speculation("off") is None and choose_speculation("ngram") is not None
    with pytest.raises(ConfigError, match="--speculate often: must be ngram or off"):
        choose_speculation("often")
