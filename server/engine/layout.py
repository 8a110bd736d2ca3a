"""The cache's layout for a model: the one place where a config becomes blocks."""

from __future__ import annotations

import torch

from cache.layout import KVLayout, LayerGroup
from model.config import ModelConfig


def cache_layout(
    config: ModelConfig, block_size: int, dtype: torch.dtype, layers: int | None = None
) -> KVLayout:
    """Blocks of `block_size` tokens in `dtype` for `layers` layers (default: all of the model's), which are
    one group: a sliding window saves no bytes yet."""
    count = config.num_layers if layers is None else layers
    group = LayerGroup(tuple(range(count)), config.num_kv_heads, config.head_dim)
    return KVLayout((group,), block_size, dtype)
