"""Weights in fewer bits: codes and, for each group of 32 inputs of an output, what turns them into numbers.

int8 is symmetric, `w = scale * q` with q in -127..127. int4 has a scale and a middle, `w = scale * h +
middle` with h = -7.5, -6.5 .. 7.5: its 16 levels span what the group spans, wherever that lies. Scales and
middles are bfloat16, and codes are chosen for them as rounded, so that rounding them costs nothing: an int8
weight is off by half a scale at most. A middle is near 0 where weights are, so its rounding is small too.

The smallest and the largest weight of a group set the levels, and least squares then moves them to what the
codes have in common; for weights that were 16 levels already (a checkpoint made from a GGUF file of Q4_1)
that finds those levels again to within the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # inputs that share a scale
Bits = Literal[4, 8]
BITS: Mapping[str, Bits] = {"int8": 8, "int4": 4}

_LEVELS = 15  # steps between an int4 group's lowest and highest number
_HALF = _LEVELS / 2  # h = q - 7.5
_INT8 = 127  # largest int8 code; -128 is not used
_ROWS = 1024  # outputs quantised at a time, so that fp32 copies stay small
_TINY = 2.0**-120  # smallest scale: a group of zeros has codes too, and 1 / scale stays a number


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight `[N, K]`; K is made up to `G` whole groups, and codes beyond K are never to be used.

    codes: int8 `[N, G * 32]` of 8 bits, or uint8 `[N, G * 16]` with two of 4 bits in a byte, input 2j in
    the low half of byte j. scale `[N, G]` bfloat16; middle the same, None for 8 bits.
    """

    codes: Tensor
    scale: Tensor
    middle: Tensor | None
    inputs: int  # K

    @property
    def bits(self) -> Bits:
        """Bits of a code."""
        return 8 if self.middle is None else 4

    @property
    def outputs(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.middle is None else self.middle.nbytes)

    def dequantise(self, dtype: torch.dtype, rows: slice | Tensor = slice(None)) -> Tensor:
        """The weight's `rows` (a slice, or `[n]` int64) as `[n, K]`, computed in fp32 and rounded to
        `dtype` once."""
        codes, scale = self.codes[rows], self.scale[rows].float().unsqueeze(2)
        if self.middle is None:
            numbers = codes.float().view(len(codes), -1, GROUP) * scale
        else:
            halves = torch.stack((codes & 15, codes >> 4), dim=2).view(len(codes), -1, GROUP)
            numbers = (halves.float() - _HALF) * scale + self.middle[rows].float().unsqueeze(2)
        return numbers.flatten(1)[:, : self.inputs].to(dtype)


def quantise(weight: Tensor, bits: Bits) -> Quantised:
    """weight `[N, K]` of any float dtype, finite -> its codes, on the same device."""
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    device = weight.device
    scale = torch.empty((outputs, groups), dtype=torch.bfloat16, device=device)
    middle = torch.empty_like(scale) if bits == 4 else None
    kind, width = (torch.uint8, GROUP // 2) if bits == 4 else (torch.int8, GROUP)
    codes = torch.empty((outputs, groups * width), dtype=kind, device=device)
    for begin in range(0, outputs, _ROWS):
        rows = slice(begin, begin + _ROWS)
        for some, group in _groups(weight[rows].float()):
            if middle is None:
                scale[rows, some], found = _int8(group)
            else:
                scale[rows, some], middle[rows, some], found = _int4(group)
            place = slice(some.start * width, some.stop * width)
            codes[rows, place] = _bytes(F.pad(found, (0, GROUP - found.shape[2])))
    return Quantised(codes, scale, middle, inputs)


def _groups(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """weight `[n, K]` -> which groups, and they as `[n, G, 32]`: all whole ones, and a last one of fewer."""
    whole = weight.shape[1] // GROUP
    if whole:
        yield slice(0, whole), weight[:, : whole * GROUP].reshape(-1, whole, GROUP)
    if weight.shape[1] > whole * GROUP:
        yield slice(whole, whole + 1), weight[:, whole * GROUP :].unsqueeze(1)


def _int8(group: Tensor) -> tuple[Tensor, Tensor]:
    """group `[n, G, size]` -> scale `[n, G]` and codes of the same shape."""
    scale = _rounded_up(group.abs().amax(2) / _INT8)
    return scale, (group / scale.float().unsqueeze(2)).round_().to(torch.int8)


def _bytes(codes: Tensor) -> Tensor:
    """codes `[n, G, 32]` -> `[n, G * 32]`, or `[n, G * 16]` with two of 4 bits in a byte."""
    if codes.dtype == torch.int8:
        return codes.flatten(1)
    pairs = codes.view(*codes.shape[:2], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).flatten(1)


def _rounded_up(positive: Tensor) -> Tensor:
    """fp32 -> the next bfloat16 that is no smaller, at least `_TINY`: no code has to be cut off for it."""
    bits = positive.clamp(min=_TINY).contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def _int4(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """group `[n, G, size]` -> scale and middle `[n, G]` and codes 0..15 of the same shape."""
    low, high = group.amin(2), group.amax(2)
    scale, middle = ((high - low) / _LEVELS).clamp(min=_TINY), (low + high) / 2
    scale, middle = _least_squares(group, _codes(group, scale, middle), scale)
    return scale, middle, _codes(group, scale, middle).add_(_HALF).to(torch.uint8)


def _codes(group: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    """group `[n, G, size]` -> the nearest of -7.5 .. 7.5, in fp32."""
    steps = (group - middle.float().unsqueeze(2)) / scale.float().unsqueeze(2)
    return steps.add_(_HALF).round_().clamp_(0, _LEVELS).sub_(_HALF)


def _least_squares(group: Tensor, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 scale and middle `[n, G]` that `scale * codes + middle` meets `group` best with.

    `scale` is kept where all codes are equal, so that nothing can be told of it. The middle is the best for
    the scale as rounded.
    """
    mean_code, mean = codes.mean(2), group.mean(2)
    off = codes - mean_code.unsqueeze(2)
    spread = off.square().sum(2)
    slope = (off * group).sum(2) / spread
    best = torch.where(spread > 0, slope, scale).clamp(min=_TINY).bfloat16()
    return best, (mean - best.float() * mean_code).bfloat16()
