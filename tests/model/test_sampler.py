"""The sampler against a slow one in numpy, against transformers' filters, and at its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling import WAYS, draw, go, slow

VOCAB = 1000

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
    us = torch.rand(len(logits), generator=generator, dtype=torch.float64).tolist()
    rows = [{**SETTINGS[i % len(SETTINGS)], "u": us[i]} for i in range(len(logits))]
    assert draw(logits, rows) == [slow(logits[i], row) for i, row in enumerate(rows)]


def test_filters_keep_what_transformers_keeps() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    ids = torch.zeros(1, 1, dtype=torch.int64)
    us = list(np.linspace(0, 1, 4000, endpoint=False))
    for setting in (s for s in SETTINGS if s):
        scores = TemperatureLogitsWarper(setting.get("temperature", 1.0))(ids, logits)
        if setting.get("top_k"):
            scores = TopKLogitsWarper(setting["top_k"])(ids, scores)
        scores = TopPLogitsWarper(setting.get("top_p", 1.0))(ids, scores)
        if setting.get("min_p"):
            scores = MinPLogitsWarper(setting["min_p"])(ids, scores)
        kept = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
        drawn = draw(logits.expand(len(us), -1), [{**setting, "u": u} for u in us])
        share = torch.softmax(scores[0], -1)
        assert set(drawn) <= kept, setting
        likely = {i for i in kept if share[i] > 2 / len(us)}  # wider than the grid of u: must be hit
        assert likely <= set(drawn), setting
        hits = np.bincount(drawn, minlength=VOCAB) / len(us)
        assert np.abs(hits - share.numpy()).max() < 1.5 / len(us), setting


@pytest.mark.parametrize("temperature", [0.0, -0.0, 5e-324, 1e-45, 1e-38, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(4)) * 5
    rows = [{"temperature": temperature, "u": u} for u in np.linspace(0, 0.999, 50)]
    assert draw(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("setting", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-10}, {"min_p": 1.0}])
def test_filters_that_leave_one_token(setting: dict[str, Any]) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(5))
    assert draw(logits, [{**setting, "u": 0.99}] * 5) == logits.argmax(-1).tolist()


def test_greedy_ties_go_to_the_lowest_id_beside_a_sampled_row() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    rows = [{"temperature": 0.0}, {"temperature": 1.4, "u": 0.99, "top_k": 2}, {"temperature": 0.0}]
    assert draw(logits, rows) == [0, 2, 0]


def test_ends_of_u_never_leave_the_kept_tokens() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [17, 400]] = torch.tensor([0.1, 0.3])
    almost_one = float(np.nextafter(1.0, 0.0))
    for setting in ({}, {"top_p": 0.99999}, {"top_k": 5}, {"min_p": 1e-30}, {"temperature": 1e-5}):
        assert draw(logits, [{**setting, "u": 0.0}]) == [400]
        assert draw(logits, [{**setting, "u": almost_one}]) == ([400] if "temperature" in setting else [17])


def test_banned_tokens_are_never_drawn_and_only_in_their_row() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 4)
    rows = [{"temperature": 0.0}, {"temperature": 0.0}, {"u": 0.0}, {"u": 0.0}]
    assert draw(logits, rows, banned=[(0, 0), (2, 0), (2, 1)]) == [1, 0, 2, 0]
    assert logits[0, 0] == 3.0, "the caller's logits are not touched"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_flagged_and_hurts_no_other(bad: float) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [{"temperature": 0.0}, {"u": 0.3}, {"u": 0.7, "top_p": 0.9}] * 2
    healthy = draw(logits, rows)
    broken = logits.clone()
    broken[0, 5], broken[1, 999] = bad, bad
    assert draw(broken, rows) == [-1, -1, *healthy[2:]]


def test_a_row_with_nothing_left_is_flagged() -> None:
    assert draw(torch.zeros(1, 2), [{"u": 0.1}], banned=[(0, 0), (0, 1)]) == [-1]


def test_parameters_of_one_row_do_not_govern_another() -> None:
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(7)) * 2
    rows = [
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 50, "u": 0.91},
        {"temperature": 0.7, "top_p": 0.5, "u": 0.3},
        {"temperature": 3.0, "u": 0.999},
        {"min_p": 0.2, "u": 0.8},
        {"top_k": 1, "u": 0.5},
        {"top_p": 0.0, "u": 0.5},
        {"temperature": 2.0, "top_k": 2000, "u": 0.97},
    ]
    alone = [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert draw(logits, rows) == alone
    order = [5, 2, 7, 0, 3, 1, 6, 4]
    assert draw(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_the_last_of_many_is_never_one_that_cannot_be_drawn() -> None:
    """The sum of a vocabulary depends a little on its order: u next to 1 may point past the last weight."""
    logits = torch.randn(400, 600, generator=torch.Generator().manual_seed(8)) * 6  # sums are inexact
    logits[:, ::2] = -torch.inf
    drawn = draw(logits, [{"u": float(np.nextafter(1.0, 0.0))}] * 400)
    assert all(token % 2 for token in drawn)
