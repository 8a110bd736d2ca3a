"""`config.json` means here what it means to transformers, and what cannot be served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from model.config import ModelConfig
from model.errors import ModelError

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def given(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **BASE, **changes}


def theirs(folder: Path, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


def their_windows(config: Any) -> tuple[int | None, ...]:
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(
        config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"num_key_value_heads": 4},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "null kv heads": {"num_key_value_heads": None},
    "head_dim": {"num_key_value_heads": 2, "head_dim": 32},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "position and eps": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "window off": {"num_key_value_heads": 2, "sliding_window": 16, "use_sliding_window": False},
    "window null": {"num_key_value_heads": 2, "sliding_window": None, "use_sliding_window": True},
    "window default": {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 2},
    "window": {
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "window by layer": {
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 3,
    },
    "layer types": {
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    },
    "one eos": {"num_key_value_heads": 2, "eos_token_id": 7, "bos_token_id": 3},
    "several eos": {"num_key_value_heads": 2, "eos_token_id": [7, 9]},
    "no eos": {"num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_fields_mean_what_transformers_reads(family: str, setting: str, tmp_path: Path) -> None:
    values = given(family, **SETTINGS[setting])
    if (family, setting) == ("mistral", "null kv heads"):  # its config class insists on a number
        values["num_key_value_heads"] = 4
    reference = theirs(tmp_path, values)
    (tmp_path / "config.json").write_text(json.dumps(given(family, **SETTINGS[setting])))
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.family == family
    assert ours.num_kv_heads == reference.num_key_value_heads
    assert ours.group * ours.num_kv_heads == ours.num_heads == 4
    assert ours.head_dim == getattr(reference, "head_dim", None) or 64 // 4
    assert ours.max_position_embeddings == reference.max_position_embeddings
    assert ours.rms_norm_eps == reference.rms_norm_eps
    assert ours.tie_embeddings is reference.tie_word_embeddings
    assert ours.rope.theta == reference.rope_parameters["rope_theta"]
    assert ours.windows == their_windows(reference)
    eos = reference.eos_token_id
    assert ours.eos_token_ids == frozenset([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert ours.bos_token_id == reference.bos_token_id


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_kv_heads_are_mha(family: str) -> None:
    assert ModelConfig.from_dict(given(family)).num_kv_heads == 4


def test_biases_and_norms_by_family() -> None:
    switched = {"attention_bias": True, "mlp_bias": True}
    seen = {}
    for family in FAMILIES:
        for name, keys in (("off", {}), ("on", switched)):
            config = ModelConfig.from_dict(given(family, **keys))
            seen[family, name] = (config.attention_bias, config.o_bias, config.mlp_bias, config.qk_norm)
    assert seen == {
        ("llama", "off"): (False, False, False, False),
        ("llama", "on"): (True, True, True, False),
        ("mistral", "off"): (False, False, False, False),
        ("mistral", "on"): (False, False, False, False),
        ("qwen2", "off"): (True, False, False, False),
        ("qwen2", "on"): (True, False, False, False),
        ("qwen3", "off"): (False, False, False, True),
        ("qwen3", "on"): (True, True, False, True),
    }


def test_head_dim_null_and_absent() -> None:
    assert ModelConfig.from_dict(given("llama", head_dim=None)).head_dim == 16
    assert ModelConfig.from_dict(given("qwen3")).head_dim == 128
    assert ModelConfig.from_dict(given("qwen3", head_dim=None)).head_dim == 16
    # An explicit head_dim needs no hidden_size that the heads divide.
    assert ModelConfig.from_dict(given("llama", hidden_size=66, head_dim=32)).head_dim == 32


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_dtype_keys_old_and_new(keys: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path) -> None:
    assert ModelConfig.from_dict(given(**keys)).torch_dtype is dtype
    assert theirs(tmp_path, given(**keys)).dtype is dtype


def test_eos_ids_that_no_logit_names_are_dropped() -> None:
    assert ModelConfig.from_dict(given(eos_token_id=[-1, 5, 128])).eos_token_ids == {5}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "gemma3"}, r"model_type 'gemma3' is not supported; .*llama.*mistral.*qwen3"),
    "no family": ({"model_type": None}, r"model_type is missing; supported are .*llama"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quantization_config \(gptq\) is not supported; supported are .*bfloat16.*llama",
    ),
    "heads": ({"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 8}, r"2; .*divide.*\(7\)"),
    "more kv heads": ({"num_key_value_heads": 8}, r"num_key_value_heads is 8"),
    "head_dim missing": ({"num_attention_heads": 6}, r"hidden_size \(64\) is not a multiple of .* \(6\)"),
    "odd head_dim": ({"head_dim": 15}, r"head_dim is 15; .*even"),
    "zero head_dim": ({"head_dim": 0}, r"head_dim is 0; .*at least 1"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; supported is silu"),
    "missing": ({"hidden_size": None}, r"hidden_size is missing"),
    "text": ({"num_hidden_layers": "four"}, r"num_hidden_layers is 'four'; .*whole number"),
    "float": ({"num_hidden_layers": 4.5}, r"num_hidden_layers is 4.5"),
    "bool": ({"num_hidden_layers": True}, r"num_hidden_layers is True"),
    "absurd layers": (
        {"num_hidden_layers": 10**30},
        r"layers is a number of 31 digits; .*65536",
    ),
    "more layers than can be listed": ({"num_hidden_layers": 2**31 - 1}, r"layers is 2147483647; .*65536"),
    "absurd context": ({"max_position_embeddings": 2**31}, r"embeddings is 2147483648; it must be at most"),
    "flag": ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes'; it must be true or false"),
    "eps": ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan"),
    "eps that no float holds": (
        {"rms_norm_eps": 10**400},
        r"rms_norm_eps is 10+; it must be a number above 0",
    ),
    "theta that no float holds": ({"rope_theta": 10**400}, r"rope_theta is 10+; it must be a number above 0"),
    "eos": ({"eos_token_id": ["</s>"]}, r"eos_token_id is \['</s>'\]"),
    "bos": ({"bos_token_id": "<s>"}, r"bos_token_id is '<s>'"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype is 'float8_e4m3fn'; .*bfloat16"),
    "per layer": ({"per_layer_config": {"0": {"head_dim": 8}}}, r"per_layer_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_key_value_and_limit(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError, match=rf"(?s)^some/config\.json: .*{message}") as caught:
        ModelConfig.from_dict({**given(), **changes}, "some/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["full_attention"] * 3, r"layer_types is 3 long; .*num_hidden_layers \(4\)"),
        (["full_attention"] * 3 + ["chunked_attention"], r"layer_types is .*chunked_attention"),
        ("full_attention", r"layer_types is 'full_attention'"),
        (["sliding_attention"] * 4, r"sliding_attention, but no sliding window"),
    ],
)
def test_layer_types_are_checked(kinds: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(given("qwen3", layer_types=kinds))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        ModelConfig.from_folder(tmp_path)
    for text, message in (
        (b'{"hidden_size": 64,', "is not valid JSON"),
        (b"[1, 2]", "holds a JSON list, not an object"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
    ):
        path.write_bytes(text)
        with pytest.raises(ModelError, match=rf"config\.json: {message}"):
            ModelConfig.from_folder(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read \(Is a directory\)"):
        ModelConfig.from_folder(tmp_path)
