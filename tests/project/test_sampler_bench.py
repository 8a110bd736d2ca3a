"""The sampler's benchmark: it runs, and its cases are what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loadtest.sampler_bench import CASES, PROMPT_TOKENS, clocked, decoding_engine, make_logits, measure, show
from tests.support.decoding import some_ids


def test_each_case_is_measured_beside_a_step_of_all_sequences(tiny: Callable[..., Path]) -> None:
    windows = [some_ids(64, seed) for seed in (1, 2)]
    result = measure(tiny(), windows, rows=5, rounds=2)
    assert [cost.name for cost in result.costs] == [case.name for case in CASES]
    assert all(cost.milliseconds > 0 and cost.share > 0 for cost in result.costs)
    assert (result.rows, result.rounds, result.vocab) == (5, 2, 128)
    assert show(result).row_count == len(CASES)


def test_a_step_that_does_less_is_no_measure() -> None:
    assert clocked(lambda: 4, at_least=4) > 0
    with pytest.raises(RuntimeError, match="3 of 4 sequences decoded"):
        clocked(lambda: 3, at_least=4)


def test_made_up_logits_are_what_their_names_say() -> None:
    model = torch.randn(6, 4000, generator=torch.Generator().manual_seed(0)) * 3
    made = make_logits(model)
    allowed = made["masked"].isfinite().sum(-1)
    assert torch.all((allowed >= 10) & (allowed <= 90))
    assert torch.equal(made["masked"][made["masked"].isfinite()], model[made["masked"].isfinite()])
    assert torch.all(made["peaked"].softmax(-1).amax(-1) > 0.9999)
    assert made["flat"].softmax(-1).amax() < 1e-3
    assert {case.logits for case in CASES} == made.keys()


def test_the_engine_has_tokens_left_for_every_round(tiny: Callable[..., Path]) -> None:
    engine = decoding_engine(tiny(), [some_ids(PROMPT_TOKENS)], rows=3, steps=40)
    for _ in range(40):
        assert len(engine.step()) == 3
