"""Weights out of thin air for any config: what a shape costs in memory and time can be measured without a
checkpoint of it.

They are held exactly as the loader holds a checkpoint's. Scales are those of a usual start of training: a
matrix keeps the size of what it is given, and what a layer adds to the stream shrinks with depth, so that
activations and logits stay near 1 in any dtype.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from model.config import ModelConfig
from model.linear import Embedding, GatedLinear, Linear, LinearBackend
from model.weights import LayerWeights, ModelWeights

# Of norm weights around 1 and of biases around 0: seen if one is dropped, small beside the rest.
_SPREAD = 0.1


def random_weights(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, linear: LinearBackend, seed: int
) -> ModelWeights:
    """Normally distributed weights of the shapes that `config` calls for; no file is read.

    The same config, seed, device and dtype give the same weights; another device draws others. Made layer by
    layer: the peak is the weights plus one layer. `seed` is any 64-bit integer.
    """
    draw = _Draw(config, linear, dtype, torch.Generator(device=device).manual_seed(seed))
    norm, embed, lm_head = _ends(config, draw)
    layers = tuple(_layer(config, draw) for _ in range(config.num_layers))
    return ModelWeights(
        embed=embed,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        tied=config.tie_embeddings,
        fingerprint=_fingerprint(config, seed, device, dtype),
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws tensors one after the other, in place: nothing wider than the run's dtype is ever made."""

    config: ModelConfig
    linear: LinearBackend
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """N(0, std²) in the run's dtype."""
        empty = torch.empty(shape, dtype=self.dtype, device=self.generator.device)
        return empty.normal_(0.0, std, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        """A norm's weight `[size]`, fp32 and near 1."""
        empty = torch.empty((size,), dtype=torch.float32, device=self.generator.device)
        return empty.normal_(1.0, _SPREAD, generator=self.generator)

    def matrix(self, rows: int, columns: int, bias: bool, gain: float = 1.0) -> Linear:
        """A projection that turns inputs of size 1 into outputs of size `gain`."""
        weight = self.normal((rows, columns), gain * columns**-0.5)
        return self.linear.pack(weight, self.normal((rows,), _SPREAD) if bias else None)

    def gated(self, inner: int, columns: int, bias: bool) -> GatedLinear:
        """Gate and up, each from inputs of size 1 to outputs of size 1."""
        weight = self.normal((2 * inner, columns), columns**-0.5)
        return self.linear.pack_gated(weight, self.normal((2 * inner,), _SPREAD) if bias else None)


def _ends(config: ModelConfig, draw: _Draw) -> tuple[Tensor, Embedding, Linear]:
    """Last norm, embedding, lm_head. A tied table is scaled as an lm_head: the norms make up for it."""
    table = (config.vocab_size, config.hidden_size)
    embed = draw.normal(table, config.hidden_size**-0.5 if config.tie_embeddings else 1.0)
    norm = draw.norm(config.hidden_size)
    if config.tie_embeddings:
        return norm, *draw.linear.pack_tied(embed)
    head = draw.normal(table, config.hidden_size**-0.5)
    return norm, *draw.linear.pack_untied(embed, head)


def _layer(config: ModelConfig, draw: _Draw) -> LayerWeights:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    depth = (2 * config.num_layers) ** -0.5
    return LayerWeights(
        input_norm=draw.norm(hidden),
        qkv=draw.matrix(q + 2 * kv, hidden, config.attention_bias),
        q_norm=draw.norm(head_dim) if config.qk_norm else None,
        k_norm=draw.norm(head_dim) if config.qk_norm else None,
        o=draw.matrix(hidden, q, config.o_bias, gain=depth),
        post_norm=draw.norm(hidden),
        gate_up=draw.gated(inner, hidden, config.mlp_bias),
        down=draw.matrix(hidden, inner, config.mlp_bias, gain=depth),
    )


def _fingerprint(config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> str:
    """A digest of all that may decide what is drawn."""
    digest = hashlib.sha256(f"random weights, seed {seed}, {device.type}, {dtype}\n".encode())
    for field in fields(config):
        value = getattr(config, field.name)
        digest.update(f"{field.name}={sorted(value) if isinstance(value, frozenset) else value}\n".encode())
    return digest.hexdigest()
