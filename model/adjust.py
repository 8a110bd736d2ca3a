"""What changes logits before a token is drawn from them; the order is that of transformers.

First `bias`, then penalties (repetition, then frequency and presence), then what cannot be drawn at all: bans
and masks. All of it is done in place, for the rows that ask, over all of them at once: a few entries of a row
where few ids are concerned, the whole row only under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_ONCE = 8  # under a mask, so that what is made of it stays in a CPU's cache


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to `E` entries, each named once."""

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64, within the vocabulary
    values: Tensor  # [E] fp32


@dataclass(frozen=True, slots=True)
class Penalties:
    """`E` entries of `P` rows, each named once, for ids that a row's prompt or answer holds.

    A logit above 0 is divided by `repetition`, any other multiplied; then `frequency` for each time that the
    id was generated is taken off, and `presence` if it was at all.
    """

    rows: Tensor  # [P] int64
    owner: Tensor  # [E] int64 below P: whose entry it is
    ids: Tensor  # [E] int64, within the vocabulary
    counts: Tensor  # [E] int64: times generated; 0 where the prompt alone holds the id
    repetition: Tensor  # [P] fp32, above 0
    frequency: Tensor  # [P] fp32
    presence: Tensor  # [P] fp32


@dataclass(frozen=True, slots=True)
class Mask:
    """The only ids that may be drawn in `M` rows: id `i` if bit `i % 32` of word `i // 32` is set.

    Bits beyond the vocabulary mean nothing, and ids beyond the words are not allowed.
    """

    rows: Tensor  # [M] int64
    bits: Tensor  # [M, W] int32


@dataclass(frozen=True, slots=True)
class Adjustments:
    """All changes to the logits of one step; None where there are none of a kind."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    banned: tuple[Tensor, Tensor] | None = None  # rows and ids, int64 each, that cannot be drawn
    mask: Mask | None = None


def adjust(logits: Tensor, adjustments: Adjustments) -> None:
    """Makes the changes to logits `[S, V]` fp32, in place. Other rows stay as they are, to the bit."""
    if adjustments.bias is not None:
        at = (adjustments.bias.rows, adjustments.bias.ids)
        logits.index_put_(at, logits[at] + adjustments.bias.values)
    if adjustments.penalties is not None:
        _penalise(logits, adjustments.penalties)
    if adjustments.banned is not None:
        nothing = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
        logits.index_put_(adjustments.banned, nothing)
    if adjustments.mask is not None:
        _mask(logits, adjustments.mask)


def _penalise(logits: Tensor, penalties: Penalties) -> None:
    owner, counts = penalties.owner, penalties.counts
    at = (penalties.rows.index_select(0, owner), penalties.ids)
    before = logits[at]
    repetition = penalties.repetition.index_select(0, owner)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= penalties.frequency.index_select(0, owner) * counts
    after -= penalties.presence.index_select(0, owner) * (counts > 0)
    # An extreme penalty may overflow. That is no fault of the model's, so what was finite stays finite.
    most = torch.finfo(logits.dtype).max
    logits.index_put_(at, torch.where(before.isfinite(), after.clamp(-most, most), before))


def _mask(logits: Tensor, mask: Mask) -> None:
    """Adds 0 or -inf to whole rows, looked up for 8 ids at once: a sixth of the time that shifting each bit
    out and filling where it is not set takes on a CPU."""
    vocab = logits.shape[1]
    octet = torch.arange(256, dtype=torch.int32, device=logits.device)[:, None]
    unset = (octet >> torch.arange(8, dtype=torch.int32, device=logits.device)) & 1 == 0
    added = torch.zeros(unset.shape, dtype=logits.dtype, device=logits.device).masked_fill_(unset, -torch.inf)
    octets = mask.bits.contiguous().view(torch.uint8).to(torch.int32)  # words are little-endian
    told = min(vocab, 8 * octets.shape[1])
    for rows, part in zip(mask.rows.split(_ROWS_AT_ONCE), octets.split(_ROWS_AT_ONCE), strict=True):  # type: ignore[no-untyped-call]
        whole = added.index_select(0, part.flatten()).view(len(part), -1)
        logits[:, :told].index_add_(0, rows, whole[:, :told])
    if told < vocab:
        logits[:, told:].index_fill_(0, mask.rows, -torch.inf)
