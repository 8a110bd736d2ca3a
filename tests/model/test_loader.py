"""Weights as loaded against the files and transformers; every way a folder can be wrong is an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import INDEX, SINGLE
from model.config import ModelConfig
from model.errors import ModelError
from model.linear import Linear, PlainBackend, PlainLinear
from model.loader import load_weights
from model.weights import ModelWeights
from tests.support.checkpoints import edit_config
from tests.support.reference import load_reference

CPU = torch.device("cpu")
PREFIX = "model.layers.1."


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, device=CPU, dtype=dtype, linear=PlainBackend(reason="test"))


def plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equals_files(weights: ModelWeights, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every tensor of the files is in the weights, where it belongs and with its own values."""
    left = dict(tensors)

    def take(*names: str) -> Tensor:
        return torch.cat([left.pop(name).to(dtype) for name in names])

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
        check(layer.gate_up, f"{at}mlp.gate_proj", f"{at}mlp.up_proj")
        check(layer.down, f"{at}mlp.down_proj")
        assert torch.equal(layer.input_norm, take(f"{at}input_layernorm.weight"))
        assert torch.equal(layer.post_norm, take(f"{at}post_attention_layernorm.weight"))
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            if f"{at}self_attn.{name}.weight" in left:
                assert norm is not None
                assert torch.equal(norm, take(f"{at}self_attn.{name}.weight"))
            else:
                assert norm is None
    assert torch.equal(weights.embed, take("model.embed_tokens.weight"))
    assert torch.equal(weights.norm, take("model.norm.weight"))
    if "lm_head.weight" in left:
        check(weights.lm_head, "lm_head")
    assert not left


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
    itemsize = torch.empty(0, dtype=run).element_size()
    assert weights.nbytes == itemsize * sum(tensor.numel() for tensor in all_tensors(folder).values())


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
    assert torch.equal(weights.embed, reference.get_input_embeddings().weight)
    assert torch.equal(plain(weights.lm_head).weight, reference.get_output_embeddings().weight)
    assert weights.lm_head.shares(weights.embed) is (tie is True and head != "different")


# ---- folders that are wrong --------------------------------------------------------------------------------


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A one-file checkpoint that the test may change."""
    return shutil.copytree(tiny(), tmp_path / "one")


@pytest.fixture
def sharded(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of several files that the test may change."""
    return shutil.copytree(tiny(shards=True), tmp_path / "many")


def rewrite(folder: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> None:
    """Replace a file by a new one: the old one may still be mapped."""
    (folder / name).unlink(missing_ok=True)
    save_file(tensors, folder / name, metadata={"format": "pt"})


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
