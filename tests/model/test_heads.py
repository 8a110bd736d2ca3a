"""Head maps: repetition is exact, and maps side by side in one forward are what each is alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.decoder import Decoder
from model.heads import HeadMap, KeyNorm, MeanHeads, NativeHeads, RepeatHeads, Variant
from model.linear import Linear, PlainLinear
from model.rope import Rotation
from tests.support import checkpoints
from tests.support.decoding import load_decoder, new_rig, run_alone, run_step, some_ids
from tests.support.equality import assert_same_logits
from tests.support.reference import load_reference

Tiny = Callable[..., Path]


@dataclass(frozen=True)
class OwnOutput:
    """A toy lossy map: one KV head, the mean of the native ones, and an output projection of its own."""

    weight: Tensor  # [hidden, Hq * D]
    kv_heads: int = 1
    owns_output: bool = True
    nbytes: int = 0
    identity: str = "toy"

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        k = k.mean(dim=1, keepdim=True)
        return rotation.apply(q), rotation.apply(k_norm(k)), v.mean(dim=1, keepdim=True)

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        return PlainLinear(self.weight * (layer + 1), None)(attended)


@dataclass(frozen=True)
class CountingHeads(NativeHeads):
    """Native heads that note how many tokens each o_proj call had."""

    calls: list[int] = field(default_factory=list)

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        if layer == 0:
            self.calls.append(len(attended))
        return o_proj(attended)


def own_output(decoder: Decoder, seed: int = 5) -> OwnOutput:
    config = decoder.config
    generator = torch.Generator().manual_seed(seed)
    shape = (config.hidden_size, config.num_heads * config.head_dim)
    return OwnOutput(torch.randn(shape, generator=generator) * 0.1)


@pytest.mark.parametrize(("kv_heads", "more"), [(1, 2), (1, 4), (2, 4), (4, 4)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_repeated_heads_give_the_checkpoint_s_logits(
    tiny: Tiny, family: str, kv_heads: int, more: int
) -> None:
    folder = tiny(family=family, kv_heads=kv_heads)
    decoder = load_decoder(folder)
    ids = some_ids(50)
    ours = run_alone(decoder, ids, RepeatHeads(more), 13)
    assert_same_logits(ours, load_reference(folder).logits(ids))


@pytest.mark.parametrize(("kv_heads", "fewer"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_mean_heads_give_the_logits_of_a_checkpoint_with_averaged_projections(
    tiny: Tiny, tmp_path: Path, family: str, kv_heads: int, fewer: int
) -> None:
    """The projection is linear, so the mean of heads is the head of mean weights (and biases: qwen2)."""
    folder = tiny(family=family, kv_heads=kv_heads)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            groups = tensor.view(fewer, kv_heads // fewer, 16, *tensor.shape[1:])
            tensors[name] = groups.mean(dim=1).flatten(0, 1).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checkpoints.edit_config(tmp_path, {"num_key_value_heads": fewer})
    ids = some_ids(50)
    ours = run_alone(load_decoder(folder), ids, MeanHeads(fewer), 13)
    assert_same_logits(ours, load_reference(tmp_path).logits(ids))


def test_maps_side_by_side_equal_each_alone(tiny: Tiny) -> None:
    """One forward holds native, repeated and two kinds of own-output sequences, prefilling and decoding."""
    folder = tiny(family="qwen3", kv_heads=2, window=16)
    decoder, reference = load_decoder(folder), load_reference(folder)
    maps: list[HeadMap] = [NativeHeads(2), RepeatHeads(4), own_output(decoder), own_output(decoder, 6)]
    texts = [some_ids(30, seed) for seed in range(8)]
    alone = [run_alone(decoder, text, maps[index % 4]) for index, text in enumerate(texts)]
    for index, text in enumerate(texts):
        if index % 4 < 2:
            assert_same_logits(alone[index], reference.logits(text))
    assert not torch.allclose(alone[2], reference.logits(texts[2]), atol=0.1)  # the toy map does something

    rig = new_rig(decoder)
    sequences = [rig.open(maps[index % 4].kv_heads) for index in range(8)]
    done = [0] * 8
    for step in range(4):
        # By map, as the engine does, then in an order that makes each sequence a segment of its own.
        order = [0, 4, 1, 5, 2, 6, 3, 7] if step % 2 else [7, 0, 1, 2, 3, 4, 5, 6]
        counts = [1 if (step and index < 4) else 8 for index in range(8)]
        work = [(sequences[i], texts[i][done[i] : done[i] + counts[i]], maps[i % 4]) for i in order]
        for i, ours in zip(order, run_step(decoder, rig, work), strict=True):
            assert_same_logits(ours, alone[i][done[i] : done[i] + counts[i]], f"sequence {i}, step {step}")
            done[i] += counts[i]


def test_neighbours_without_own_output_share_one_projection(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(family="llama", kv_heads=2))
    rig = new_rig(decoder)
    native, repeated, own = CountingHeads(2), RepeatHeads(4), own_output(decoder)
    maps: list[HeadMap] = [native, repeated, own, native]
    work = [(rig.open(each.kv_heads), some_ids(3 + i), each) for i, each in enumerate(maps)]
    run_step(decoder, rig, work)
    assert native.calls == [3 + 4, 6]


def test_a_variant_has_its_map_s_heads() -> None:
    assert Variant("mha", RepeatHeads(9)).kv_heads == 9
