"""Scores of drawn tokens: transformers' log_softmax on the same text, whatever runs beside."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from server.engine.request import SamplingParams
from tests.engine.conftest import Oracle
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import checked, ids_of, pool_of, prompt_of
from tests.support.reference import load_reference
from tests.support.scores import assert_output_scores, right_scores


@pytest.mark.parametrize("best", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_scores_of_drawn_tokens_are_those_of_the_raw_logits(
    small: Path, oracle: Oracle, best: int, temperature: float
) -> None:
    prompt = prompt_of(20, 60)
    sampling = SamplingParams(temperature, top_k=3 if temperature else 0, seed=4)
    request = greedy_request(prompt, 12, sampling=sampling, logprobs=best)
    ((answer,),) = run(fp32_engine(small)[0], [request])
    assert_output_scores(oracle, prompt, answer, best)


def test_no_bias_penalty_or_ban_shows_in_the_scores(small: Path, oracle: Oracle) -> None:
    """Each changes what is drawn, next to a row that asks for changes and no scores."""
    changes: list[dict[str, Any]] = [
        {"sampling": SamplingParams(0.0, logit_bias=((77, 100.0), (5, -100.0)))},
        {"sampling": SamplingParams(0.0, repetition_penalty=0.3, presence_penalty=2.0)},
        {"stop_ids": oracle.greedy(prompt_of(20, 59), 3), "min_tokens": 12},
    ]
    silent = greedy_request(prompt_of(20, 58), 12, **changes[0])
    requests = [silent, *(greedy_request(prompt_of(20, 59), 12, logprobs=5, **change) for change in changes)]
    for (answer,), request in zip(run(fp32_engine(small)[0], requests), requests, strict=True):
        assert answer.ids != oracle.greedy(request.prompts[0], 12)
        if request is not silent:
            assert_output_scores(oracle, request.prompts[0], answer, 5)


def test_only_those_who_ask_get_scores_and_ids_stay_the_same(small: Path, oracle: Oracle) -> None:
    """Rows of a step with other wishes, in a pool that preempts: each as it is alone."""
    requests = [
        greedy_request(prompt_of(20 + i, 61), 30, sampling=SamplingParams(i / 4, seed=i), logprobs=wish)
        for i, wish in enumerate([None, 0, 5, None, 20, 1])
    ]
    plain = [dataclasses.replace(r, id=f"{r.id}-plain", logprobs=None) for r in requests]
    expected = ids_of(fp32_engine(small)[0], plain)
    tight = checked(pool_of(small, 14)[0])
    for (answer,), ids, request in zip(run(tight, requests), expected, requests, strict=True):
        assert answer.ids == ids
        if request.logprobs is None:
            assert set(answer.scores) == {None}
        else:
            assert_output_scores(oracle, request.prompts[0], answer, request.logprobs)
    assert tight.stats().preemptions > 0


@pytest.mark.model
def test_the_default_model(smol: Path) -> None:
    """S5, S10: 1e-3 of transformers' log_softmax, prompt and answer."""
    prompt = [19556, 905, 17565, 28, 253, 1165, 282, 905]
    oracle = Oracle(load_reference(smol))
    ((answer,),) = run(fp32_engine(smol)[0], [greedy_request(prompt, 8, prompt_logprobs=5, logprobs=5)])
    right = right_scores(oracle, [*prompt, *answer.ids])
    assert answer.prompt_scores is not None
    told = [*answer.prompt_scores[1:], *answer.scores]
    for score, row, token in zip(told, right, [*prompt, *answer.ids][1:], strict=False):
        assert score is not None and score.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
