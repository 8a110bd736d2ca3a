"""How a token of each row is drawn: its weights, the last token that the filters keep, the race of the kept.

What a row weighs bounds how low the last token can be that top_p keeps, and the best of its blocks do so for
top_k. Tokens no lower are *candidates*, few as a rule. They are counted into buckets by how far they are
from the best, so that running sums tell in which the last token is, and only that one's tokens are sorted.
(All of a row's logits being equal, that is all of them.) What comes of a broken row means nothing, and every
index stays in range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.draw_rows import LOWEST_KEY, Rows, order_keys, until
from model.race import BLOCK, block_count, block_sums, race_of_blocks, race_of_tokens

BUCKETS = 1024
GUESS = 4  # the last token that top_p keeps is mostly that much heavier than it must be
_ROWS_AT_ONCE = 8  # of whole vocabularies, so that what is computed of them stays in a CPU's cache
_ROWS_ELSEWHERE = 64  # other devices want few operations, and their memory holds that
_SLACK = 1e-4  # of a depth; what rounding does to a weight is less
_FLAT = -1e-30  # the depth of the deepest token of a row whose logits are all equal: not 0, for it divides
_LOWEST = torch.finfo(torch.float32).min
_NEVER = torch.iinfo(torch.int64).max  # no sum exceeds it
_BLOCK_BITS = BLOCK.bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Tokens of `D` rows by ascending id, `n` of each; where a row has fewer, some that weigh nothing."""

    token: Tensor  # [D, n] int64
    logit: Tensor  # [D, n] fp32
    weight: Tensor  # [D, n] fp32
    units: Tensor  # [D, n] int64
    bucket: Tensor  # [D, n] int64


def draw(rows: Rows) -> Tensor:
    """The drawn ids `[D]`; of a broken row, any."""
    some = _ROWS_AT_ONCE if rows.logits.is_cpu else _ROWS_ELSEWHERE
    weighed = [_weigh(rows.part(slice(at, at + some))) for at in range(0, len(rows.logits), some)]
    sums, last = torch.cat([sums for sums, _ in weighed]), torch.cat([last for _, last in weighed])
    token, units = _members(rows, race_of_blocks(rows.key, sums), last)
    return token.gather(1, race_of_tokens(rows.key, token, units))[:, 0]


def _weigh(rows: Rows) -> tuple[Tensor, Tensor]:
    """What the kept tokens of each block weigh, `[D, blocks]`, and the key of the last token that top_k and
    top_p keep, `[D, 1]`."""
    limited, shared = rows.limited, rows.top_p < 1
    cut = limited | shared | (rows.min_p > 0)
    last = torch.full_like(rows.top_k, LOWEST_KEY)
    any_limited = bool(limited.any())
    if any_limited and bool(limited.all()):  # then nobody asks what the others weigh
        sums = last.new_zeros((len(last), block_count(rows.logits.shape[1])))
    else:
        sums = block_sums(rows.units(rows.depth(rows.logits).exp_()))
    if not bool(cut.any()):
        return sums, last
    mass = sums.sum(-1, keepdim=True)
    floor = _best_of_blocks(rows) if any_limited else torch.full_like(rows.peak, _LOWEST)
    some = _candidates(rows, mass, floor.masked_fill_(~cut, torch.nan))
    if any_limited:
        last = _last(some, (some.units > 0).to(torch.int64), rows.top_k - 1)
        best = some.units * until(some.logit, some.token, last)
        mass = torch.where(limited, best.sum(-1, keepdim=True), mass)
    if bool(shared.any()):
        last = torch.maximum(last, _last(some, some.units, _above(rows, mass)))
    kept = some.units * (until(some.logit, some.token, last) & (some.weight >= rows.min_p))
    return torch.zeros_like(sums).scatter_add_(1, some.token >> _BLOCK_BITS, kept).where(cut, sums), last


def _above(rows: Rows, mass: Tensor) -> Tensor:
    """The units that a running sum must exceed for its token to be the last that top_p keeps of `mass`."""
    above = torch.minimum((rows.top_p * mass).ceil_().to(torch.int64), mass) - 1
    return above.masked_fill_(rows.top_p >= 1, _NEVER)


