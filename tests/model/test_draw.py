"""What is drawn is the definition, to the last unit, whatever the logits look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import draw as drawing
from model.draw_rows import LOWEST_KEY, key_tokens, order_keys, until
from model.race import BLOCK
from tests.support import sampling
from tests.support.sampling import WAYS, Row, go, rows_of, slow

Draw = Callable[..., list[int]]  # the fixture: each sampler's draws

BIG = BLOCK * 64 + 37
VOCABULARIES = [1, 2, 3, 7, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 2 * BLOCK, BIG]


def logits_of(kind: str, count: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, vocab, generator=generator)
    chosen = torch.rand(count, vocab, generator=generator)
    some = chosen == chosen.amax(-1, keepdim=True)  # one of each row
    match kind:
        case "like a model's":
            return noise * 3
        case "tied":
            return (noise * 2).round()
        case "peaked":
            return noise.masked_fill(some, 12.0)
        case "nearly flat":
            return noise * 1e-3
        case "flat":
            return torch.full_like(noise, -0.7)
        case "all but a handful masked":
            return (noise * 2).masked_fill((chosen < 1 - 5 / vocab) & ~some, -torch.inf)
        case "all but one masked":
            return noise.masked_fill(~some, -torch.inf)
        case "half masked, the rest tied":
            return noise.round().masked_fill((chosen < 0.5) & ~some, -torch.inf)
        case "far apart":
            return noise * 1e30
    raise ValueError(kind)


KINDS = [
    "like a model's",
    "tied",
    "peaked",
    "nearly flat",
    "flat",
    "all but a handful masked",
    "all but one masked",
    "half masked, the rest tied",
    "far apart",
]


def mixed_rows(count: int, vocab: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    blocks = vocab // BLOCK
    near = [blocks - 1, blocks, blocks + 1, 500, vocab - 1, vocab, vocab + 1]
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-4, 0.1, 0.8, 1.0, 1.5, 2.0],
        "top_k": [0, 0, 0, 1, 2, 50, *(k for k in near if k > 0), 10**9],
        "top_p": [1.0, 1.0, 0.999, 0.95, 0.5, 1e-10],
        "min_p": [0.0, 0.0, 0.0, 1e-6, 0.05, 0.9, 1.0],
    }
    return [
        {name: values[rng.integers(len(values))] for name, values in choices.items()}
        | {"key": rng.integers(2**63)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_any_mix_of_parameters_draws_what_the_definition_draws(draw: Draw, kind: str, vocab: int) -> None:
    logits = logits_of(kind, 40, vocab, seed=vocab)
    rows = mixed_rows(40, vocab, seed=vocab)
    assert draw(logits, rows) == [slow(logits[i], row) for i, row in enumerate(rows)]


def test_a_filter_keeps_one_token_more_a_hair_beyond_each_sum() -> None:
    """Next to each sum that the best tokens can make, a hair to either side of it: it decides."""
    logits = logits_of("like a model's", 1, BIG, seed=3)
    weight = np.exp((logits[0].numpy() - logits.max().item()) / np.float32(1.5)).astype(np.float64)
    sums = np.cumsum(np.sort(weight)[::-1])[:256] / weight.sum()
    rows: list[Row] = [
        {"temperature": 1.5, "top_p": share + step, "key": key}
        for key, share in enumerate(sums[sums < 1])
        for step in (-(2.0**-18), 2.0**-18)
    ]
    drawn = sampling.draw(logits.expand(len(rows), -1), rows)
    assert len(set(drawn)) > 50
    assert drawn == [slow(logits[0], row) for row in rows]


@pytest.mark.parametrize("way", WAYS)
def test_a_row_is_drawn_alone_as_in_a_crowd(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(monkeypatch, way)
    logits = logits_of("tied", 60, 700, seed=4)
    rows = mixed_rows(60, 700, seed=5)
    alone = [sampling.draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sampling.draw(logits, rows) == alone


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("like a model's", {"temperature": 0.3, "top_p": 0.95}),
        ("like a model's", {"temperature": 2.0, "top_k": 50, "top_p": 0.9}),
        ("like a model's", {"min_p": 0.05}),
        ("peaked", {"temperature": 0.8, "top_p": 0.95}),
        ("all but a handful masked", {"temperature": 1.5, "top_p": 0.95}),
    ],
)
def test_few_tokens_are_candidates_in_usual_rows(
    kind: str, setting: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the answer is right and slow."""
    found: list[int] = []
    places = drawing._places

    def counted(mask: Tensor) -> tuple[Tensor, Tensor]:
        found.append(int(mask.sum()))
        return places(mask)

    monkeypatch.setattr(drawing, "_places", counted)
    sampling.draw(logits_of(kind, 8, BIG, seed=6), [setting] * 8)
    assert found and found[0] < 8 * BIG / 100


