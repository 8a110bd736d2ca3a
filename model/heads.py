"""Head maps: how one checkpoint serves several numbers of KV heads from one copy of its weights.

MHA has a KV head for each query head (arXiv 1706.03762), MQA one for all (arXiv 1911.02150), GQA one for each
group of them (arXiv 2305.13245).

Every variant runs the native projections; its head map turns the native q, k, v into the variant's own,
normed and position-encoded, before they reach the cache, and may own the output projection after attention.
Nothing else in the decoder knows the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model.linear import Linear
from model.rope import Rotation

# The checkpoint's k-norm over the last axis; it changes nothing where the checkpoint has none.
KeyNorm = Callable[[Tensor], Tensor]


class HeadMap(Protocol):
    """The seam between the native projections and one attention mode."""

    @property
    def kv_heads(self) -> int:
        """KV heads of the mode: how many rows a sequence has in the cache."""
        ...

    @property
    def owns_output(self) -> bool:
        """Whether `out` uses weights of its own; if not, its tokens share the native o_proj call."""
        ...

    @property
    def repeats(self) -> bool:
        """Whether its KV heads are the checkpoint's, each once or several times, and nothing else is done."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that the map owns beside the checkpoint's."""
        ...

    @property
    def identity(self) -> str:
        """What its cache depends on beside the checkpoint and `kv_heads`: the map's name and a digest of its
        weights; empty for an exact map. Caches of different identities never mix."""
        ...

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Native q `[T, Hq, D]`, k, v `[T, Hkv, D]` -> q `[T, Hq, D]`, k, v `[T, kv_heads, D]`.

        All come after bias; q is normed already, k is not: the map calls `k_norm`, before or after it mixes
        heads. `rotation` turns each token by its position, in the checkpoint's own frequencies.
        """
        ...

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """attended `[T, Hq * D]` -> `[T, hidden]`; `o_proj` is the native projection."""
        ...


@dataclass(frozen=True, slots=True)
class _Weightless:
    """What is so of every map without weights of its own."""

    kv_heads: int
    owns_output: bool = False
    repeats: bool = True
    nbytes: int = 0
    identity: str = ""

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """See `HeadMap.out`."""
        return o_proj(attended)


@dataclass(frozen=True, slots=True)
class NativeHeads(_Weightless):
    """The checkpoint's own KV heads: RoPE and nothing more."""

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`."""
        return rotation.apply(q), rotation.apply(k_norm(k)), v


@dataclass(frozen=True, slots=True)
class RepeatHeads(_Weightless):
    """More KV heads than the checkpoint has, by repetition: exact, and free of weights."""

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`."""
        times = self.kv_heads // k.shape[1]
        k = rotation.apply(k_norm(k)).repeat_interleave(times, dim=1)  # [T, Hkv, D] -> [T, kv_heads, D]
        return rotation.apply(q), k, v.repeat_interleave(times, dim=1)


@dataclass(frozen=True, slots=True)
class MeanHeads(_Weightless):
    """Fewer KV heads, each the mean of a group of the checkpoint's: lossy, and free of weights.

    The start that the GQA paper trains on from (arXiv 2305.13245): without that training it ruins a model.
    """

    repeats: bool = False
    identity: str = "mean"

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`. Keys are averaged before `k_norm`, as a checkpoint of such heads does it."""
        k = rotation.apply(k_norm(self._mean(k)))
        return rotation.apply(q), k, self._mean(v)

    def _mean(self, heads: Tensor) -> Tensor:
        """`[T, Hkv, D]` -> `[T, kv_heads, D]`: neighbours averaged, in fp32."""
        tokens, count, head_dim = heads.shape
        grouped = heads.reshape(tokens, self.kv_heads, count // self.kv_heads, head_dim)
        return grouped.float().mean(dim=2).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class Variant:
    """One attention mode of the loaded checkpoint; `name` is canonical: native, mha, mqa or gqaK."""

    name: str
    head_map: HeadMap

    @property
    def kv_heads(self) -> int:
        """KV heads of the mode."""
        return self.head_map.kv_heads


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, stop)` of a step that share a head map; the segments of a step tile its token axis."""

    head_map: HeadMap
    start: int
    stop: int
