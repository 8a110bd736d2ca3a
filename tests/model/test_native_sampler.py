"""Draws in C++: exact where sums and ties decide, whatever the shape, the batch and the threads are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.logprobs import score
from model.sampler import make_sampling, sample
from model.sampler_native import NativeSampler, choose_sampler, choose_scorer
from tests.support.attention import CPU
from tests.support.sampling import Row, batch_of, draw, sampler_of, slow


@pytest.fixture(params=["native", "avx2"])
def sampler(request: pytest.FixtureRequest) -> NativeSampler:
    found = sampler_of(request.param)
    assert isinstance(found, NativeSampler)
    return found


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, sampler: NativeSampler) -> Iterator[int]:
    """As many work on the rows of this thread."""
    sampler.library.ops.lend_threads(request.param)
    yield request.param
    sampler.library.ops.lend_threads(0)


def some_logits(rng: np.random.Generator, count: int, vocab: int) -> Tensor:
    """Rows of all sorts: spread, rounded so that many tie, masked, peaked, flat."""
    logits = rng.normal(size=(count, vocab)) * rng.choice([0.01, 1.0, 4.0], size=(count, 1))
    for row in logits:
        if rng.random() < 0.3:
            np.round(row, out=row)
        if rng.random() < 0.3:
            row[rng.random(vocab) < rng.choice([0.5, 0.999])] = -np.inf
        if rng.random() < 0.2:
            row[rng.integers(vocab)] = 30.0
        if rng.random() < 0.1:
            row[:] = -0.0
        row[rng.integers(vocab)] = 0.5
    return torch.from_numpy(logits.astype(np.float32))


def some_rows(rng: np.random.Generator, count: int, vocab: int) -> list[Row]:
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-5, 0.3, 0.8, 1.0, 1.5, 1e3],
        "top_k": [0, 0, 1, 3, 60, 767, 768, 769, max(1, vocab - 1), vocab, 10**12],
        "top_p": [1.0, 1.0, 1 - 1e-12, 0.95, 0.5, 0.0, 5e-324],
        "min_p": [0.0, 0.0, 1e-9, 0.05, 1.0],
    }
    return [
        {name: values[rng.integers(len(values))] for name, values in choices.items()}
        | {"key": rng.integers(-(2**63), 2**63)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.usefixtures("threads")
def test_any_rows_draw_what_the_definition_and_pytorch_draw(sampler: NativeSampler, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, vocab = int(rng.integers(1, 71)), int(rng.choice([1, 5, 255, 257, 769, 2000, 3333, 12_301]))
    logits, rows = some_logits(rng, count, vocab), some_rows(rng, count, vocab)
    drawn = draw(logits, rows, sampler=sampler)
    assert drawn == draw(logits, rows)
    for row in rng.integers(count, size=8):
        assert drawn[row] == slow(logits[row], rows[row])


def test_a_row_is_drawn_alone_as_in_any_crowd(sampler: NativeSampler) -> None:
    rng = np.random.default_rng(100)
    logits, rows = some_logits(rng, 70, 5001), some_rows(rng, 70, 5001)
    drawn = draw(logits, rows, sampler=sampler)
    assert drawn == [draw(logits[i : i + 1], [row], sampler=sampler)[0] for i, row in enumerate(rows)]
    order = rng.permutation(70)[:40]
    assert draw(logits[order], [rows[i] for i in order], sampler=sampler) == [drawn[i] for i in order]


def test_few_rows_that_race_among_greedy_ones(sampler: NativeSampler) -> None:
    logits = torch.randn(20, 900, generator=torch.Generator().manual_seed(6))
    rows: list[Row] = [{"temperature": 0.0}] * 20
    rows[3], rows[11], rows[18] = {"key": 4}, {"top_p": 0.5, "key": 5}, {"temperature": 2.0, "key": 6}
    batch = batch_of(rows)
    assert batch.rows is not None and batch.rows.tolist() == [3, 11, 18]
    drawn = sampler(logits, batch).tolist()
    assert drawn == [slow(row, each) for row, each in zip(logits, rows, strict=True)]
    assert sum(logits.argmax(-1).ne(torch.tensor(drawn)).tolist()) == 3


def test_broken_rows_are_flagged_and_hurt_no_other(sampler: NativeSampler) -> None:
    rng = np.random.default_rng(101)
    vocab = 777
    logits, rows = some_logits(rng, 60, vocab), some_rows(rng, 60, vocab)
    whole = draw(logits, rows, sampler=sampler)
    for row in range(0, 40, 2):
        logits[row, rng.integers(vocab)] = [torch.nan, torch.inf][row // 2 % 2]
    logits[41], logits[43, :] = -torch.inf, torch.nan
    broken = {*range(0, 40, 2), 41, 43}
    expected = [-1 if row in broken else token for row, token in enumerate(whole)]
    assert draw(logits, rows, sampler=sampler) == expected


def test_a_filter_keeps_one_token_more_a_hair_beyond_each_sum(sampler: NativeSampler) -> None:
    """Flat enough that thousands of tokens are kept: sums are exact but for the exponential's last bit."""
    logits = torch.randn(1, 6007, generator=torch.Generator().manual_seed(3)) * 0.5
    weight = np.exp(logits[0].double().numpy() - logits.max().item())
    sums = np.cumsum(np.sort(weight)[::-1])[::40] / weight.sum()
    rows: list[Row] = [
        {"top_p": share + step, "key": key}
        for key, share in enumerate(sums[sums < 0.999])
        for step in (-(2.0**-20), 2.0**-20)
    ]
    assert draw(logits.expand(len(rows), -1), rows, sampler=sampler) == [slow(logits[0], row) for row in rows]


