"""W8: the tensors of a checkpoint are all there, each where it belongs, or the server does not start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import INDEX, SINGLE
from tests.support.checkpoint_cases import assert_as_transformers, refused_at_start
from tests.support.command import InProcess
from tests.support.decoding import some_ids
from tests.support.tensors import all_tensors, rewrite

Tiny = Callable[..., Path]
LAYER = "model.layers.1.self_attn."


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """`copied(...)`: a tiny checkpoint of these arguments that the test may change."""

    def copy(**arguments: Any) -> Path:
        return shutil.copytree(tiny(**arguments), tmp_path / f"model-{len(list(tmp_path.iterdir()))}")

    return copy


# ---- W8: shards and stray files


def weight_map(folder: Path) -> dict[str, str]:
    listed: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return listed


def write_index(folder: Path, listed: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}), encoding="utf-8")


def test_w8_a_shard_that_is_missing_is_named(copied: Callable[..., Path], here: InProcess) -> None:
    for index in range(len(set(weight_map(copied(shards=True)).values()))):
        folder = copied(shards=True)
        shard = sorted(set(weight_map(folder).values()))[index]
        (folder / shard).unlink()
        refused_at_start(here, folder, shard, "is missing")


@pytest.mark.parametrize("name", ["model.ghost.weight", LAYER + "q_proj.weight_scale"])
def test_w8_an_index_that_names_an_absent_tensor(
    copied: Callable[..., Path], here: InProcess, name: str
) -> None:
    folder = copied(shards=True)
    listed = weight_map(folder)
    write_index(folder, listed | {name: listed["model.norm.weight"]})
    refused_at_start(here, folder, name, listed["model.norm.weight"])


def test_w8_a_tensor_in_another_shard_than_the_index_says(
    copied: Callable[..., Path], here: InProcess
) -> None:
    """Neither copy is taken on trust."""
    folder = copied(shards=True)
    listed = weight_map(folder)
    name = "model.norm.weight"
    other = next(shard for shard in listed.values() if shard != listed[name])
    rewrite(folder, load_file(folder / other) | {name: torch.zeros(64)}, other)
    refused_at_start(here, folder, name, other)


def test_w8_stray_files_are_ignored(copied: Callable[..., Path]) -> None:
    for shards in (True, False):
        folder = copied(shards=shards)
        before = all_tensors(folder)
        wrong = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        for name in (
            "consolidated.safetensors",
            "model-00009-of-00009.safetensors",
            "adapter_model.safetensors",
        ):
            rewrite(folder, wrong, name)
        (folder / "pytorch_model.bin").write_bytes(b"not read")
        (folder / "old.safetensors").mkdir()
        assert_as_transformers(folder, some_ids(12))


def test_w8_rotary_tables_are_ignored(copied: Callable[..., Path]) -> None:
    folder = copied()
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in (0, 1)}
    rewrite(folder, all_tensors(folder) | tables | {"model.rotary_emb.inv_freq": torch.ones(8)})
    assert_as_transformers(folder, some_ids(12))


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen2", {LAYER + "q_proj.bias": None}, (LAYER + "q_proj.bias", "missing")),
        ("llama", {LAYER + "q_proj.bias": torch.zeros(64)}, (LAYER + "q_proj.bias", "no place")),
        ("llama", {LAYER + "q_norm.weight": torch.zeros(16)}, (LAYER + "q_norm.weight", "no place")),
        ("qwen3", {LAYER + "k_norm.weight": None}, (LAYER + "k_norm.weight", "missing")),
        ("llama", {"model.layers.2.input_layernorm.weight": torch.ones(64)}, ("model.layers.2.", "no place")),
        (
            "llama",
            {LAYER + "q_proj.weight_scale": torch.ones(1)},
            (LAYER + "q_proj.weight_scale", "no place"),
        ),
        (
            "llama",
            {LAYER + "o_proj.weight": torch.zeros(64, 32)},
            (LAYER + "o_proj.weight", "[64, 32]", "[64, 64]"),
        ),
        ("llama", {LAYER + "v_proj.weight": torch.zeros(64, 64)}, (LAYER + "v_proj.weight", "4 KV heads")),
        (
            "llama",
            {"model.embed_tokens.weight": torch.zeros(127, 64)},
            ("model.embed_tokens.weight", "[127, 64]"),
        ),
        ("llama", {"model.norm.weight": torch.ones(1, 64)}, ("model.norm.weight", "[1, 64]")),
        ("llama", {"model.norm.weight": None, LAYER + "k_proj.weight": None}, ("is missing (and 1 more)",)),
        (
            "llama",
            {LAYER + "q_proj.weight": torch.zeros(64, 64, dtype=torch.int8)},
            (LAYER + "q_proj.weight", "I8"),
        ),
    ],
    ids=lambda value: (
        "" if isinstance(value, tuple) else str(value if isinstance(value, str) else next(iter(value)))
    ),
)
def test_w8_what_does_not_fit_is_refused_by_name(
    copied: Callable[..., Path],
    here: InProcess,
    family: str,
    changes: dict[str, torch.Tensor | None],
    says: tuple[str, ...],
) -> None:
    folder = copied(family=family)
    tensors = all_tensors(folder) | changes
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    refused_at_start(here, folder, *says)


def test_w8_files_that_are_no_weights(copied: Callable[..., Path], here: InProcess) -> None:
    folder = copied()
    content = (folder / SINGLE).read_bytes()
    for broken, says in (
        (content[:-1], "truncated"),
        (b"", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ):
        (folder / SINGLE).unlink()
        (folder / SINGLE).write_bytes(broken)
        refused_at_start(here, folder, SINGLE, says)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    refused_at_start(here, folder, "pytorch_model.bin", "safetensors")
    (folder / "pytorch_model.bin").unlink()
    refused_at_start(here, folder, "no weights")
