"""Linear layers over weights of 4 or 8 bits, through PyTorch: they run on any device and in any dtype.

Rows of a weight are made again, some at a time, for every product, so this saves memory and no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model.linear import Embedding, GatedLinear, Linear, SplitGate
from model.quantise import Bits, Quantised, quantise

ENDS: Bits = 8  # of an embedding and an lm_head: 4 cost more quality there than in all layers together
_SCRATCH = 1 << 22  # numbers of a weight that are made again at a time


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """Codes in row order."""

    weight: Quantised
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        rows = max(1, _SCRATCH // self.weight.inputs)
        parts = [slice(begin, begin + rows) for begin in range(0, self.weight.outputs, rows)]
        return torch.cat([self._product(x, part) for part in parts], dim=-1)

    def _product(self, x: Tensor, part: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[part].to(x.dtype)
        return F.linear(x, self.weight.dequantise(x.dtype, part), bias)

    def fp32(self, x: Tensor) -> Tensor:
        """See `Linear.fp32`."""
        return self(x.float())

    @property
    def out_features(self) -> int:
        """See `Linear.out_features`."""
        return self.weight.outputs

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class QuantisedEmbedding:
    """A table of codes in row order; each row is made again when it is looked up."""

    table: Quantised
    dtype: torch.dtype  # of what is looked up

    def rows(self, ids: Tensor) -> Tensor:
        """See `Embedding.rows`."""
        return self.table.dequantise(self.dtype, ids.flatten()).view(*ids.shape, self.table.inputs)

    @property
    def size(self) -> int:
        """See `Embedding.size`."""
        return self.table.outputs

    @property
    def device(self) -> torch.device:
        """See `Embedding.device`."""
        return self.table.codes.device

    @property
    def nbytes(self) -> int:
        """See `Embedding.nbytes`."""
        return self.table.nbytes


@dataclass(frozen=True, slots=True)
class QuantisedBackend:
    """Layers of `bits` bits, and 8 at both ends of the model."""

    bits: Bits
    reason: str
    where: ClassVar[str] = "torch"

    @property
    def kind(self) -> str:
        """See `LinearBackend.kind`."""
        return f"int{self.bits}"

    @property
    def name(self) -> str:
        """See `LinearBackend.name`."""
        return f"{self.where}-int{self.bits}"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `LinearBackend.pack`."""
        return QuantisedLinear(quantise(weight, self.bits), bias)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> GatedLinear:
        """See `LinearBackend.pack_gated`."""
        return SplitGate(self.pack(weight, bias))

    def pack_tied(self, table: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_tied`."""
        codes = quantise(table, ENDS)
        return QuantisedEmbedding(codes, table.dtype), QuantisedLinear(codes, None)

    def pack_untied(self, table: Tensor, head: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_untied`."""
        return self.pack_tied(table)[0], self.pack_tied(head)[1]
