"""Step 7 of a request's trip: logits become ids. A pure function of (logits, parameters, key).

Greedy rows take the largest logit, of equals the lowest id. Any other row owns a key (`model/randomness.py`),
by which its kept tokens race (`model/race.py`): each wins with the probability that the softmax gives it.

Filters keep the first of the tokens in descending order, equals by ascending id: `top_k` first, then `top_p`
(the fewest that reach that share of what top_k left), then `min_p` (those at least that share as likely as
the best). Order and sets are those of transformers' logits warpers, except that `top_k` keeps exactly k
tokens where the k-th ties.

Weights are fp32 and their sums exact (`model/draw_rows.py`), so that the two ways to find the kept tokens
cannot disagree: among the best few, which decides nearly every row that has a filter
(`model/draw_narrow.py`), or in the whole vocabulary (`model/draw_wide.py`). `model/sampler_native.py` is the
same in C++.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.draw_narrow import WIDTH, draw_narrow
from model.draw_rows import Rows
from model.draw_wide import draw_wide

# Below this temperature a gap of 1e-3 between two logits is e^-100: the draw is the largest logit.
GREEDY_TEMPERATURE = 1e-5

_PART = 512  # ids

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the `S` rows of a step are drawn; the parameters are those of the `D` rows that race.

    Where most rows do, all of them do: a greedy one as the best of one, which is the same token.
    """

    rows: Tensor | None  # [D] int64: which rows they are; None if every row is greedy
    every_row: bool  # D == S
    temperature: Tensor  # [D, 1] fp32
    top_p: Tensor  # [D, 1] fp64
    min_p: Tensor  # [D, 1] fp32
    top_k: Tensor  # [D, 1] int64, a huge number where there is no limit
    key: Tensor  # [D, 1] int64: where each row's chance comes from
    filtered: bool  # some row keeps less than the vocabulary
    needs_total: bool  # what some row keeps depends on what the whole vocabulary weighs


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
    greedy = temperature < GREEDY_TEMPERATURE
    drawn = np.flatnonzero(~greedy)
    if 2 * len(drawn) >= len(greedy):
        drawn = np.arange(len(greedy))  # cheaper than to pick them out
        temperature = np.where(greedy, 1.0, temperature)
        top_k = np.where(greedy, 1, top_k)
    no_limit = np.iinfo(np.int64).max
    limit = np.where(top_k[drawn] > 0, top_k[drawn], no_limit)
    reals = torch.from_numpy(np.stack([temperature[drawn], top_p[drawn], min_p[drawn]]))
    reals = reals.to(device=device, dtype=torch.float64)[:, :, None]
    whole = torch.from_numpy(np.stack([limit, key[drawn]])).to(device=device, dtype=torch.int64)[:, :, None]
    shared = top_p[drawn] < 1
    return SamplingBatch(
        rows=torch.from_numpy(drawn).to(device=device, dtype=torch.int64) if len(drawn) else None,
        every_row=len(drawn) == len(greedy),
        temperature=reals[0].to(torch.float32),
        top_p=reals[1],
        min_p=reals[2].to(torch.float32),
        top_k=whole[0],
        key=whole[1],
        filtered=bool((shared | (limit < no_limit) | (min_p[drawn] > 0)).any()),
        needs_total=bool((shared & (limit > WIDTH)).any()),
    )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The `Sampler` of PyTorch's operators, for any device: the reference."""
    best, ids = _largest(logits)
    if batch.rows is not None and batch.every_row:
        ids = _draw(_rows(logits, best, batch), batch)
    elif batch.rows is not None:
        part, peak = logits.index_select(0, batch.rows), best.index_select(0, batch.rows)
        drawn = _draw(_rows(part, peak, batch), batch)
        ids = ids.index_copy(0, batch.rows, drawn)
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


def _rows(logits: Tensor, peak: Tensor, batch: SamplingBatch) -> Rows:
    return Rows(
        logits=logits,
        peak=peak[:, None],
        temperature=batch.temperature,
        top_p=batch.top_p,
        min_p=batch.min_p,
        top_k=batch.top_k,
        key=batch.key,
    )


def _draw(rows: Rows, batch: SamplingBatch) -> Tensor:
    """The drawn ids `[D]`, of anything where a row is broken."""
    if not batch.filtered:
        return draw_wide(rows)
    ids, sure = draw_narrow(rows, batch.needs_total)
    undecided = torch.nonzero(~sure)[:, 0]
    if undecided.numel() == 0:
        return ids
    return ids.index_copy(0, undecided, draw_wide(rows.take(undecided)))
