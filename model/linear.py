"""Linear layers: one protocol, and the backends that hold a weight in the layout they read.

A backend takes the weight over (`pack`); whoever loads drops the original afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y = x Wᵀ + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> `[..., out]`, in x's dtype."""
        ...

    def fp32(self, x: Tensor) -> Tensor:
        """x `[M, in]` -> `[M, out]` in fp32 whatever the dtype of the weight: for logits, where rounding
        to bfloat16 would tie neighbours (at 25 its steps are 0.125 apart)."""
        ...

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and bias as they are held."""
        ...


class GatedLinear(Protocol):
    """silu(W_gate x) * (W_up x): the first half of a SwiGLU MLP (arXiv 2002.05202)."""

    def __call__(self, x: Tensor) -> Tensor:
        """x `[..., in]` -> `[..., inner]`, in x's dtype."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and biases as they are held."""
        ...


class Embedding(Protocol):
    """The vectors of a vocabulary."""

    def rows(self, ids: Tensor) -> Tensor:
        """ids `[...]` int64 -> `[..., hidden]` in the dtype of the run."""
        ...

    @property
    def size(self) -> int:
        """Rows of the table."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the run."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the table as it is held."""
        ...


class LinearBackend(Protocol):
    """Makes `Linear`s; chosen once per device and dtype."""

    @property
    def name(self) -> str:
        """What reports and the start table call it."""
        ...

    @property
    def reason(self) -> str:
        """Why this backend was chosen, in a few words for the start table."""
        ...

    @property
    def kind(self) -> str:
        """What it makes of weights: none (they stay as they are), int8 or int4."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight `[out, in]`, bias `[out]` or None, both on the device and in the dtype of the run."""
        ...

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> GatedLinear:
        """weight `[2 * inner, in]`, rows gate | up, and bias alike or None."""
        ...

    def pack_tied(self, table: Tensor) -> tuple[Embedding, Linear]:
        """table `[V, hidden]` -> the embedding and the lm_head of a tied model: one copy serves both."""
        ...

    def pack_untied(self, table: Tensor, head: Tensor) -> tuple[Embedding, Linear]:
        """table and head `[V, hidden]` -> the embedding and the lm_head of a model that has both."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """`torch.nn.functional.linear` on the weight as stored."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        return F.linear(x, self.weight, self.bias)

    def fp32(self, x: Tensor) -> Tensor:
        """See `Linear.fp32`."""
        if x.dtype == torch.float32:
            return self(x)
        # Products sum in fp32 and are rounded once, at the end. A second pass starts from minus the rounded
        # sum, so that it returns what rounding took: 16 bits of the logit instead of 8.
        rounded = x @ self.weight.t()
        lost = torch.addmm(rounded, x, self.weight.t(), beta=-1)
        product = rounded.float() + lost.float()
        return product if self.bias is None else product + self.bias.float()

    @property
    def out_features(self) -> int:
        """See `Linear.out_features`."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class SplitGate:
    """Gate and up as one product, parted after it."""

    linear: Linear  # rows gate | up

    def __call__(self, x: Tensor) -> Tensor:
        """See `GatedLinear.__call__`."""
        gate, up = self.linear(x).chunk(2, dim=-1)
        return F.silu(gate) * up

    @property
    def nbytes(self) -> int:
        """See `GatedLinear.nbytes`."""
        return self.linear.nbytes


@dataclass(frozen=True, slots=True)
class PlainEmbedding:
    """A table looked up row by row."""

    table: Tensor  # [V, hidden]

    def rows(self, ids: Tensor) -> Tensor:
        """See `Embedding.rows`."""
        return F.embedding(ids, self.table)

    @property
    def size(self) -> int:
        """See `Embedding.size`."""
        return self.table.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """See `Embedding.dtype`."""
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        """See `Embedding.device`."""
        return self.table.device

    @property
    def nbytes(self) -> int:
        """See `Embedding.nbytes`."""
        return self.table.nbytes


@dataclass(frozen=True, slots=True)
class PlainBackend:
    """Runs anywhere, in any dtype, and adds no copy of a weight."""

    reason: str
    name: str = "torch"
    kind: str = "none"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `LinearBackend.pack`."""
        return PlainLinear(weight, bias)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> GatedLinear:
        """See `LinearBackend.pack_gated`."""
        return SplitGate(self.pack(weight, bias))

    def pack_tied(self, table: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_tied`."""
        return PlainEmbedding(table), PlainLinear(table, None)

    def pack_untied(self, table: Tensor, head: Tensor) -> tuple[Embedding, Linear]:
        """See `LinearBackend.pack_untied`."""
        return PlainEmbedding(table), self.pack(head, None)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the blocked layout that oneDNN's bfloat16 kernels read; `nbytes` leaves its padding out."""

    weight: Tensor  # opaque [out, in]
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear.__call__`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product

    def fp32(self, x: Tensor) -> Tensor:
        """See `Linear.fp32`."""
        rounded = self(x)  # and a second pass for what rounding took, as in PlainLinear
        lost: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, rounded.neg(), self.weight, self.bias, "add"
        )
        return rounded.float() + lost.float()

    @property
    def out_features(self) -> int:
        """See `Linear.out_features`."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`."""
        return self.weight.numel() * self.weight.itemsize + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class PackedBackend(PlainBackend):
    """oneDNN on the CPU with each weight reordered once, where `F.linear` reads it in its plain order. A tied
    table stays plain: no row can be read of oneDNN's own layout.

    SmolLM2-135M, 2 cores, one token: 12.5 ms instead of 16.9; packing all of it takes 0.06 s.
    """

    name: str = "onednn-packed"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `LinearBackend.pack`."""
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)
