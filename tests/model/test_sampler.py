"""The sampler against a slow one in numpy, against transformers' filters, and at its edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import sampling
from tests.support.sampling import WAYS, go, slow

Draw = Callable[..., list[int]]  # the fixture: each sampler's draws

VOCAB = 1000
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, size=8000).tolist()

SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 1e9},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 300, "temperature": 3.0},
    {"top_k": VOCAB},
    {"top_k": 9_999_999},
    {"top_p": 0.9},
    {"top_p": 1e-10},
    {"top_p": 0.999, "temperature": 5.0},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
    {"top_k": 600, "top_p": 0.95, "min_p": 0.001, "temperature": 4.0},
]


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_definition(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, way)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(SETTINGS) * 20, VOCAB, generator=generator) * 2
    logits[::3] = logits[::3].round()  # many exact ties
    rows = [{**SETTINGS[i % len(SETTINGS)], "key": i} for i in range(len(logits))]
    assert sampling.draw(logits, rows) == [slow(logits[i], row) for i, row in enumerate(rows)]


def test_filters_keep_what_transformers_keeps(draw: Draw) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    ids = torch.zeros(1, 1, dtype=torch.int64)
    draws = 5000
    for setting in (s for s in SETTINGS if s):
        scores = TemperatureLogitsWarper(setting.get("temperature", 1.0))(ids, logits)
        if setting.get("top_k"):
            scores = TopKLogitsWarper(setting["top_k"])(ids, scores)
        scores = TopPLogitsWarper(setting.get("top_p", 1.0))(ids, scores)
        if setting.get("min_p"):
            scores = MinPLogitsWarper(setting["min_p"])(ids, scores)
        kept = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
        drawn = draw(logits.expand(draws, -1), [{**setting, "key": key} for key in KEYS[:draws]])
        share = torch.softmax(scores[0], -1).numpy().astype(np.float64)
        assert set(drawn) <= kept, setting
        likely = {i for i in kept if share[i] > 20 / draws}  # missed once in e^20
        assert likely <= set(drawn), setting
        hits = np.bincount(drawn, minlength=VOCAB)
        deviation = np.sqrt(draws * share * (1 - share)) + 1
        assert (np.abs(hits - draws * share) < 5 * deviation).all(), setting


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-45, 1e-38, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(draw: Draw, temperature: float) -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(4)) * 5
    rows = [{"temperature": temperature, "key": key} for key in KEYS[:50]]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-10}, {"min_p": 1.0}])
def test_filters_that_leave_one_token(draw: Draw, setting: dict[str, Any]) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(5))
    assert draw(logits, [{**setting, "key": key} for key in KEYS[:5]]) == logits.argmax(-1).tolist()


def test_greedy_ties_go_to_the_lowest_id_beside_a_sampled_row(draw: Draw) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    rows = [{"temperature": 0.0}, {"temperature": 1.4, "key": 3, "top_k": 1}, {"temperature": 0.0}]
    assert draw(logits, rows) == [0, 1, 0]


@pytest.mark.parametrize("vocab", [7, 512, 1000, 1536, 49152])
def test_greedy_finds_the_first_of_the_largest_wherever_they_are(draw: Draw, vocab: int) -> None:
    """In one part of a row or in several, at their edges, among equals; a broken value anywhere is seen."""
    places = [0, vocab - 1, vocab // 2, vocab // 3, min(511, vocab - 1), min(512, vocab - 2)]
    logits = torch.randn(len(places), vocab, generator=torch.Generator().manual_seed(vocab)).clamp(max=2)
    for row, place in enumerate(places):
        logits[row, [place, max(place, vocab - 1)]] = 3.0
    greedy = [{"temperature": 0.0}] * len(places)
    assert draw(logits, greedy) == places
    logits[2, places[2]], logits[3, places[3]] = torch.nan, torch.inf
    logits[4] = -torch.inf
    assert draw(logits, greedy) == [*places[:2], -1, -1, -1, places[5]]


def test_nothing_but_what_is_left_is_drawn(draw: Draw) -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [17, 400]] = torch.tensor([0.1, 0.3])
    settings: list[dict[str, Any]] = [{}, {"top_p": 0.99999}, {"top_k": 5}, {"min_p": 1e-30}, {"top_k": 599}]
    for setting in settings:
        drawn = draw(logits.expand(500, -1), [{**setting, "key": key} for key in KEYS[:500]])
        assert set(drawn) == {17, 400}
        assert 200 < drawn.count(400) < 350  # 275 are expected, give or take 11
    assert draw(logits, [{"temperature": 1e-5, "key": 1}]) == [400]


def test_banned_tokens_are_never_drawn_and_only_in_their_row(draw: Draw) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 4)
    rows = [{"temperature": 0.0}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 1}]
    assert draw(logits, rows, banned=[(0, 0), (2, 0), (2, 1)]) == [1, 0, 2, 0]
    assert logits[0, 0] == 3.0, "the caller's logits are not touched"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_flagged_and_hurts_no_other(draw: Draw, bad: float) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [{"temperature": 0.0}, {"key": 3}, {"key": 7, "top_p": 0.9}] * 2
    healthy = draw(logits, rows)
    broken = logits.clone()
    broken[0, 5], broken[1, 999] = bad, bad
    assert draw(broken, rows) == [-1, -1, *healthy[2:]]


def test_a_row_with_nothing_left_is_flagged(draw: Draw) -> None:
    assert draw(torch.zeros(1, 2), [{"key": 1}], banned=[(0, 0), (0, 1)]) == [-1]


def test_parameters_of_one_row_do_not_govern_another(draw: Draw) -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(7)) * 2
    rows = [
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 50, "key": 910},
        {"temperature": 0.7, "top_p": 0.5, "key": 300},
        {"temperature": 3.0, "key": 999},
        {"min_p": 0.2, "key": 800},
        {"top_k": 1, "key": 500},
        {"top_p": 0.0, "key": 500},
        {"temperature": 2.0, "top_k": 2000, "key": 970},
    ]
    alone = [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert draw(logits, rows) == alone
    order = [5, 2, 7, 0, 3, 1, 6, 4]
    assert draw(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_another_batch_of_the_same_logits_draws_the_same(draw: Draw) -> None:
    """Nearly equal logits that differ in their last bits, as those of two batches do: of 2,000 draws among
    thousands of tokens one may differ. (A running sum of the likeliest first would differ in 20 or so.)"""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(2000, 12_000, generator=generator)
    noise = torch.randn(logits.shape, generator=generator) * 1e-6
    rows = [{"key": key, **[{}, {"top_p": 0.9}, {"top_k": 4000}][key % 3]} for key in range(2000)]
    same = [a == b for a, b in zip(draw(logits, rows), draw(logits + noise, rows), strict=True)]
    assert same.count(False) <= 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shares_of_a_large_vocabulary_across_blocks(draw: Draw, temperature: float) -> None:
    """Many draws of one row: every 500 ids together get their share (chi-square), blocks or none."""
    logits = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(10))
    draws = 8000
    rows = [{"temperature": temperature, "key": key} for key in KEYS[:draws]]
    hits = np.bincount(draw(logits.expand(draws, -1), rows), minlength=10_000)
    share = torch.softmax(logits[0].double() / temperature, -1).numpy()
    expected = draws * share.reshape(-1, 500).sum(-1)
    chi = ((hits.reshape(-1, 500).sum(-1) - expected) ** 2 / expected).sum()
    assert chi < 60  # 19 degrees of freedom: beyond that once in 10^5
