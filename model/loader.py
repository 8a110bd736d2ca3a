"""From a checkpoint folder to the weights that the decoder reads.

Each tensor is copied once, from the mapped file to its place in a fused matrix, converted on the way, and the
linear backend packs that; a layer's pages are given back before the next is read. So the peak is the weights,
one layer of the file, and what packing takes for a moment (for the kernels in C++ three times a layer's gate
and up; or two tables, but those come first, when nothing else is there). Nothing of the files stays mapped: a
file that changes later changes nothing here.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.expected import EMBED, LM_HEAD, NORM, check_tensors, layer_prefix, layer_tensors
from model.linear import Embedding, Linear, LinearBackend
from model.weights import LayerWeights, ModelWeights

_SAMPLE = 4096  # bytes of each tensor that go into the fingerprint as they are, beside a checksum of all


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the weights go and in which form."""

    device: torch.device
    dtype: torch.dtype
    linear: LinearBackend

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """`parts` below each other in one new tensor of the target's device and dtype."""
        rows = sum(part.shape[0] for part in parts)
        joined = torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        begin = 0
        for part in parts:
            joined[begin : begin + part.shape[0]].copy_(part)
            begin += part.shape[0]
        return joined

    def vector(self, tensor: Tensor) -> Tensor:
        """A norm's weight, in fp32 whatever the target's dtype: norms are computed there."""
        return tensor.to(device=self.device, dtype=torch.float32, copy=True)

    def fuse(self, tensors: Mapping[str, Tensor], *names: str) -> tuple[Tensor, Tensor | None]:
        """The projections `names` as one, rows in that order, and their biases where there are any."""
        biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
        weight = self.join([tensors[f"{name}.weight"] for name in names])
        return weight, self.join(biases) if biases else None


def load_weights(
    folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, linear: LinearBackend
) -> ModelWeights:
    """The weights of `folder`, which must hold exactly the tensors that `config` calls for.

    Raises ModelError naming file and tensor for whatever is missing, left over, misshapen, truncated or of a
    dtype other than bf16, fp16 and fp32; no weight is ever made up.
    """
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint, config)
    target = _Target(device, dtype, linear)
    digest = hashlib.sha256()
    _add_config(digest, folder)
    if linear.kind != "none":
        digest.update(f"{linear.kind}\n".encode())
    norm, embed, lm_head, tied = _ends(checkpoint, config, target, digest)
    layers = tuple(_layer(checkpoint, config, layer, target, digest) for layer in range(config.num_layers))
    return ModelWeights(
        embed=embed,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        tied=tied,
        fingerprint=digest.hexdigest(),
    )


def _ends(
    checkpoint: Checkpoint, config: ModelConfig, target: _Target, digest: _Digest
) -> tuple[Tensor, Embedding, Linear, bool]:
    """Last norm, embedding, lm_head, and whether the two are one.

    A tied model's lm_head is the embedding, unless the file holds one with other values: transformers (5.24)
    then keeps the two apart, whatever config.json says, and so does this.
    """
    held = [name for name in (EMBED, NORM, LM_HEAD) if name in checkpoint.entries]
    with checkpoint.mapped(held) as tensors:
        _add_tensors(digest, tensors)
        norm = target.vector(tensors[NORM])
        embed = target.join([tensors[EMBED if EMBED in tensors else LM_HEAD]])
        head = target.join([tensors[LM_HEAD]]) if LM_HEAD in tensors and EMBED in tensors else embed
        if head is embed or (config.tie_embeddings and torch.equal(head, embed)):
            return norm, *target.linear.pack_tied(embed), True
        return norm, *target.linear.pack_untied(embed, head), False


def _layer(
    checkpoint: Checkpoint, config: ModelConfig, layer: int, target: _Target, digest: _Digest
) -> LayerWeights:
    prefix = layer_prefix(layer)
    with checkpoint.mapped(prefix + name for name in layer_tensors(config)) as mapped:
        _add_tensors(digest, mapped)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in mapped.items()}

        def vector(name: str) -> Tensor:
            return target.vector(tensors[name])

        pack = target.linear.pack
        return LayerWeights(
            input_norm=vector("input_layernorm.weight"),
            qkv=pack(*target.fuse(tensors, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            q_norm=vector("self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=vector("self_attn.k_norm.weight") if config.qk_norm else None,
            o=pack(*target.fuse(tensors, "self_attn.o_proj")),
            post_norm=vector("post_attention_layernorm.weight"),
            gate_up=target.linear.pack_gated(*target.fuse(tensors, "mlp.gate_proj", "mlp.up_proj")),
            down=pack(*target.fuse(tensors, "mlp.down_proj")),
        )


def _add_config(digest: _Digest, folder: Path) -> None:
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())


def _add_tensors(digest: _Digest, tensors: Mapping[str, Tensor]) -> None:
    """Name, dtype, shape, a sample and a checksum of each tensor. A fit is kept by it, so any change counts;
    a cryptographic hash of all would double the load."""
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.reshape(-1).view(torch.uint8)
        begin = max(0, (flat.numel() - _SAMPLE) // 2)
        digest.update(flat[begin : begin + _SAMPLE].numpy().tobytes())
        digest.update(zlib.crc32(flat.numpy().data).to_bytes(4, "big"))
