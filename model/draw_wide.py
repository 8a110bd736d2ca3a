"""Tokens found in the whole vocabulary, for the rows that the best few tokens did not decide.

Nothing as long as a vocabulary is sorted. Tokens are counted into buckets by how far they lie below the best,
so that running sums over the buckets tell in which of them the last token is that a filter keeps. Only that
bucket's tokens are sorted. (All of a row's logits being equal, that is all of them.) Rows without such a
filter need no buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.draw_rows import Rows, key_logits, key_tokens, order_keys, top_p_at
from model.race import BLOCK, block_sums, race_of_blocks, race_of_tokens

BUCKETS = 2048
_ROWS_AT_ONCE = 4  # of whole vocabularies, so that what is computed of them stays in a CPU's cache
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
    """The drawn ids `[D]` of rows that are not broken, or that no filter cuts."""
    starts = range(0, rows.logits.shape[0], _ROWS_AT_ONCE)
    weighed = [_weigh(rows.part(slice(start, start + _ROWS_AT_ONCE))) for start in starts]
    sums, last = torch.cat([sums for sums, _ in weighed]), torch.cat([last for _, last in weighed])
    token, units = _members(rows, race_of_blocks(rows.key, sums), last)
    return token.gather(1, race_of_tokens(rows.key, token, units))[:, 0]


def _weigh(rows: Rows) -> tuple[Tensor, Tensor]:
    """What the kept tokens of each block weigh, `[D, blocks]`, and the key of the last token that top_k and
    top_p keep, `[D, 1]`."""
    depth = rows.depth(rows.logits)
    weight = depth.exp()
    units = rows.units(weight)
    last = torch.full_like(rows.top_k, _EMPTY)
    limited, shared = rows.top_k < rows.logits.shape[1], rows.top_p < 1
    if bool((limited | shared).any()):
        buckets = _fill(rows, depth, units)
        mass = buckets.through[:, -1:]
        if bool(limited.any()):
            key, sum_of_best = _best(buckets, rows.top_k)
            last, mass = torch.where(limited, key, last), torch.where(limited, sum_of_best, mass)
        if bool(shared.any()):
            key, _ = _find(buckets, top_p_at(rows.top_p, mass))
            last = torch.maximum(last, torch.where(shared, key, last))
        token = torch.arange(units.shape[1], dtype=torch.int64, device=units.device)
        units *= _until(rows.logits, token, last)
    if bool((rows.min_p > 0).any()):
        units *= weight >= rows.min_p
    return block_sums(units), last


def _until(logit: Tensor, token: Tensor, last: Tensor) -> Tensor:
    """Which tokens come no later than the one whose key is `last` `[D, 1]`; all where that is _EMPTY."""
    least = key_logits(last)
    return (logit > least) | ((logit == least) & (token <= key_tokens(last))) | (last == _EMPTY)


def _members(rows: Rows, block: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens `[D, BLOCK]` of each row's block, and their units, 0 where one is not kept."""
    vocab = rows.logits.shape[1]
    token = block * BLOCK + torch.arange(BLOCK, dtype=torch.int64, device=block.device)
    logit = rows.logits.gather(1, token.clamp(max=vocab - 1))
    weight = rows.depth(logit).exp_()
    kept = (token < vocab) & _until(logit, token, last) & (weight >= rows.min_p)
    return token, rows.units(weight) * kept


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
    """The key `[D, 1]` of the first token whose running sum exceeds `above` `[D, 1]`, which is below the
    row's sum; and that running sum."""
    at = torch.searchsorted(buckets.through, above, right=True)
    keys, running = _sorted_members(buckets, at)
    running = running + buckets.before.gather(1, at)
    index = torch.searchsorted(running, above, right=True)
    return keys.gather(1, index), running.gather(1, index)


def _best(buckets: _Buckets, count: Tensor) -> tuple[Tensor, Tensor]:
    """The key `[D, 1]` of the last of each row's `count` `[D, 1]` best tokens, and the units of them all."""
    weighty = (buckets.units > 0).to(torch.int64)  # the others come last and change no sum
    filled = _count(buckets.bucket, weighty)
    through = filled.cumsum(-1)
    rank = torch.minimum(count, through[:, -1:]) - 1
    at = torch.searchsorted(through, rank, right=True)
    keys, running = _sorted_members(buckets, at)
    inside = rank - (through - filled).gather(1, at)
    return keys.gather(1, inside), buckets.before.gather(1, at) + running.gather(1, inside)


def _sorted_members(buckets: _Buckets, at: Tensor) -> tuple[Tensor, Tensor]:
    """The keys `[D, n]` of the tokens in each row's bucket `at` `[D, 1]`, from high to low, and the running
    sums of their units; n is the most that a row has, and what comes after a row's own means nothing."""
    row, token = torch.nonzero(buckets.bucket == at, as_tuple=True)
    held = torch.bincount(row, minlength=at.shape[0])[:, None]
    first = held.cumsum(0) - held
    place = torch.arange(row.shape[0], dtype=torch.int64, device=row.device) - first[row, 0]
    longest = int(held.max())
    keys = torch.full((at.shape[0], longest), _EMPTY, dtype=torch.int64, device=row.device)
    keys[row, place] = order_keys(buckets.logits[row, token], token)
    keys = keys.sort(-1, descending=True).values
    ids = torch.where(keys != _EMPTY, key_tokens(keys), 0)
    return keys, buckets.units.gather(1, ids).cumsum(-1)
