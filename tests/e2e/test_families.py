"""Logits equal transformers' in fp32: every family, every head count, every way a token can get computed.

All through the real loader and the real engine; a tap on the decoder hears the logits of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import driving
from tests.support.checkpoints import ROPE_KINDS
from tests.support.driving import fp32_engine, greedy_request
from tests.support.equality import assert_same_ids
from tests.support.reference import Reference, load_reference
from tests.support.tap import Tap, listen

Tiny = Callable[..., Path]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HEADS = {"mha": None, "gqa": 2, "mqa": 1}
VOCAB = 128

family = pytest.mark.parametrize("family", FAMILIES)
heads = pytest.mark.parametrize("heads", HEADS)


@pytest.fixture
def tap() -> Iterator[Tap]:
    with listen() as tap:
        yield tap


def random_ids(count: int, seed: int) -> list[int]:
    """Ids above the special ones."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_answer(reference: Reference, tap: Tap, prompt: list[int], answer: list[int]) -> list[Any]:
    """Ids are the reference's greedy ids, logits the reference's wherever they were computed."""
    assert_same_ids(answer, reference.greedy_along(prompt, answer))
    text = [*prompt, *answer]
    return tap.check(text, reference.logits(text))


@family
@heads
def test_one_chunk(tiny: Tiny, tap: Tap, family: str, heads: str) -> None:
    folder = tiny(family=family, kv_heads=HEADS[heads])
    engine, _ = fp32_engine(folder)
    prompt = random_ids(200, seed=1)
    answer = driving.generate(engine, prompt, 30)
    assert len(answer) == 30
    (only,) = check_answer(load_reference(folder), tap, prompt, answer)
    assert (only.start, only.stop, only.chunks) == (0, 229, 30)


@family
@heads
def test_many_chunks(tiny: Tiny, tap: Tap, family: str, heads: str) -> None:
    """A budget of 23 tokens a step, which no block size divides; shards on disk this time."""
    folder = tiny(family=family, kv_heads=HEADS[heads], shards=True, seed=3)
    engine, _ = fp32_engine(folder, max_batch_tokens=23, max_num_seqs=4)
    prompt = random_ids(200, seed=2)
    answer = driving.generate(engine, prompt, 30)
    (only,) = check_answer(load_reference(folder), tap, prompt, answer)
    assert (only.start, only.stop, only.chunks) == (0, 229, 9 + 29)


@family
@heads
def test_prefix_hit(tiny: Tiny, tap: Tap, family: str, heads: str) -> None:
    """The same prompt again, and one with the same first half: only what is new is computed."""
    folder = tiny(family=family, kv_heads=HEADS[heads])
    engine, _ = fp32_engine(folder)
    prompt = random_ids(160, seed=4)
    other = prompt[:90] + random_ids(70, seed=5)
    first = driving.generate(engine, prompt, 20)
    for again, start in ((prompt, 144), (other, 80)):
        tap.clear()
        answer = driving.generate(engine, again, 20)
        (only,) = check_answer(load_reference(folder), tap, again, answer)
        assert (only.start, only.stop) == (start, 179)
        assert again is other or answer == first


@family
@heads
def test_after_preemption(tiny: Tiny, tap: Tap, family: str, heads: str) -> None:
    """Two that grow to 9 blocks each in a pool of 13: one is pushed out and computed again."""
    folder = tiny(family=family, kv_heads=HEADS[heads])
    kv_heads = HEADS[heads] or 4
    engine, facts = fp32_engine(folder, kv_memory=13 * kv_heads * 2 * 2 * 16 * 16 * 4)
    assert facts.total_blocks == 13 * kv_heads
    prompts = [random_ids(40, seed=6), random_ids(40, seed=7)]
    answers = driving.run(engine, [greedy_request(prompt, 100) for prompt in prompts])
    assert engine.stats().preemptions > 0
    runs = 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 100
        runs += len(check_answer(load_reference(folder), tap, prompt, answer.ids))
    assert runs > 2
    assert engine.report(check=True).states.live.blocks == 0


@pytest.mark.parametrize("old_rope_keys", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_kinds(tiny: Tiny, tap: Tap, kind: str, old_rope_keys: bool) -> None:
    """Positions 0 to 499, in chunks, under both spellings."""
    folder = tiny(rope=kind, old_rope_keys=old_rope_keys, seed=8)
    engine, _ = fp32_engine(folder, max_batch_tokens=100)
    prompt = random_ids(460, seed=9)
    answer = driving.generate(engine, prompt, 41)
    (only,) = check_answer(load_reference(folder), tap, prompt, answer)
    assert (only.start, only.stop) == (0, 500)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_rope_kinds_of_other_families(tiny: Tiny, tap: Tap, family: str, kind: str) -> None:
    folder = tiny(family=family, rope=kind, kv_heads=1)
    engine, _ = fp32_engine(folder)
    prompt = random_ids(460, seed=10)
    answer = driving.generate(engine, prompt, 20)
    check_answer(load_reference(folder), tap, prompt, answer)


@pytest.mark.parametrize("chunk", [512, 23])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows(tiny: Tiny, tap: Tap, family: str, chunk: int) -> None:
    """A window of 32 in prefill, in chunks and in decode; Qwen's first layer has none."""
    folder = tiny(family=family, window=32, layers=3)
    engine, _ = fp32_engine(folder, max_batch_tokens=chunk, max_num_seqs=4)
    prompt = random_ids(120, seed=11)
    answer = driving.generate(engine, prompt, 40)
    check_answer(load_reference(folder), tap, prompt, answer)


SHAPES: dict[str, dict[str, Any]] = {
    "head_dim of its own": {"head_dim": 32},
    "small head_dim": {"head_dim": 8, "kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "odd heads": {"heads": 9, "kv_heads": 3, "hidden": 72},
    "another eps and theta": {"rms_norm_eps": 1e-3, "rope": {"rope_type": "default", "rope_theta": 1e6}},
    "vocabulary of one block": {"vocab": 131},
    "Qwen2, tied": {"family": "qwen2", "tie_word_embeddings": True},
    "Qwen3 with biases": {"family": "qwen3", "attention_bias": True, "head_dim": 24},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tiny: Tiny, tap: Tap, shape: str) -> None:
    folder = tiny(**SHAPES[shape])
    engine, _ = fp32_engine(folder, max_batch_tokens=64)
    prompt = random_ids(100, seed=12)
    answer = driving.generate(engine, prompt, 20)
    check_answer(load_reference(folder), tap, prompt, answer)
