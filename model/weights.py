"""The weights of a decoder as it reads them: projections fused, each tensor held once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from model.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are fp32 whatever the dtype of the run."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # rows q | k | v: hidden -> (Hq + 2 Hkv) * D
    q_norm: Tensor | None  # [D], Qwen3
    k_norm: Tensor | None  # [D], Qwen3
    o: Linear  # Hq * D -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # rows gate | up: hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's weights as they are held."""
        norms = (self.input_norm, self.q_norm, self.k_norm, self.post_norm)
        linears = (self.qkv, self.o, self.gate_up, self.down)
        return sum(norm.nbytes for norm in norms if norm is not None) + sum(
            linear.nbytes for linear in linears
        )


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole decoder. `fingerprint` identifies the checkpoint: equal files, equal fingerprint."""

    embed: Tensor  # [V, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> V; of a tied model it may live in `embed`'s storage
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are held; a tied lm_head that shares the embedding is counted once."""
        return sum(self._parts())

    def _parts(self) -> Iterator[int]:
        yield self.embed.nbytes
        yield self.norm.nbytes
        yield from (layer.nbytes for layer in self.layers)
        if not self.lm_head.shares(self.embed):
            yield self.lm_head.nbytes
