"""Scores of drawn tokens and of prompts: transformers' log_softmax on the same text, whatever runs beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from server.engine.request import SamplingParams, TokenScore
from tests.engine.conftest import Oracle
from tests.support.driving import Answer, fp32_engine, greedy_request, run
from tests.support.engines import checked, ids_of, pool_of, prompt_of

TOLERANCE = 1e-4


def right_scores(oracle: Oracle, text: Sequence[int]) -> torch.Tensor:
    """`[T, V]` fp64: log-probabilities after each token."""
    return torch.log_softmax(oracle.reference.logits(text).to(torch.float64), -1)


def assert_score(told: TokenScore | None, right: torch.Tensor, token: int, best: int) -> None:
    assert told is not None
    assert told.logprob == pytest.approx(float(right[token]), abs=TOLERANCE)
    order = torch.sort(right, descending=True, stable=True).indices[:best].tolist()
    assert [token for token, _ in told.top] == order
    for token, value in told.top:
        assert value == pytest.approx(float(right[token]), abs=TOLERANCE)


def assert_output_scores(oracle: Oracle, prompt: Sequence[int], answer: Answer, best: int) -> None:
    right = right_scores(oracle, [*prompt, *answer.ids])[len(prompt) - 1 :]
    assert len(answer.scores) == len(answer.ids) > 0
    for told, row, token in zip(answer.scores, right, answer.ids, strict=False):
        assert_score(told, row, token, best)


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
