"""Fits the `aligned` head maps: one pass over a text, layer by layer, native and reduced model side by side.

In each layer the shared keys and values come from second moments of what the reduced model computes there
(`fit_keys`, `fit_output`), and the keys are refined by where attention goes (`refine_keys`); then its W_O is
refitted so that its stream stays near the native one. Nothing is drawn at random: the same weights, text and
machine give the same fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.aligned import AlignedHeads, aligned_heads
from model.calibration import Calibration, LayerFit
from model.decoder import Decoder
from model.errors import ModelError
from model.fit_keys import KeyStatistics
from model.fit_output import Ridge, ValueStatistics
from model.linear import PlainBackend
from model.modes import Mode
from model.refine_keys import refine
from model.rope import Rotation

KINDS = ("aligned", "aligned-fixed")
METHOD = "3"  # part of what a kept fit is known by: raise it when a fit would come out differently

# Chosen on SmolLM2-135M, 3 heads -> 1, from a few round values each, by KL on the shipped texts that are held
# out from the calibration: scores on those are a little flattered by the choice.
_RIDGE = 0.1  # of the Gram matrix's mean diagonal; less follows the calibration text too closely
_CATCH_UP = 0.5  # share of the stream's distance from the native one that a layer is asked to make good
# The few tokens that attention rests on (the first of a text) have streams a hundred times larger, and so are
# their distances: they would be all that a regression sees. A distance counts up to this many medians.
_LONGEST_CATCH_UP = 2.0


@torch.no_grad()
def calibrate(
    decoder: Decoder,
    mode: Mode,
    ids: Tensor,
    *,
    kind: str,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """The fit of a reduced `mode` to `decoder` on the text `ids` `[W, T]` int64: W windows of T tokens.

    `kind` is `aligned` or `aligned-fixed`. `progress` is told the share that is done after each layer. Needs
    memory for two streams, `2 * W * T * hidden` fp32, one layer's heads beside them, and what is made: fp32
    too, mostly each layer's W_O. Raises ModelError where the fit cannot apply, with the reason.
    """
    _check(decoder, mode, ids, kind)
    windows = _Windows.of(decoder, ids)
    layers = []
    for index in range(decoder.config.num_layers):
        layers.append(_fit_layer(decoder, index, mode, kind, windows))
        if not _finite(windows.native, windows.reduced):
            raise ModelError(_not_finite(decoder, index, kind))
        if progress is not None:
            progress((index + 1) / decoder.config.num_layers)
    return Calibration.of(kind, mode.kv_heads, layers)


def _check(decoder: Decoder, mode: Mode, ids: Tensor, kind: str) -> None:
    config = decoder.config
    if kind not in KINDS:
        raise ModelError(f"head map {kind!r} is not fitted; those that are: {', '.join(KINDS)}")
    if mode.kv_heads >= config.num_kv_heads or config.num_kv_heads % mode.kv_heads:
        raise ModelError(
            f"--head-map {kind} merges groups of KV heads; {mode.name} has {mode.kv_heads}, the checkpoint "
            f"{config.num_kv_heads}"
        )
    if ids.ndim != 2 or ids.dtype != torch.int64:
        raise ModelError(f"calibration ids must be int64 of shape [windows, tokens], not {list(ids.shape)}")
    least = config.num_kv_heads // mode.kv_heads * config.head_dim
    if ids.numel() < least:
        raise ModelError(
            f"--head-map {kind} needs a text of {least} tokens or more for groups of "
            f"{config.num_kv_heads // mode.kv_heads} heads of {config.head_dim}; this one has {ids.numel()}"
        )
    if ids.shape[1] > config.max_position_embeddings:
        raise ModelError(
            f"calibration windows of {ids.shape[1]} tokens are longer than the model's context of "
            f"{config.max_position_embeddings}"
        )
    vocabulary = decoder.weights.embed.size
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ModelError(f"calibration id {wrong} is not in the checkpoint's vocabulary of {vocabulary}")


@dataclass(slots=True)
class _Windows:
    """Both models' residual streams `[W, T, hidden]` fp32 before the layer that comes next."""

    native: Tensor
    reduced: Tensor
    rotation: Rotation

    @staticmethod
    def of(decoder: Decoder, ids: Tensor) -> _Windows:
        embed = decoder.weights.embed
        native = embed.rows(ids.to(embed.device)).float()
        positions = torch.arange(ids.shape[1], dtype=torch.int64, device=embed.device)
        return _Windows(native, native.clone(), decoder.rope.at(positions))


