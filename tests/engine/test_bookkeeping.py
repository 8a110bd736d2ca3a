"""What a step costs beside the model: counted in calls, which no busy machine can change."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from server.engine.engine import Engine
from server.engine.runner import Drawn
from tests.support.driving import fp32_engine, greedy_request
from tests.support.engines import prompt_of

SEATS = 64
CALLS_A_SEQUENCE = 110  # of Python functions and builtins, about 10 µs
CALLS_A_STEP = 1200


def without_a_model(engine: Engine) -> Engine:
    """Every draw is id 5."""
    engine._runner.run = lambda batch: Drawn(np.full(len(batch.wanted), 5))  # type: ignore[method-assign]
    return engine


def calls(engine: Engine, steps: int) -> int:
    """Python and builtin calls of so many steps."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def decoding(folder: Path, sequences: int, **options: Any) -> Engine:
    """An engine in which so many sequences decode, past the first blocks of their prompts."""
    engine = without_a_model(fp32_engine(folder, max_num_seqs=SEATS, **options)[0])
    for seed in range(sequences):
        engine.add(greedy_request(prompt_of(20, seed), 200))
    while any(sequence.output < 4 for sequence in engine._scheduler.running) or engine._scheduler.waiting:
        engine.step()
    return engine


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_a_step_costs_so_many_calls_a_sequence(small: Path, speculate: str) -> None:
    """16 steps, so that each sequence takes one new block, whatever its length."""
    few = calls(decoding(small, 1, speculate=speculate), 16) / 16
    many = calls(decoding(small, SEATS, speculate=speculate), 16) / 16
    assert few < CALLS_A_STEP
    assert (many - few) / (SEATS - 1) < CALLS_A_SEQUENCE


def test_ten_thousand_requests_that_wait_cost_a_step_nothing(small: Path) -> None:
    engine = decoding(small, 8, max_batch_tokens=SEATS)
    for seed in range(SEATS - 8):
        engine.add(greedy_request(prompt_of(3, seed), 200))
    while engine._scheduler.waiting:
        engine.step()
    engine.step()
    before = calls(engine, 16)
    for seed in range(10_000):
        engine.add(greedy_request(prompt_of(3, seed % 50), 2))
    assert calls(engine, 16) <= 1.02 * before
