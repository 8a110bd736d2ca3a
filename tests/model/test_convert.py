"""Converted checkpoints: transformers on the new folder, our decoder on it, and the head map on the old one
say the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.calibration import Calibration
from model.config import ModelConfig
from model.convert import AveragedRows, RepeatedRows, Rewrite, aligned_rows, no_form
from model.convert_folder import Written, check_out, convert_folder
from model.errors import ModelError
from model.heads import HeadMap, MeanHeads, NativeHeads, RepeatHeads
from model.progress import Progress, Silent
from tests.support import checkpoints
from tests.support.calibrations import heads_of, random_calibration
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.equality import assert_same_logits
from tests.support.reference import load_reference

Tiny = Callable[..., Path]
IDS = some_ids(50)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "tied": {"family": "llama", "tie_word_embeddings": True},
    "all biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "head_dim": {"family": "llama", "head_dim": 24, "rope": "yarn"},
    "old keys": {"family": "llama", "rope": "llama3", "old_rope_keys": True},
    "qwen2": {"family": "qwen2"},
    "qwen2 window": {"family": "qwen2", "window": 16},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral", "window": 16},
    "shards": {"family": "qwen2", "shards": True},
    "mha": {"family": "llama", "kv_heads": None},
}


def convert(
    source: Path,
    out: Path,
    rewrite: Callable[[ModelConfig], Rewrite],
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Written:
    config = ModelConfig.from_folder(source)
    return convert_folder(
        source, out, config, rewrite(config), dtype=dtype, progress=progress or Silent(), **options
    )


def check_three_ways(source: Path, out: Path, head_map: HeadMap) -> None:
    expected = load_reference(out).logits(IDS)
    decoder = load_decoder(out)
    assert decoder.config.num_kv_heads == head_map.kv_heads
    assert_same_logits(run_alone(decoder, IDS, NativeHeads(head_map.kv_heads), 13), expected, "converted")
    assert_same_logits(run_alone(load_decoder(source), IDS, head_map, 13), expected, "as a variant")


@pytest.mark.parametrize("case", [case for case in FAMILIES if case != "mha"])
def test_repeated(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """Exact: the new checkpoint says what the old one does."""
    source = tiny(**{"heads": 8, "kv_heads": 2} | FAMILIES[case])
    for more in (4, 8):
        out = tmp_path / str(more)
        convert(source, out, lambda config, more=more: RepeatedRows(config, more))
        check_three_ways(source, out, RepeatHeads(more))
        assert_same_logits(load_reference(out).logits(IDS), load_reference(source).logits(IDS))


@pytest.mark.parametrize("case", FAMILIES)
def test_averaged(tiny: Tiny, tmp_path: Path, case: str) -> None:
    source = tiny(**{"heads": 8, "kv_heads": 4} | FAMILIES[case])
    for fewer in (1, 2):
        out = tmp_path / str(fewer)
        convert(source, out, lambda config, fewer=fewer: AveragedRows(config, fewer))
        check_three_ways(source, out, MeanHeads(fewer))


@pytest.mark.parametrize("case", [case for case in FAMILIES if case != "qwen3"])
def test_aligned(tiny: Tiny, tmp_path: Path, case: str) -> None:
    source = tiny(**{"heads": 8, "kv_heads": 4} | FAMILIES[case])
    for fewer in (1, 2):
        out = tmp_path / str(fewer)
        decoder = load_decoder(source)
        biased = decoder.config.o_bias
        fit = random_calibration(decoder.config, fewer, seed=fewer, free=False, o_bias=biased)
        convert(source, out, lambda config, fit=fit: aligned_rows(fit, config))
        check_three_ways(source, out, heads_of(fit, decoder))


def test_a_fit_without_a_bias_has_none(tiny: Tiny, tmp_path: Path) -> None:
    """The checkpoint has one after attention, the fit does not: it must not be added back."""
    source = tiny(family="llama", heads=8, kv_heads=4, attention_bias=True)
    decoder = load_decoder(source)
    fit = random_calibration(decoder.config, 1, free=False)
    convert(source, tmp_path / "out", lambda config: aligned_rows(fit, config))
    check_three_ways(source, tmp_path / "out", heads_of(fit, decoder))


def test_there_and_back_is_the_same_file(tiny: Tiny, tmp_path: Path) -> None:
    """Repeated, then the equal heads averaged: every byte of every tensor, in bfloat16 too."""
    source = tiny(family="qwen2", heads=8, kv_heads=2, dtype=torch.bfloat16)
    convert(source, tmp_path / "more", lambda config: RepeatedRows(config, 8))
    convert(tmp_path / "more", tmp_path / "back", lambda config: AveragedRows(config, 2))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch.bfloat16
        assert torch.equal(tensor, after[name]), name


def test_only_heads_change_in_the_config(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(family="mistral", heads=8, kv_heads=4), tmp_path / "source")
    checkpoints.edit_config(source, {"unknown": {"a": [1]}, "name": "München"}, drop=("head_dim",))
    convert(source, tmp_path / "out", lambda config: AveragedRows(config, 2))
    before, after = checkpoints.read_config(source), checkpoints.read_config(tmp_path / "out")
    assert after == before | {"num_key_value_heads": 2, "head_dim": 8}


def test_everything_else_is_copied(tiny: Tiny, tmp_path: Path) -> None:
    """Links too, as in the hub's cache; other weights, code and our own stamp are not."""
    source = shutil.copytree(tiny(shards=True), tmp_path / "source")
    copied = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "tokenizer.model": "x", "vocab.json": "{}",
        "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"temperature": 0.6}',
        "special_tokens_map.json": "{}", "LICENSE": "free", "README.md": "# Model", "merges.txt": "a b",
    }  # fmt: skip
    left = {
        "modeling_own.py": "import os", "pytorch_model.bin": "pickle", "pytorch_model.bin.index.json": "{}",
        "headroom.json": "{}", ".gitattributes": "", "other.safetensors": "", "model.gguf": "", "a.pth": "",
    }  # fmt: skip
    for name, text in (copied | left).items():
        (source / name).write_text(text)
    (source / "LICENSE").rename(tmp_path / "blob")
    (source / "LICENSE").symlink_to(tmp_path / "blob")
    (source / "onnx").mkdir()
    convert(source, tmp_path / "out", lambda config: AveragedRows(config, 1))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*copied, "config.json", "model.safetensors"}
    for name, text in copied.items():
        assert (tmp_path / "out" / name).read_text() == text
    assert not (tmp_path / "out" / "LICENSE").is_symlink()


