"""Rows to draw from, the definition of a draw written plainly, and ways to make the sampler find it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import draw as drawing
from model.adjust import Adjustments, adjust
from model.draw_rows import Rows
from model.native.library import NativeLibrary
from model.sampler import Sampler, SamplingBatch, make_sampling, sample
from model.sampler_native import choose_sampler
from tests.support.attention import CPU
from tests.support.native import avx2, native

Row = dict[str, Any]  # parameters of a row that are not the default
DEFAULTS: Row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "key": 0}

SAMPLERS = {"torch": lambda: "PyTorch's operators", "native": native, "avx2": avx2}

# (BUCKETS, GUESS): what is sorted of the candidates, and how few of these there are at first.
WAYS = {
    "default": (drawing.BUCKETS, drawing.GUESS),
    "no guess": (drawing.BUCKETS, 1),
    "guessed too high, three buckets": (3, 10**9),
    "one bucket": (1, drawing.GUESS),
}


def kernels_of(name: str) -> NativeLibrary | str:
    """What one of the SAMPLERS draws with; skips the test where there is none."""
    found = SAMPLERS[name]()
    if name != "torch" and not isinstance(found, NativeLibrary):
        pytest.skip(found)
    return found


def sampler_of(name: str) -> Sampler:
    """One of the SAMPLERS; skips the test where there is none."""
    return choose_sampler(kernels_of(name))


def go(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have PyTorch's sampler find the last token in one of the WAYS."""
    buckets, guess = WAYS[way]
    monkeypatch.setattr(drawing, "BUCKETS", buckets)
    monkeypatch.setattr(drawing, "GUESS", guess)


def batch_of(rows: Sequence[Row]) -> SamplingBatch:
    """The sampling tensors of rows that say what is not the default."""
    columns = {name: np.array([row.get(name, value) for row in rows]) for name, value in DEFAULTS.items()}
    whole = {name: columns.pop(name).astype(np.int64) for name in ("top_k", "key")}
    return make_sampling(
        **{name: column.astype(np.float64) for name, column in columns.items()}, **whole, device=CPU
    )


def rows_of(logits: Tensor, rows: Sequence[Row]) -> Rows:
    """The same as `model/draw.py` takes them; no row may be greedy."""
    batch = batch_of(rows)
    peak = logits.amax(-1, keepdim=True)
    return Rows(logits, peak, batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.key)


def draw(
    logits: Tensor, rows: Sequence[Row], banned: Sequence[tuple[int, int]] = (), sampler: Sampler = sample
) -> list[int]:
    """The drawn ids; `banned` are (row, token id) pairs that cannot be."""
    logits = logits.clone()
    if banned:
        pairs = torch.tensor(banned, dtype=torch.int64)
        adjust(logits, Adjustments(banned=(pairs[:, 0], pairs[:, 1])))
    return sampler(logits, batch_of(rows)).tolist()


def slow(logits: Tensor, row: Row) -> int:
    """The definition, one row, in numpy with sums in fp64."""
    p = DEFAULTS | row
    value = logits.numpy()
    order = np.lexsort((np.arange(len(value)), -value))
    if p["temperature"] == 0:
        return int(order[0])
    weight = np.exp((value[order] - value.max()) / np.float32(p["temperature"])).astype(np.float64)
    weight = weight[: p["top_k"] or len(weight)]
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    kept = (before < p["top_p"] * weight.sum()) | (before == 0.0)
    kept &= weight >= np.float32(p["min_p"])
    shares = np.zeros(len(value))
    shares[order[: len(kept)][kept]] = weight[kept]
    return race(shares, int(p["key"]))


def race(shares: np.ndarray[Any, Any], key: int) -> int:
    """The heats of one row: blocks of 256 ids by what they weigh, then the tokens of the one that won."""
    blocks = [shares[start : start + 256] for start in range(0, len(shares), 256)]
    block = _first([(block.sum(), number) for number, block in enumerate(blocks)], key)
    inside = [(share, 2**32 + 256 * block + place) for place, share in enumerate(blocks[block])]
    return 256 * block + _first(inside, key)


def _first(runners: list[tuple[float, int]], key: int) -> int:
    times = [noise(key, counter) / share if share else np.inf for share, counter in runners]
    return int(np.argmin(times))


def noise(key: int, counter: int) -> float:
    """splitmix64 of the key, `counter + 1` steps on, as exponential noise; in Python's own integers."""
    state = (key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
    state ^= state >> 31
    return -math.log1p(-((state >> 11) + 0.5) / 2**53)
