"""All layers of a decoder in one call of C++, for steps whose attention modes are the checkpoint's own heads,
as they are or repeated.

What it saves is the way back to Python between operators: at one token a step, that is a tenth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.attention.base import LayerKV
from model.attention.native import StepArrays
from model.config import ModelConfig
from model.linear_native import NativeGated, NativeLinear
from model.native.library import LANES, NativeLibrary
from model.rope import Rotation
from model.weights import LayerWeights, ModelWeights

MOST_HEAD_DIM = 256


class NativeLayers:
    """The layers and the last norm of one checkpoint, on weights that `NativeLinearBackend` packed."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, library: NativeLibrary) -> None:
        self._layers: Any = library.classes.Layers(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
            weights.norm,
        )
        for layer, window in zip(weights.layers, config.windows, strict=True):
            self._layers.add(
                layer.input_norm,
                _packed(layer.qkv),
                layer.q_norm,
                layer.k_norm,
                _packed(layer.o),
                layer.post_norm,
                _packed(layer.gate_up),
                _packed(layer.down),
                window or 0,
            )

    def run(
        self, x: Tensor, rotation: Rotation, step: StepArrays, kv: Sequence[LayerKV], wanted: Tensor
    ) -> Tensor:
        """x `[T, hidden]` fp32, the embedded tokens, which it uses up -> the normed last state of the wanted
        ones, `[N, hidden]` in the dtype of the run. Writes the step's K and V."""
        if wanted.shape[0] > x.shape[0]:  # some of them twice: drawn from, and scored as a prompt's
            every = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
            return self.run(x, rotation, step, kv, every).index_select(0, wanted)
        normed: Tensor = self._layers.run(
            x,
            rotation.cos,
            rotation.sin,
            step.row_tables,
            step.row_slot,
            step.row_start,
            step.query_start,
            step.seq_len,
            [layer.k for layer in kv],
            [layer.v for layer in kv],
            wanted,
        )
        return normed


def native_layers(
    config: ModelConfig, weights: ModelWeights, library: NativeLibrary | str
) -> NativeLayers | None:
    """The layers in C++; None where there is no library, or a weight has a form that it does not know."""
    if not isinstance(library, NativeLibrary):
        return None
    if config.head_dim % LANES or config.head_dim > MOST_HEAD_DIM:
        return None
    return NativeLayers(config, weights, library) if all(map(_is_packed, weights.layers)) else None


def _is_packed(layer: LayerWeights) -> bool:
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return all(isinstance(one, NativeLinear | NativeGated) and not one.missing for one in linears)


def _packed(linear: object) -> Any:
    """The C++ weight of a projection that `_is_packed` has seen."""
    assert isinstance(linear, NativeLinear | NativeGated)
    return linear.weight
