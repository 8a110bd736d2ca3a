"""Scores against torch's own log_softmax in fp64, and a stable sort of the whole row."""

from __future__ import annotations

import math

import pytest
import torch

from model.logprobs import PIECE_BYTES, Scorer, score_hidden
from model.sampler_native import choose_scorer
from tests.support import sampling

CPU = torch.device("cpu")


@pytest.fixture(params=sampling.SAMPLERS)
def score(request: pytest.FixtureRequest) -> Scorer:
    """Each scorer that can run here."""
    return choose_scorer(sampling.kernels_of(request.param))


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, vocab, generator=torch.Generator(CPU).manual_seed(seed))


def ids_of(rows: int, vocab: int) -> torch.Tensor:
    return torch.randint(vocab, (rows,), generator=torch.Generator(CPU).manual_seed(1))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1000), (15, 20), (16, 257), (17, 9001), (40, 6000)])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_log_softmax(score: Scorer, rows: int, vocab: int, ties: bool) -> None:
    logits, ids = logits_of(rows, vocab), ids_of(rows, vocab)
    if ties:
        logits = logits.round()  # many equals at every place
    told = score(logits, ids, 20).to_host()
    right = torch.log_softmax(logits.to(torch.float64), -1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :20]
    assert told.best_ids.tolist() == order.tolist()
    assert told.logprob == pytest.approx(right.gather(1, ids[:, None])[:, 0].numpy(), abs=1e-6)
    assert told.best == pytest.approx(right.gather(1, order).numpy(), abs=1e-6)


def test_arithmetic(score: Scorer) -> None:
    """Weights 1, 2, 3, 2 of 8; the two of equal weight by their ids."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.0]]).log() + 50
    told = score(logits, torch.tensor([3]), 3).to_host()
    assert told.logprob.tolist() == pytest.approx([math.log(2 / 8)], abs=1e-5)
    assert told.best_ids.tolist() == [[2, 1, 3]]
    assert told.best[0].tolist() == pytest.approx([math.log(w / 8) for w in (3, 2, 2)], abs=1e-5)


@pytest.mark.parametrize(("best", "width"), [(0, 0), (1, 1), (7, 7), (8, 7)])
def test_how_many_of_the_best(score: Scorer, best: int, width: int) -> None:
    told = score(torch.zeros(2, 7), torch.tensor([0, 6]), best).to_host()
    assert told.best_ids.tolist() == [list(range(width))] * 2, "all are equal: the lowest ids"
    assert told.logprob.tolist() == pytest.approx([-math.log(7)] * 2, abs=1e-6)


def test_a_row_of_which_only_one_token_is_likely(score: Scorer) -> None:
    """The others' weights vanish in the sum, but their own scores are told."""
    told = score(torch.tensor([[0.0, 200.0, -1e30]]), torch.tensor([0]), 3).to_host()
    assert told.logprob.tolist() == [-200.0]
    assert told.best_ids.tolist() == [[1, 0, 2]]
    assert told.best[0].tolist() == pytest.approx([0.0, -200.0, -1e30], rel=1e-6)


def test_rows_do_not_depend_on_each_other(score: Scorer) -> None:
    logits, ids = logits_of(33, 500), ids_of(33, 500)
    broken = logits.clone()
    broken[3, 5] = torch.nan
    together, beside = score(logits, ids, 5), score(broken, ids, 5)
    for row in range(33):
        alone = score(logits[row : row + 1], ids[row : row + 1], 5)
        assert torch.equal(alone.logprob, together.logprob[row : row + 1])
        assert torch.equal(alone.best_ids, together.best_ids[row : row + 1])
        if row != 3:
            assert torch.equal(alone.best, beside.best[row : row + 1])
    assert bool(beside.logprob[3].isnan())


def test_whole_prompts_are_scored_in_pieces(score: Scorer) -> None:
    """No call of the head gives more than 32 MiB, and every row is scored once, in order."""
    vocab, rows, width = 1 << 17, 150, 4
    assert PIECE_BYTES == 32 * 1024 * 1024
    head = torch.randn(vocab, width, generator=torch.Generator(CPU).manual_seed(2))
    hidden = logits_of(rows, width)
    sizes: list[int] = []

    def project(part: torch.Tensor) -> torch.Tensor:
        made = part @ head.t()
        sizes.append(made.nbytes)
        return made

    ids = ids_of(rows, vocab)
    told = score_hidden(hidden, ids, 2, project, vocab, score)
    assert max(sizes) <= PIECE_BYTES and len(sizes) == 3
    right = torch.log_softmax((hidden @ head.t()).to(torch.float64), -1)
    assert told.logprob.numpy() == pytest.approx(right.gather(1, ids[:, None])[:, 0].numpy(), abs=1e-4)
    assert told.best_ids.shape == (rows, 2)


def test_a_vocabulary_wider_than_a_piece_goes_row_by_row(score: Scorer) -> None:
    calls: list[int] = []

    def project(part: torch.Tensor) -> torch.Tensor:
        calls.append(len(part))
        return torch.zeros(len(part), 8)

    score_hidden(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), 1, project, PIECE_BYTES, score)
    assert calls == [1, 1, 1]
