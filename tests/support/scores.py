"""Right scores: transformers' log_softmax of the same text, and answers compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from server.engine.request import TokenScore
from tests.engine.conftest import Oracle
from tests.support.driving import Answer

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