def _candidates(rows: Rows, total: Tensor, floor: Tensor) -> _Candidates:
    """All kept tokens, and others, but none below `floor` `[D, 1]`; none at all of rows where that is NaN."""
    above = _above(rows, total)
    # The last token of top_p and all after it weigh total - above or more, together: so it is not light.
    light = (total - above).to(torch.float64) / (rows.logits.shape[1] * rows.unit)
    guessed = (rows.top_p < 1) & ~rows.limited & (rows.min_p == 0)
    for guess in (GUESS, 1):
        least = torch.maximum(light * torch.where(guessed, guess, 1), rows.min_p)
        least = least.masked_fill_(rows.limited, 0).clamp_(1 / rows.unit, 1)
        bound = rows.peak + rows.temperature * (torch.log(least) - _SLACK)
        some = _no_lower(rows, torch.maximum(bound.to(torch.float32), floor))
        if not bool((guessed & (some.units.sum(-1, keepdim=True) <= above)).any()):
            break
    return some


def _best_of_blocks(rows: Rows) -> Tensor:
    """A finite number `[D, 1]` no larger than the top_k-th logit, if that is finite: each of the top_k best
    blocks has a token as good as the last of these blocks' best."""
    blocks = rows.logits.shape[1] // BLOCK
    if not blocks:
        return torch.full_like(rows.peak, _LOWEST)
    best = rows.logits[:, : blocks * BLOCK].reshape(-1, blocks, BLOCK).amax(-1)
    best = best.sort(-1, descending=True).values.gather(1, rows.top_k.clamp(max=blocks) - 1)
    return best.masked_fill_(rows.top_k > blocks, _LOWEST).clamp_(min=_LOWEST)


def _no_lower(rows: Rows, bound: Tensor) -> _Candidates:
    """The tokens whose logits are no lower than `bound` `[D, 1]`; none where that is NaN.

    Buckets are equal steps from the best to the deepest; equal logits share one, since rounding is monotone.
    """
    token, real = _places(rows.logits >= bound)
    logit = rows.logits.gather(1, token)
    depth = rows.depth(logit)
    steps = BUCKETS / depth.amin(-1, keepdim=True).clamp_(max=_FLAT)
    bucket = (depth * steps).to(torch.int64).clamp_(0, BUCKETS - 1)
    weight = depth.exp_()
    return _Candidates(token, logit, weight, rows.units(weight).mul_(real), bucket)


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of a mask `[D, m]` is true: `[D, n]` int64, ascending, and which of these are real; the
    others repeat a row's last, or are anything if it has none."""
    count, width = mask.shape
    found = torch.nonzero(mask.flatten())[:, 0]
    start = torch.arange(count + 1, dtype=torch.int64, device=mask.device)[:, None] * width
    edge = torch.searchsorted(found, start)
    longest = max(1, int(edge.diff(dim=0).max()))
    rank = edge[:-1] + torch.arange(1, longest + 1, dtype=torch.int64, device=mask.device)
    place = torch.nn.functional.pad(found, (1, 0)).take(torch.minimum(rank, edge[1:]))
    return place.sub_(start[:-1]).clamp_(min=0), rank <= edge[1:]


def _last(some: _Candidates, amount: Tensor, above: Tensor) -> Tensor:
    """The key `[D, 1]` of each row's first token with which the running sum of `amount` `[D, n]` exceeds
    `above` `[D, 1]`; LOWEST_KEY if none does."""
    filled = torch.zeros((len(above), BUCKETS), dtype=torch.int64, device=above.device)
    through = filled.scatter_add_(1, some.bucket, amount).cumsum(-1)
    at = torch.searchsorted(through, above, right=True)
    inside, real = _places(some.bucket == at)
    keys = order_keys(some.logit.gather(1, inside), some.token.gather(1, inside))
    keys, order = keys.masked_fill_(~real, LOWEST_KEY).sort(-1, descending=True)
    before = (through - filled).gather(1, at.clamp(max=BUCKETS - 1))
    running = before + amount.gather(1, inside).gather(1, order).cumsum(-1)
    index = torch.searchsorted(running, above, right=True).clamp_(max=keys.shape[1] - 1)
    return keys.gather(1, index)


def _members(rows: Rows, block: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens `[D, BLOCK]` of each row's block, and their units, 0 where one is not kept."""
    vocab = rows.logits.shape[1]
    token = block * BLOCK + torch.arange(BLOCK, dtype=torch.int64, device=block.device)
    logit = rows.logits.gather(1, token.clamp(max=vocab - 1))
    weight = rows.depth(logit).exp_()
    kept = (token < vocab) & until(logit, token, last) & (weight >= rows.min_p)
    return token, rows.units(weight) * kept