def test_top_p_keeps_a_token_for_the_least_part_of_a_unit(draw: Draw) -> None:
    """Half the weight is the first of two equal tokens; a hair more takes both."""
    logits = torch.full((2, BIG), -torch.inf)
    logits[:, [5, 900]] = 0.25
    half: list[Row] = [{"top_p": 0.5, "key": key} for key in range(50)]
    more: list[Row] = [{"top_p": 0.5 + 2.0**-49, "key": key} for key in range(50)]
    assert set(draw(logits[:1].expand(50, -1), half)) == {5}
    assert set(draw(logits[:1].expand(50, -1), more)) == {5, 900}


def test_a_broken_row_hurts_no_other_where_all_are_nearly_equal(draw: Draw) -> None:
    logits = logits_of("nearly flat", 6, BIG, seed=8)
    rows: list[Row] = [{"key": key, "top_p": 0.9} for key in (1, 5, 9)] * 2
    healthy = draw(logits, rows)
    broken = logits.clone()
    broken[1, 5], broken[2, BIG - 1], broken[3] = torch.nan, torch.inf, -torch.inf
    assert draw(broken, rows) == [healthy[0], -1, -1, -1, *healthy[4:]]


def test_greedy_rows_among_drawn_ones_take_the_first_of_the_largest(draw: Draw) -> None:
    logits = logits_of("tied", 30, BIG, seed=9)
    logits[3] = 0.0  # more ties than are sorted
    rows: list[Row] = [{"temperature": 0.0 if i % 3 == 0 else 1.0} for i in range(30)]
    drawn = draw(logits, rows)
    assert drawn[::3] == logits.argmax(-1)[::3].tolist()
    assert drawn[3] == 0


def test_keys_order_floats_and_then_ids() -> None:
    special = [0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -torch.inf, 1.0, 1.0, -1.0, -1.0, -2.0]
    value = torch.cat([torch.tensor(special), torch.randn(500, generator=torch.Generator().manual_seed(10))])
    value = torch.cat([value, value])  # all of it twice
    token = torch.arange(len(value), dtype=torch.int64)
    keys = order_keys(value, token)
    assert key_tokens(keys).tolist() == token.tolist()
    ordered = key_tokens(keys.sort(descending=True).values).tolist()
    assert ordered == np.lexsort((token.numpy(), -value.numpy())).tolist()


def test_all_tokens_come_before_the_lowest_key() -> None:
    value = torch.tensor([[-torch.inf, -3.4e38, -0.0, 3.4e38]])
    token = torch.tensor([[2**31 - 2, 5, 0, 1]])
    assert until(value, token, torch.tensor([[LOWEST_KEY]])).all()
    assert (order_keys(value, token) > LOWEST_KEY).all()


def test_weights_are_the_exponentials_and_fill_no_more_than_62_bits() -> None:
    logits = logits_of("like a model's", 4, BIG, seed=11)
    rows = rows_of(logits, [{"temperature": t} for t in (0.3, 0.8, 1.0, 2.0)])
    units = rows.units(rows.depth(logits).exp_())
    exact = torch.exp((logits.double() - rows.peak.double()) / rows.temperature.double())
    assert torch.allclose(units.double() / rows.unit, exact, rtol=1e-5, atol=1 / rows.unit)
    heaviest = rows_of(torch.zeros(1, BIG), [{}]).units(torch.ones(1, BIG)).sum()
    assert 2**61 < heaviest < 2**62
