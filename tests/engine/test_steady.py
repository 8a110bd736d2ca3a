"""A batch that is made from the one before is the batch that would have been made from nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Several
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.engine.batch import build_batch
from server.engine.engine import Engine
from server.engine.request import Request, SamplingParams
from server.engine.scheduler import Scheduled
from server.engine.sequence import Sequence
from server.engine.steady import _Steady
from tests.support.driving import GREEDY, fp32_engine, greedy_request, run
from tests.support.engines import pool_of, prompt_of, rows_are_free

WARM = SamplingParams(temperature=0.9, seed=3)
NARROW = SamplingParams(temperature=1.1, top_p=0.8, top_k=30, min_p=0.01, seed=4, logit_bias=((4, 1.0),))
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2)


def same(a: Any, b: Any, where: str = "batch") -> None:
    """Two values, however deep, of the same types, dtypes and numbers."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b), where
    elif is_dataclass(a):
        for field in fields(a):
            same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, tuple):
        assert len(a) == len(b), where
        for at, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}[{at}]")
    else:
        assert a is b or a == b, where


def compared(engine: Engine) -> tuple[Engine, list[bool]]:
    """The same engine, whose every batch is compared with one made from nothing; which ones were not."""
    batches = engine._attempts._batches
    build, quick = batches.build, []

    def checked(entries: Several[Scheduled]) -> Any:
        before = batches._steady
        batch = build(entries)
        rows = [batches._first_row(entry) for entry in entries]
        same(batch, build_batch(entries, rows, batches._manager.row_tables, batches._shape))
        quick.append(before is not None and batches._steady is before)
        return batch

    batches.build = checked  # type: ignore[method-assign]
    return engine, quick


def mixture(variants: Several[str]) -> list[Request]:
    return [
        greedy_request(
            prompt_of(3 + 5 * at, at), 12 + 3 * at, sampling=sampling, variant=variants[at % len(variants)],
            **extra,
        )
        for at, (sampling, extra) in enumerate(
            [
                (GREEDY, {}),
                (WARM, {"n": 3}),
                (NARROW, {"logprobs": 3}),
                (PENALISED, {}),
                (WARM, {"min_tokens": 9, "stop_ids": range(0, 512, 3)}),
                (GREEDY, {"prompt_logprobs": 1}),
            ]
        )
    ]  # fmt: skip


def test_a_mixture_that_comes_and_goes(small: Path) -> None:
    engine, quick = compared(fp32_engine(small, attention=("native", "mha"), max_num_seqs=8, debug=True)[0])
    run(engine, mixture(("native", "mha")))
    assert engine.dead is None and engine.stats().failed_steps == 0
    assert sum(quick) > len(quick) / 2


def test_greedy_and_sampled_alone(small: Path) -> None:
    for sampling in (GREEDY, WARM, PENALISED, NARROW):
        engine, quick = compared(fp32_engine(small)[0])
        run(engine, [greedy_request(prompt_of(9, i), 20, sampling=sampling) for i in range(3)])
        assert engine.stats().failed_steps == 0 and sum(quick) == 18, "the first is made, and 18 follow"


def test_where_sequences_are_pushed_out_and_come_back_elsewhere(small: Path) -> None:
    engine, quick = compared(pool_of(small, 12, debug=True)[0])
    run(engine, [greedy_request(prompt_of(20 + i, i), 40, sampling=WARM) for i in range(5)])
    assert engine.stats().preemptions > 0 and engine.stats().failed_steps == 0
    assert any(quick) and not all(quick)


def test_beside_drafts(small: Path) -> None:
    engine, quick = compared(rows_are_free(fp32_engine(small, speculate="ngram")[0]))
    prompt = prompt_of(6, 1) * 4
    run(engine, [greedy_request(prompt, 60), greedy_request(prompt, 60, sampling=WARM)])
    assert engine.stats().drafts > 0 and engine.stats().failed_steps == 0 and any(quick)


def test_an_idle_engine_keeps_no_sequence(small: Path) -> None:
    """Neither after the end of all, nor after an abort."""
    engine = fp32_engine(small)[0]
    for aborted in (False, True):
        request = greedy_request(prompt_of(9, 1), 20)
        engine.add(request)
        for _ in range(4):
            engine.step()
        assert isinstance(engine._attempts._batches._steady, _Steady)
        if aborted:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()
        gc.collect()
        alive = [each for each in gc.get_objects() if type(each) is Sequence]
        assert request.id not in [sequence.work.request.id for sequence in alive]


def test_a_slot_that_has_changed_hands_is_seen(small: Path) -> None:
    engine = fp32_engine(small)[0]
    engine.add(greedy_request(prompt_of(9, 1), 20))
    for _ in range(4):
        engine.step()
    steady = engine._attempts._batches._steady
    assert isinstance(steady, _Steady)
    (sequence,) = engine._scheduler.running
    entry = Scheduled(sequence, sequence.computed, 1)
    assert steady.fits([entry]) and not steady.fits([entry, entry])
    assert not steady.fits([Scheduled(sequence, sequence.computed, 1, (5,))])
    assert sequence.slot is not None
    sequence.slot += 1
    assert not steady.fits([entry])
