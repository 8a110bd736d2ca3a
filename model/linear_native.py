"""Linear layers in C++ on a CPU: weights packed once in panels, products in our own kernels.

A panel holds 16 outputs, with P consecutive inputs of each side by side in 4 bytes (a pair of bfloat16, one
float32): `[out / 16, in / P, 16, P]`. One token streams it from memory in order; many tokens use it from the
caches. Each token's sums are made in the same order whoever else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.linear import Embedding, GatedLinear, Linear, PlainEmbedding, PlainLinear, SplitGate
from model.native.library import LANES, NativeLibrary


def rows_of_panels(panels: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` `[...]` of the weight that `panels` hold: `[..., K]`."""
    return panels[ids // LANES, :, ids % LANES].flatten(-2)


def padded(bias: Tensor | None, parts: int = 1) -> Tensor | None:
    """A bias as the kernels read it: fp32, in whole panels; of two parts (gate and up), in turn."""
    if bias is None:
        return None
    whole = [F.pad(part.float(), (0, -len(part) % LANES)).view(-1, LANES) for part in bias.chunk(parts)]
    return alternating(*whole).flatten()


def alternating(*panels: Tensor) -> Tensor:
    """The panels of one weight or more in turn: of gate and up, so that a kernel has both at hand."""
    return torch.stack(panels, dim=1).flatten(0, 1)


def _flat(x: Tensor, missing: int) -> Tensor:
    """x `[..., K]` in rows, with so many zeros after each."""
    rows = x.reshape(-1, x.shape[-1])
    return F.pad(rows, (0, missing)) if missing else rows.contiguous()


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed weight; `nbytes` leaves its padding out."""

    ops: Any
    weight: Any  # the C++ class Weight
    out_features: int
    nbytes: int
    missing: int = 0  # inputs that the weight has beyond K

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        product: Tensor = self.ops.linear(_flat(x, self.missing), self.weight, False)
        return product.view(*x.shape[:-1], self.out_features)

    def fp32(self, x: Tensor) -> Tensor:
        """See `Linear.fp32`."""
        product: Tensor = self.ops.linear(_flat(x, self.missing), self.weight, True)
        return product


@dataclass(frozen=True, slots=True)
class NativeGated:
    """Gate and up, packed panel by panel in turn; multiplied before they leave the registers."""

    ops: Any
    weight: Any
    inner: int
    nbytes: int
    missing: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """See `GatedLinear.__call__`."""
        product: Tensor = self.ops.gated_linear(_flat(x, self.missing), self.weight, self.inner)
        return product.view(*x.shape[:-1], self.inner)


@dataclass(frozen=True, slots=True)
class PanelEmbedding:
    """A tied model's table, read from the lm_head's panels."""

    panels: Tensor  # [ceil(V / 16), hidden / P, 16, P]
    size: int
    nbytes: int

    def rows(self, ids: Tensor) -> Tensor:
        """See `Embedding.rows`."""
        return rows_of_panels(self.panels, ids)

    @property
    def dtype(self) -> torch.dtype:
        """See `Embedding.dtype`."""
        return self.panels.dtype

    @property
    def device(self) -> torch.device:
        """See `Embedding.device`."""
        return self.panels.device


@dataclass(frozen=True, slots=True)
class NativeLinearBackend:
    """Weights for the C++ kernels."""

    library: NativeLibrary
    reason: str
    name: str = "native"
    kind: str = "none"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `LinearBackend.pack`."""
        if not _fits(weight):
            return PlainLinear(weight, bias)
        return self._linear(self._settled(weight), weight, bias)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> GatedLinear:
        """See `LinearBackend.pack_gated`."""
        if not _fits(weight):
            return SplitGate(PlainLinear(weight, bias))
        gate, up = (self._panels(half) for half in weight.chunk(2))
        panels = self.library.ops.settle(alternating(gate, up))
        packed = self._weight(panels, padded(bias, 2), panels.shape[0] * LANES, weight.shape[1])
        return NativeGated(self.library.ops, packed, weight.shape[0] // 2, _nbytes(weight, bias))

    def pack_tied(self, table: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_tied`."""
        if not _fits(table):
            return PlainEmbedding(table), PlainLinear(table, None)
        panels = self._settled(table)
        return PanelEmbedding(panels, table.shape[0], table.nbytes), self._linear(panels, table, None)

    def pack_untied(self, table: Tensor, head: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_untied`."""
        return PlainEmbedding(table), self.pack(head, None)

    def _panels(self, weight: Tensor) -> Tensor:
        """weight `[N, K]` -> `[ceil(N / 16), K / P, 16, P]`, rows past N zero."""
        panels: Tensor = self.library.ops.to_panels(weight.contiguous())
        return panels

    def _settled(self, weight: Tensor) -> Tensor:
        """`_panels`, where they stay."""
        panels: Tensor = self.library.ops.settle(self._panels(weight))
        return panels

    def _linear(self, panels: Tensor, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        packed = self._weight(panels, padded(bias), *weight.shape)
        return NativeLinear(self.library.ops, packed, weight.shape[0], _nbytes(weight, bias))

    def _weight(self, panels: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> Any:
        return self.library.classes.Weight(panels, bias, outputs, inputs)


def _fits(weight: Tensor) -> bool:
    """Whether inputs fill whole lanes; an odd number of bfloat16 does not."""
    return weight.shape[1] * weight.itemsize % 4 == 0


def _nbytes(weight: Tensor, bias: Tensor | None) -> int:
    return weight.nbytes + (0 if bias is None else bias.nbytes)
