"""Whole windows scored: the logits are transformers', in every mode, however they are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.reference import ReferenceAttention
from model.decoder import Decoder
from model.errors import ModelError
from model.heads import HeadMap, MeanHeads, NativeHeads, RepeatHeads, Variant
from server.engine.errors import ConfigError
from server.engine.options import EngineOptions
from server.engine.scoring import Scorer, chunk_tokens, load_scoring
from tests.support.attention import CPU
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.equality import assert_same_logits
from tests.support.reference import load_reference

FAMILIES: tuple[dict[str, Any], ...] = (
    {"family": "llama"},
    {"family": "qwen3", "rope": "yarn"},
    {"family": "mistral", "window": 24},
)


def scorer(decoder: Decoder, heads: HeadMap, window: int = 100, chunk: int | None = None) -> Scorer:
    return Scorer(decoder, ReferenceAttention(CPU), Variant("some", heads), window, chunk=chunk)


def score(decoder: Decoder, heads: HeadMap, ids: list[int], chunk: int | None = None) -> Tensor:
    return torch.cat(list(scorer(decoder, heads, len(ids), chunk).logits(ids)))


@pytest.mark.parametrize("checkpoint", FAMILIES, ids=lambda c: str(c["family"]))
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 99, 100])
def test_the_logits_are_the_references(
    tiny: Callable[..., Path], checkpoint: dict[str, Any], chunk: int | None
) -> None:
    folder, ids = tiny(**checkpoint), some_ids(100)
    for heads in (NativeHeads(2), RepeatHeads(4)):
        ours = score(load_decoder(folder), heads, ids, chunk)
        assert_same_logits(ours, load_reference(folder).logits(ids), f"{heads.kv_heads} heads")


def test_a_lossy_mode_is_scored_as_it_runs(tiny: Callable[..., Path]) -> None:
    """Against the same map over a cache of scattered blocks, in one piece."""
    decoder, ids = load_decoder(tiny()), some_ids(70)
    ours = score(decoder, MeanHeads(1), ids, 9)
    assert_same_logits(ours, run_alone(decoder, ids, MeanHeads(1)))
    assert float((ours - score(decoder, NativeHeads(2), ids)).abs().max()) > 0.1


def test_windows_do_not_see_each_other(tiny: Callable[..., Path]) -> None:
    """A short one after a long one, whose blocks it takes over; the same again gives the same bits."""
    decoder = load_decoder(tiny())
    used = scorer(decoder, NativeHeads(2), chunk=16)
    long, short = some_ids(100, seed=1), some_ids(33, seed=2)
    first = torch.cat(list(used.logits(long)))
    after = torch.cat(list(used.logits(short)))
    assert torch.equal(after, torch.cat(list(scorer(decoder, NativeHeads(2), chunk=16).logits(short))))
    assert torch.equal(first, torch.cat(list(used.logits(long))))


def test_what_a_scorer_holds(tiny: Callable[..., Path]) -> None:
    """A pool for one window: 7 logical blocks for 100 tokens, each a block a KV head; and the scratch."""
    decoder = load_decoder(tiny())
    for heads in (1, 2, 4):
        pool = scorer(decoder, RepeatHeads(heads) if heads > 1 else MeanHeads(1))._pool
        assert pool.total == 7 * heads
        assert pool.nbytes == (7 * heads + 1) * 2 * 2 * 16 * 16 * 4


def test_chunks_bound_the_logits() -> None:
    """32 MiB hold 170 rows of 49,152 logits in fp32 and 65 of 128,256; short vocabularies go by tokens."""
    assert chunk_tokens(512, 49152) == 128
    assert chunk_tokens(170, 49152) == 170
    assert chunk_tokens(171, 49152) == 86
    assert chunk_tokens(512, 128256) == 64
    assert chunk_tokens(512, 128) == 256
    assert chunk_tokens(3, 10**9) == 1
    for window in range(1, 700, 13):
        assert chunk_tokens(window, 49152) * 49152 * 4 <= 32 << 20


def test_a_chunk_holds_no_more_than_it_says(tiny: Callable[..., Path]) -> None:
    parts = list(scorer(load_decoder(tiny()), NativeHeads(2), chunk=30).logits(some_ids(100)))
    assert [tuple(part.shape) for part in parts] == [(30, 128), (30, 128), (30, 128), (10, 128)]
    assert {part.dtype for part in parts} == {torch.float32}


def test_one_chunk_at_a_time(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs before it is asked for, so that two modes can go side by side."""
    forwards = 0
    forward = Decoder.forward

    def counted(self: Decoder, *args: Any) -> Tensor:
        nonlocal forwards
        forwards += 1
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", counted)
    chunks = scorer(load_decoder(tiny()), NativeHeads(2), chunk=30).logits(some_ids(100))
    assert forwards == 0
    for number, _ in enumerate(chunks, 1):
        assert forwards == number


@pytest.mark.parametrize("length", [0, 101])
def test_a_window_that_does_not_fit(tiny: Callable[..., Path], length: int) -> None:
    with pytest.raises(ValueError, match=f"a window of {length} tokens; this takes 1 to 100"):
        list(scorer(load_decoder(tiny()), NativeHeads(2)).logits([1] * length))


def test_no_room_for_the_pool(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"scoring \d+ tokens as some: the KV pool needs"):
        scorer(load_decoder(tiny()), NativeHeads(2), window=1 << 50)


def test_in_bfloat16_the_cache_is_too(tiny: Callable[..., Path]) -> None:
    decoder = load_decoder(tiny(), torch.bfloat16)
    made = scorer(decoder, NativeHeads(2))
    assert made._pool.arena.dtype is torch.bfloat16
    assert_close_to(torch.cat(list(made.logits(some_ids(100)))), load_reference(tiny()).logits(some_ids(100)))


def assert_close_to(ours: Tensor, reference: Tensor) -> None:
    error = float((ours - reference).square().mean().sqrt())
    assert 0 < error < 0.05 * float(reference.std())


def test_from_a_folder(tiny: Callable[..., Path]) -> None:
    """As many modes as asked for, in their order; positions no further than the model goes."""
    options = EngineOptions("cpu", "float32", attention=("mha", "mqa"), head_map="mean")
    scoring = load_scoring(options, tiny(), 10_000)
    assert [(v.name, v.kv_heads) for v in scoring.variants] == [("mha", 4), ("mqa", 1)]
    assert (scoring.native.name, scoring.native.kv_heads) == ("native", 2)
    ids = some_ids(512)
    for variant in (scoring.native, scoring.variants[0]):
        ours = torch.cat(list(scoring.scorer(variant, 512).logits(ids)))
        assert_same_logits(ours, load_reference(tiny()).logits(ids))
    with pytest.raises(IndexError):
        list(load_scoring(options, tiny(), 100).scorer(scoring.native, 101).logits(some_ids(101)))


def test_from_a_folder_in_the_options_dtype(tiny: Callable[..., Path]) -> None:
    scoring = load_scoring(EngineOptions("cpu", "bfloat16"), tiny(), 100)
    assert scoring.decoder.weights.embed.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions("cpu", attention=("gqa3",)), "attention mode gqa3"),
        (EngineOptions("cpu", attention=("mqa",)), "fitted to a text, and there is none"),
        (EngineOptions("tpu"), "--device tpu"),
    ],
)
def test_options_that_cannot_be(tiny: Callable[..., Path], options: EngineOptions, message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        load_scoring(options, tiny(), 100)