@pytest.mark.parametrize("tied", [False, True])
def test_large_ones_are_sharded(tiny: Tiny, tmp_path: Path, tied: bool) -> None:
    source, out = (
        tiny(family="qwen2", heads=8, kv_heads=4, tie_word_embeddings=tied, layers=5),
        tmp_path / "out",
    )
    done: list[int] = []
    totals: list[int | None] = []

    class Shown:
        def start(self, label: str, total: int | None) -> None:
            totals.append(total)

        def update(self, amount: int) -> None:
            done.append(amount)

    limit = 400_000
    written = convert(
        source, out, lambda config: AveragedRows(config, 2), progress=Shown(), shard_bytes=limit
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count == written.files > 1
    assert files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    held = {name: tensor for file in files for name, tensor in load_file(out / file).items()}
    assert set(held) == set(index["weight_map"])
    sizes = [sum(t.nbytes for t in load_file(out / file).values()) for file in files]
    assert max(sizes) <= limit
    assert sum(sizes) == written.weight_bytes == index["metadata"]["total_size"] == totals[-1] == done[-1]
    assert done == sorted(done)
    check_three_ways(source, out, MeanHeads(2))


def test_a_small_one_is_one_file_of_the_usual_form(tiny: Tiny, tmp_path: Path) -> None:
    written = convert(tiny(shards=True), tmp_path / "out", lambda config: AveragedRows(config, 1))
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert written == Written(sum(t.nbytes for t in load_file(file).values()), 1)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "out/config.json").stat().st_mode)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype(tiny: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    """Computed in fp32 and rounded once; config.json says which."""
    source = tiny(heads=8, kv_heads=4)
    name = str(dtype).removeprefix("torch.")
    convert(source, tmp_path / "exact", lambda config: AveragedRows(config, 1))
    convert(source, tmp_path / "small", lambda config: AveragedRows(config, 1), dtype)
    exact, small = (
        load_file(tmp_path / "exact/model.safetensors"),
        load_file(tmp_path / "small/model.safetensors"),
    )
    for key, tensor in exact.items():
        assert torch.equal(small[key], tensor.to(dtype)), key
    assert ModelConfig.from_folder(tmp_path / "small").torch_dtype is dtype
    assert name in (tmp_path / "small/config.json").read_text()


def test_what_float16_cannot_hold(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70_000.0
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that float16 cannot"):
        convert(source, tmp_path / "out", no_layers, torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(source, tmp_path / "out", no_layers, torch.bfloat16)


def test_each_tensor_keeps_its_own_dtype(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(dtype=torch.bfloat16), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    mixed = {name: t.float() if "norm" in name else t for name, t in tensors.items()}
    save_file(mixed, source / "model.safetensors")
    convert(source, tmp_path / "out", lambda config: AveragedRows(config, 1))
    written = load_file(tmp_path / "out/model.safetensors")
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in mixed.items()}


def test_tied_tables_are_written_as_they_were_held(tiny: Tiny, tmp_path: Path) -> None:
    """Only an lm_head, or both with other values: both are what transformers reads, and stay so."""
    source = shutil.copytree(tiny(tie_word_embeddings=True), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    for held in (
        {"lm_head.weight": table},
        {"model.embed_tokens.weight": table, "lm_head.weight": table + 1},
    ):
        save_file(tensors | held, source / "model.safetensors", metadata={"format": "pt"})
        out = tmp_path / f"out{len(held)}"
        convert(source, out, lambda config: RepeatedRows(config, 4))
        written = load_file(out / "model.safetensors")
        assert {name for name in written if "layers" not in name} == {*held, "model.norm.weight"}
        assert all(torch.equal(written[name], tensor) for name, tensor in held.items())


def no_layers(config: ModelConfig) -> Rewrite:
    return AveragedRows(config, 1)


def test_nothing_is_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny()
    for name in ("file", "link", "full"):
        out = tmp_path / name
        if name == "file":
            out.write_text("mine")
        elif name == "link":
            out.symlink_to(tmp_path / "nowhere")
        else:
            out.mkdir()
            (out / "mine").write_text("mine")
        with pytest.raises(ModelError, match="name a new folder"):
            convert(source, out, no_layers)
    assert (tmp_path / "file").read_text() == (tmp_path / "full/mine").read_text() == "mine"
    with pytest.raises(ModelError, match="is not empty"):
        convert(source, source, no_layers)
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", no_layers)
    convert(source, tmp_path / "some/where/new", no_layers)
    assert load_decoder(tmp_path / "empty").config.num_kv_heads == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "full", "empty", "some"}


def test_a_place_where_nothing_can_be_made(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before anything is downloaded, fitted or written."""
    (tmp_path / "file").write_text("mine")
    for out, reason in (
        (tmp_path / "file" / "out", "file is a file, so"),
        (tmp_path / "file" / "deep" / "out", "file is a file, so"),
        (tmp_path / ("x" * 300), "File name too long; name another folder"),
        (tmp_path / ("x" * 300) / "out", "File name too long; name another folder"),
    ):
        with pytest.raises(ModelError, match=reason):
            check_out(out)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ModelError, match=f"{tmp_path} may not be written"):
        check_out(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [".", "link", "there/../empty"])
def test_an_empty_folder_by_another_name(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(empty)
    monkeypatch.chdir(empty if name == "." else tmp_path)
    convert(tiny(), Path(name), no_layers)
    assert load_decoder(empty).config.num_kv_heads == 1
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "there", "link"}
    assert (tmp_path / "link").is_symlink()


def test_a_folder_filled_meanwhile_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Meddler(Silent):
        def update(self, done: int) -> None:
            out.mkdir(exist_ok=True)
            (out / "mine").write_text("mine")

    with pytest.raises(ModelError, match="filled by somebody else meanwhile"):
        convert(tiny(), out, no_layers, progress=Meddler())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_failure_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    class Interrupted(Silent):
        def update(self, done: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny(), tmp_path / "out", no_layers, progress=Interrupted())
    assert list(tmp_path.iterdir()) == []


def test_no_room(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"out needs [\d,]+ bytes and .* has 5 left; name another disk"):
        convert(tiny(), tmp_path / "out", no_layers)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_checkpoint_is_refused_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj\.weight is missing"):
        convert(source, tmp_path / "out", no_layers)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_maps_without_a_form(tiny: Tiny) -> None:
    llama = ModelConfig.from_folder(tiny(family="llama", heads=8, kv_heads=4))
    qwen3 = ModelConfig.from_folder(tiny(family="qwen3", heads=8, kv_heads=4))
    free = random_calibration(llama, 2)
    with pytest.raises(ModelError, match="free slots turn with frequencies of their own"):
        aligned_rows(free, llama)
    disguised = Calibration.of("aligned-fixed", 2, free.layers)
    with pytest.raises(ModelError, match="not the pair of its own frequency"):
        aligned_rows(disguised, llama)
    with pytest.raises(ModelError, match="which is not linear"):
        aligned_rows(random_calibration(qwen3, 2, free=False), qwen3)
    biased = random_calibration(llama, 2, free=False, o_bias=True)
    with pytest.raises(ModelError, match="a bias after attention"):
        aligned_rows(biased, llama)
    assert no_form("mean", qwen3) is None and no_form("aligned-fixed", llama) is None


def test_k_norm_is_why_aligned_has_no_form(tiny: Tiny, tmp_path: Path) -> None:
    """Forced past the refusal, the converted model is another one than the variant: the refusal is earned."""
    source, out = tiny(family="qwen3", heads=8, kv_heads=4), tmp_path / "out"
    decoder = load_decoder(source)
    fit = random_calibration(decoder.config, 2, free=False)
    plain = dataclasses.replace(decoder.config, qk_norm=False)
    forced = aligned_rows(fit, plain)
    convert(source, out, lambda config: forced)
    variant = run_alone(decoder, IDS, heads_of(fit, decoder))
    other: Tensor = load_reference(out).logits(IDS)
    assert float((variant - other).abs().max()) > 0.1 * float(variant.abs().max())
