"""One forward, several attention modes: native, heads repeated, and a toy map with its own output projection.

Each mode has its reference in transformers: repetition changes nothing, and the toy (every query head reads
the first KV head, and another W_O follows) is an MQA checkpoint whose weights are written out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.heads import KeyNorm, NativeHeads, RepeatHeads, Variant
from model.linear import Linear
from model.rope import Rotation
from tests.support import checkpoints
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.equality import assert_same_ids
from tests.support.reference import load_reference
from tests.support.tap import Tap, listen

Tiny = Callable[..., Path]
HEAD_DIM, LAYERS = 16, 2


@dataclass(frozen=True)
class ToyHeads:
    """MQA by the first KV head alone, and an output projection `[hidden, Hq * D]` for each layer."""

    projections: tuple[Tensor, ...]
    kv_heads: int = 1
    owns_output: bool = True
    repeats: bool = False
    nbytes: int = 0
    identity: str = "toy"

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rotation.apply(q), rotation.apply(k_norm(k)[:, :1]), v[:, :1]

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        return attended @ self.projections[layer].T


@pytest.fixture
def tap() -> Iterator[Tap]:
    with listen() as tap:
        yield tap


@pytest.fixture(scope="module")
def native(tiny: Tiny) -> Path:
    return tiny(family="qwen2", rope="llama3")


@pytest.fixture(scope="module")
def projections() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(64, 64, generator=generator) * 0.2 for _ in range(LAYERS))


@pytest.fixture(scope="module")
def toy(native: Path, projections: tuple[Tensor, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that ToyHeads makes of `native`, in full."""
    folder = tmp_path_factory.mktemp("toy")
    tensors = load_file(native / "model.safetensors")
    for layer in range(LAYERS):
        for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            key = f"model.layers.{layer}.self_attn.{name}"
            tensors[key] = tensors[key][:HEAD_DIM].clone()
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] = projections[layer].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((native / "config.json").read_text())
    checkpoints.edit_config(folder, {"num_key_value_heads": 1})
    return folder


@pytest.fixture(scope="module")
def variants(projections: tuple[Tensor, ...]) -> tuple[Variant, ...]:
    return (
        Variant("native", NativeHeads(2)),
        Variant("mha", RepeatHeads(4)),
        Variant("toy", ToyHeads(projections)),
    )


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_all(
    tap: Tap, folders: dict[str, Path], asked: Sequence[tuple[str, list[int]]], answers: Sequence[Any]
) -> int:
    """Every answer against its mode's reference; how many runs the tap heard."""
    heard = 0
    for (mode, prompt), (answer,) in zip(asked, answers, strict=True):
        reference = load_reference(folders[mode])
        text = prompt + answer.ids
        assert_same_ids(answer.ids, reference.greedy_along(prompt, answer.ids), where=mode)
        heard += len(tap.check(text, reference.logits(text), mode))
    return heard


ASKED = [(mode, random_ids(30 + 17 * i, seed=i)) for i, mode in enumerate(["native", "mha", "toy"] * 3)]


@pytest.mark.parametrize("chunk", [512, 50])
def test_three_modes_in_one_forward(
    native: Path, toy: Path, variants: tuple[Variant, ...], tap: Tap, chunk: int
) -> None:
    engine, _ = fp32_engine(native, variants=variants, max_batch_tokens=chunk, max_num_seqs=9)
    answers = run(engine, [greedy_request(ids, 40, variant=mode) for mode, ids in ASKED])
    folders = {"native": native, "mha": native, "toy": toy}
    assert check_all(tap, folders, ASKED, answers) == len(ASKED)
    chunks = -(-sum(len(ids) for _, ids in ASKED) // chunk)
    assert tap.steps < chunks + 60, "the modes did not share their steps"


def test_three_modes_in_a_pool_too_small(
    native: Path, toy: Path, variants: tuple[Variant, ...], tap: Tap
) -> None:
    """Rows of 1, 2 and 4 KV heads take blocks from each other, are pushed out and come back."""
    block_bytes = 2 * LAYERS * 16 * HEAD_DIM * 4
    engine, facts = fp32_engine(native, variants=variants, kv_memory=90 * block_bytes, max_model_len=350)
    assert facts.total_blocks == 90
    answers = run(engine, [greedy_request(ids, 60, variant=mode) for mode, ids in ASKED])
    folders = {"native": native, "mha": native, "toy": toy}
    assert check_all(tap, folders, ASKED, answers) >= len(ASKED)
    assert engine.stats().preemptions > 0
    assert engine.report(check=True).states.live.blocks == 0


def test_each_mode_counts_its_own_blocks(native: Path, variants: tuple[Variant, ...]) -> None:
    """50 tokens of prompt and 15 of output: 64 are written, 4 logical blocks of Hkv physical ones."""
    engine, _ = fp32_engine(native, variants=variants)
    requests = [greedy_request(random_ids(50, seed=9), 15, variant=v.name) for v in variants]
    for variant, (answer,) in zip(variants, run(engine, requests), strict=True):
        assert answer.kv is not None
        assert answer.kv.blocks == answer.kv.exclusive == 4 * variant.kv_heads
        assert (answer.kv.tokens, answer.kv.cached_tokens) == (64, 0)


def test_modes_share_no_cache(native: Path, toy: Path, variants: tuple[Variant, ...], tap: Tap) -> None:
    """The same prompt and root in another mode is no prefix hit: its blocks mean something else."""
    engine, _ = fp32_engine(native, variants=variants)
    prompt = random_ids(100, seed=10)
    asked = [(v.name, prompt) for v in variants]
    answers = [run(engine, [greedy_request(prompt, 10, variant=mode)])[0] for mode, _ in asked]
    assert check_all(tap, {"native": native, "mha": native, "toy": toy}, asked, answers) >= 3
    assert all(answer.kv is not None and answer.kv.cached_tokens == 0 for (answer,) in answers)
