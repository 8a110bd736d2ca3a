"""The decoder: ids in, logits out, for every supported family; it knows tensors, not requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.base import AttentionStep, LayerKV
from model.attention.native import NativeStep
from model.config import ModelConfig
from model.heads import HeadMap, KeyNorm, Segment
from model.layers_native import NativeLayers
from model.linear import Linear
from model.rope import Rope, Rotation
from model.weights import LayerWeights, ModelWeights


class Decoder:
    """A pre-norm transformer (Llama, arXiv 2302.13971): RMSNorm (arXiv 1910.07467), attention under RoPE, a
    SwiGLU MLP (arXiv 2002.05202). Its weights are read and never written."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        device: torch.device,
        max_position: int | None = None,
        layers: NativeLayers | None = None,
    ) -> None:
        """`max_position` bounds the positions that will be asked for (default: the checkpoint's own).

        `layers`, which hold the same weights, run the steps that they can in one call. The numbers are the
        same to rounding: in a bfloat16 run, what attention and the MLP add to the stream is rounded to it
        first in a step that goes layer by layer, and not in one call.
        """
        self.config = config
        self.layers = layers
        self.weights = weights
        self.rope = Rope(config.rope, config.head_dim, max_position or config.max_position_embeddings, device)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        attention: AttentionStep,
        kv: Sequence[LayerKV],
        wanted: Tensor,
    ) -> Tensor:
        """`logits` of `hidden`: those after each of the wanted tokens, `[N, V]` in fp32."""
        return self.logits(self.hidden(ids, positions, segments, attention, kv, wanted))

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        attention: AttentionStep,
        kv: Sequence[LayerKV],
        wanted: Tensor,
    ) -> Tensor:
        """One step over a flat token axis; writes the step's K/V through `attention`.

        ids, positions `[T]` int64; `segments` tile `[0, T)`; `kv` holds one view per layer; `wanted`
        `[N]` int64 are the tokens that something is asked of. Returns their last state,
        normed, `[N, hidden]`.
        """
        _check_tiling(segments, positions.shape[0])
        # The residual stream stays in fp32: in bfloat16 it would be rounded twice in each layer.
        x = self.weights.embed.rows(ids).float()
        if self.layers is not None and isinstance(attention, NativeStep) and all(map(_repeats, segments)):
            return self.layers.run(x, self.rope.at(positions), attention.arrays, kv, wanted)
        step = _Step(attention, _parts(segments, positions, self.rope))
        last = self.config.num_layers - 1
        for index, layer in enumerate(self.weights.layers):
            x += self._attention(index, layer, x, step, kv[index])
            if index == last:
                x = x.index_select(0, wanted)  # nothing below mixes tokens
            x += self.mlp(layer, x)
        return self.norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden `[N, hidden]` as `hidden` gives it -> logits `[N, V]` in fp32."""
        return self.weights.lm_head.fp32(hidden)

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, step: _Step, kv: LayerKV) -> Tensor:
        """x `[T, hidden]` fp32 -> what attention adds to it."""
        q, k, v = self.qkv(layer, x)
        q, k, v = step.map_heads(index, q, k, v, self.key_norm(layer))
        attended = step.attention.forward(q, k, v, kv, self.config.windows[index])
        return step.project(index, attended.flatten(1), layer.o)

    def qkv(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x `[T, hidden]` fp32 -> native q `[T, Hq, D]`, normed; k, v `[T, Hkv, D]`, k not normed yet."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        fused = layer.qkv(self.norm(x, layer.input_norm)).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
        if layer.q_norm is not None:
            q = self.norm(q, layer.q_norm)
        return q, k, v

    def key_norm(self, layer: LayerWeights) -> KeyNorm:
        """The layer's k-norm; it changes nothing where the checkpoint has none."""
        weight = layer.k_norm
        return (lambda k: k) if weight is None else (lambda k: self.norm(k, weight))

    def mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """x `[T, hidden]` fp32 -> what the gated MLP adds to it."""
        return layer.down(layer.gate_up(self.norm(x, layer.post_norm)))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last axis, computed in fp32, in the dtype of the weights' products."""
        normed = F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps)
        return normed.to(self.weights.embed.dtype)


def _repeats(segment: Segment) -> bool:
    return segment.head_map.repeats


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment with what its head map needs in every layer."""

    head_map: HeadMap
    span: slice
    rotation: Rotation  # of the span's tokens


def _check_tiling(segments: Sequence[Segment], tokens: int) -> None:
    ends = [0, *(segment.stop for segment in segments)]
    starts = [*(segment.start for segment in segments), tokens]
    if ends != starts:
        raise ValueError(f"segments must tile tokens [0, {tokens}), got {segments}")


def _parts(segments: Sequence[Segment], positions: Tensor, rope: Rope) -> tuple[_Part, ...]:
    if len(segments) == 1:  # the usual case: nothing is sliced
        return (_Part(segments[0].head_map, slice(None), rope.at(positions)),)
    parts = []
    for segment in segments:
        span = slice(segment.start, segment.stop)
        parts.append(_Part(segment.head_map, span, rope.at(positions[span])))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one forward share."""

    attention: AttentionStep
    parts: tuple[_Part, ...]

    def map_heads(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Native q `[T, Hq, D]`, k, v `[T, Hkv, D]` -> q `[T, Hq, D]` and all segments' k, v as `[N, D]`."""
        head_dim = q.shape[2]
        queries, keys, values = [], [], []
        for part in self.parts:
            span = part.span
            own_q, own_k, own_v = part.head_map.qkv(layer, q[span], k[span], v[span], k_norm, part.rotation)
            queries.append(own_q)
            keys.append(own_k.reshape(-1, head_dim))
            values.append(own_v.reshape(-1, head_dim))
        return _joined(queries), _joined(keys), _joined(values)

    def project(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        """attended `[T, Hq * D]` -> `[T, hidden]`; maps without weights of their own share a call."""
        outputs = []
        for owns, group in groupby(self.parts, key=lambda part: part.head_map.owns_output):
            parts = tuple(group)
            if owns:
                outputs += [part.head_map.out(layer, attended[part.span], o_proj) for part in parts]
            else:
                shared = slice(parts[0].span.start, parts[-1].span.stop)
                outputs.append(parts[0].head_map.out(layer, attended[shared], o_proj))
        return _joined(outputs)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Tensors in token order as one, without a copy where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
