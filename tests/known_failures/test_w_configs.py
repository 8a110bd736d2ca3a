"""W1, W2, W4: a config means here what it means to transformers, or it is refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import checkpoints
from tests.support.checkpoint_cases import assert_as_transformers, refused_at_start
from tests.support.checkpoints import edit_config, read_config
from tests.support.command import InProcess
from tests.support.decoding import load_decoder, native_heads, run_alone, some_ids
from tests.support.driving import fp32_engine
from tests.support.tensors import all_tensors, rewrite

Tiny = Callable[..., Path]
LAYER = "model.layers.1.self_attn."


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """`copied(...)`: a tiny checkpoint of these arguments that the test may change."""

    def copy(**arguments: Any) -> Path:
        return shutil.copytree(tiny(**arguments), tmp_path / f"model-{len(list(tmp_path.iterdir()))}")

    return copy


# ---- W1: head geometry

W1: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], int, int]] = {
    # arguments, keys written into config.json, keys taken out of it, KV heads, head_dim
    "head_dim 32": ({"head_dim": 32}, {}, (), 2, 32),
    "head_dim 8": ({"head_dim": 8}, {}, (), 2, 8),
    "head_dim null": ({}, {"head_dim": None}, (), 2, 16),
    "head_dim absent": ({}, {}, ("head_dim",), 2, 16),
    "kv heads absent": ({"kv_heads": 4}, {}, ("num_key_value_heads",), 4, 16),
    "kv heads null": ({"kv_heads": None}, {"num_key_value_heads": None}, (), 4, 16),
    "one kv head": ({"kv_heads": 1}, {}, (), 1, 16),
    "two kv heads": ({"kv_heads": 2}, {}, (), 2, 16),
    "both": ({"kv_heads": 1, "head_dim": 32}, {}, (), 1, 32),
    "nine and three": ({"heads": 9, "kv_heads": 3, "hidden": 72}, {}, ("head_dim",), 3, 8),
}


@pytest.mark.parametrize("case", W1)
def test_w1_logits_and_bytes_follow_the_heads(copied: Callable[..., Path], case: str) -> None:
    arguments, keys, gone, kv_heads, head_dim = W1[case]
    folder = copied(**arguments)
    edit_config(folder, keys, drop=gone)
    assert_as_transformers(folder, some_ids(40), chunk=11)
    _, facts = fp32_engine(folder)
    assert (facts.variants[0].kv_heads, facts.head_dim) == (kv_heads, head_dim)
    assert facts.variants[0].bytes_per_token == 2 * 2 * kv_heads * head_dim * 4  # K and V, two layers, fp32


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 16},
            ("num_key_value_heads is 2", "(7)"),
        ),
        ({"num_key_value_heads": 3}, ("num_key_value_heads is 3", "(4)")),
        ({"num_key_value_heads": 8}, ("num_key_value_heads is 8", "(4)")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads is 0",)),
        ({"num_key_value_heads": -1}, ("num_key_value_heads is -1",)),
        ({"num_key_value_heads": 2.0}, ("num_key_value_heads is 2.0",)),
        ({"num_key_value_heads": 1}, ("k_proj", "num_key_value_heads is 1")),
        ({"num_key_value_heads": 4}, ("k_proj", "num_key_value_heads is 4")),
        ({"head_dim": 32}, ("k_proj", "head_dim 32")),
        ({"head_dim": 15}, ("head_dim is 15", "even")),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None}, ("head_dim", "64", "6")),
        ({"num_attention_heads": 0}, ("num_attention_heads is 0",)),
    ],
)
def test_w1_heads_that_cannot_be(
    copied: Callable[..., Path], here: InProcess, keys: dict[str, Any], says: tuple[str, ...]
) -> None:
    folder = copied()
    edit_config(folder, keys)
    refused_at_start(here, folder, *says)


# ---- W2: tied embeddings


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("head", ["none", "same", "different"])
@pytest.mark.parametrize("tie", [True, None, False], ids=["tied", "key absent", "untied"])
def test_w2_the_lm_head_is_the_one_transformers_takes(
    copied: Callable[..., Path], here: InProcess, family: str, head: str, tie: bool | None
) -> None:
    """An absent key is transformers' default of the family; what is nowhere is never made up."""
    folder = copied(family=family)
    tensors = all_tensors(folder)
    if head == "none":
        del tensors["lm_head.weight"]
    elif head == "same":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(folder, tensors)
    edit_config(
        folder,
        {} if tie is None else {"tie_word_embeddings": tie},
        drop=["tie_word_embeddings"][: tie is None],
    )
    if head == "none" and not tie:
        refused_at_start(here, folder, "lm_head.weight is missing")
        return
    assert_as_transformers(folder, some_ids(12))


