"""Calibrations that no fit made: random ones, and ones whose reduced checkpoint can be written out."""

from __future__ import annotations

import torch
from torch import Tensor

from model.aligned import AlignedHeads, aligned_heads
from model.calibration import Calibration, LayerFit
from model.config import ModelConfig
from model.decoder import Decoder
from model.linear import choose_linear_backend


def random_fit(
    config: ModelConfig, kv_heads: int, generator: torch.Generator, *, free: bool = True, o_bias: bool = False
) -> LayerFit:
    """A layer's fit with no structure at all; `free`: slots take any pair, some twice and some never."""
    native, head_dim, slots = config.num_kv_heads, config.head_dim, config.head_dim // 2
    width, shared = config.num_heads * head_dim, native // kv_heads * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def factors() -> Tensor:
        return torch.complex(normal(native, slots), normal(native, slots))

    free_slots = torch.randint(0, slots, (kv_heads, slots), generator=generator)
    return LayerFit(
        frequency=free_slots if free else torch.arange(slots).repeat(kv_heads, 1),
        key=factors() * (kv_heads / native) ** 0.5,
        query=factors() * 0.5,
        v_in=normal(kv_heads, head_dim, shared) * shared**-0.5,
        o=normal(config.hidden_size, width) * width**-0.5,
        o_bias=normal(config.hidden_size) if o_bias else None,
    )


def random_calibration(
    config: ModelConfig, kv_heads: int, seed: int = 0, *, free: bool = True, o_bias: bool = False
) -> Calibration:
    """A calibration with a random fit for each layer, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    fits = [
        random_fit(config, kv_heads, generator, free=free, o_bias=o_bias) for _ in range(config.num_layers)
    ]
    return Calibration.of("aligned" if free else "aligned-fixed", kv_heads, fits)


def heads_of(calibration: Calibration, decoder: Decoder) -> AlignedHeads:
    """The head map of a calibration in the decoder's dtype."""
    embed = decoder.weights.embed
    linear = choose_linear_backend(embed.device, embed.dtype)
    return aligned_heads(calibration, device=embed.device, dtype=embed.dtype, linear=linear)
