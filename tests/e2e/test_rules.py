"""The rules of equality themselves: each lets pass what it should, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.support.equality import Tally, assert_bf16_logits, assert_same_ids, assert_same_logits


def gap(size: float) -> torch.Tensor:
    """Logits whose two best ids, 3 and 5, are `size` apart."""
    logits = torch.zeros(8)
    logits[3], logits[5] = 10 + size, 10
    return logits


def test_logits_within_a_share_of_the_largest() -> None:
    reference = torch.tensor([[1.0, -50.0], [2.0, 3.0]])
    assert assert_same_logits(reference + 0.0049, reference) == pytest.approx(0.98, rel=0.01)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(reference + 0.0051, reference)
    small = torch.tensor([0.1, 0.2])  # the share of small logits is that of 1
    assert_same_logits(small + 0.9e-4, small)
    with pytest.raises(AssertionError, match="differ by"):
        assert_same_logits(small + 1.1e-4, small)


def test_logits_that_are_not_numbers_or_of_another_shape() -> None:
    with pytest.raises(AssertionError, match="finite"):
        assert_same_logits(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError, match="shape"):
        assert_same_logits(torch.zeros(2, 3), torch.zeros(3))


def test_ids_are_identical_without_a_second_opinion() -> None:
    assert_same_ids([1, 2, 3], [1, 2, 3])
    for other in ([1, 2], [1, 2, 4], [1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            assert_same_ids(other, [1, 2, 3])


def test_a_near_tie_is_counted_and_a_difference_is_not_one() -> None:
    tally = Tally()
    seen: list[list[int]] = []

    def near(ids: list[int]) -> torch.Tensor:
        seen.append(list(ids))
        return gap(9e-4)

    assert_same_ids([7, 3, 1], [7, 5, 2], prompt=[9], rescore=near, tally=tally)
    assert seen == [[9, 7]], "the text in common is scored, and nothing else"
    assert (tally.answers, tally.ids, tally.near_ties) == (1, 1, 1)
    with pytest.raises(AssertionError, match="no near tie"):
        assert_same_ids([3], [5], rescore=lambda ids: gap(1.1e-3))
    with pytest.raises(AssertionError, match="two best alone"):
        assert_same_ids([4], [5], rescore=lambda ids: gap(1e-4))


def test_bf16_errs_no_more_than_the_reference_does() -> None:
    exact = torch.zeros(4, 8)
    reference = exact + 0.01
    assert assert_bf16_logits(exact - 0.01, reference, exact) == pytest.approx(0.02)
    with pytest.raises(AssertionError, match="bf16 error"):
        assert_bf16_logits(exact + 0.011, reference, exact)
