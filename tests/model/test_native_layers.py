"""All layers in one call of C++ against the same layers one by one in PyTorch: families, norms of heads,
biases, windows, repeated heads, chunks and crowds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.native import NativeAttention, StepArrays
from model.decoder import Decoder
from model.heads import HeadMap, MeanHeads, NativeHeads, RepeatHeads, Segment
from model.layers_native import NativeLayers, native_layers
from model.linear_native import NativeLinearBackend
from model.native.library import NativeLibrary
from tests.support.attention import CPU, LayerCache
from tests.support.decoding import load_decoder, new_rig, run_step, some_ids
from tests.support.equality import assert_bf16_logits, assert_same_logits
from tests.support.native import avx2, native
from tests.support.reference import load_reference

BUILDS = {"native": native, "avx2": avx2}
CHECKPOINTS: list[dict[str, Any]] = [
    {"family": "llama", "tie_word_embeddings": True},
    {"family": "llama", "attention_bias": True, "mlp_bias": True},
    {"family": "mistral", "sliding_window": 24},
    {"family": "qwen2", "heads": 8, "kv_heads": 4, "hidden": 96},
    {"family": "qwen3", "head_dim": 32},
    {"family": "llama", "kv_heads": 1, "head_dim": 48, "intermediate": 100},
]


@pytest.fixture(params=list(BUILDS))
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    found = BUILDS[request.param]()
    if not isinstance(found, NativeLibrary):
        pytest.skip(found)
    return found


def with_layers(folder: Path, library: NativeLibrary, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = load_decoder(folder, dtype, NativeLinearBackend(library, reason="test"))
    layers = native_layers(decoder.config, decoder.weights, library)
    assert isinstance(layers, NativeLayers)
    return Decoder(decoder.config, decoder.weights, CPU, layers=layers)


def heads_of(decoder: Decoder) -> list[HeadMap]:
    native, queries = decoder.config.num_kv_heads, decoder.config.num_heads
    return [NativeHeads(native), RepeatHeads(queries)]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: "-".join(map(str, c.values())))
def test_the_same_logits(
    tiny: Callable[..., Path], library: NativeLibrary, checkpoint: dict[str, Any], monkeypatch: Any
) -> None:
    """Sequences of both modes in one step: chunks, then a token each, then a chunk beside single tokens."""
    folder = tiny(layers=3, **{"head_dim": 16, **checkpoint})
    fast, plain = with_layers(folder, library), load_decoder(folder)
    calls = 0
    run = NativeLayers.run

    def counted(self: NativeLayers, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return run(self, *args)

    monkeypatch.setattr(NativeLayers, "run", counted)
    backend = NativeAttention(library)
    ours, theirs = new_rig(fast, block=16), new_rig(plain, block=16)
    steps = [(40, 17, 1, 33), (1, 1, 1, 1), (1, 30, 1, 16), (1, 1, 1, 1)]
    maps = [head_map for head_map in heads_of(plain) for _ in range(2)]
    open_ours = [ours.open(each.kv_heads) for each in maps]
    open_theirs = [theirs.open(each.kv_heads) for each in maps]
    for number, counts in enumerate(steps):
        ids = [some_ids(count, seed=10 * number + i) for i, count in enumerate(counts)]
        got = run_step(fast, ours, list(zip(open_ours, ids, maps, strict=True)), backend)
        expected = run_step(plain, theirs, list(zip(open_theirs, ids, maps, strict=True)))
        for one, other in zip(got, expected, strict=True):
            assert_same_logits(one, other, f"step {number}")
    assert calls == len(steps), "the layers in C++ ran"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_errs_no_more_than_transformers(
    tiny: Callable[..., Path], library: NativeLibrary, family: str
) -> None:
    folder = tiny(family=family, hidden=128, layers=4, head_dim=32, dtype=torch.bfloat16, std=0.1)
    ids = some_ids(200)
    decoder = with_layers(folder, library, torch.bfloat16)
    rig = new_rig(decoder, block=16)
    work = [(rig.open(decoder.config.num_kv_heads), ids, heads_of(decoder)[0])]
    (ours,) = run_step(decoder, rig, work, NativeAttention(library))
    reference = [load_reference(folder, dtype).logits(ids) for dtype in (torch.bfloat16, torch.float32)]
    assert_bf16_logits(ours, *reference)


def test_only_wanted_states_come_back(tiny: Callable[..., Path], library: NativeLibrary) -> None:
    decoder = with_layers(tiny(layers=2, head_dim=16), library)
    backend, head_map, ids = NativeAttention(library), heads_of(decoder)[0], torch.tensor(some_ids(20))
    states = []
    for wanted in ([*range(20)], [19, 3, 3], []):
        rig = new_rig(decoder, block=16)
        meta = rig.meta([(rig.open(head_map.kv_heads), 20)])
        segments = [Segment(head_map, 0, 20)]
        asked = torch.tensor(wanted, dtype=torch.int64)
        states.append(decoder.hidden(ids, meta.positions, segments, backend.begin(meta), rig.layers, asked))
    assert torch.equal(states[1], states[0][[19, 3, 3]])
    assert states[2].shape == (0, decoder.config.hidden_size)


def test_other_maps_go_layer_by_layer(tiny: Callable[..., Path], library: NativeLibrary) -> None:
    """Averaged heads in a step with the checkpoint's own, and alone: the same, and what PyTorch gives."""
    folder = tiny(layers=2, head_dim=16, heads=4, kv_heads=2)
    fast, plain = with_layers(folder, library), load_decoder(folder)
    maps: list[HeadMap] = [NativeHeads(2), MeanHeads(1)]
    results = []
    for decoder, backend in ((fast, NativeAttention(library)), (plain, None)):
        rig = new_rig(decoder, block=16)
        work = [(rig.open(each.kv_heads), some_ids(30, seed=i), each) for i, each in enumerate(maps)]
        results.append(run_step(decoder, rig, work, backend))
    for one, other in zip(*results, strict=True):
        assert_same_logits(one, other)


