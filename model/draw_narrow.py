"""Tokens found among the best few: this decides nearly every row, and is quick.

The logits are laid out as GROUP lines of equal length, one under the other. One pass gives the best of each
column; whatever is not in one of the GROUPS best columns is no larger than the least of these columns' best.

What all the other tokens weigh together is known only roughly, from a quick sum in fp32. So a filter keeps at
least so many and at most so many tokens, and a row is decided if these are the same and all of them are seen.
The others are left to `draw_wide`, which would have drawn the same in the decided rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.draw_rows import Rows, key_tokens, order_keys, top_p_at
from model.race import race_of_few

WIDTH = 128  # the best tokens that are sorted
GROUPS = 128
GROUP = 64
# The quick sum's relative error is a few 1e-6: of 2^x, of its argument, and of the sum itself.
_SLACK = 2.0**-15
_ROWS_AT_ONCE = 8  # of whole vocabularies, so that what is computed of them stays in a CPU's cache
_DEEPEST = -100.0  # 2^-100 of the best is nothing in a sum, and no slow denormal
_UNKNOWN = 2**62  # units; more than any row has


@dataclass(frozen=True, slots=True)
class _Best:
    """The best tokens of `D` rows, from high to low, `n` of each."""

    token: Tensor  # [D, n] int64
    weight: Tensor  # [D, n] fp32
    running: Tensor  # [D, n] int64: units up to and with each
    seen: Tensor  # [D, 1] int64, at least 1: so many of the weights are the row's best
    certain: Tensor  # [D, 1] int64, at most `seen`: so many of the tokens are in their place
    edge: Tensor  # [D, 1] fp32: no token beyond `seen` weighs more
    total: Tensor  # [D, 2] int64: units of the whole row, at least and at most


def draw_narrow(rows: Rows, needs_total: bool) -> tuple[Tensor, Tensor]:
    """The drawn ids `[D]`, and which of them are sure (broken rows are, of anything).

    `needs_total` may be False if no row's filters depend on what its tokens weigh beyond the first WIDTH.
    """
    best = _best_tokens(rows, needs_total)
    low, high = (_weighty(rows, best, count) for count in _kept(rows, best))
    rank = torch.arange(best.token.shape[1], dtype=torch.int64, device=best.token.device)
    units = rows.units(best.weight).masked_fill(rank >= high, 0)
    place = race_of_few(rows.key, best.token, units, rows.logits.shape[1])
    sure = ((low == high) & (high <= best.certain)) | ~torch.isfinite(rows.peak)
    return best.token.gather(1, place)[:, 0], sure[:, 0]


def _weighty(rows: Rows, best: _Best, count: Tensor) -> Tensor:
    """`count` `[D, 1]`, or less where all after it weigh nothing: most of what a mask leaves is such."""
    unseen = rows.units(best.edge) > 0
    return torch.where(
        unseen, count, torch.minimum(count, (rows.units(best.weight) > 0).sum(-1, keepdim=True))
    )


def _best_tokens(rows: Rows, needs_total: bool) -> _Best:
    found, bound = _candidates(rows.logits)
    token = key_tokens(order_keys(rows.logits.gather(1, found), found).sort(-1, descending=True).values)
    logit = rows.logits.gather(1, token)
    weight = rows.depth(logit).exp_()
    running = rows.units(weight).cumsum(-1)
    if token.shape[1] == rows.logits.shape[1]:
        every = torch.full_like(rows.top_k, token.shape[1])
        nothing = torch.zeros_like(rows.peak)
        return _Best(token, weight, running, every, every, nothing, running[:, -1:].expand(-1, 2))
    edge = logit[:, -1:] if bound is None else torch.maximum(bound, logit[:, -1:])
    seen = (logit >= edge).sum(-1, keepdim=True).clamp(min=1)
    certain = (logit > edge).sum(-1, keepdim=True)
    known = running.gather(1, seen - 1)
    total = _roughly(rows) if needs_total else torch.cat([known, torch.full_like(known, _UNKNOWN)], dim=1)
    return _Best(
        token=token,
        weight=weight,
        running=running,
        seen=seen,
        certain=certain,
        edge=rows.depth(edge).exp_(),
        total=total,
    )


def _candidates(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """WIDTH (or V) good tokens of each row `[D, n]`, in no order, and a bound `[D, 1]`: those among them that
    are above it are all there are above it, as far as there is room. None: they are simply the best."""
    vocab = logits.shape[1]
    columns = vocab // GROUP
    whole = columns * GROUP
    if columns <= GROUPS:
        return torch.topk(logits, min(WIDTH, vocab), dim=-1, sorted=False).indices, None
    lines = logits[:, :whole].reshape(-1, GROUP, columns)
    top, column = torch.topk(lines.amax(1), GROUPS, dim=-1, sorted=False)
    value = lines.gather(2, column[:, None, :].expand(-1, GROUP, -1)).flatten(1)
    if whole < vocab:
        value = torch.cat([value, logits[:, whole:]], dim=1)
    pick = torch.topk(value, min(WIDTH, value.shape[1]), dim=-1, sorted=False).indices
    token = pick // GROUPS * columns + column.gather(1, pick % GROUPS)
    rest = pick - GROUP * GROUPS + whole
    return torch.where(pick < GROUP * GROUPS, token, rest), top.amin(-1, keepdim=True)


def _roughly(rows: Rows) -> Tensor:
    """Bounds `[D, 2]` of what each row weighs, in units; the upper one may be beyond what there can be."""
    logits = rows.logits
    count, vocab = logits.shape
    scale = math.log2(math.e) / rows.temperature
    sums = torch.empty((count, 1), dtype=torch.float32, device=logits.device)
    room = torch.empty((min(_ROWS_AT_ONCE, count), vocab), dtype=torch.float32, device=logits.device)
    for first in range(0, count, _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        weight = torch.sub(logits[some], rows.peak[some], out=room[: len(logits[some])])
        weight.mul_(scale[some]).clamp_(min=_DEEPEST).exp2_()
        torch.sum(weight, dim=-1, keepdim=True, out=sums[some])
    total = sums.to(torch.float64) * rows.unit
    at_least = total * (1 - _SLACK) - vocab  # each weight may have lost up to a unit
    return torch.cat([at_least, total * (1 + _SLACK)], dim=1).to(torch.int64)


def _kept(rows: Rows, best: _Best) -> tuple[Tensor, Tensor]:
    """How many of the best tokens the filters keep, at least and at most, `[D, 1]` each; at least 1."""
    every = torch.full_like(rows.top_k, rows.logits.shape[1])
    limit = torch.minimum(rows.top_k, every)
    by_share = _top_p(rows, best, _mass(rows, best))
    by_share = torch.where(rows.top_p < 1, by_share, every)
    low, high = _min_p(rows, best, every)
    return (
        torch.minimum(torch.minimum(limit, by_share[:, :1]), low),
        torch.minimum(torch.minimum(limit, by_share[:, 1:]), high),
    )


def _mass(rows: Rows, best: _Best) -> Tensor:
    """Bounds `[D, 2]` of what the tokens weigh that top_k keeps, in units."""
    limited = best.running.gather(1, torch.minimum(rows.top_k, best.seen) - 1)
    beyond = torch.cat([limited, best.total[:, 1:]], dim=1)
    no_limit = rows.top_k >= rows.logits.shape[1]
    return torch.where(rows.top_k <= best.seen, limited, torch.where(no_limit, best.total, beyond))


def _top_p(rows: Rows, best: _Best, mass: Tensor) -> Tensor:
    """Bounds `[D, 2]` of how many tokens `top_p` keeps of `mass`; more than were seen may be any number."""
    count = torch.searchsorted(best.running, top_p_at(rows.top_p, mass), right=True) + 1
    least, most = torch.minimum(count[:, :1], best.seen + 1), count[:, 1:]
    return torch.cat([least, most.masked_fill(most > best.seen, rows.logits.shape[1])], dim=1)


def _min_p(rows: Rows, best: _Best, every: Tensor) -> tuple[Tensor, Tensor]:
    """The same for `min_p`: exact, if the first token that it drops is among those seen."""
    heavy = torch.minimum((best.weight >= rows.min_p).sum(-1, keepdim=True), best.seen)
    exact = (heavy < best.seen) | (best.edge < rows.min_p)
    cut = rows.min_p > 0
    return torch.where(cut, heavy, every), torch.where(cut & exact, heavy, every)
