"""Other KV heads by other rows: what a head map does to activations, done once to the projections' weights.

The projections are linear, so a map that is linear in q, k and v up to RoPE is a change of their rows, and
of their biases like another column. Everything is computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.calibration import Calibration
from model.config import ModelConfig
from model.errors import ModelError


class Rewrite(Protocol):
    """How a layer's attention weights become those of `kv_heads` KV heads."""

    @property
    def kv_heads(self) -> int:
        """KV heads of the new checkpoint."""
        ...

    @property
    def changes(self) -> frozenset[str]:
        """Names of the projections that it changes."""
        ...

    def projection(self, layer: int, name: str, part: str, rows: Tensor) -> Tensor:
        """The new weight or bias (`part`) of the projection `name`, from the old one: fp32 on the CPU."""
        ...


@dataclass(frozen=True, slots=True)
class RepeatedRows:
    """Each KV head several times: exact (`RepeatHeads`)."""

    config: ModelConfig
    kv_heads: int
    changes: frozenset[str] = frozenset({"k_proj", "v_proj"})

    def projection(self, layer: int, name: str, part: str, rows: Tensor) -> Tensor:
        """See `Rewrite.projection`."""
        heads = _by_head(rows, self.config.head_dim)
        return heads.repeat_interleave(self.kv_heads // len(heads), dim=0).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class AveragedRows:
    """Each KV head the mean of a group (`MeanHeads`)."""

    config: ModelConfig
    kv_heads: int
    changes: frozenset[str] = frozenset({"k_proj", "v_proj"})

    def projection(self, layer: int, name: str, part: str, rows: Tensor) -> Tensor:
        """See `Rewrite.projection`."""
        return _grouped(_by_head(rows, self.config.head_dim), self.kv_heads).mean(dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class AlignedRows:
    """Each KV head shared by a group in a fitted basis (`AlignedHeads`); see `aligned_rows`."""

    config: ModelConfig
    calibration: Calibration
    changes: frozenset[str] = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})

    @property
    def kv_heads(self) -> int:
        """See `Rewrite.kv_heads`."""
        return self.calibration.kv_heads

    def projection(self, layer: int, name: str, part: str, rows: Tensor) -> Tensor:
        """See `Rewrite.projection`."""
        fit = self.calibration.layers[layer]
        if name == "o_proj":
            own = fit.o if part == "weight" else fit.o_bias
            return torch.zeros_like(rows) if own is None else own.cpu()
        heads = _by_head(rows, self.config.head_dim)
        if name == "v_proj":
            together = _grouped(heads.flatten(0, 1), self.kv_heads)  # [K, h * D, ...]
            return torch.einsum("gij,gj...->gi...", fit.v_in.cpu(), together).flatten(0, 1)
        if name == "q_proj":
            factors = fit.query.cpu().repeat_interleave(self.config.group, dim=0)
            return _turned(heads, factors).flatten(0, 1)
        return _grouped(_turned(heads, fit.key.cpu()), self.kv_heads).sum(dim=1).flatten(0, 1)


def aligned_rows(calibration: Calibration, config: ModelConfig) -> AlignedRows:
    """The rewrite of a calibration whose slots are the checkpoint's own pairs.

    Raises ModelError with the reason where the map has no form that a checkpoint can hold.
    """
    reason = no_form(calibration.kind, config)
    if reason is not None:
        raise ModelError(f"head map {calibration.kind} has no form as a checkpoint: {reason}")
    for fit in calibration.layers:
        own = torch.arange(config.head_dim // 2, device=fit.frequency.device, dtype=torch.int64)
        if not torch.equal(fit.frequency, own.expand_as(fit.frequency)):
            raise ModelError("a slot of the calibration is not the pair of its own frequency")
        if fit.o_bias is not None and not config.o_bias:
            raise ModelError("the calibration has a bias after attention, and the checkpoint has none there")
    return AlignedRows(config, calibration)


def no_form(head_map: str, config: ModelConfig) -> str | None:
    """Why a reducing map of this kind cannot be written as a checkpoint; None if it can."""
    if head_map == "aligned":
        return (
            "its free slots turn with frequencies of their own in each layer, which config.json cannot "
            "express; take aligned-fixed, or mean"
        )
    if head_map == "aligned-fixed" and config.qk_norm:
        return (
            f"it mixes the heads of a {config.family} model after their norm (q_norm, k_norm), which is not "
            "linear, so no weights before that norm do the same; take mean"
        )
    return None


def _by_head(rows: Tensor, head_dim: int) -> Tensor:
    """`[H * D, ...]` -> `[H, D, ...]`."""
    return rows.reshape(-1, head_dim, *rows.shape[1:])


def _grouped(rows: Tensor, groups: int) -> Tensor:
    """`[N, ...]` -> `[groups, N / groups, ...]`."""
    return rows.reshape(groups, -1, *rows.shape[1:])


def _turned(heads: Tensor, factors: Tensor) -> Tensor:
    """heads `[H, D, ...]`, whose rows i and i + D/2 are a pair, times complex factors `[H, D / 2]`."""
    real, imaginary = heads.chunk(2, dim=1)
    shape = (*factors.shape, *(1,) * (heads.dim() - 2))
    a, b = factors.real.reshape(shape), factors.imag.reshape(shape)
    return torch.cat((a * real - b * imaginary, a * imaginary + b * real), dim=1)
