"""Head maps: how one checkpoint serves several numbers of KV heads from one copy of its weights.

MHA has a KV head for each query head (arXiv 1706.03762), MQA one for all (arXiv 1911.02150), GQA one for each
group of them (arXiv 2305.13245).

Every variant runs the native projections; its head map turns the native q, k, v (after bias and
q/k norm, before RoPE) into the variant's own, position-encoded, before they reach the cache, and
may own the output projection after attention. Nothing else in the decoder knows the mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model.linear import Linear
from model.rope import Rotation


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

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q `[T, Hq, D]`, k, v `[T, Hkv, D]`, positions `[T]` -> q `[T, Hq, D]`, k, v `[T, kv_heads, D]`.

        `rotation` turns by those positions in the checkpoint's own frequencies.
        """
        ...

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """attended `[T, Hq * D]` -> `[T, hidden]`; `o_proj` is the native projection."""
        ...


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """The checkpoint's own KV heads: RoPE and nothing more."""

    kv_heads: int
    owns_output: bool = False

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`."""
        return rotation.apply(q), rotation.apply(k), v

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """See `HeadMap.out`."""
        return o_proj(attended)


@dataclass(frozen=True, slots=True)
class RepeatHeads:
    """More KV heads than the checkpoint has, by repetition: exact, and free of weights."""

    kv_heads: int
    owns_output: bool = False

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadMap.qkv`."""
        times = self.kv_heads // k.shape[1]
        k = rotation.apply(k).repeat_interleave(times, dim=1)  # [T, Hkv, D] -> [T, kv_heads, D]
        return rotation.apply(q), k, v.repeat_interleave(times, dim=1)

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """See `HeadMap.out`."""
        return o_proj(attended)


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
