"""Rows to draw from, the definition of a draw written plainly, and ways to make the sampler find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import draw_narrow, draw_wide, sampler
from model.adjust import Adjustments, adjust
from model.draw_rows import Rows
from model.sampler import SamplingBatch, make_sampling, sample
from tests.support.attention import CPU

Row = dict[str, Any]  # parameters of a row that are not the default
DEFAULTS: Row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "u": 0.5}

# (WIDTH, GROUPS, GROUP, BUCKETS): what is sorted at first, and how the best and the rest are found.
WAYS = {
    "default": (draw_narrow.WIDTH, draw_narrow.GROUPS, draw_narrow.GROUP, draw_wide.BUCKETS),
    "few": (8, 6, 4, 16),
    "columns are scarce": (40, 3, 5, 3),
    "one token, then the buckets": (1, 1, 2, 64),
    "one bucket": (1, 1, 2, 1),
    "all sorted": (1 << 20, 1 << 20, 1, 1),
}


def go(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have the sampler find tokens in one of the WAYS."""
    width, groups, group, buckets = WAYS[way]
    monkeypatch.setattr(sampler, "WIDTH", width)
    monkeypatch.setattr(draw_narrow, "WIDTH", width)
    monkeypatch.setattr(draw_narrow, "GROUPS", groups)
    monkeypatch.setattr(draw_narrow, "GROUP", group)
    monkeypatch.setattr(draw_wide, "BUCKETS", buckets)


def batch_of(rows: Sequence[Row]) -> SamplingBatch:
    """The sampling tensors of rows that say what is not the default."""
    columns = {name: np.array([row.get(name, value) for row in rows]) for name, value in DEFAULTS.items()}
    reals = {name: column.astype(np.float64) for name, column in columns.items() if name != "top_k"}
    return make_sampling(**reals, top_k=columns["top_k"].astype(np.int64), device=CPU)


def rows_of(logits: Tensor, rows: Sequence[Row]) -> Rows:
    """The same as the two ways to find a token take them; no row may be greedy."""
    batch = batch_of(rows)
    peak = logits.amax(-1, keepdim=True)
    return Rows(logits, peak, batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.u)


def draw(logits: Tensor, rows: Sequence[Row], banned: Sequence[tuple[int, int]] = ()) -> list[int]:
    """The drawn ids; `banned` are (row, token id) pairs that cannot be."""
    logits = logits.clone()
    if banned:
        pairs = torch.tensor(banned, dtype=torch.int64)
        adjust(logits, Adjustments(banned=(pairs[:, 0], pairs[:, 1])))
    return sample(logits, batch_of(rows)).tolist()


def slow(logits: Tensor, row: Row) -> int:
    """The definition, one row, in numpy with running sums in fp64."""
    p = DEFAULTS | row
    value = logits.numpy()
    order = np.lexsort((np.arange(len(value)), -value))
    if p["temperature"] == 0:
        return int(order[0])
    weight = np.exp((value[order] - value.max()) / np.float32(p["temperature"])).astype(np.float64)
    weight = weight[: p["top_k"] or len(weight)]
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    kept = (before < p["top_p"] * weight.sum()) | (before == 0.0)
    weight = weight[kept & (weight >= np.float32(p["min_p"]))]
    return int(order[np.searchsorted(np.cumsum(weight), p["u"] * weight.sum(), side="right")])


def cuts(logits: Tensor, temperature: float) -> list[float]:
    """The `u` at which one row's draw, unfiltered, goes from one token to the next, to the last bit or so."""
    value = np.sort(logits.numpy().astype(np.float64))[::-1]
    running = np.cumsum(np.exp((value - value[0]) / temperature))
    return [float(u) for u in running / running[-1] if 0 < u < 1]