def test_weights_in_another_form_have_no_layers_in_cpp(tiny: Callable[..., Path]) -> None:
    decoder = load_decoder(tiny())
    library = native()
    assert native_layers(decoder.config, decoder.weights, library) is None
    assert native_layers(decoder.config, decoder.weights, "no compiler") is None


def test_what_would_be_read_or_written_elsewhere_is_refused(
    tiny: Callable[..., Path], library: NativeLibrary
) -> None:
    """The last look before plain memory: each of these would read or write past an end."""
    decoder = with_layers(tiny(layers=2, head_dim=16), library)
    heads = decoder.config.num_kv_heads
    rig = new_rig(decoder, block=16)
    meta = rig.meta([(rig.open(heads), 20)])
    step = StepArrays.of(meta)
    good = {
        "x": torch.zeros(20, decoder.config.hidden_size),
        "rotation": decoder.rope.at(meta.positions),
        "step": step,
        "kv": rig.layers,
        "wanted": torch.tensor([19]),
    }
    other = new_rig(decoder, block=32).layers
    half = [LayerCache(layer.k.bfloat16(), layer.v.bfloat16()) for layer in rig.layers]
    wrong: list[tuple[str, Any, str]] = [
        ("x", torch.zeros(19, decoder.config.hidden_size), "cos and sin"),
        ("rotation", decoder.rope.at(meta.positions[:19]), "cos and sin"),
        ("kv", rig.layers[:1], "one K and V for each layer"),
        ("kv", [rig.layers[0], other[1]], "alike in all layers"),
        ("kv", half, "the weights' dtype"),
        ("wanted", torch.tensor([20]), "wanted must be tokens"),
        ("wanted", torch.tensor([-1]), "wanted must be tokens"),
        ("step", replace(step, row_slot=step.row_slot + 10_000), "rows of the tables"),
        ("step", replace(step, row_slot=step.row_slot[:1]), "a slot for each row"),
        ("step", replace(step, seq_len=step.seq_len - 5), "as long as its query tokens"),
        ("step", replace(step, seq_len=step.seq_len + 100_000), "longer than its table"),
        ("step", replace(step, query_start=step.query_start // 2), "the step's tokens"),
    ]
    layers = decoder.layers
    assert layers is not None
    for name, value, words in wrong:
        with pytest.raises(RuntimeError, match=words):
            layers.run(**{**good, name: value})
    assert layers.run(**good).shape == (1, decoder.config.hidden_size)
