"""Step 7 of a request's trip: logits become ids. A pure function of (logits, parameters, u).

Every row owns a number `u` in [0, 1) (`model/randomness.py`), and takes the first token whose running
probability, in descending order, exceeds it. Greedy rows take the largest logit. Ties go to the lowest id.

Filters keep a prefix of that order: `top_k` first, then `top_p` (the smallest prefix that reaches that share
of what top_k left), then `min_p` (tokens at least that share as likely as the best). The order and the sets
are those of transformers' logits warpers, except that `top_k` keeps exactly k tokens where the k-th ties.

Weights are fp32; their running sums are fp64, because the sum of a whole vocabulary in fp32 depends on its
order, and the two ways to find a token (the best few hundred, or a full sort) must not disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Below this temperature a gap of 1e-3 between two logits is e^-100: the draw is the largest logit.
GREEDY_TEMPERATURE = 1e-5
# How many of the best tokens are sorted at first, then for the rows that these did not decide; then all.
# A row of 49,152 on one CPU core: 0.13, 0.5, 1.5 ms, and 3.2 ms for all.
WIDTHS = (256, 2048, 12288)
_ROWS_AT_ONCE = 8  # of whole vocabularies, so that what is computed of them stays in a CPU's cache
_NO_WEIGHT = -80.0  # e^-80 of the best token is nothing in a sum; without it exp would make slow denormals

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the `S` rows of a step are drawn; the parameters are those of the `D` rows that are not greedy."""

    rows: Tensor | None  # [D] int64: which rows they are; None if every row is greedy
    every_row: bool  # D == S
    temperature: Tensor  # [D, 1] fp32
    top_p: Tensor  # [D, 1] fp64
    min_p: Tensor  # [D, 1] fp32
    top_k: Tensor  # [D, 1] int64, a huge number where there is no limit
    u: Tensor  # [D, 1] fp64 in [0, 1)
    needs_total: bool  # some top_k is wider than the first width


def make_sampling(
    temperature: FloatArray,
    top_p: FloatArray,
    top_k: IdArray,
    min_p: FloatArray,
    u: FloatArray,
    device: torch.device,
) -> SamplingBatch:
    """Arrays `[S]` of per-row parameters (top_k 0 = no limit) to one upload of each kind."""
    drawn = np.flatnonzero(temperature >= GREEDY_TEMPERATURE)
    no_limit = np.iinfo(np.int64).max
    limit = np.where(top_k[drawn] > 0, top_k[drawn], no_limit)
    reals = torch.from_numpy(np.stack([temperature[drawn], top_p[drawn], min_p[drawn], u[drawn]]))
    reals = reals.to(device=device, dtype=torch.float64)[:, :, None]
    return SamplingBatch(
        rows=torch.from_numpy(drawn).to(device=device, dtype=torch.int64) if len(drawn) else None,
        every_row=len(drawn) == len(temperature),
        temperature=reals[0].to(torch.float32),
        top_p=reals[1],
        min_p=reals[2].to(torch.float32),
        top_k=torch.from_numpy(limit).to(device=device, dtype=torch.int64)[:, None],
        u=reals[3],
        needs_total=bool((limit > WIDTHS[0]).any()),
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
        ids = _draw(logits, best[:, None], batch)
    else:
        part, peak = logits.index_select(0, batch.rows), best.index_select(0, batch.rows)
        ids = logits.argmax(dim=-1).index_copy(0, batch.rows, _draw(part, peak[:, None], batch))
    return torch.where(torch.isfinite(best), ids, -1)


def _draw(logits: Tensor, peak: Tensor, batch: SamplingBatch) -> Tensor:
    """logits `[D, V]`, peak `[D, 1]` -> ids `[D]`: narrow first, wider for the rows that need it."""
    parameters = (batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.u)
    if batch.needs_total or logits.shape[1] <= WIDTHS[0]:
        total = _total(logits, peak, batch.temperature)
    else:
        total = torch.full_like(batch.u, torch.inf)
    ids = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
    undecided: Tensor | None = None  # every row
    for width in _widths(logits.shape[1]):
        if undecided is None:
            ids, sure = _pick(logits, width, peak, total, *parameters)
        else:
            part = (tensor.index_select(0, undecided) for tensor in (peak, total, *parameters))
            found, sure = _pick(logits.index_select(0, undecided), width, *part)
            ids = ids.index_copy(0, undecided, found)
        again = torch.nonzero(~sure)[:, 0]
        undecided = again if undecided is None else undecided.index_select(0, again)
        if undecided.numel() == 0:
            break
    return ids


def _total(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """The weight of the whole vocabulary `[D, 1]` fp64, the best token's being 1."""
    parts = zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in (logits, peak, temperature)), strict=True)  # type: ignore[no-untyped-call]
    sums = [
        (row - best).div_(warmth).clamp_(min=_NO_WEIGHT).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        for row, best, warmth in parts
    ]
    return torch.cat(sums)


def _widths(vocab: int) -> Iterator[int]:
    yield from (width for width in WIDTHS if width < vocab)
    yield vocab


def _pick(
    logits: Tensor,
    width: int,
    peak: Tensor,
    total: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    u: Tensor,
) -> tuple[Tensor, Tensor]:
    """The drawn ids `[D]` among the `width` best tokens, and whether all the others could not change them.

    `total` is the weight of the whole vocabulary, the best token's being 1. A row is sure if its filters' cut
    is known and the token drawn is strictly better than the last one seen: then so is everything before it.
    """
    vocab = logits.shape[1]
    value, token = _descending(logits, width)
    weight = ((value - peak) / temperature).exp()  # [D, width] fp32
    running = weight.to(torch.float64).cumsum(-1)
    kept, uncut = _kept(weight, running, total, top_p, min_p, top_k, vocab)
    mass = torch.where(uncut, total, running.gather(1, kept - 1))
    last = torch.minimum(kept, (weight > 0).sum(-1, keepdim=True)) - 1
    index = torch.minimum((running <= u * mass).sum(-1, keepdim=True), last).clamp(min=0)
    ids = token.gather(1, index)[:, 0]
    if width == vocab:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    # A cut before the width is the true one, unless top_p was measured against a mass that is not known yet.
    true_cut = (kept < width) & ((top_k >= vocab) | (top_p >= 1))
    known = uncut | (top_k <= width) | true_cut
    ahead = value.gather(1, index) > value[:, -1:]
    return ids, ((known & ahead) | ~torch.isfinite(peak))[:, 0]


def _descending(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits and their ids `[D, width]`, equals by ascending id."""
    if width == logits.shape[1]:
        value, token = torch.sort(logits, dim=-1, descending=True, stable=True)
        return value, token
    token = torch.topk(logits, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    value, order = torch.sort(logits.gather(1, token), dim=-1, descending=True, stable=True)
    return value, token.gather(1, order)


def _kept(
    weight: Tensor, running: Tensor, total: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """How many of the best tokens the filters leave `[D, 1]`, at least 1, and whether they cut nothing."""
    width = weight.shape[1]
    everything = top_k >= vocab
    uncut = everything & (top_p >= 1) & (min_p <= 0)
    mass = torch.where(everything, total, running.gather(1, top_k.clamp(max=width) - 1))
    before = torch.nn.functional.pad(running[:, :-1], (1, 0))
    rank = torch.arange(width, dtype=torch.int64, device=weight.device)
    keep = (rank < top_k) & ((before < top_p * mass) | (top_p >= 1)) & (weight >= min_p)
    return torch.where(uncut, width, keep.sum(-1, keepdim=True).clamp(min=1)), uncut
