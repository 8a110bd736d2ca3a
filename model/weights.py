"""The weights of a decoder as it reads them: projections fused, each tensor held once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from model.linear import Embedding, GatedLinear, Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are fp32 whatever the dtype of the run."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # rows q | k | v: hidden -> (Hq + 2 Hkv) * D
    q_norm: Tensor | None  # [D], Qwen3
    k_norm: Tensor | None  # [D], Qwen3
    o: Linear  # Hq * D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: GatedLinear  # hidden -> intermediate
    down: Linear  # intermediate -> hidden

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's weights as they are held."""
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        products = self.qkv.nbytes + self.o.nbytes + self.gate_up.nbytes + self.down.nbytes
        return products + sum(norm.nbytes for norm in norms if norm is not None)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole decoder. `fingerprint` identifies its numbers: equal files, quantised alike, have the same."""

    embed: Embedding  # V rows of hidden
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> V
    tied: bool  # the lm_head and the embedding are one copy
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held; what is tied is counted once."""
        return sum(self._parts())

    def _parts(self) -> Iterator[int]:
        yield self.lm_head.nbytes
        yield self.norm.nbytes
        yield from (layer.nbytes for layer in self.layers)
        if not self.tied:
            yield self.embed.nbytes
