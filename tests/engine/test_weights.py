"""`--weights int8|int4`: a model on quantised weights is transformers' on the same weights made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.progress import Silent
from model.quantise import BITS, quantise
from server.engine.errors import ConfigError
from server.engine.options import EngineOptions
from server.engine.scoring import load_scoring
from server.engine.variants import CalibrationSource
from tests.support import prompts
from tests.support.decoding import some_ids
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.equality import assert_bf16_logits, assert_same_logits
from tests.support.native import native
from tests.support.reference import load_reference, load_reference_tokenizer

KINDS = ("int8", "int4")
# Whole groups, tied; ragged groups and biases, heads as the C++ layers want them; a norm of heads, untied.
CHECKPOINTS: tuple[dict[str, Any], ...] = (
    {"family": "llama", "hidden": 64, "tie_word_embeddings": True},
    {"family": "qwen2", "hidden": 80, "heads": 5, "kv_heads": 1},
    {"family": "qwen3", "hidden": 96},
)


def made_again(folder: Path, kind: str, out: Path) -> Path:
    """The checkpoint with each matrix replaced by what its codes stand for, in fp32."""
    copytree(folder, out)
    (file,) = out.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        ends = "embed_tokens" in name or "lm_head" in name
        if tensor.dim() == 2:
            tensor = quantise(tensor, 8 if ends else BITS[kind]).dequantise(torch.float32)
        tensors[name] = tensor.float().contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return out


def scored(folder: Path, ids: list[int], **options: Any) -> Tensor:
    """Logits after each id, through the engine's own decoder, attention and cache."""
    settings = {"device": "cpu", "dtype": "float32"} | options
    scoring = load_scoring(EngineOptions(**settings), folder, len(ids), native=native)
    return torch.cat(list(scoring.scorer(scoring.native, len(ids)).logits(ids)))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: str(c["family"]))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_weights_made_again(
    tiny: Callable[..., Path], tmp_path: Path, checkpoint: dict[str, Any], kind: str
) -> None:
    folder, ids = tiny(std=0.1, dtype=torch.bfloat16, **checkpoint), some_ids(60)
    other = made_again(folder, kind, tmp_path / "again")
    expected = load_reference(other).logits(ids)
    assert_same_logits(scored(folder, ids, weights=kind), expected, kind)
    assert float((scored(folder, ids) - expected).abs().max()) > 1e-3, "weights were quantised"
    in_bf16 = scored(folder, ids, dtype="bfloat16", weights=kind)
    assert_bf16_logits(in_bf16, load_reference(other, torch.bfloat16).logits(ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_same_alone_and_in_a_crowd(small: Path, kind: str) -> None:
    asked = [[(5 * i + 3 * j) % 500 for j in range(10 + i)] for i in range(9)]
    settings: dict[str, Any] = {"weights": kind, "kv_memory": 4 << 20}
    crowd = run(fp32_engine(small, **settings)[0], [greedy_request(prompt, 12) for prompt in asked])
    for prompt, answers in zip(asked, crowd, strict=True):
        (alone,) = run(fp32_engine(small, **settings)[0], [greedy_request(prompt, 12)])
        assert [a.ids for a in answers] == [a.ids for a in alone]


def test_facts(small: Path) -> None:
    """Hidden 64 and no ragged group: 5 bits and 8.5 with their scales; norms stay in fp32."""
    found = {kind: fp32_engine(small, weights=kind, dtype="bfloat16")[1] for kind in ("none", *KINDS)}
    tables, norms = 2 * 512 * 64, 5 * 64
    body = found["none"].parameters - tables - norms
    assert found["none"].weight_bytes == 2 * (body + tables) + 4 * norms
    assert found["int8"].weight_bytes == (body + tables) * 8.5 / 8 + 4 * norms
    assert found["int4"].weight_bytes == body * 5 / 8 + tables * 8.5 / 8 + 4 * norms
    for kind, facts in found.items():
        assert facts.weight_kind == kind
        assert facts.bits_per_weight == 8 * facts.weight_bytes / facts.parameters
        assert (f"-{kind}" in facts.linear_backend) == (kind != "none")
    assert len({facts.fingerprint for facts in found.values()}) == 3
    again = fp32_engine(small, weights="int4", dtype="bfloat16")[1]
    assert again.fingerprint == found["int4"].fingerprint


def test_each_kind_has_its_own_fit_and_what_is_fitted_stays_as_it_is(small: Path, tmp_path: Path) -> None:
    text = [[3 + i % 500 for i in range(100)]]
    source = CalibrationSource(lambda: text, tmp_path, Silent())
    facts = {}
    for kind in ("none", "int4", "int4", "none"):
        facts[kind] = fp32_engine(small, calibration=source, attention=("native", "mqa"), weights=kind)[1]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    mqa = {kind: facts[kind].variants[1] for kind in facts}
    assert mqa["none"].identity != mqa["int4"].identity
    assert mqa["none"].weight_bytes == mqa["int4"].weight_bytes


def test_a_kind_that_there_is_not(small: Path) -> None:
    for load in (
        lambda: fp32_engine(small, weights="int3"),
        lambda: load_scoring(EngineOptions(weights="int3"), small, 10),
    ):
        with pytest.raises(ConfigError, match="--weights int3: must be one of none, int8, int4"):
            load()


@pytest.mark.model
def test_perplexity_of_the_default_model(smol: Path) -> None:
    """Its body was of 4 bits in groups of 32 once, and its table of 8, so int4 finds it again; int8 has other
    levels in the body. Bounds: a thousandth, and a hundredth."""
    ids = list(load_reference_tokenizer(smol)(prompts.PROSE).input_ids)[:512]

    def perplexity(kind: str) -> float:
        logits = scored(smol, ids, dtype="bfloat16", weights=kind)
        return float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp())

    none, int8, int4 = (perplexity(kind) for kind in ("none", *KINDS))
    print(f"perplexity: none {none:.4f}, int8 {int8:.4f}, int4 {int4:.4f}")
    assert int4 == pytest.approx(none, rel=5e-3)
    assert int8 == pytest.approx(none, rel=1.5e-2)
