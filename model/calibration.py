"""A calibration: everything that an aligned head map fits to a checkpoint, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_MAPS = ("aligned", "aligned-fixed", "mean")


@dataclass(frozen=True, slots=True)
class LayerFit:
    """One layer's fit: K KV heads, each shared by a group of h = Hkv / K native ones; S = D / 2 slots.

    A slot is a pair of columns (s, s + S) of the reduced head, read as one complex number. It turns under
    RoPE with the frequency of the native pair that it was made from.
    """

    frequency: Tensor  # [K, S] int64: the native pair (i, i + S) that a slot is made from
    key: Tensor  # [Hkv, S] complex64: slot s of the shared key is sum over h of key[h, s] * k_h[frequency[s]]
    query: Tensor  # [Hkv, S] complex64: a reader of native head h uses q[frequency[s]] * query[h, s]
    v_in: Tensor  # [K, D, h * D] fp32: shared value = v_in @ the group's values, one after the other
    o: Tensor  # [hidden, Hq * D] fp32: the map's own output projection
    o_bias: Tensor | None  # [hidden] fp32


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a head map of `kind` with `kv_heads` KV heads is made from; make it with `Calibration.of`."""

    kind: str  # aligned or aligned-fixed
    kv_heads: int
    layers: tuple[LayerFit, ...]
    digest: str  # of all of the above

    @staticmethod
    def of(kind: str, kv_heads: int, layers: Iterable[LayerFit]) -> Calibration:
        """The calibration with its digest, which changes with any value in it."""
        layers = tuple(layers)
        return Calibration(kind, kv_heads, layers, _digest(kind, kv_heads, layers))


def layer_tensors(layer: LayerFit) -> dict[str, Tensor]:
    """A layer's tensors by field name, in one order, real and on the CPU: complex ones as `[..., 2]` fp32."""
    named = {
        "frequency": layer.frequency,
        "key": torch.view_as_real(layer.key.resolve_conj()),
        "query": torch.view_as_real(layer.query.resolve_conj()),
        "v_in": layer.v_in,
        "o": layer.o,
    }
    if layer.o_bias is not None:
        named["o_bias"] = layer.o_bias
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}


def _digest(kind: str, kv_heads: int, layers: tuple[LayerFit, ...]) -> str:
    """SHA-256 over kind, heads, and every tensor's place, name, shape, dtype and bytes; hexadecimal."""
    digest = hashlib.sha256(f"{kind} {kv_heads} {len(layers)}".encode())
    for index, layer in enumerate(layers):
        for name, tensor in layer_tensors(layer).items():
            digest.update(f"\n{index} {name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
