"""Weights as loaded, against the files and against transformers; memory and fingerprint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import INDEX, SINGLE
from model.errors import ModelError
from tests.support.checkpoints import edit_config
from tests.support.reference import load_reference
from tests.support.tensors import all_tensors, assert_equals_files, load, plain, rewrite, table

PREFIX = "model.layers.1."


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"family": "llama"},
        {"family": "llama", "attention_bias": True, "mlp_bias": True},
        {"family": "llama", "kv_heads": None, "head_dim": 32},
        {"family": "mistral", "kv_heads": 1},
        {"family": "qwen2"},
        {"family": "qwen3"},
    ],
    ids=lambda value: "-".join(str(part) for part in value.values()),
)
def test_every_tensor_lands_in_its_place(
    tiny: Callable[..., Path], arguments: dict[str, Any], shards: bool
) -> None:
    folder = tiny(shards=shards, **arguments)
    assert (folder / INDEX).exists() is shards
    assert_equals_files(load(folder), all_tensors(folder), torch.float32)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("run", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_dtype_is_converted_once_to_the_one_of_the_run(
    tiny: Callable[..., Path], stored: torch.dtype, run: torch.dtype
) -> None:
    folder = tiny(dtype=stored)
    weights = load(folder, run)
    assert weights.embed.dtype == run
    assert_equals_files(weights, all_tensors(folder), run)
    sizes = {name: tensor.numel() for name, tensor in all_tensors(folder).items()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)  # held in fp32
    assert weights.nbytes == run.itemsize * (sum(sizes.values()) - norms) + 4 * norms


def test_weights_do_not_depend_on_the_file_any_more(copied: Path) -> None:
    weights = load(copied)
    before = plain(weights.layers[0].o).weight.clone()
    (copied / SINGLE).write_bytes(b"\0" * (copied / SINGLE).stat().st_size)
    assert torch.equal(plain(weights.layers[0].o).weight, before)


# ---- the lm_head of tied and untied models -----------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False, None], ids=["tied", "untied", "key absent"])
@pytest.mark.parametrize("head", ["same", "different", "absent", "instead of the embedding"])
def test_lm_head_follows_transformers(copied: Path, tie: bool | None, head: str) -> None:
    tensors = all_tensors(copied)
    if head == "same":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif head == "absent":
        del tensors["lm_head.weight"]
    elif head == "instead of the embedding":
        del tensors["model.embed_tokens.weight"]
    rewrite(copied, tensors)
    edit_config(
        copied,
        {} if tie is None else {"tie_word_embeddings": tie},
        drop=("tie_word_embeddings",) * (tie is None),
    )

    if head in ("absent", "instead of the embedding") and not tie:
        name = "lm_head" if head == "absent" else "model.embed_tokens"
        with pytest.raises(ModelError, match=f"tensor {name}.weight is missing"):
            load(copied)
        return
    weights, reference = load(copied), load_reference(copied).model
    assert torch.equal(table(weights.embed), reference.get_input_embeddings().weight)
    assert torch.equal(plain(weights.lm_head).weight, reference.get_output_embeddings().weight)
    assert weights.tied is (tie is True and head != "different")


# ---- fingerprint, memory -----------------------------------------------------------------------------------


def test_fingerprint_is_that_of_the_files(copied: Path, sharded: Path, tmp_path: Path) -> None:
    first = load(copied).fingerprint
    assert load(copied, torch.bfloat16).fingerprint == first
    assert load(shutil.copytree(copied, tmp_path / "again")).fingerprint == first
    tensors = all_tensors(copied)
    tensors[PREFIX + "mlp.up_proj.weight"] += 1
    rewrite(copied, tensors)
    second = load(copied).fingerprint
    edit_config(copied, {"rms_norm_eps": 1e-4})
    assert len({first, second, load(copied).fingerprint}) == 3


@pytest.mark.parametrize("place", [0, -1, 1000])
def test_any_value_changes_the_fingerprint(copied: Path, place: int) -> None:
    """A fitted head map is kept by it: one value anywhere in a large tensor makes another checkpoint."""
    first = load(copied).fingerprint
    tensors = all_tensors(copied)
    changed = tensors[PREFIX + "mlp.up_proj.weight"].view(-1)
    assert changed.nbytes > 16384, "much larger than what is hashed as it is"
    changed[place] += 1
    rewrite(copied, tensors)
    assert load(copied).fingerprint != first


_MEASURE = """
import sys, torch
from pathlib import Path
from model.config import ModelConfig
from model.linear import PlainBackend
from model.loader import load_weights

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
config = ModelConfig.from_folder(folder)
device, dtype = torch.device("cpu"), getattr(torch, sys.argv[2])
before = status("VmRSS")
weights = load_weights(folder, config, device=device, dtype=dtype, linear=PlainBackend(reason="test"))
print(weights.nbytes, status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_and_little_more(smol: Path, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(smol), dtype],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    nbytes, peak, after = (int(word) for word in done.stdout.split())
    layer = 2 * 3_540_000  # bytes of one layer in the file
    slack = 24 << 20  # allocator and page tables
    assert nbytes - slack < after < nbytes + slack
    assert peak < nbytes + layer + slack
