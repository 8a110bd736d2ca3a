"""Tokens found among the best few: this decides nearly every row, and is quick.

The logits are laid out as GROUP lines of equal length, one under the other. One pass gives the best of each
column; whatever is not in one of the GROUPS best columns is no larger than the least of these columns' best.

What all the other tokens weigh together is known only roughly, from a quick sum in fp32. So every cut has a
lower and an upper bound, and a row is decided if both draw the same token, and that token is certainly in its
place. The others are left to `draw_wide`, which would have drawn the same in the decided rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.draw_rows import Rows, drawn_at, key_tokens, order_keys, top_p_at

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
    """The best tokens of `D` rows, in the order of draws, `n` of each."""

    token: Tensor  # [D, n] int64
    weight: Tensor  # [D, n] fp32
    running: Tensor  # [D, n] int64: units up to and with each
    seen: Tensor  # [D, 1] int64, at least 1: so many of the weights are the row's best
    certain: Tensor  # [D, 1] int64, at most `seen`: so many of the tokens are in their place
    edge: Tensor  # [D, 1] fp32: no token beyond `seen` weighs more
    total: Tensor  # [D, 2] int64: units of the whole row, at least and at most


def draw_narrow(rows: Rows, needs_total: bool) -> tuple[Tensor, Tensor]:
    """The drawn ids `[D]`, and which of them are sure (broken rows are, of anything).

    `needs_total` may be False if no row's draw depends on what its tokens weigh beyond the first WIDTH.
    """
    best = _best_tokens(rows, needs_total)
    index = torch.searchsorted(best.running, drawn_at(rows.u, _kept(rows, best)), right=True)
    low, high = index[:, :1], index[:, 1:]
    sure = ((low == high) & (low < best.certain)) | ~torch.isfinite(rows.peak)
    ids = best.token.gather(1, low.clamp(max=best.token.shape[1] - 1))
    return ids[:, 0], sure[:, 0]


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


def _kept(rows: Rows, best: _Best) -> Tensor:
    """Bounds `[D, 2]` of what the tokens weigh that the filters keep, in units."""
    mass = _top_p(rows, best, _top_k(rows, best))
    return torch.minimum(mass, _min_p(rows, best))


def _top_k(rows: Rows, best: _Best) -> Tensor:
    limited = best.running.gather(1, torch.minimum(rows.top_k, best.seen) - 1)
    beyond = torch.cat([limited, best.total[:, 1:]], dim=1)
    no_limit = rows.top_k >= rows.logits.shape[1]
    return torch.where(rows.top_k <= best.seen, limited, torch.where(no_limit, best.total, beyond))


def _top_p(rows: Rows, best: _Best, mass: Tensor) -> Tensor:
    """What `top_p` keeps of `mass`: up to a token that was seen, or its share and at most a token more."""
    above = top_p_at(rows.top_p, mass)
    index = torch.searchsorted(best.running, above, right=True)
    seen = best.running.gather(1, index.clamp(max=best.running.shape[1] - 1))
    more = torch.cat([torch.zeros_like(best.seen), rows.units(best.edge)], dim=1)
    return torch.minimum(mass, torch.where(index < best.seen, seen, above + 1 + more))


def _min_p(rows: Rows, best: _Best) -> Tensor:
    """What `min_p` keeps of the row: exactly, if the first token that it drops is among those seen."""
    heavy = (best.weight >= rows.min_p).sum(-1, keepdim=True).clamp(min=1)
    exact = (heavy < best.seen) | (best.edge < rows.min_p)
    part = best.running.gather(1, torch.minimum(heavy, best.seen) - 1)
    low = torch.where(exact | (rows.min_p > 0), part, _UNKNOWN)
    return torch.cat([low, torch.where(exact, part, _UNKNOWN)], dim=1)
