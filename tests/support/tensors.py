"""Reading a checkpoint's tensors back, as its files hold them and as the loader placed them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import SINGLE
from model.config import ModelConfig
from model.linear import (
    Embedding,
    GatedLinear,
    Linear,
    PlainBackend,
    PlainEmbedding,
    PlainLinear,
    SplitGate,
)
from model.loader import load_weights
from model.weights import ModelWeights

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, device=CPU, dtype=dtype, linear=PlainBackend(reason="test"))


def plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def fused(gated: GatedLinear) -> PlainLinear:
    """Gate and up of a plain backend, as one."""
    assert isinstance(gated, SplitGate)
    return plain(gated.linear)


def table(embedding: Embedding) -> Tensor:
    """The table of a plain embedding."""
    assert isinstance(embedding, PlainEmbedding)
    return embedding.table


def all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> None:
    """Replace a file by a new one: the old one may still be mapped."""
    (folder / name).unlink(missing_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def assert_equals_files(weights: ModelWeights, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every tensor of the files is in the weights, where it belongs and with its own values."""
    left = dict(tensors)

    def take(*names: str) -> Tensor:
        return torch.cat([left.pop(name).to(dtype) for name in names])

    def take_norm(name: str) -> Tensor:
        return left.pop(name).float()

    def check(linear: Linear, *names: str) -> None:
        found = plain(linear)
        assert torch.equal(found.weight, take(*(f"{name}.weight" for name in names)))
        if f"{names[0]}.bias" in left:
            assert found.bias is not None
            assert torch.equal(found.bias, take(*(f"{name}.bias" for name in names)))
        else:
            assert found.bias is None

    for number, layer in enumerate(weights.layers):
        at = f"model.layers.{number}."
        check(layer.qkv, *(f"{at}self_attn.{name}_proj" for name in "qkv"))
        check(layer.o, f"{at}self_attn.o_proj")
        check(fused(layer.gate_up), f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        check(layer.down, f"{at}mlp.down_proj")
        assert torch.equal(layer.input_norm, take_norm(f"{at}input_layernorm.weight"))
        assert torch.equal(layer.post_norm, take_norm(f"{at}post_attention_layernorm.weight"))
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            if f"{at}self_attn.{name}.weight" in left:
                assert norm is not None
                assert torch.equal(norm, take_norm(f"{at}self_attn.{name}.weight"))
            else:
                assert norm is None
    assert torch.equal(table(weights.embed), take("model.embed_tokens.weight"))
    assert torch.equal(weights.norm, take_norm("model.norm.weight"))
    if "lm_head.weight" in left:
        check(weights.lm_head, "lm_head")
    assert not left
