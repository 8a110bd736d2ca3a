"""Every way in which a checkpoint folder can be wrong is one line that names the file and the tensor."""

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
from model.errors import ModelError
from tests.support.checkpoints import edit_config
from tests.support.tensors import all_tensors, assert_equals_files, load, rewrite

PREFIX = "model.layers.1."


def refused(folder: Path, *parts: str) -> str:
    """Loading fails with one line that holds all of `parts`."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    return message


def weight_map(folder: Path) -> dict[str, str]:
    listed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return listed


def write_index(folder: Path, listed: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


@pytest.mark.parametrize(
    "name", ["model.norm.weight", PREFIX + "self_attn.k_proj.weight", PREFIX + "mlp.down_proj.weight"]
)
def test_missing_tensor(copied: Path, name: str) -> None:
    tensors = all_tensors(copied)
    del tensors[name]
    rewrite(copied, tensors)
    refused(copied, str(copied / SINGLE), f"tensor {name} is missing")


def test_missing_bias_of_a_family_that_always_has_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny(family="qwen2"), tmp_path / "qwen2")
    tensors = all_tensors(folder)
    del tensors[PREFIX + "self_attn.q_proj.bias"]
    rewrite(folder, tensors)
    refused(folder, f"tensor {PREFIX}self_attn.q_proj.bias is missing")


@pytest.mark.parametrize(
    "name", [PREFIX + "self_attn.q_proj.bias", "model.layers.2.input_layernorm.weight", "model.extra.weight"]
)
def test_extra_tensor(copied: Path, name: str) -> None:
    rewrite(copied, all_tensors(copied) | {name: torch.zeros(64)})
    refused(copied, str(copied / SINGLE), f"tensor {name} has no place")


def test_rotary_table_is_ignored(copied: Path) -> None:
    tables = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8, dtype=torch.float64),
    }
    expected = all_tensors(copied)
    rewrite(copied, expected | tables)
    assert_equals_files(load(copied), expected, torch.float32)


def test_wrong_shape(copied: Path) -> None:
    name = PREFIX + "mlp.up_proj.weight"
    rewrite(copied, all_tensors(copied) | {name: torch.zeros(64, 64)})
    refused(copied, str(copied / SINGLE), name, "[64, 64]", "[128, 64]")


def test_scalar_in_place_of_a_matrix(copied: Path) -> None:
    name = PREFIX + "self_attn.k_proj.weight"
    rewrite(copied, all_tensors(copied) | {name: torch.tensor(1.0)})
    refused(copied, name, "shape []")


@pytest.mark.parametrize(("heads", "rows"), [(1, "2 KV heads"), (4, "2 KV heads")])
def test_kv_rows_that_disagree_with_the_config(copied: Path, heads: int, rows: str) -> None:
    edit_config(copied, {"num_key_value_heads": heads})
    refused(copied, "k_proj", rows, "head_dim 16", f"num_key_value_heads is {heads}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_dtypes_that_are_not_weights(copied: Path, dtype: torch.dtype) -> None:
    name = PREFIX + "self_attn.o_proj.weight"
    tensors = all_tensors(copied)
    rewrite(copied, tensors | {name: tensors[name].to(dtype)})
    refused(copied, str(copied / SINGLE), name, "supported are BF16, F16, F32")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_file(copied: Path, keep: float) -> None:
    content = (copied / SINGLE).read_bytes()
    (copied / SINGLE).unlink()
    (copied / SINGLE).write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refused(copied, str(copied / SINGLE), "truncated")


def test_tensor_given_twice_in_one_file(copied: Path) -> None:
    one = torch.zeros(4).numpy().tobytes()
    entries = [f'"a":{{"dtype":"F32","shape":[4],"data_offsets":[{at},{at + 16}]}}' for at in (0, 16)]
    header = f"{{{','.join(entries)}}}".encode()
    (copied / SINGLE).unlink()
    (copied / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + one + one)
    refused(copied, str(copied / SINGLE))


def test_git_lfs_pointer(copied: Path) -> None:
    (copied / SINGLE).unlink()
    (copied / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(copied, str(copied / SINGLE), "git lfs pull")


def test_weights_only_as_pickle(copied: Path) -> None:
    (copied / SINGLE).rename(copied / "pytorch_model.bin")
    refused(copied, "pytorch_model.bin", "convert it to safetensors")


def test_no_weights_at_all(copied: Path) -> None:
    (copied / SINGLE).unlink()
    refused(copied, str(copied), "no weights", SINGLE)


# ---- shards ------------------------------------------------------------------------------------------------


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(set(weight_map(sharded).values()))[1]
    (sharded / shard).unlink()
    refused(sharded, str(sharded / shard), "is missing")


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, "model-00001-of-", INDEX)


def test_index_that_names_a_tensor_no_shard_holds(sharded: Path) -> None:
    listed = weight_map(sharded)
    shard = next(iter(listed.values()))
    write_index(sharded, listed | {"model.ghost.weight": shard})
    refused(sharded, str(sharded / INDEX), "model.ghost.weight", shard)


def test_index_that_leaves_a_tensor_out(sharded: Path) -> None:
    listed = weight_map(sharded)
    shard = listed.pop("model.norm.weight")
    write_index(sharded, listed)
    refused(sharded, str(sharded / shard), "model.norm.weight")


def test_tensor_in_two_shards(sharded: Path) -> None:
    listed = weight_map(sharded)
    name = "model.norm.weight"
    other = next(shard for shard in listed.values() if shard != listed[name])
    rewrite(sharded, load_file(sharded / other) | {name: torch.zeros(64)}, other)
    refused(sharded, str(sharded / other), name, listed[name])


@pytest.mark.parametrize(
    "place",
    [
        "../one/model.safetensors",
        "/etc/model.safetensors",
        "..\\x.safetensors",
        "weights.bin",
        "..",
        "",
        3,
        None,
    ],
)
def test_index_that_leads_elsewhere(sharded: Path, copied: Path, place: Any) -> None:
    write_index(sharded, weight_map(sharded) | {"model.norm.weight": place})
    refused(sharded, str(sharded / INDEX), "model.norm.weight", repr(place))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": []}', "{}"])
def test_index_that_is_no_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, str(sharded / INDEX))


def test_files_that_the_index_does_not_name_are_ignored(sharded: Path) -> None:
    expected = all_tensors(sharded)
    rewrite(sharded, {"model.norm.weight": torch.zeros(3)}, "model-00009-of-00009.safetensors")
    (sharded / "consolidated.safetensors").write_bytes(b"not a safetensors file")
    assert_equals_files(load(sharded), expected, torch.float32)


def test_consolidated_beside_a_single_file_is_ignored(copied: Path) -> None:
    expected = all_tensors(copied)
    shutil.copy(copied / SINGLE, copied / "consolidated.safetensors")
    assert_equals_files(load(copied), expected, torch.float32)
