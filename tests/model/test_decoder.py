"""Logits equal transformers' in fp32: families, attention kinds, RoPE kinds, windows, biases, crowds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.reference import ReferenceAttention
from model.decoder import Decoder
from model.heads import NativeHeads, Segment
from tests.support.checkpoints import ROPE_KINDS
from tests.support.decoding import load_decoder, native_heads, new_rig, run_alone, run_step, some_ids
from tests.support.equality import assert_bf16_logits, assert_same_logits
from tests.support.reference import load_reference

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
# transformers' Mistral config takes no null; test_config covers ours.
NULL_MEANS_MHA = ("llama", "qwen2", "qwen3")
Tiny = Callable[..., Path]


@pytest.mark.parametrize("kind", KV_HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_chunk_and_many(tiny: Tiny, family: str, kind: str) -> None:
    folder = tiny(family=family, kv_heads=KV_HEADS[kind])
    decoder, reference = load_decoder(folder), load_reference(folder)
    ids = some_ids(75)
    expected = reference.logits(ids)
    for chunk in (None, 1, 7, 32):
        ours = run_alone(decoder, ids, native_heads(decoder), chunk)
        assert ours.dtype == torch.float32
        assert_same_logits(ours, expected, f"chunks of {chunk}")


@pytest.mark.parametrize("family", NULL_MEANS_MHA)
def test_null_kv_heads(tiny: Tiny, family: str) -> None:
    folder = tiny(family=family, kv_heads=None)
    decoder = load_decoder(folder)
    ids = some_ids(33)
    ours = run_alone(decoder, ids, native_heads(decoder), 9)
    assert_same_logits(ours, load_reference(folder).logits(ids))


@pytest.mark.parametrize("old_keys", [False, True])
@pytest.mark.parametrize("rope", ROPE_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_kinds_up_to_500_positions(tiny: Tiny, family: str, rope: str, old_keys: bool) -> None:
    folder = tiny(family=family, rope=rope, old_rope_keys=old_keys)
    decoder = load_decoder(folder)
    assert decoder.config.rope.kind == rope
    ids = some_ids(500)
    expected = load_reference(folder).logits(ids)
    assert_same_logits(run_alone(decoder, ids, native_heads(decoder), 177), expected)


@pytest.mark.parametrize("chunk", [None, 1, 9, 16, 17])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_window(tiny: Tiny, family: str, chunk: int | None) -> None:
    folder = tiny(family=family, window=16)
    decoder = load_decoder(folder)
    assert decoder.config.windows == ((16, 16) if family == "mistral" else (None, 16))
    ids = some_ids(40)
    expected = load_reference(folder).logits(ids)
    assert_same_logits(run_alone(decoder, ids, native_heads(decoder), chunk), expected)


@pytest.mark.parametrize("window", [1, 2, 15, 39, 40, 41])
def test_window_sizes_around_the_prompt(tiny: Tiny, window: int) -> None:
    folder = tiny(family="mistral", window=window)
    decoder = load_decoder(folder)
    ids = some_ids(40)
    expected = load_reference(folder).logits(ids)
    for chunk in (None, 6):
        assert_same_logits(run_alone(decoder, ids, native_heads(decoder), chunk), expected)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layer_types_choose_the_windowed_layers(tiny: Tiny, family: str) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    switch: dict[str, Any] = {} if family == "mistral" else {"use_sliding_window": True}
    model = "ministral" if family == "mistral" else family  # what transformers makes of it
    folder = tiny(family=family, layers=3, sliding_window=8, layer_types=kinds, **switch)
    decoder, reference = load_decoder(folder), load_reference(folder)
    assert reference.model.config.model_type == model
    assert decoder.config.windows == (8, None, 8)
    ids = some_ids(40)
    assert_same_logits(run_alone(decoder, ids, native_heads(decoder), 11), reference.logits(ids))


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "llama", "attention_bias": True},
        {"family": "llama", "mlp_bias": True},
        {"family": "qwen3", "attention_bias": True},
        {"family": "llama", "head_dim": 32},
        {"family": "mistral", "head_dim": 8},
        {"family": "qwen2", "head_dim": 32},
        {"family": "qwen3", "head_dim": 128},
        {"family": "llama", "tie_word_embeddings": True},
        {"family": "qwen2", "tie_word_embeddings": True},
        {"family": "llama", "rms_norm_eps": 0.1},
        {"family": "llama", "heads": 9, "kv_heads": 3, "hidden": 72},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items()),
)
def test_shapes_and_biases(tiny: Tiny, settings: dict[str, Any]) -> None:
    folder = tiny(**settings)
    decoder = load_decoder(folder)
    ids = some_ids(33)
    expected = load_reference(folder).logits(ids)
    assert_same_logits(run_alone(decoder, ids, native_heads(decoder), 20), expected)


def test_a_crowd_equals_each_alone(tiny: Tiny) -> None:
    """Prefills, chunks and decodes of many lengths in one step; each row of logits as transformers says."""
    folder = tiny(family="qwen3", window=16)
    decoder, reference = load_decoder(folder), load_reference(folder)
    heads, rig = native_heads(decoder), new_rig(decoder, blocks=800)
    texts = [some_ids(count, seed) for seed, count in enumerate((1, 2, 30, 300, 5, 17, 64))]
    sequences = [rig.open(heads.kv_heads) for _ in texts]
    expected = [reference.logits(text) for text in texts]
    done = [0] * len(texts)
    step = 0
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        work, who = [], []
        for index, text in enumerate(texts):
            # Some sequences decode while others bring chunks of a size that changes from step to step.
            count = min(len(text) - done[index], 1 if (index + step) % 3 == 0 else 13 * (index + 1))
            if count:
                work.append((sequences[index], text[done[index] : done[index] + count], heads))
                who.append(index)
        for index, ours in zip(who, run_step(decoder, rig, work), strict=True):
            stop = done[index] + len(ours)
            assert_same_logits(ours, expected[index][done[index] : stop], f"text {index} at {done[index]}")
            done[index] = stop
        step += 1


def test_only_the_wanted_logits(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(family="llama"))
    heads, ids = native_heads(decoder), some_ids(12)
    everything = run_alone(decoder, ids, heads)
    for wanted in ([11], [3, 0, 7], []):
        rig = new_rig(decoder)
        meta = rig.meta([(rig.open(heads.kv_heads), 12)])
        step = ReferenceAttention(rig.device).begin(meta)
        picked = torch.tensor(wanted, dtype=torch.int64)
        segments = [Segment(heads, 0, 12)]
        ours = decoder.forward(torch.tensor(ids), meta.positions, segments, step, rig.layers, picked)
        assert ours.shape == (len(wanted), 128)
        torch.testing.assert_close(ours, everything[wanted])


def test_segments_must_tile_the_tokens(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(family="llama"))
    rig = new_rig(decoder)
    meta = rig.meta([(rig.open(2), 4)])
    step = ReferenceAttention(rig.device).begin(meta)
    heads = NativeHeads(2)
    for spans in ([(0, 3)], [(0, 2), (3, 4)], [(1, 4)], []):
        segments = [Segment(heads, *span) for span in spans]
        with pytest.raises(ValueError, match=r"must tile tokens \[0, 4\)"):
            decoder.forward(
                torch.tensor([1, 2, 3, 4]), meta.positions, segments, step, rig.layers, rig.device
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_worse_than_transformers(tiny: Tiny, family: str) -> None:
    """Both round at different places, so the error is taken over many logits."""
    folder = tiny(family=family, hidden=128, layers=4, dtype=torch.bfloat16, std=0.1)
    decoder = load_decoder(folder, torch.bfloat16)
    ids = some_ids(200)
    exact = load_reference(folder).logits(ids)
    theirs = load_reference(folder, torch.bfloat16).logits(ids)
    assert_bf16_logits(run_alone(decoder, ids, native_heads(decoder), 64), theirs, exact, family)


def test_the_residual_stream_of_a_bfloat16_model_is_fp32(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 it would be rounded twice a layer, which the rule above would still let pass."""
    norm, seen = Decoder.norm, []

    def noted(self: Decoder, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, weight.dtype))
        return norm(self, x, weight)

    monkeypatch.setattr(Decoder, "norm", noted)
    decoder = load_decoder(tiny(family="llama", dtype=torch.bfloat16), torch.bfloat16)
    run_alone(decoder, some_ids(5), native_heads(decoder))
    assert seen == [(torch.float32, torch.float32)] * (2 * decoder.config.num_layers + 1)


def test_float16_runs(tiny: Tiny) -> None:
    folder = tiny(family="llama")
    decoder = load_decoder(folder, torch.float16)
    ids = some_ids(20)
    ours = run_alone(decoder, ids, native_heads(decoder), 8)
    assert ours.dtype == torch.float32
    exact = load_reference(folder).logits(ids)
    assert float((ours - exact).abs().max()) < 0.02 * float(exact.abs().max())
