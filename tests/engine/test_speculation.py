"""Drafts change how many steps an answer takes, and nothing else: no id, no score, no block that stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.arrays import Int32
from server.engine.engine import Engine
from server.engine.request import FinishReason, Request, SamplingParams
from server.engine.speculation import LONGEST, Speculation
from server.engine.step_cost import StepCost
from tests.support.checkpoints import make_chain
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import (
    Flat,
    checked,
    manager_of,
    on_batches,
    pool_of,
    prompt_of,
    run_staggered,
)

WARM = SamplingParams(temperature=0.8, seed=11)
NARROW = SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=12, logit_bias=((7, 2.0), (9, -3.0)))


class Steep(StepCost):
    """Ten tokens take ten times as long as one."""

    def seconds(self, tokens: int) -> float:
        return float(tokens)


class Gossip:
    """A source that knows the texts to come, and now and then says something else."""

    def __init__(self, texts: Sequence[Sequence[int]], lies: float, dice: random.Random) -> None:
        self._texts = texts
        self._lies = lies
        self._dice = dice

    def follow(self, tokens: Int32, count: int) -> list[int]:
        known = tokens.tolist()
        for text in self._texts:
            if list(text[: len(known)]) == known:
                told = list(text[len(known) : len(known) + count])
                return [0 if self._dice.random() < self._lies else token for token in told]
        return [5] * count


def speculating(engine: Engine, speculation: Speculation) -> Engine:
    """The same engine with these drafts."""
    engine._speculation = speculation
    engine._scheduler._speculation = speculation
    engine._commit._speculation = speculation
    return engine


def gossiping(
    engine: Engine, requests: Sequence[Request], answers: Sequence[Sequence[Answer]], lies: float
) -> Engine:
    """An engine that is told what each choice said without drafts."""
    texts = [
        (*request.prompts[choice // request.n], *answer.ids)
        for request, told in zip(requests, answers, strict=True)
        for choice, answer in enumerate(told)
    ]
    dice = random.Random(4)
    return speculating(engine, Speculation(Flat(), lambda: Gossip(texts, lies, dice)))


def assert_same(plain: Sequence[Sequence[Answer]], drafted: Sequence[Sequence[Answer]]) -> None:
    """Ids, ends and scores of all; the cache of those who share none with a sibling."""
    for one, other in zip(plain, drafted, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.ids, a.finish, a.error) == (b.ids, b.finish, b.error)
            for x, y in zip(a.scores, b.scores, strict=True):
                assert (x is None) == (y is None)
                if x is not None and y is not None:
                    assert [i for i, _ in x.top] == [i for i, _ in y.top]
                    assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            if len(one) == 1:  # what was exclusive at a peak depends on who else was there then
                assert a.kv is not None and b.kv is not None
                assert replace(a.kv, exclusive=0) == replace(b.kv, exclusive=0)


def crowd(tokens: int = 30) -> list[Request]:
    """Greedy and sampled, one choice and several, short and long, a shared prefix, scores, a bias."""
    shared = prompt_of(40, 3)
    return [
        greedy_request(shared, tokens),
        greedy_request((*shared, 9), tokens, sampling=WARM, logprobs=2),
        greedy_request(prompt_of(3, 4), tokens + 9, sampling=NARROW),
        greedy_request(prompt_of(17, 5), tokens - 7, n=3, sampling=WARM),
        greedy_request(prompt_of(33, 6), tokens, logprobs=0),
        greedy_request(prompt_of(16, 7), 1),
        greedy_request(prompt_of(15, 8), 2, sampling=WARM),
    ]


@pytest.mark.parametrize("lies", [0.0, 0.3, 1.0])
def test_a_crowd_says_what_it_says_without_drafts(small: Path, lies: float) -> None:
    plain, asked = fp32_engine(small)[0], crowd()
    expected = run(plain, asked)
    engine = gossiping(checked(fp32_engine(small, debug=True)[0]), asked, expected, lies)
    again = crowd()
    assert_same(expected, run(engine, again))
    stats = engine.stats()
    assert stats.output_tokens == plain.stats().output_tokens
    assert stats.batched_tokens == plain.stats().batched_tokens + stats.draft_tokens - stats.accepted_tokens
    assert stats.draft_tokens > 0
    if lies == 0:
        # Where two choices have said the same so far, the gossip is of the first of them.
        assert stats.accepted_tokens > 0.95 * stats.draft_tokens and stats.steps < plain.stats().steps / 3
    if lies == 1:
        assert stats.accepted_tokens == 0 and stats.steps == plain.stats().steps
    assert manager_of(engine).live_blocks == 0


def test_arriving_late_with_hits_and_in_small_steps(small: Path) -> None:
    arrivals = [(5 * i, request) for i, request in enumerate(crowd())]
    plain = fp32_engine(small, max_num_seqs=4, max_batch_tokens=6)[0]
    expected = run_staggered(plain, arrivals)
    asked = [request for _, request in arrivals]
    told = [expected[request.id] for request in asked]
    engine = fp32_engine(small, max_num_seqs=4, max_batch_tokens=6, debug=True)[0]
    sizes: list[int] = []
    on_batches(engine, lambda batch: sizes.append(len(batch.ids)))
    answers = run_staggered(gossiping(checked(engine), asked, told, 0.2), arrivals)
    assert_same(told, [answers[request.id] for request in asked])
    assert max(sizes) <= 6 and engine.stats().accepted_tokens > 20


def test_in_a_pool_that_is_too_small(small: Path) -> None:
    """Sequences are pushed out and come back as without drafts, which take nothing from anybody."""
    asked = [greedy_request(prompt_of(20 + i, i), 40, sampling=WARM) for i in range(6)]
    plain = pool_of(small, 14)[0]
    expected = run(plain, asked)
    assert plain.stats().preemptions > 0
    engine = gossiping(checked(pool_of(small, 14, debug=True)[0]), asked, expected, 0.3)
    answers = run(engine, asked)
    assert [a.ids for (a,) in answers] == [a.ids for (a,) in expected]
    assert engine.stats().preemptions > 0 and engine.stats().accepted_tokens > 0
    assert engine.peak_live_bytes() <= 14 * 2 * manager_of(engine).state.layout.block_bytes
    assert manager_of(engine).live_blocks == 0


def test_drafts_take_no_block_that_the_prefix_index_knows(small: Path) -> None:
    """A pool of 8 blocks, 6 of them cached and one free beside what runs: no draft drives one out."""
    first, second = greedy_request(prompt_of(96, 1), 1), greedy_request(prompt_of(12, 2), 25)
    plain = pool_of(small, 8)[0]
    expected = run(plain, [first]) + run(plain, [second])
    engine = gossiping(checked(pool_of(small, 8, debug=True)[0]), [first, second], expected, 0.4)
    answers = run(engine, [first]) + run(engine, [second])
    assert_same(expected, answers)
    assert engine.stats().accepted_tokens > 5
    assert manager_of(engine).cached_blocks == manager_of(plain).cached_blocks
    again, _ = pool_of(small, 8)
    run(again, [first])
    kv = run(engine, [greedy_request(prompt_of(96, 1), 1)])[0][0].kv
    assert kv is not None and kv.cached_tokens == 80, "all but the last block of it is still there"


def test_what_ends_an_answer_ends_it_among_drafts(small: Path) -> None:
    (free,) = run(fp32_engine(small)[0], [greedy_request(prompt_of(9, 1), 60)])
    for position in (1, 2, 5, 16, 40):
        stop = free[0].ids[position]
        first = free[0].ids.index(stop)
        (plain,) = run(fp32_engine(small)[0], [greedy_request(prompt_of(9, 1), 60, stop_ids=[stop])])
        engine = checked(fp32_engine(small, debug=True)[0])
        asked = greedy_request(prompt_of(9, 1), 60, stop_ids=[stop])
        (answer,) = run(gossiping(engine, [asked], [free], 0.0), [asked])
        assert_same([plain], [answer])
        assert answer[0].finish == FinishReason.STOP and answer[0].ids == free[0].ids[: first + 1]
    for tokens in (1, 2, 8, 9, 10):
        asked = greedy_request(prompt_of(9, 1), tokens)
        engine = gossiping(checked(fp32_engine(small, debug=True)[0]), [asked], [free], 0.0)
        (answer,) = run(engine, [asked])
        assert answer[0].finish == FinishReason.LENGTH and answer[0].ids == free[0].ids[:tokens]
        assert engine.stats().draft_tokens <= max(0, tokens - 2), "none that could not be said"


def test_a_block_of_refused_drafts_is_in_no_request_s_peak(small: Path) -> None:
    """16 tokens are written, and the answer stops; drafts had reached into a second block."""
    (free,) = run(fp32_engine(small)[0], [greedy_request(prompt_of(9, 1), 60)])
    stop = free[0].ids[7]
    assert free[0].ids.index(stop) == 7 and 5 not in free[0].ids[:8]
    asked = greedy_request(prompt_of(9, 1), 60, stop_ids=[stop])
    engine = checked(fp32_engine(small, debug=True)[0])
    (answer,) = run(gossiping(engine, [], [], 1.0), [asked])
    block_bytes = manager_of(engine).state.layout.block_bytes
    assert engine.peak_live_bytes() == 2 * 2 * block_bytes, "two KV heads, and a block more for a step"
    assert answer[0].kv is not None and (answer[0].kv.blocks, answer[0].kv.tokens) == (2, 16)


def test_capacity_ends_an_answer_among_drafts(small: Path) -> None:
    asked = greedy_request(prompt_of(9, 1), 60)
    (free,) = run(fp32_engine(small)[0], [asked])
    engine = checked(fp32_engine(small, max_model_len=32, debug=True)[0])
    (answer,) = run(gossiping(engine, [asked], [free], 0.0), [asked])
    assert answer[0].finish == FinishReason.LENGTH and answer[0].ids == free[0].ids[: 32 - 9]


def test_several_tokens_of_a_step_come_in_order(small: Path) -> None:
    asked = greedy_request(prompt_of(9, 1), 20)
    (free,) = run(fp32_engine(small)[0], [asked])
    engine = gossiping(fp32_engine(small)[0], [asked], [free], 0.0)
    engine.add(asked)
    steps = [[event.token for event in engine.step()] for _ in range(4)]
    assert len(steps[0]) == 1 < len(steps[1]) < len(steps[2]) == 1 + LONGEST, "trust grows"
    assert [token for step in steps for token in step] == free[0].ids and not engine.has_work


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(temperature=0.0, repetition_penalty=1.2)},
        {"sampling": SamplingParams(temperature=0.0, presence_penalty=0.5)},
        {"sampling": SamplingParams(temperature=0.0, frequency_penalty=0.5)},
        {"min_tokens": 40, "stop_ids": [3]},
    ],
)
def test_none_where_a_draw_depends_on_the_one_before(small: Path, fields: dict[str, Any]) -> None:
    asked = greedy_request(prompt_of(9, 1), 20, **fields)
    expected = run(fp32_engine(small)[0], [asked])
    engine = gossiping(checked(fp32_engine(small)[0]), [asked], expected, 0.0)
    assert_same(expected, run(engine, [asked]))
    assert engine.stats().draft_tokens == 0


def test_an_abort_between_accepted_drafts_and_the_rest(small: Path) -> None:
    asked = [greedy_request(prompt_of(9, i), 40, n=2, sampling=WARM) for i in range(3)]
    expected = run(fp32_engine(small)[0], asked)
    engine = gossiping(checked(fp32_engine(small, debug=True)[0]), asked, expected, 0.2)
    for request in asked:
        engine.add(request)
    engine.step()
    engine.step()
    engine.abort(asked[0].id)
    engine.abort(asked[1].id, 1)
    ended = [event for _ in range(50) for event in engine.step() if event.finish is not None]
    assert sorted(event.finish for event in ended) == ["abort"] * 3 + ["length"] * 3
    assert engine.dead is None and manager_of(engine).live_blocks == 0


def test_a_step_that_fails_with_drafts_is_run_again(small: Path) -> None:
    asked = [greedy_request(prompt_of(9 + i, i), 30) for i in range(3)]
    expected = run(fp32_engine(small)[0], asked)
    engine = gossiping(checked(fp32_engine(small, debug=True)[0]), asked, expected, 0.3)
    batches = iter(range(10**6))

    def fail_the_fourth(batch: Any) -> None:
        if next(batches) == 3:
            raise RuntimeError("once")

    on_batches(engine, fail_the_fourth)
    assert_same(expected, run(engine, asked))
    assert engine.stats().failed_steps == 1


def test_broken_logits_after_a_draft_end_nobody_before_they_are_reached(small: Path) -> None:
    """Row 3 of a run of drafts is broken: what comes before it is said, and the next step draws it again."""
    asked = greedy_request(prompt_of(9, 1), 30)
    (free,) = run(fp32_engine(small)[0], [asked])
    engine = gossiping(checked(fp32_engine(small, debug=True)[0]), [asked], [free], 0.0)
    forward = engine._runner.run

    def broken(batch: Any) -> Any:
        drawn = forward(batch)
        drawn.ids[3:4] = -1
        return drawn

    engine._runner.run = broken  # type: ignore[method-assign]
    (answer,) = run(engine, [asked])
    assert answer[0].ids == free[0].ids
    assert engine.stats().steps == 1 + 10, "one for the prompt, and three tokens each after it"


def test_a_text_that_repeats_takes_few_steps_and_says_the_same(tmp_path: Path) -> None:
    """Greedy decoding of a loop of 12 ids, which is known to the n-grams once it has come round."""
    script = list(range(10, 22))
    folder = make_chain(tmp_path / "chain", [*script, script[0]], vocab=64)
    request = greedy_request(script[:1], 120)
    steps, ids = [], []
    for kind in ("off", "ngram"):
        engine = checked(fp32_engine(folder, speculate=kind, debug=True)[0])
        if engine._speculation is not None:
            engine._speculation.cost = Flat()
        ((answer,),) = run(engine, [request])
        steps.append(engine.stats().steps)
        ids.append(answer.ids)
    assert ids[0] == ids[1] == [script[(1 + i) % 12] for i in range(120)]
    assert steps[0] == 120
    assert steps[1] <= 14 + 5 + 106 // (1 + LONGEST) + 1, (
        "one round alone, a few to trust it, then nine a step"
    )


def test_a_source_that_is_always_wrong_is_soon_left_alone(small: Path) -> None:
    request = greedy_request(prompt_of(9, 1), 230)
    engine = speculating(
        fp32_engine(small)[0], Speculation(Flat(), lambda: Gossip([], 1.0, random.Random(0)))
    )
    drafts: list[int] = []
    on_batches(engine, lambda batch: drafts.append(len(batch.ids) - 1))
    run(engine, [request])
    assert sum(drafts[1:40]) < 60 and drafts[2] > 1
    assert sum(drafts[80:]) == len([d for d in drafts[80:] if d]) <= 5, "a probe now and then"


def test_no_drafts_where_a_row_costs_what_it_brings(small: Path) -> None:
    asked = greedy_request(prompt_of(9, 1), 20)
    (free,) = run(fp32_engine(small)[0], [asked])
    texts = [(*asked.prompts[0], *free[0].ids)]
    source = Gossip(texts, 0.0, random.Random(0))
    engine = speculating(fp32_engine(small)[0], Speculation(Steep(), lambda: source))
    assert_same([free], run(engine, [asked]))
    assert engine.stats().draft_tokens == 0