def _fit_layer(decoder: Decoder, index: int, mode: Mode, kind: str, windows: _Windows) -> LayerFit:
    """One layer's fit; takes both streams to the next layer."""
    layer = decoder.weights.layers[index]
    keys, values = KeyStatistics(mode.kv_heads), ValueStatistics(mode.kv_heads)
    o, bias = _projection(decoder, index)
    gap = windows.native - windows.reduced
    heads = []  # of the reduced stream, by window
    for window in windows.reduced:
        q, k, v = decoder.qkv(layer, window)
        q, k, v = q.float(), decoder.key_norm(layer)(k).float(), v.float()
        keys.add(q, k)
        values.add(v)
        heads.append((q, k, v))
    if not _finite(o, *(part for parts in heads for part in parts)):
        raise ModelError(_not_finite(decoder, index, kind))
    seen = decoder.config.windows[index]
    slots = keys.slots(free=kind == "aligned")
    slots = refine(slots, [(q, k) for q, k, _ in heads], windows.rotation, seen)
    v_in, start = values.subspace(o.view(len(o), decoder.config.num_kv_heads, -1, decoder.config.head_dim))
    fit = LayerFit(slots.frequency, slots.key, slots.query, v_in, start, bias)
    own = _head_map(fit, mode, kind)
    ridge, attended = Ridge(start), []
    target = _target(gap)
    for number, (q, k, v) in enumerate(heads):
        made = own.qkv(0, q, k, v, lambda k: k, windows.rotation)
        attended.append(attend(*made, seen))
        native = _native(decoder, index, windows, number) @ o.T
        windows.native[number] += native if bias is None else native + bias
        ridge.add(attended[-1], native + target[number])
    weight = ridge.weight(_RIDGE)
    for number, features in enumerate(attended):
        made_up = features @ weight.T
        windows.reduced[number] += made_up if bias is None else made_up + bias
    for stream in (windows.native, windows.reduced):
        for window in stream:
            window += decoder.mlp(layer, window)
    return LayerFit(slots.frequency, slots.key, slots.query, v_in, weight, bias)


def _target(gap: Tensor) -> Tensor:
    """gap `[W, T, hidden]`, native minus reduced stream -> what attention is asked to add beside its own."""
    length = gap.norm(dim=-1, keepdim=True)
    longest = _LONGEST_CATCH_UP * length.median()
    share: Tensor = _CATCH_UP * (longest / length.clamp_min(1e-30)).clamp_max(1.0)
    return gap * share


def _native(decoder: Decoder, index: int, windows: _Windows, number: int) -> Tensor:
    """What the native heads attend to in one window, `[T, Hq * D]` fp32."""
    layer = decoder.weights.layers[index]
    q, k, v = decoder.qkv(layer, windows.native[number])
    q, k = windows.rotation.apply(q.float()), windows.rotation.apply(decoder.key_norm(layer)(k).float())
    return attend(q, k, v.float(), decoder.config.windows[index])


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one text: q `[T, Hq, D]`, k, v `[T, heads, D]` -> `[T, Hq * D]`, in fp32."""
    tokens = q.shape[0]
    visible = None
    if window is not None and window < tokens:
        place = torch.arange(tokens, dtype=torch.int64, device=q.device)
        past = place.unsqueeze(1) - place
        visible = (past >= 0) & (past < window)
    q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (q, k, v))
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


def _projection(decoder: Decoder, index: int) -> tuple[Tensor, Tensor | None]:
    """The native W_O `[hidden, Hq * D]` and its bias in fp32.

    How the weight is laid out is its backend's secret, so an identity goes through it.
    """
    config, embed = decoder.config, decoder.weights.embed
    linear, width = decoder.weights.layers[index].o, config.num_heads * config.head_dim
    columns = linear.fp32(torch.eye(width, dtype=embed.dtype, device=embed.device))
    if not config.o_bias:
        return columns.T.contiguous(), None
    bias = linear.fp32(torch.zeros(1, width, dtype=embed.dtype, device=embed.device))[0]
    return (columns - bias).T.contiguous(), bias


def _head_map(fit: LayerFit, mode: Mode, kind: str) -> AlignedHeads:
    """The map of one layer, in fp32."""
    linear = PlainBackend(reason="one layer of a fit")
    one = Calibration(kind, mode.kv_heads, (fit,), digest="")  # nothing is cached under it
    return aligned_heads(one, device=fit.o.device, dtype=torch.float32, linear=linear)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.sum().isfinite()) for tensor in tensors)  # a test of each value takes much longer


def _not_finite(decoder: Decoder, layer: int, kind: str) -> str:
    dtype = str(decoder.weights.embed.dtype).removeprefix("torch.")
    return (
        f"--head-map {kind}: layer {layer} of this model gives values that are not finite on the calibration "
        f"text, in {dtype}; take another --dtype or --head-map mean"
    )
