"""Aligned heads with one slot per frequency are heads that a checkpoint can hold: transformers runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.calibration import Calibration
from tests.support import checkpoints
from tests.support.calibrations import heads_of, random_calibration, write_reduced
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.equality import assert_bf16_logits, assert_same_logits
from tests.support.reference import load_reference

Tiny = Callable[..., Path]


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_one_slot_per_frequency_is_a_checkpoint(
    tiny: Tiny, tmp_path: Path, family: str, kv_heads: int
) -> None:
    folder = tiny(family=family, heads=8, kv_heads=4, rope="yarn")
    decoder = load_decoder(folder)
    calibration = random_calibration(decoder.config, kv_heads, free=False)
    reduced = write_reduced(tmp_path / "reduced", folder, calibration)
    ids = some_ids(60)
    ours = run_alone(decoder, ids, heads_of(calibration, decoder), 13)
    assert_same_logits(ours, load_reference(reduced).logits(ids))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_unit_factors_that_pick_the_first_head_are_its_mqa_checkpoint(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    """With qwen3 the k-norm is applied to the head that was picked."""
    folder = tiny(family=family, heads=4, kv_heads=2)
    decoder = load_decoder(folder)
    fits = []
    for fit, layer in zip(random_calibration(decoder.config, 1, free=False).layers, (0, 1), strict=True):
        key = torch.tensor([[1.0], [0.0]]).expand(2, 8).to(torch.complex64)
        v_in = torch.eye(16, 32).unsqueeze(0)
        o = load_file(folder / "model.safetensors")[f"model.layers.{layer}.self_attn.o_proj.weight"]
        unit = torch.ones(2, 8, dtype=torch.complex64)
        fits.append(dataclasses.replace(fit, key=key, query=unit, v_in=v_in, o=o))
    calibration = Calibration.of("aligned-fixed", 1, fits)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = tensor[:16].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checkpoints.edit_config(tmp_path, {"num_key_value_heads": 1})
    ids = some_ids(50)
    ours = run_alone(decoder, ids, heads_of(calibration, decoder), 7)
    assert_same_logits(ours, load_reference(tmp_path).logits(ids))


def test_bf16_errs_no_more_than_the_checkpoint_does(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny(family="llama", heads=9, kv_heads=3, hidden=144)
    decoder = load_decoder(folder, torch.bfloat16)
    calibration = random_calibration(decoder.config, 1, free=False)
    reduced = write_reduced(tmp_path / "reduced", folder, calibration)
    ids = some_ids(100)
    ours = run_alone(decoder, ids, heads_of(calibration, decoder))
    in_bf16 = load_reference(reduced, torch.bfloat16).logits(ids)
    assert_bf16_logits(ours, in_bf16, load_reference(reduced).logits(ids))
