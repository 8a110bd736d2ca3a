"""RoPE: every kind's frequencies and rotation equal transformers', in the old spelling and the new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model.errors import ModelError
from model.rope import Rope, RopeConfig, inverse_frequencies

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.7},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3 long": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "llama3 no original": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn no original": {"rope_type": "yarn", "factor": 4.0},
    "yarn null factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn below one": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
    "yarn attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.3,
    },
    "yarn one mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
    },
    "yarn betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "yarn step": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
    },
}


def written(spelling: str, parameters: dict[str, Any], theta: float = 500_000.0) -> dict[str, Any]:
    """A config that spells the same RoPE in one of three ways."""
    base = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 8,
        "max_position_embeddings": 512,
    }
    if spelling == "rope_parameters":
        return {**base, "rope_parameters": {**parameters, "rope_theta": theta}}
    old = dict(parameters)
    if spelling == "type":
        old["type"] = old.pop("rope_type")
    return {**base, "rope_theta": theta, "rope_scaling": old}


def reference(folder: Path, config: dict[str, Any]) -> LlamaRotaryEmbedding:
    (folder / "config.json").write_text(json.dumps(config))
    return LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))


def rope_config(config: dict[str, Any]) -> RopeConfig:
    return RopeConfig.from_config(config, config["max_position_embeddings"])


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_attention_factor(kind: str, spelling: str, tmp_path: Path) -> None:
    config = written(spelling, KINDS[kind])
    expected = reference(tmp_path, config)
    ours = rope_config(config)
    assert ours.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(ours, 32, CPU), expected.inv_freq, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "yarn attention"])
def test_rotation(kind: str, tmp_path: Path) -> None:
    """Queries and keys at positions up to the last one, in any order."""
    config = written("rope_parameters", KINDS[kind])
    expected = reference(tmp_path, config)
    x = torch.randn(40, 3, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.randperm(512, generator=torch.Generator().manual_seed(1))[:40]
    positions[:2] = torch.tensor([511, 0])
    cos, sin = expected(x, positions[None])
    rotated, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    rope = Rope(rope_config(config), 32, 512, CPU)
    torch.testing.assert_close(rope.at(positions).apply(x), rotated[0], rtol=1e-5, atol=1e-5)


def test_pairs_are_halves_apart_and_turn_by_the_position() -> None:
    """Arithmetic by hand: theta 4 and head_dim 4 give frequencies 1 and 1/2."""
    rope = Rope(RopeConfig(theta=4.0), 4, 8, CPU)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rope.at(torch.tensor([3])).apply(x)[0, 0].double()
    a, b = torch.tensor(3.0).double(), torch.tensor(1.5).double()
    hand = torch.stack([a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos()])
    torch.testing.assert_close(turned, hand, rtol=1e-6, atol=1e-6)


def test_half_precision_is_rotated_in_fp32() -> None:
    rope = Rope(RopeConfig(), 16, 4096, CPU)
    x = torch.randn(7, 2, 16).bfloat16()
    positions = torch.arange(4000, 4007)
    assert torch.equal(rope.at(positions).apply(x), rope.at(positions).apply(x.float()).bfloat16())


def test_one_rotation_serves_any_number_of_heads_and_each_token_its_own_position() -> None:
    rope = Rope(RopeConfig(), 8, 64, CPU)
    x, positions = torch.randn(5, 2, 8), torch.tensor([9, 3, 3, 60, 0])
    rotation = rope.at(positions)
    for token, position in enumerate(positions.tolist()):
        alone = rope.at(torch.tensor([position])).apply(x[token : token + 1])
        assert torch.equal(rotation.apply(x)[token], alone[0])
        assert torch.equal(rotation.apply(x[:, :1])[token], alone[0, :1])


def test_where_theta_comes_from() -> None:
    """Inside the object, then beside it, then 10,000; a filled rope_scaling wins over rope_parameters."""
    linear = {"rope_type": "linear", "factor": 2.0}
    assert RopeConfig.from_config({}, 64).theta == 10_000
    assert RopeConfig.from_config({"rope_theta": 5e5, "rope_scaling": None}, 64).theta == 5e5
    inside = {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 8.0}}
    assert RopeConfig.from_config(inside, 64).theta == 8
    beside = RopeConfig.from_config({"rope_theta": 7.0, "rope_scaling": linear}, 64)
    assert (beside.kind, beside.theta, beside.factor) == ("linear", 7, 2)
    both = {"rope_scaling": linear, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}
    assert RopeConfig.from_config(both, 64).kind == "linear"


def test_original_length_beside_the_object_wins(tmp_path: Path) -> None:
    config = written("rope_parameters", KINDS["llama3"]) | {"original_max_position_embeddings": 128}
    expected = reference(tmp_path, config)
    ours = rope_config(config)
    assert ours.original_max_position == 128
    torch.testing.assert_close(inverse_frequencies(ours, 32, CPU), expected.inv_freq, rtol=2e-6, atol=0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "longrope"}, r"rope_type is 'longrope'; supported are default, linear, dynamic, yarn"),
    ({"type": "mrope"}, r"rope_type is 'mrope'"),
    ({"rope_type": "linear"}, r"factor is missing"),
    ({"rope_type": "dynamic", "factor": None}, r"factor is missing"),
    ({"rope_type": "linear", "factor": "2"}, r"factor is '2'; it must be a number above 0"),
    ({"rope_type": "yarn"}, r"factor is missing"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, r"beta_fast is -1"),
    ({**LLAMA3, "factor": None}, r"factor is missing"),
    ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, r"low_freq_factor is missing"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, r"high_freq_factor is missing"),
    ({**LLAMA3, "high_freq_factor": 1.0}, r"high_freq_factor is 1; it must be above low_freq_factor \(1\)"),
    ({**LLAMA3, "original_max_position_embeddings": "8k"}, r"original_max_position_embeddings is '8k'"),
    ({"rope_type": "default", "rope_theta": 0}, r"rope_theta is 0"),
    ({"rope_type": "default", "rope_theta": 1}, r"rope_theta is 1; it must be above 1"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
    ({"full_attention": {"rope_type": "default"}}, r"full_attention is an object"),
]


@pytest.mark.parametrize(("parameters", "message"), REFUSED)
def test_refused(parameters: dict[str, Any], message: str) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ModelError, match=rf"^config\.json, {key}: {message}"):
            RopeConfig.from_config({key: parameters}, 64)


def test_refused_beside_the_object() -> None:
    with pytest.raises(ModelError, match=r"^config\.json: partial_rotary_factor is 0.25"):
        RopeConfig.from_config({"partial_rotary_factor": 0.25}, 64)
    with pytest.raises(ModelError, match=r"^config\.json: rope_scaling is 'yarn'; it must be an object"):
        RopeConfig.from_config({"rope_scaling": "yarn"}, 64)
