"""Shared keys: which (frequency, direction) pairs a group of KV heads keeps, and the factors that make them.

RoPE (arXiv 2104.09864) turns a pair of columns as one complex number, so complex factors commute with it. At
each frequency the keys of a group's heads are a vector of h complex numbers; where one head's keys nearly
determine another's, a few directions of it carry all. Each is weighted by how strongly queries read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A head that no query reads at a frequency still gets this share of the largest weight: its factor divides.
_WEIGHT_FLOOR = 1e-3
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Slots:
    """The D / 2 slots of each shared key, as `LayerFit` has them."""

    frequency: Tensor  # [K, S] int64
    key: Tensor  # [Hkv, S] complex64
    query: Tensor  # [Hkv, S] complex64


class KeyStatistics:
    """Second moments of a layer's queries and keys, before RoPE, summed over tokens in fp64."""

    def __init__(self, kv_heads: int) -> None:
        """`kv_heads`: K, those of the mode."""
        self._kv_heads = kv_heads
        self._cross: Tensor | None = None  # [K, F, h, h] complex128: sum of conj(k_i) k_j
        self._query: Tensor | None = None  # [Hkv, F] fp64: sum of |q|², over tokens and readers
        self._readers = 0

    def add(self, q: Tensor, k: Tensor) -> None:
        """q `[T, Hq, D]`, k `[T, Hkv, D]` fp32, both after bias and norm."""
        tokens, native, head_dim = k.shape
        share = native // self._kv_heads
        # Per frequency one real product of all real and imaginary parts, [K, F, 2h, T] by its transpose: a
        # complex product is many times slower.
        parts = k.view(tokens, self._kv_heads, share, 2, head_dim // 2).permute(1, 4, 3, 2, 0)
        parts = parts.reshape(self._kv_heads, head_dim // 2, 2 * share, tokens)
        moment = parts @ parts.transpose(-1, -2)
        (rr, ri), (ir, ii) = (half.chunk(2, dim=-1) for half in moment.chunk(2, dim=-2))
        cross = torch.complex((rr + ii).double(), (ri - ir).double())
        power = q.square().view(tokens, native, -1, 2, head_dim // 2).sum(dim=3)
        self._cross = cross if self._cross is None else self._cross + cross
        power = power.sum(dim=(0, 2)).double()
        self._query = power if self._query is None else self._query + power
        self._readers += tokens * q.shape[1] // native

    def slots(self, *, free: bool) -> Slots:
        """The strongest slots; unless `free`, the strongest direction of each frequency. Raises ValueError
        where nothing was added."""
        if self._cross is None or self._query is None:
            raise ValueError("no tokens were added")
        device = self._cross.device
        groups, pairs, share, _ = self._cross.shape
        weight = (self._query.cpu() / self._readers).sqrt().view(groups, share, pairs)
        floor = (_WEIGHT_FLOOR * weight.amax(dim=(1, 2), keepdim=True)).clamp_min(_TINY)
        weight = weight.maximum(floor).transpose(1, 2)  # [K, F, h]
        weighted = self._cross.cpu() * weight.unsqueeze(-1) * weight.unsqueeze(-2)
        strength, direction = torch.linalg.eigh(weighted)  # ascending; directions are columns
        strength, direction = strength.flip(-1), _one_phase(direction.flip(-1))
        found = [_strongest(strength[group], free) for group in range(groups)]
        frequency = torch.stack([pair for pair, _ in found])  # [K, S]
        group = torch.arange(groups, dtype=torch.int64, device=frequency.device).unsqueeze(1)
        chosen = direction[group, frequency, :, torch.stack([rank for _, rank in found])]  # [K, S, h]
        scale = weight[group, frequency]
        key = (chosen * scale).transpose(1, 2).flatten(0, 1).to(torch.complex64)
        query = (chosen / scale).transpose(1, 2).flatten(0, 1).to(torch.complex64)
        return Slots(frequency.to(device), key.to(device), query.to(device))


def _strongest(strength: Tensor, free: bool) -> tuple[Tensor, Tensor]:
    """strength `[F, h]`, descending in h -> frequency and rank of each slot, `[F]` each, by frequency."""
    pairs, share = strength.shape
    if not free:
        frequency = torch.arange(pairs, dtype=torch.int64, device=strength.device)
        return frequency, torch.zeros_like(frequency)
    order = strength.flatten().sort(descending=True, stable=True).indices[:pairs].sort().values
    return order // share, order % share


def _one_phase(direction: Tensor) -> Tensor:
    """Eigenvectors `[..., h, n]` are free in phase: the largest entry of each becomes real and positive."""
    largest = direction.gather(-2, direction.abs().argmax(dim=-2, keepdim=True))
    return direction * largest.conj() / largest.abs()
