"""Tokens found in the whole vocabulary, for the rows that the best few tokens did not decide.

Nothing as long as a vocabulary is sorted. Tokens are counted into buckets by how far they lie below the best,
so that running sums over the buckets tell in which of them a token is that one looks for: the last that a
filter keeps, or the one to draw. Only that bucket's tokens are sorted. (All of a row's logits being equal,
that is all of them.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.draw_rows import Rows, drawn_at, key_tokens, order_keys, top_p_at

BUCKETS = 2048
_FLAT = -1e-30  # the depth of the deepest token of a row whose logits are all equal: not 0, for it divides
_EMPTY = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class _Buckets:
    """The tokens of `D` rows by depth; bucket 0 holds the best."""

    logits: Tensor  # [D, V] fp32
    units: Tensor  # [D, V] int64
    bucket: Tensor  # [D, V] int64
    before: Tensor  # [D, BUCKETS] int64: units in the buckets before
    through: Tensor  # [D, BUCKETS] int64: and with this one


def draw_wide(rows: Rows) -> Tensor:
    """The drawn ids `[D]` of rows that are not broken."""
    depth = rows.depth(rows.logits)
    weight = depth.exp()
    buckets = _fill(rows, depth, rows.units(weight))
    mass = buckets.through[:, -1:]
    limited = rows.top_k < rows.logits.shape[1]
    if bool(limited.any()):
        mass = torch.where(limited, _best(buckets, rows.top_k), mass)
    if bool((rows.top_p < 1).any()):
        mass = torch.minimum(mass, _find(buckets, top_p_at(rows.top_p, mass))[1])
    if bool((rows.min_p > 0).any()):
        heavy = (buckets.units * (weight >= rows.min_p)).sum(-1, keepdim=True)
        mass = torch.minimum(mass, torch.maximum(heavy, buckets.units.amax(-1, keepdim=True)))
    return _find(buckets, drawn_at(rows.u, mass))[0][:, 0]


def _fill(rows: Rows, depth: Tensor, units: Tensor) -> _Buckets:
    """Buckets of equal steps from the best to the deepest; equal logits share one, since rounding is
    monotone."""
    deepest = depth.amin(-1, keepdim=True).clamp(max=_FLAT)
    bucket = (depth * (BUCKETS / deepest)).clamp_(max=BUCKETS - 1).to(torch.int64)
    filled = _count(bucket, units)
    through = filled.cumsum(-1)
    return _Buckets(rows.logits, units, bucket, through - filled, through)


def _count(bucket: Tensor, amount: Tensor) -> Tensor:
    """`[D, BUCKETS]` int64: the amounts `[D, V]` in each bucket."""
    empty = torch.zeros((bucket.shape[0], BUCKETS), dtype=torch.int64, device=bucket.device)
    return empty.scatter_add_(1, bucket, amount)


def _find(buckets: _Buckets, above: Tensor) -> tuple[Tensor, Tensor]:
    """The first token `[D, 1]` whose running sum exceeds `above` `[D, 1]`, which is below the row's sum; and
    that running sum."""
    at = torch.searchsorted(buckets.through, above, right=True)
    token, running = _sorted_members(buckets, at)
    running = running + buckets.before.gather(1, at)
    index = torch.searchsorted(running, above, right=True)
    return token.gather(1, index), running.gather(1, index)


def _best(buckets: _Buckets, count: Tensor) -> Tensor:
    """The units of each row's `count` `[D, 1]` best tokens, `[D, 1]`."""
    weighty = (buckets.units > 0).to(torch.int64)  # the others come last and change no sum
    filled = _count(buckets.bucket, weighty)
    through = filled.cumsum(-1)
    rank = torch.minimum(count, through[:, -1:]) - 1
    at = torch.searchsorted(through, rank, right=True)
    _, running = _sorted_members(buckets, at)
    inside = rank - (through - filled).gather(1, at)
    return buckets.before.gather(1, at) + running.gather(1, inside)


def _sorted_members(buckets: _Buckets, at: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens `[D, n]` of each row's bucket `at` `[D, 1]` in the order of draws, and the running sums of
    their units; n is the most that a row has, and what comes after a row's own means nothing."""
    row, token = torch.nonzero(buckets.bucket == at, as_tuple=True)
    held = torch.bincount(row, minlength=at.shape[0])[:, None]
    first = held.cumsum(0) - held
    place = torch.arange(row.shape[0], dtype=torch.int64, device=row.device) - first[row, 0]
    longest = int(held.max())
    keys = torch.full((at.shape[0], longest), _EMPTY, dtype=torch.int64, device=row.device)
    keys[row, place] = order_keys(buckets.logits[row, token], token)
    keys = keys.sort(-1, descending=True).values
    ids = torch.where(keys != _EMPTY, key_tokens(keys), 0)
    return ids, buckets.units.gather(1, ids).cumsum(-1)
