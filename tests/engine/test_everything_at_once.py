"""All that a request may ask of the engine, mixed at random: each answer is the one it is alone."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from server.engine.request import Request, SamplingParams, TokenScore
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import VOCAB, checked, manager_of, pool_of, prompt_of, run_staggered


def some_request(dice: random.Random, number: int) -> Request:
    """Some begin alike, so that blocks are shared; what is left out is asked for by others."""
    prompt = prompt_of(64, dice.randrange(2))[: dice.randrange(1, 50)]
    prompt += prompt_of(dice.randrange(1, 20), number)
    scored = dice.choice([None, None, 0, 2])
    tokens = 0 if scored is not None and dice.random() < 0.3 else dice.randrange(10, 70)
    sampling = SamplingParams(
        temperature=dice.choice([0.0, 0.9, 1.3]), top_p=dice.choice([1.0, 0.9]),
        top_k=dice.choice([0, 5, 200]), min_p=dice.choice([0.0, 0.05]), seed=number,
        repetition_penalty=dice.choice([1.0, 1.2]), presence_penalty=dice.choice([0.0, 0.5]),
        frequency_penalty=dice.choice([0.0, -0.5]),
        logit_bias=dice.choice([(), ((dice.randrange(VOCAB), 5.0),)]),
    )  # fmt: skip
    return greedy_request(
        prompt, tokens, n=dice.randrange(1, 4), sampling=sampling, priority=dice.randrange(-1, 2),
        prompt_logprobs=scored, logprobs=dice.choice([None, 0, 3]), min_tokens=min(tokens, 3),
        stop_ids=(dice.randrange(VOCAB), dice.randrange(VOCAB)),
    )  # fmt: skip


def assert_same(answer: Answer, alone: Answer) -> None:
    assert (answer.ids, answer.finish, answer.error) == (alone.ids, alone.finish, None)
    assert (answer.prompt_scores is None) == (alone.prompt_scores is None)
    for mine, its in (
        (answer.scores, alone.scores),
        (answer.prompt_scores or (), alone.prompt_scores or ()),
    ):
        assert list(map(shape, mine)) == list(map(shape, its))
        assert values(mine) == pytest.approx(values(its), abs=1e-4)


def shape(score: TokenScore | None) -> int | None:
    return None if score is None else len(score.top)


def values(scores: object) -> list[float]:
    assert isinstance(scores, list | tuple)
    return [value for one in scores if one for value in (one.logprob, *(value for _, value in one.top))]


@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_is_answered_as_alone(small: Path, seed: int) -> None:
    """They come one after the other, to a pool that pushes sequences out, in chunks of 40."""
    dice = random.Random(seed)
    requests = [some_request(dice, number) for number in range(24)]
    solo = fp32_engine(small, prefix_cache=False)[0]
    alone = [run(solo, [dataclasses.replace(r, id=f"{r.id}-alone", priority=0)])[0] for r in requests]
    engine = checked(pool_of(small, 11, max_batch_tokens=40, max_num_seqs=12, debug=True)[0])
    answers = run_staggered(engine, [(dice.randrange(40), request) for request in requests])
    for request, right in zip(requests, alone, strict=True):
        for answer, one in zip(answers[request.id], right, strict=True):
            assert_same(answer, one)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0 and stats.failed_steps == 0
    assert engine.dead is None and manager_of(engine).live_blocks == 0
