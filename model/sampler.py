"""Step 7 of a request's trip: logits become ids. A pure function of (logits, parameters, u).

Every row owns a number `u` in [0, 1) (`model/randomness.py`), and takes the first token whose running
probability, in descending order, exceeds it. Greedy rows take the largest logit. Ties go to the lowest id.

Filters keep a prefix of that order: `top_k` first, then `top_p` (the smallest prefix that reaches that share
of what top_k left), then `min_p` (tokens at least that share as likely as the best). The order and the sets
are those of transformers' logits warpers, except that `top_k` keeps exactly k tokens where the k-th ties.

Weights are fp32 and their sums exact (`model/draw_rows.py`), so that the two ways to find a token cannot
disagree: among the best few, which decides nearly every row (`model/draw_narrow.py`), or in the whole
vocabulary (`model/draw_wide.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.draw_narrow import WIDTH, draw_narrow
from model.draw_rows import Rows
from model.draw_wide import draw_wide

# Below this temperature a gap of 1e-3 between two logits is e^-100: the draw is the largest logit.
GREEDY_TEMPERATURE = 1e-5
_WIDE_ROWS = 4  # of whole vocabularies at once, so that what is computed of them stays in a CPU's cache

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the `S` rows of a step are drawn; the parameters are those of the `D` rows that go by `u`.

    Where most rows do, all of them do: a greedy one as the best of one, which is the same token.
    """

    rows: Tensor | None  # [D] int64: which rows they are; None if every row is greedy
    every_row: bool  # D == S
    temperature: Tensor  # [D, 1] fp32
    top_p: Tensor  # [D, 1] fp64
    min_p: Tensor  # [D, 1] fp32
    top_k: Tensor  # [D, 1] int64, a huge number where there is no limit
    u: Tensor  # [D, 1] fp64 in [0, 1)
    needs_total: bool  # what some row keeps depends on what the whole vocabulary weighs


def make_sampling(
    temperature: FloatArray,
    top_p: FloatArray,
    top_k: IdArray,
    min_p: FloatArray,
    u: FloatArray,
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
    reals = torch.from_numpy(np.stack([temperature[drawn], top_p[drawn], min_p[drawn], u[drawn]]))
    reals = reals.to(device=device, dtype=torch.float64)[:, :, None]
    by_total = (limit > WIDTH) & ((top_p[drawn] < 1) | (min_p[drawn] <= 0))
    return SamplingBatch(
        rows=torch.from_numpy(drawn).to(device=device, dtype=torch.int64) if len(drawn) else None,
        every_row=len(drawn) == len(greedy),
        temperature=reals[0].to(torch.float32),
        top_p=reals[1],
        min_p=reals[2].to(torch.float32),
        top_k=torch.from_numpy(limit).to(device=device, dtype=torch.int64)[:, None],
        u=reals[3],
        needs_total=bool(by_total.any()),
    )


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits `[S, V]` fp32 -> ids `[S]` int64.

    -1 marks a row whose logits hold NaN, +inf or nothing but -inf; it hurts no other. The logits are left as
    they are.
    """
    best = logits.amax(dim=-1)  # NaN if any is
    if batch.rows is None:
        ids = logits.argmax(dim=-1)  # the first of equals
    elif batch.every_row:
        ids = _draw(_rows(logits, best, batch), batch.needs_total)
    else:
        part, peak = logits.index_select(0, batch.rows), best.index_select(0, batch.rows)
        drawn = _draw(_rows(part, peak, batch), batch.needs_total)
        ids = logits.argmax(dim=-1).index_copy(0, batch.rows, drawn)
    return torch.where(torch.isfinite(best), ids, -1)


def _rows(logits: Tensor, peak: Tensor, batch: SamplingBatch) -> Rows:
    return Rows(
        logits=logits,
        peak=peak[:, None],
        temperature=batch.temperature,
        top_p=batch.top_p,
        min_p=batch.min_p,
        top_k=batch.top_k,
        u=batch.u,
    )


def _draw(rows: Rows, needs_total: bool) -> Tensor:
    """The drawn ids `[D]`, of anything where a row is broken."""
    ids, sure = draw_narrow(rows, needs_total)
    undecided = torch.nonzero(~sure)[:, 0]
    if undecided.numel() == 0:
        return ids
    starts = range(0, undecided.numel(), _WIDE_ROWS)
    found = [draw_wide(rows.take(undecided[start : start + _WIDE_ROWS])) for start in starts]
    return ids.index_copy(0, undecided, torch.cat(found))
