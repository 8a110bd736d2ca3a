"""Step 7 of a request's trip: logits become ids. A pure function of (logits, parameters, key).

Greedy rows take the largest logit, of equals the lowest id. Any other row owns a key (`model/randomness.py`),
by which its kept tokens race (`model/race.py`): each wins with the probability that the softmax gives it.

Filters keep the first of the tokens in descending order, equals by ascending id: `top_k` first, then `top_p`
(the fewest that reach that share of what top_k left), then `min_p` (those at least that share as likely as
the best). Order and sets are those of transformers' logits warpers, except that `top_k` keeps exactly k
tokens where the k-th ties.

Weights are fp32 and their sums exact (`model/draw_rows.py`); `model/draw.py` finds what is kept.
`model/sampler_native.py` is the same in C++.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.draw import draw
from model.draw_rows import Rows

# Below this temperature a gap of 1e-3 between two logits is e^-100: the draw is the largest logit.
GREEDY_TEMPERATURE = 1e-5

_PART = 512  # ids

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the `S` rows of a step are drawn; the parameters are those of the `D` rows that race."""

    rows: Tensor | None  # [D] int64: which rows they are; None if every row is greedy
    temperature: Tensor  # [D, 1] fp32
    top_p: Tensor  # [D, 1] fp64
    min_p: Tensor  # [D, 1] fp32
    top_k: Tensor  # [D, 1] int64, a huge number where there is no limit
    key: Tensor  # [D, 1] int64: where each row's chance comes from


class Sampler(Protocol):
    """Draws a step's ids; chosen once for an engine."""

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """logits `[S, V]` fp32 -> ids `[S]` int64.

        -1 marks a row whose logits hold NaN, +inf or nothing but -inf; it hurts no other. The logits are left
        as they are.
        """
        ...


def make_sampling(
    temperature: FloatArray,
    top_p: FloatArray,
    top_k: IdArray,
    min_p: FloatArray,
    key: IdArray,
    device: torch.device,
) -> SamplingBatch:
    """Arrays `[S]` of per-row parameters (top_k 0 = no limit) to one upload of each kind."""
    drawn = np.flatnonzero(temperature >= GREEDY_TEMPERATURE)
    limit = np.where(top_k > 0, top_k, np.iinfo(np.int64).max)[drawn]
    reals = torch.from_numpy(np.stack([temperature[drawn], top_p[drawn], min_p[drawn]]))
    reals = reals.to(device=device, dtype=torch.float64)[:, :, None]
    whole = torch.from_numpy(np.stack([limit, key[drawn]])).to(device=device, dtype=torch.int64)[:, :, None]
    return SamplingBatch(
        rows=torch.from_numpy(drawn).to(device=device, dtype=torch.int64) if len(drawn) else None,
        temperature=reals[0].to(torch.float32),
        top_p=reals[1],
        min_p=reals[2].to(torch.float32),
        top_k=whole[0],
        key=whole[1],
    )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The `Sampler` of PyTorch's operators, for any device: the reference."""
    best, ids = _largest(logits)
    if batch.rows is not None:
        ids = ids.index_copy(0, batch.rows, draw(_racing(logits, best, batch, batch.rows)))
    return torch.where(torch.isfinite(best), ids, -1)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits `[S, V]` -> the largest of each row (NaN if any is) and its id, the first of equals.

    By way of the largest of each part of a row: on a CPU, seven times as fast as to look for an id at once.
    """
    rows, vocab = logits.shape
    width = math.gcd(vocab, _PART)
    parts = logits.reshape(rows, vocab // width, width)
    tops = parts.amax(dim=-1)
    part = tops.argmax(dim=-1, keepdim=True)  # [S, 1]
    inside = parts.gather(1, part.unsqueeze(-1).expand(-1, -1, width)).squeeze(1)  # [S, width]
    ids = part.squeeze(1) * width + inside.argmax(dim=-1)
    return tops.gather(1, part).squeeze(1), ids


def _racing(logits: Tensor, peak: Tensor, batch: SamplingBatch, rows: Tensor) -> Rows:
    if len(rows) < len(logits):
        logits, peak = logits.index_select(0, rows), peak.index_select(0, rows)
    return Rows(
        logits=logits,
        peak=peak[:, None],
        temperature=batch.temperature,
        top_p=batch.top_p,
        min_p=batch.min_p,
        top_k=batch.top_k,
        key=batch.key,
    )
