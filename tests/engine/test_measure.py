"""The largest step, measured: a GPU's counters are stood in for, the step itself is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cache.layout import KVLayout, LayerGroup
from model.heads import RepeatHeads, Variant
from server.engine.measure import room_on_gpu
from server.engine.runner import ModelRunner
from tests.support.driving import fp32_engine


def test_what_is_left_after_the_largest_step(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter((1000 + 5000, 1000 + 4000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))
    batches: list[Any] = []
    forward = ModelRunner.run

    def seen(self: ModelRunner, batch: Any) -> Any:
        batches.append(batch)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "run", seen)
    variants = (Variant("native", RepeatHeads(2)), Variant("mha", RepeatHeads(4)))
    engine = fp32_engine(small, variants=variants)[0]
    runner = engine._runner
    layout = KVLayout((LayerGroup((0, 1), 2, 16),), 16, torch.float32)
    room = room_on_gpu(
        runner._decoder, runner._backend, layout, engine._shape, tokens=64, drawn=8, context=250
    )
    for batch in batches:
        assert batch.positions.tolist() == list(range(250 - 64, 250))
        assert len(batch.wanted) == 8
        assert batch.draws.scored.rows.tolist() == list(range(8)), "and each of them is scored"
        assert batch.prompt.positions.tolist() == list(range(64)), "and so is the prompt"
    assert [batch.segments[0].head_map.kv_heads for batch in batches] == [2, 4], "each mode is tried"
    assert room == 1_000_000 - 5000, "and the one that takes most counts"