def test_w2_without_either_table(copied: Callable[..., Path], here: InProcess) -> None:
    folder = copied()
    tensors = all_tensors(folder)
    del tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    rewrite(folder, tensors)
    edit_config(folder, {"tie_word_embeddings": True})
    refused_at_start(here, folder, "is missing")


# ---- W4: rope_scaling

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ROPES: dict[str, Any] = {
    "llama3": LLAMA3,
    "llama3 by its old name": {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"},
    "linear": {"type": "linear", "factor": 2},
    "linear by its new name": {"rope_type": "linear", "factor": 2.0},
    "default": {"rope_type": "default"},
    "default by its old name": {"type": "default"},
    "null": None,
    "empty": {},
    "yarn": YARN,
    "yarn with all its keys": {
        **YARN,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.5,
        "truncate": False,
    },
    "both names": {"type": "linear", "rope_type": "linear", "factor": 3},
    "dynamic, within its length": {"type": "dynamic", "factor": 2.0},
}


@pytest.fixture(scope="module")
def rope_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND with a smaller vocabulary, its RoPE spelled as transformers 4 does."""
    return checkpoints.make_rand(tmp_path_factory.mktemp("rope") / "model", vocab=512, old_rope_keys=True)


@pytest.fixture
def roped(rope_base: Path, tmp_path: Path) -> Callable[..., Path]:
    def build(scaling: Any, **beside: Any) -> Path:
        folder = shutil.copytree(rope_base, tmp_path / "roped")
        edit_config(folder, {"rope_scaling": scaling, **beside})
        return folder

    return build


@pytest.mark.parametrize("kind", ROPES)
def test_w4_every_spelling_gives_transformers_logits(roped: Callable[..., Path], kind: str) -> None:
    folder = roped(ROPES[kind])
    assert "rope_parameters" not in read_config(folder)
    assert_as_transformers(folder, some_ids(200, vocab=512), chunk=64)


def test_w4_scaling_is_not_ignored(roped: Callable[..., Path], rope_base: Path) -> None:
    """The comparison above would notice: each kind changes the logits of the same weights."""
    ids = some_ids(200, vocab=512)
    decoder = load_decoder(roped(LLAMA3))
    plain = load_decoder(rope_base)
    scaled = run_alone(decoder, ids, native_heads(decoder))
    assert float((scaled - run_alone(plain, ids, native_heads(plain)))[-1].abs().max()) > 0.1


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"type": "foo", "factor": 2.0}, "'foo'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "'longrope'"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [1.0]}, "'su'"),
        ({"type": "mrope", "mrope_section": [2, 3, 3]}, "'mrope'"),
        ({"type": "ntk", "factor": 2.0}, "'ntk'"),
        ({"rope_type": "proportional"}, "'proportional'"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor is '2'"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "linear", "factor": -1.0}, "factor is -1.0"),
        ({"type": "dynamic"}, "factor is missing"),
        ({"type": "yarn"}, "factor is missing"),
        ({**LLAMA3, "factor": None}, "factor is missing"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor is missing"),
        ({**LLAMA3, "low_freq_factor": 4}, "high_freq_factor is 4"),
        ("linear", "rope_scaling is 'linear'"),
        ([2.0], "rope_scaling is [2.0]"),
    ],
)
def test_w4_what_is_not_known_is_refused(
    roped: Callable[..., Path], here: InProcess, scaling: Any, says: str
) -> None:
    if isinstance(scaling, dict):
        scaling = {key: value for key, value in scaling.items() if value is not None}
    refused_at_start(here, roped(scaling), says)


def test_w4_llama3_without_its_length_takes_the_models(roped: Callable[..., Path]) -> None:
    """transformers falls back on max_position_embeddings; so does this."""
    lacking = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert_as_transformers(roped(lacking), some_ids(200, vocab=512))
