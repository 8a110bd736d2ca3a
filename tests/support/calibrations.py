"""Calibrations that no fit made: random factors, so that nothing in them is a special case."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.aligned import AlignedHeads, aligned_heads
from model.calibration import Calibration, LayerFit
from model.config import ModelConfig
from model.decoder import Decoder
from model.linear_choice import choose_linear_backend
from tests.support import checkpoints


def random_layers(
    layers: int,
    *,
    q_heads: int = 8,
    native: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 24,
    seed: int = 0,
    free: bool = True,
    o_bias: bool = False,
) -> tuple[LayerFit, ...]:
    """Random fits, the same for the same seed; `free`: slots take any pair, some twice and some never."""
    generator = torch.Generator().manual_seed(seed)
    slots, shared, width = head_dim // 2, native // kv_heads * head_dim, q_heads * head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def factors() -> Tensor:
        return torch.complex(normal(native, slots), normal(native, slots))

    def frequency() -> Tensor:
        if free:
            return torch.randint(0, slots, (kv_heads, slots), generator=generator)
        return torch.arange(slots).repeat(kv_heads, 1)

    return tuple(
        LayerFit(
            frequency=frequency(),
            key=factors() * (kv_heads / native) ** 0.5,
            query=factors() * 0.5,
            v_in=normal(kv_heads, head_dim, shared) * shared**-0.5,
            o=normal(hidden, width) * width**-0.5,
            o_bias=normal(hidden) if o_bias else None,
        )
        for _ in range(layers)
    )


def random_calibration(
    config: ModelConfig, kv_heads: int, seed: int = 0, *, free: bool = True, o_bias: bool = False
) -> Calibration:
    """Random fits of the checkpoint's shape."""
    layers = random_layers(
        config.num_layers,
        q_heads=config.num_heads,
        native=config.num_kv_heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        seed=seed,
        free=free,
        o_bias=o_bias,
    )
    return Calibration.of("aligned" if free else "aligned-fixed", kv_heads, layers)


def heads_of(calibration: Calibration, decoder: Decoder) -> AlignedHeads:
    """The head map of a calibration on the decoder's device, in its dtype."""
    embed = decoder.weights.embed
    linear = choose_linear_backend(embed.device, embed.dtype)
    return aligned_heads(calibration, device=embed.device, dtype=embed.dtype, linear=linear)


def as_pairs(x: Tensor) -> Tensor:
    """`[..., D]` -> `[..., D / 2]` complex128: column i and column i + D/2 of it."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.complex(first, second)


def as_columns(x: Tensor) -> Tensor:
    """The inverse of `as_pairs`, in x's precision."""
    return torch.cat((x.real, x.imag), dim=-1)


def write_reduced(folder: Path, native: Path, calibration: Calibration) -> Path:
    """The ordinary checkpoint whose own KV heads are those of an `aligned-fixed` calibration of `native`.

    A complex factor on a pair is a 2 x 2 block on two rows of a projection (and of its bias).
    """
    config = checkpoints.read_config(native)
    q_heads, native_count = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = load_file(native / "model.safetensors")
    for index, fit in enumerate(calibration.layers):
        at = f"model.layers.{index}.self_attn."
        share = native_count // calibration.kv_heads
        for part in ("weight", "bias"):
            names = [f"{at}{x}_proj.{part}" for x in "qkv"]
            if names[0] not in tensors:
                continue
            q, k, v = (tensors[name].unflatten(0, (-1, fit.v_in.shape[1])) for name in names)
            factors = fit.query.repeat_interleave(q_heads // native_count, dim=0)
            tensors[names[0]] = _times(q, factors).flatten(0, 1)
            tensors[names[1]] = _times(k, fit.key).unflatten(0, (-1, share)).sum(1).flatten(0, 1)
            grouped = v.flatten(0, 1).unflatten(0, (calibration.kv_heads, -1))
            tensors[names[2]] = torch.einsum("gij,gj...->gi...", fit.v_in, grouped).flatten(0, 1)
        tensors[f"{at}o_proj.weight"] = fit.o
    folder.mkdir()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((native / "config.json").read_text())
    checkpoints.edit_config(folder, {"num_key_value_heads": calibration.kv_heads})
    return folder


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    """rows `[H, D, ...]`, their pairs times factors `[H, D / 2]`."""
    moved = rows.movedim(1, -1)
    broadcast = factors.reshape(len(rows), *(1,) * (rows.dim() - 2), -1)
    return as_columns(as_pairs(moved) * broadcast).float().movedim(-1, 1)
