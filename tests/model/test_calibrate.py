"""Fitting aligned heads: exact where fewer heads can be, elsewhere no worse than the mean, and repeatable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.calibrate import attend, calibrate
from model.calibration import Calibration
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import ModelError
from model.fit_keys import KeyStatistics, Slots
from model.heads import HeadMap, MeanHeads
from model.modes import Heads, parse_mode
from tests.support import checkpoints
from tests.support.calibrations import as_columns, as_pairs, heads_of
from tests.support.decoding import load_decoder, native_heads, run_alone, some_ids
from tests.support.equality import assert_same_logits
from tests.support.tensors import table

Tiny = Callable[..., Path]


def windows(count: int, length: int, seed: int) -> Tensor:
    return torch.tensor(some_ids(count * length, seed)).view(count, length)


def fit(decoder: Decoder, mode: str, kind: str = "aligned", ids: Tensor | None = None) -> Calibration:
    heads = Heads(decoder.config.num_heads, decoder.config.num_kv_heads)
    ids = windows(12, 64, seed=1) if ids is None else ids
    return calibrate(decoder, parse_mode(mode, heads), ids, kind=kind)


def mean_kl(decoder: Decoder, head_map: HeadMap, texts: list[list[int]]) -> float:
    total = 0.0
    for text in texts:
        native = run_alone(decoder, text, native_heads(decoder)).log_softmax(-1)
        reduced = run_alone(decoder, text, head_map).log_softmax(-1)
        total += float((native.exp() * (native - reduced)).sum(-1).mean())
    return total / len(texts)


def scores(q: Tensor, k: Tensor, angle: float) -> Tensor:
    """Complex q `[T, S]`, k `[T, S]` turned against each other by `angle` -> real dot products `[T, T]`."""
    return torch.einsum("ts,us->tu", q * torch.exp(torch.tensor(1j * angle)), k.conj()).real


def slot_scores(slots: Slots, q: Tensor, k: Tensor, head: int, conjugated: bool = False) -> Tensor:
    """Scores of query head `head` (of as many as there are KV heads) against the one shared key."""
    pair = slots.frequency[0]
    key, query = slots.key, slots.query
    if conjugated:
        key, query = key.conj(), query.conj()
    shared = sum(key[h] * as_pairs(k[:, h])[:, pair] for h in range(k.shape[1]))
    assert isinstance(shared, Tensor)
    return scores(as_pairs(q[:, head])[:, pair] * query[head], shared, 0.7)


@pytest.mark.parametrize("free", [True, False])
def test_keys_that_are_multiples_of_one_another_need_one_slot_a_frequency(free: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(200, 3, 16, generator=generator)
    common = as_pairs(torch.randn(200, 1, 16, generator=generator))
    factor = as_pairs(torch.randn(3, 16, generator=generator))
    k = as_columns(common * factor).float()  # k_h = a_h · c
    statistics = KeyStatistics(1)
    statistics.add(q, k)
    slots = statistics.slots(free=free)
    assert slots.frequency.tolist() == [list(range(8))]
    for head in range(3):
        native = scores(as_pairs(q[:, head]), as_pairs(k[:, head]), 0.7)
        torch.testing.assert_close(slot_scores(slots, q, k, head), native, rtol=1e-3, atol=1e-3)
        wrong = slot_scores(slots, q, k, head, conjugated=True)
        assert float((wrong - native).norm() / native.norm()) > 0.3


def test_free_slots_go_where_the_keys_are_strong() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(500, 2, 8, generator=generator), torch.randn(500, 2, 8, generator=generator)
    k[:, :, [1, 5]] *= 100  # frequency 1 carries two unrelated heads, frequency 3 nearly nothing
    k[:, :, [3, 7]] *= 0.01
    statistics = KeyStatistics(1)
    statistics.add(q, k)
    assert statistics.slots(free=True).frequency.tolist() == [[0, 1, 1, 2]]
    assert statistics.slots(free=False).frequency.tolist() == [[0, 1, 2, 3]]


def with_copied_heads(source: Path, folder: Path) -> Path:
    """The checkpoint with K and V of each pair's first head in both of its heads."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = ModelConfig.from_folder(source)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.view(config.num_kv_heads // 2, 2, config.head_dim, -1)
            tensors[name] = heads[:, :1].expand_as(heads).reshape(tensor.shape).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["aligned", "aligned-fixed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_that_are_copies_lose_nothing(tiny: Tiny, tmp_path: Path, family: str, kind: str) -> None:
    window = None if family == "llama" else 24
    source = tiny(family=family, heads=8, kv_heads=4, window=window, seed=3)
    decoder = load_decoder(with_copied_heads(source, tmp_path / "copies"))
    text = some_ids(80, seed=7)
    reduced = run_alone(decoder, text, heads_of(fit(decoder, "gqa2", kind), decoder))
    assert_same_logits(reduced, run_alone(decoder, text, native_heads(decoder)))
    # The same heads in another order are not copies of their neighbours, and lose much.
    whole = load_decoder(source)
    lossy = run_alone(whole, text, heads_of(fit(whole, "gqa2", kind), whole))
    assert float((lossy - run_alone(whole, text, native_heads(whole))).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("heads", "mode", "kind"), [(8, "gqa4", "aligned"), (8, "gqa4", "aligned-fixed"), (32, "gqa8", "aligned")]
)
def test_no_worse_than_the_mean_on_random_checkpoints(
    tmp_path: Path, heads: int, mode: str, kind: str
) -> None:
    texts = [some_ids(64, seed=100 + i) for i in range(4)]
    reduced = parse_mode(mode, Heads(heads, heads))
    for seed in range(10):
        folder = checkpoints.make_checkpoint(
            tmp_path / str(seed), heads=heads, kv_heads=heads, head_dim=8, hidden=64, seed=seed
        )
        decoder = load_decoder(folder)
        ours = mean_kl(decoder, heads_of(fit(decoder, mode, kind, windows(16, 64, seed=1)), decoder), texts)
        mean = mean_kl(decoder, MeanHeads(reduced.kv_heads), texts)
        assert ours <= mean, f"seed {seed}: {ours:.4f} against {mean:.4f}"


def test_the_same_fit_each_time_and_progress_to_the_end(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(heads=8, kv_heads=4))
    seen: list[float] = []
    heads = Heads(8, 4)
    ids = windows(8, 64, seed=1)
    first = calibrate(decoder, parse_mode("mqa", heads), ids, kind="aligned", progress=seen.append)
    assert seen == [0.5, 1.0]
    assert fit(decoder, "mqa", ids=ids).digest == first.digest
    assert fit(load_decoder(tiny(heads=8, kv_heads=4)), "mqa", ids=ids).digest == first.digest
    assert fit(decoder, "mqa", "aligned-fixed", ids).digest != first.digest
    assert fit(decoder, "mqa", ids=windows(8, 64, seed=2)).digest != first.digest


def test_fixed_slots_turn_each_with_its_own_frequency(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(heads=8, kv_heads=4))
    for layer in fit(decoder, "gqa2", "aligned-fixed").layers:
        assert layer.frequency.tolist() == [list(range(4))] * 2


def test_biases_are_kept(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(heads=4, kv_heads=2, attention_bias=True))
    weights = load_file(tiny(heads=4, kv_heads=2, attention_bias=True) / "model.safetensors")
    for index, layer in enumerate(fit(decoder, "mqa").layers):
        assert layer.o_bias is not None
        torch.testing.assert_close(layer.o_bias, weights[f"model.layers.{index}.self_attn.o_proj.bias"])


def test_works_from_packed_bfloat16(tiny: Tiny) -> None:
    folder = tiny(heads=8, kv_heads=4)
    exact, packed = load_decoder(folder), load_decoder(folder, torch.bfloat16)
    text = [some_ids(64, seed=9)]
    ours = mean_kl(packed, heads_of(fit(packed, "gqa2"), packed), text)
    assert ours == pytest.approx(mean_kl(exact, heads_of(fit(exact, "gqa2"), exact), text), rel=0.1)


def test_what_cannot_be_fitted_is_refused_with_the_reason(tiny: Tiny) -> None:
    decoder = load_decoder(tiny(heads=8, kv_heads=4))
    ids = windows(8, 64, seed=1)
    with pytest.raises(ModelError, match="mha has 8, the checkpoint 4"):
        fit(decoder, "mha", ids=ids)
    with pytest.raises(ModelError, match="native has 4, the checkpoint 4"):
        fit(decoder, "native", ids=ids)
    with pytest.raises(ModelError, match="'mean' is not fitted"):
        fit(decoder, "mqa", "mean", ids)
    with pytest.raises(ModelError, match=r"32 tokens or more .* has 30"):
        fit(decoder, "mqa", ids=windows(2, 15, seed=1))
    with pytest.raises(ModelError, match="id 128 is not in the checkpoint's vocabulary of 128"):
        fit(decoder, "mqa", ids=ids + 1 + (127 - int(ids.max())))
    with pytest.raises(ModelError, match="id -1 is not in"):
        fit(decoder, "mqa", ids=ids - 1 - int(ids.min()))
    with pytest.raises(ModelError, match="513 tokens are longer than the model's context of 512"):
        fit(decoder, "mqa", ids=windows(1, 513, seed=1))
    table(decoder.weights.embed)[5, 3] = float("nan")
    with pytest.raises(ModelError, match=r"layer 0 .* not finite .* in float32"):
        fit(decoder, "mqa", ids=ids)


@pytest.mark.parametrize(
    "name", ["self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
)
def test_a_weight_that_is_not_finite_is_refused_with_its_layer(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny(heads=8, kv_heads=4), tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.1.{name}.weight"][2, 3] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layer 1 .* not finite .* in float32"):
        fit(load_decoder(folder), "mqa")


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_text_attends_as_the_model_does(kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 8, generator=generator)
    k, v = (torch.randn(7, kv_heads, 8, generator=generator) for _ in range(2))
    expected = torch.empty(7, 4, 8)
    for token in range(7):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(4):
            read = head // (4 // kv_heads)
            weights = (k[first : token + 1, read] @ q[token, head] / 8**0.5).softmax(dim=0)
            expected[token, head] = weights @ v[first : token + 1, read]
    torch.testing.assert_close(attend(q, k, v, window), expected.flatten(1))