def test_exactly_so_many_tokens_as_top_k_says_and_equals_by_id(sampler: NativeSampler) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 1000:] = -0.0  # equal to the others
    for count, draws in ((2, 100), (100, 2_000), (770, 12_000)):
        rows = batch_of([{"top_k": count, "key": key} for key in range(draws)])
        assert set(sampler(logits.expand(draws, -1), rows).tolist()) == set(range(count))


@pytest.mark.parametrize("depth", [-0.3, -1.7, -4.4, -8.1, -11.9, -13.8])
def test_a_weight_is_the_exponential_to_a_millionth(sampler: NativeSampler, depth: float) -> None:
    """Beside the best, tokens of one weight, enough for one to win soon: min_p takes all of them or none."""
    exact = np.exp(np.float64(np.float32(depth)))
    logits = torch.full((1, int(2 / exact) + 2), depth)
    logits[0, 0] = 0.0

    def others_win(min_p: float) -> bool:
        return any(
            draw(logits.expand(20, -1), [{"min_p": min_p, "key": k} for k in range(20)], sampler=sampler)
        )

    assert others_win(exact * (1 - 2.0**-20))
    assert not others_win(exact * (1 + 2.0**-20))


def test_tokens_that_hardly_weigh_anything_have_their_share(sampler: NativeSampler) -> None:
    """6,000 tokens of 2^-27 beside one of 1: of 200,000 draws they win 9."""
    logits = torch.full((1, 6001), -27 * float(np.log(2)))
    logits[0, 77] = 0.0
    drawn = sampler(logits.expand(200_000, -1), batch_of([{"key": key} for key in range(200_000)]))
    assert 2 <= int((drawn != 77).sum()) <= 20


@pytest.mark.filterwarnings("ignore:overflow encountered")  # in the definition too
def test_logits_of_any_size_and_temperatures_of_any(sampler: NativeSampler) -> None:
    """Depths that overflow fp32 are those of tokens that weigh nothing."""
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(4))
    logits[1] *= 5e37
    logits[2, ::2] = -torch.inf
    settings = [
        {"temperature": t, **more} for t in (1e-5, 1.0, 3e38) for more in ({}, {"top_p": 0.9}, {"top_k": 9})
    ]
    for setting in settings:
        rows: list[Row] = [{**setting, "key": key} for key in range(30)]
        for row in logits:
            assert draw(row.expand(30, -1), rows, sampler=sampler) == [slow(row, each) for each in rows]


def test_rows_of_a_wider_matrix_are_read_where_they_lie_and_left_as_they_are(sampler: NativeSampler) -> None:
    whole = torch.randn(20, 700, generator=torch.Generator().manual_seed(5))
    before = whole.clone()
    rows: list[Row] = [{"top_p": 0.9, "key": key} for key in range(20)]
    assert sampler(whole[:, 100:600], batch_of(rows)).tolist() == draw(before[:, 100:600], rows)
    assert torch.equal(whole, before)


@pytest.mark.parametrize(
    ("logits", "what"),
    [
        (torch.zeros(3, 0), "one token at least"),
        (torch.zeros(3, 4, dtype=torch.bfloat16), "fp32"),
        (torch.zeros(4, 3).t(), "fp32"),
        (torch.zeros(4), "fp32"),
        (torch.zeros(2, 4), "rows of the logits"),
    ],
)
def test_what_is_no_batch_is_refused(sampler: NativeSampler, logits: Tensor, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        sampler(logits, batch_of([{}] * 3))


@pytest.mark.parametrize("rows", [torch.zeros(2, dtype=torch.int32), torch.arange(4)[::2]])
def test_rows_of_another_form_are_refused(sampler: NativeSampler, rows: Tensor) -> None:
    with pytest.raises(RuntimeError, match="rows must be int64"):
        sampler(torch.zeros(4, 4), dataclasses.replace(batch_of([{}] * 2), rows=rows))


def test_no_token_to_keep_is_refused(sampler: NativeSampler) -> None:
    batch = batch_of([{}])
    with pytest.raises(RuntimeError, match="one token at least"):
        sampler(torch.zeros(1, 4), dataclasses.replace(batch, top_k=torch.zeros_like(batch.top_k)))


def test_parameters_of_another_dtype_are_refused(sampler: NativeSampler) -> None:
    batch = make_sampling(*[np.ones(2)] * 2, np.zeros(2, np.int64), np.zeros(2), np.zeros(2, np.int64), CPU)
    with pytest.raises(RuntimeError, match="a parameter for each row"):
        sampler.library.ops.draw(
            torch.zeros(2, 4),
            batch.rows,
            batch.temperature.double(),
            batch.top_p,
            batch.min_p,
            batch.top_k,
            batch.key,
        )


@pytest.mark.parametrize(
    ("ids", "best", "what"),
    [
        ([0], 1, "an id for each row"),
        ([0, 4], 1, "must be tokens"),
        ([-1, 0], 1, "must be tokens"),
        ([0, 3], 5, "no more"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    sampler: NativeSampler, ids: list[int], best: int, what: str
) -> None:
    with pytest.raises(RuntimeError, match=what):
        sampler.library.ops.score(torch.zeros(2, 4), torch.tensor(ids), best)


def test_without_a_library_pytorch_draws_and_scores() -> None:
    assert (choose_sampler("no compiler"), choose_scorer("no compiler")) == (sample, score)
