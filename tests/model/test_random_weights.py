"""Weights without a checkpoint: drawn anew the same, held as the loader holds them, and of sensible size."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.decoder import Decoder
from model.heads import RepeatHeads
from model.linear import Linear, PlainBackend
from model.linear_choice import choose_linear_backend
from model.random_weights import _fingerprint, random_weights
from model.weights import LayerWeights, ModelWeights
from tests.support.attention import CPU
from tests.support.decoding import native_heads, run_alone, some_ids
from tests.support.equality import assert_same_logits
from tests.support.reference import load_reference
from tests.support.tensors import assert_equals_files, fused, load, plain, rewrite, table

FAMILIES: tuple[dict[str, Any], ...] = (
    {"family": "llama", "tie_word_embeddings": True},
    {"family": "llama", "attention_bias": True, "mlp_bias": True, "kv_heads": 4},
    {"family": "qwen2"},
    {"family": "qwen3", "head_dim": 32},
)
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 2048, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def draw(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> ModelWeights:
    linear = choose_linear_backend(CPU, dtype)
    return random_weights(config, device=CPU, dtype=dtype, linear=linear, seed=seed)


def logits_of(config: ModelConfig, weights: ModelWeights, count: int = 40) -> Tensor:
    decoder = Decoder(config, weights, CPU)
    return run_alone(decoder, some_ids(count, vocab=config.vocab_size), native_heads(decoder))


def as_files(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors as a checkpoint names and cuts them."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": table(weights.embed), "model.norm.weight": weights.norm}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = plain(weights.lm_head).weight
    for number, layer in enumerate(weights.layers):
        at = f"model.layers.{number}."
        tensors[f"{at}input_layernorm.weight"] = layer.input_norm
        tensors[f"{at}post_attention_layernorm.weight"] = layer.post_norm
        for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
            if norm is not None:
                tensors[f"{at}self_attn.{name}.weight"] = norm
        for linear, parts in _projections(layer, q, kv, config.intermediate_size, config.hidden_size):
            for name, piece in _cut(linear, parts):
                tensors[f"{at}{name}"] = piece
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _projections(
    layer: LayerWeights, q: int, kv: int, inner: int, hidden: int
) -> Iterator[tuple[Linear, dict[str, int]]]:
    yield layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    yield layer.o, {"self_attn.o_proj": hidden}
    yield fused(layer.gate_up), {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    yield layer.down, {"mlp.down_proj": hidden}


def _cut(linear: Linear, parts: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    found = plain(linear)
    yield from zip((f"{n}.weight" for n in parts), found.weight.split(list(parts.values())), strict=True)
    if found.bias is not None:
        yield from zip((f"{n}.bias" for n in parts), found.bias.split(list(parts.values())), strict=True)


@pytest.mark.parametrize("checkpoint", FAMILIES, ids=lambda c: f"{c['family']}-{len(c)}")
def test_saved_as_a_checkpoint_they_mean_the_same(
    tiny: Callable[..., Path], tmp_path: Path, checkpoint: dict[str, Any]
) -> None:
    """Written out, they load here tensor for tensor, and transformers computes the same logits from them."""
    folder = shutil.copytree(tiny(**checkpoint), tmp_path / "drawn")
    config = ModelConfig.from_folder(folder)
    weights = draw(config, seed=3)
    tensors = as_files(weights, config)
    rewrite(folder, tensors)
    assert_equals_files(weights, tensors, torch.float32)
    loaded = load(folder)
    assert loaded.nbytes == weights.nbytes
    assert loaded.tied == weights.tied == config.tie_embeddings
    ours = logits_of(config, weights)
    assert_same_logits(ours, load_reference(folder).logits(some_ids(40, vocab=config.vocab_size)))


def test_the_seed_decides(tiny: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny())
    one, again, other = draw(config, 7), draw(config, 7), draw(config, 8)
    assert torch.equal(logits_of(config, one), logits_of(config, again))
    assert not torch.allclose(logits_of(config, one), logits_of(config, other), atol=0.1)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    longer = dataclasses.replace(config, rms_norm_eps=1e-3)
    assert draw(longer, 7).fingerprint != one.fingerprint, "another config is another model"


def test_no_two_tensors_are_alike(tiny: Callable[..., Path]) -> None:
    """A generator started anew for each layer would make all layers the same."""
    config = ModelConfig.from_folder(tiny())
    first, second = draw(config).layers
    assert not torch.equal(plain(first.qkv).weight, plain(second.qkv).weight)
    assert not torch.equal(first.input_norm, first.post_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [2, 40])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_stay_near_one(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, depth: int, tied: bool
) -> None:
    config = ModelConfig.from_folder(tiny())
    config = dataclasses.replace(
        config, num_layers=depth, windows=(None,) * depth, tie_embeddings=tied, vocab_size=1000
    )
    streams: list[Tensor] = []
    norm = Decoder.norm

    def seen(self: Decoder, x: Tensor, weight: Tensor) -> Tensor:
        streams.append(x)
        return norm(self, x, weight)

    monkeypatch.setattr(Decoder, "norm", seen)
    weights = draw(config, dtype=dtype)
    assert weights.tied == tied
    logits = logits_of(config, weights)
    assert 0.1 < float(streams[-1].std()) < 2.0, "the stream does not grow with depth"
    assert bool(torch.isfinite(logits).all())
    assert 0.5 < float(logits.std()) < 2.0
    assert float((logits[1:] - logits[:-1]).std()) > 0.2, "each position says something of its own"


def test_a_large_shape_takes_its_weights_and_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3-8B's layers, of which nothing but shapes is made: what is alive at once is counted."""
    config = ModelConfig.from_dict(LLAMA_8B)
    alive = peak = 0

    class Counted(PlainBackend):
        """Stands for a backend that copies what it packs; the copy stays, the original goes."""

        def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
            nonlocal alive, peak
            peak = max(peak, alive + 2 * weight.nbytes)
            alive += weight.nbytes
            return super().pack(weight, bias)

    monkeypatch.setattr(Tensor, "normal_", lambda tensor, *_, **__: tensor)
    weights = random_weights(config, device=CPU, dtype=torch.bfloat16, linear=Counted(reason="test"), seed=0)
    layer = 2 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    ends = 2 * 2 * 2048 * 4096
    norms = 4 * 4096 * (2 * 2 + 1)
    assert weights.nbytes == 2 * layer + ends + norms
    assert peak <= 2 * layer + ends // 2 + layer


def test_heads_repeat_on_them_too(tiny: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny())
    decoder = Decoder(config, draw(config), CPU)
    ids = some_ids(30)
    wide = run_alone(decoder, ids, RepeatHeads(config.num_heads))
    assert_same_logits(wide, run_alone(decoder, ids, native_heads(decoder)))


def test_the_fingerprint_knows_every_field(tiny: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(tiny())
    base = draw(config).fingerprint
    for change in ({"eos_token_ids": frozenset({5})}, {"rope": dataclasses.replace(config.rope, theta=7.0)}):
        assert draw(dataclasses.replace(config, **change)).fingerprint != base


def test_other_numbers_have_another_fingerprint(tiny: Callable[..., Path]) -> None:
    """A fit is kept by the fingerprint; the generator of another device draws other numbers."""
    config = ModelConfig.from_folder(tiny())
    assert draw(config, dtype=torch.bfloat16).fingerprint != draw(config).fingerprint
    places = [torch.device(name) for name in ("cpu", "cuda:0", "cuda:1")]
    cpu, first, second = (_fingerprint(config, 0, place, torch.float32) for place in places)
    assert cpu == draw(config).fingerprint and first == second != cpu
