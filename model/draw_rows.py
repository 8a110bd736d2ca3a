"""The rows that tokens are drawn from, the weights of their tokens, and the order of these.

A weight is the fp32 number e^((logit - best logit) / temperature), cut to whole units and counted in int64. A
unit is as small as a sum over the vocabulary allows, 2^-46 of the best token's weight where there are 49,152:
what the cuts take away changes no share by more than 10^-9 of the whole. So sums are exact, whatever their
order, and do not depend on who else is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_WEIGHT = -44.0  # e^-44 is no unit in any vocabulary; what is below would cost exp slow denormals
_ID_BITS = 0x7FFFFFFF
LOWEST_KEY = -0x7F800001 << 32  # minus infinity and the highest id: all tokens come before


@dataclass(frozen=True, slots=True)
class Rows:
    """`D` rows to draw from; each column is `[D, 1]`."""

    logits: Tensor  # [D, V] fp32
    peak: Tensor  # fp32, the largest logit; the row is broken if it is not finite
    temperature: Tensor  # fp32
    top_p: Tensor  # fp64
    min_p: Tensor  # fp32
    top_k: Tensor  # int64, at least 1; a huge number where there is no limit
    key: Tensor  # int64: where the row's chance comes from

    def part(self, some: slice) -> Rows:
        """Consecutive rows, as views."""
        return Rows(
            logits=self.logits[some],
            peak=self.peak[some],
            temperature=self.temperature[some],
            top_p=self.top_p[some],
            min_p=self.min_p[some],
            top_k=self.top_k[some],
            key=self.key[some],
        )

    @property
    def limited(self) -> Tensor:
        """Which rows `top_k` leaves less than the vocabulary, `[D, 1]`."""
        return self.top_k < self.logits.shape[1]

    @property
    def unit(self) -> float:
        """How many units the best token weighs: a power of two; a whole vocabulary weighs less than 2^62."""
        return 2.0 ** (62 - self.logits.shape[1].bit_length())

    def depth(self, logits: Tensor) -> Tensor:
        """How far below the best some of the rows' logits `[D, n]` lie, in temperatures: fp32, at most 0.

        Nothing is deeper than NO_WEIGHT.
        """
        return (logits - self.peak).div_(self.temperature).clamp_(min=NO_WEIGHT)

    def units(self, weight: Tensor) -> Tensor:
        """fp32 weights, the best token's being 1, in whole units: int64."""
        return (weight * self.unit).to(torch.int64)


def order_keys(logit: Tensor, token: Tensor) -> Tensor:
    """int64 keys that are all different; from high to low, tokens go by logit, and equals by ascending id.

    `logit` fp32 and `token` int64 have one shape. A float's bits, read as an integer, order like the float
    once those of negative ones are turned over; -0.0 becomes 0.0 first, since the two are equal.
    """
    bits = (logit + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) | (_ID_BITS - token)


def key_logits(keys: Tensor) -> Tensor:
    """The logits that are in keys of `order_keys`, 0.0 for either zero."""
    bits = (keys >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def key_tokens(keys: Tensor) -> Tensor:
    """The token ids that are in keys of `order_keys`."""
    return _ID_BITS - (keys & _ID_BITS)


def until(logit: Tensor, token: Tensor, last: Tensor) -> Tensor:
    """Which tokens come no later than the one whose key is `last` `[D, 1]`."""
    least = key_logits(last)
    return (logit > least) | ((logit == least) & (token <= key_tokens(last)))
