"""Changes to logits against transformers' own processors, and against loops over rows and ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from model.adjust import Adjustments, Bias, Mask, Penalties, adjust

VOCAB = 100  # no multiple of 32
CPU = torch.device("cpu")


def logits_of(rows: int, seed: int = 0) -> Tensor:
    logits = 5 * torch.randn(rows, VOCAB, generator=torch.Generator(CPU).manual_seed(seed))
    logits[:, ::7] = 0.0
    return logits


def whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def real(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def bias_of(pairs: dict[int, dict[int, float]]) -> Bias:
    """`pairs`: row -> id -> bias."""
    flat = [(row, token, value) for row, own in pairs.items() for token, value in own.items()]
    rows, ids, values = zip(*flat, strict=True)
    return Bias(whole(rows), whole(ids), real(values))


def penalties_of(
    rows: dict[int, dict[int, int]], repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0
) -> Penalties:
    """`rows`: row -> id -> times generated."""
    entries = [(n, token, count) for n, own in enumerate(rows.values()) for token, count in own.items()]
    owner, ids, counts = zip(*entries, strict=True)
    each = [real([value] * len(rows)) for value in (repetition, frequency, presence)]
    return Penalties(whole(list(rows)), whole(owner), whole(ids), whole(counts), *each)


def adjusted(logits: Tensor, adjustments: Adjustments) -> Tensor:
    changed = logits.clone()
    adjust(changed, adjustments)
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 2.0])
def test_repetition_is_transformers_own_to_the_bit(penalty: float) -> None:
    dice, logits = random.Random(1), logits_of(6)
    texts = [[dice.randrange(VOCAB) for _ in range(30)] for _ in range(6)]
    rows = {row: dict.fromkeys(text, 0) for row, text in enumerate(texts)}
    right = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(texts), logits.clone())
    assert torch.equal(adjusted(logits, Adjustments(penalties=penalties_of(rows, penalty))), right)


def test_bias_is_transformers_own_to_the_bit_and_comes_before_repetition() -> None:
    logits, text = logits_of(1), [3, 7, 8, 9, 7]
    bias = {7: -3.5, 8: 100.0, 14: -100.0, 50: 0.25}
    biased = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    right = biased(torch.tensor([text]), logits.clone())
    assert torch.equal(adjusted(logits, Adjustments(bias=bias_of({0: bias}))), right)
    right = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([text]), right)
    both = Adjustments(bias=bias_of({0: bias}), penalties=penalties_of({0: dict.fromkeys(text, 0)}, 1.3))
    assert torch.equal(adjusted(logits, both), right)


def test_frequency_and_presence_by_arithmetic() -> None:
    """After repetition: the prompt's id 2 is not generated, 3 once, 4 three times."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 1:6] = real([1.0, 2.0, 3.0, -4.0, 5.0])
    penalties = penalties_of({0: {2: 0, 3: 1, 4: 3}}, repetition=2.0, frequency=0.5, presence=0.25)
    changed = adjusted(logits, Adjustments(penalties=penalties))
    assert changed[0, 1:6].tolist() == [1.0, 2 / 2, 3 / 2 - 0.5 - 0.25, -4 * 2 - 1.5 - 0.25, 5.0]
    raised = penalties_of({0: {3: 2}}, frequency=-1.0, presence=-0.5)
    assert adjusted(logits, Adjustments(penalties=raised))[0, 3] == 3 + 2 + 0.5


def test_rows_keep_their_own_penalties() -> None:
    logits = logits_of(4)
    mixed = Penalties(
        whole([3, 1]), whole([0, 0, 1]), whole([5, 6, 5]), whole([1, 0, 2]),
        repetition=real([1.5, 1.0]), frequency=real([0.0, 1.0]), presence=real([0.0, 0.5]),
    )  # fmt: skip
    changed = adjusted(logits, Adjustments(penalties=mixed))
    expected = logits.clone()
    for token in (5, 6):
        value = logits[3, token]
        expected[3, token] = value / 1.5 if value > 0 else value * 1.5
    expected[1, 5] = expected[1, 5] - 2.0 - 0.5
    assert torch.equal(changed, expected)


def test_an_extreme_penalty_leaves_finite_logits_and_hides_no_broken_ones() -> None:
    logits = real([30.0, -30.0, 0.0, torch.nan, torch.inf, 1.0])[None]
    ids = dict.fromkeys(range(5), 0)
    tiny = adjusted(logits, Adjustments(penalties=penalties_of({0: ids}, torch.finfo(torch.float32).tiny)))
    most = torch.finfo(torch.float32).max
    assert tiny[0, 0] == most and tiny[0, 2] == 0 and bool(tiny[0, :3].isfinite().all())
    huge = adjusted(logits, Adjustments(penalties=penalties_of({0: ids}, most)))
    assert huge[0, 1] == -most and huge[0, 2] == 0 and bool(huge[0, :3].isfinite().all())
    for changed in (tiny, huge):
        assert bool(changed[0, 3].isnan()) and changed[0, 4] == torch.inf and changed[0, 5] == 1


def packed(allowed: Sequence[set[int]], words: int) -> Tensor:
    """The bits as the protocol says, one by one."""
    bits = torch.zeros(len(allowed), words, dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for token in ids:
            bits[row, token // 32] |= 1 << (token % 32)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)


@pytest.mark.parametrize("words", [1, 3, 4, 5], ids=["one word", "too few", "just enough", "too many"])
@pytest.mark.parametrize("rows", [[0], [2, 0], list(range(20))])
def test_a_mask_leaves_the_allowed_ids_of_its_rows(words: int, rows: list[int]) -> None:
    dice, logits = random.Random(words), logits_of(20)
    allowed = [set(dice.sample(range(32 * words), 20)) | {31, 0} for _ in rows]
    changed = adjusted(logits, Adjustments(mask=Mask(whole(rows), packed(allowed, words))))
    expected = logits.clone()
    for row, ids in zip(rows, allowed, strict=True):
        for token in range(VOCAB):
            if token not in ids:
                expected[row, token] = -torch.inf
    assert torch.equal(changed, expected)


def test_everything_at_once_touches_its_own_rows_only() -> None:
    logits = logits_of(6)
    everything = Adjustments(
        bias=bias_of({1: {3: 5.0, VOCAB - 1: 1.0}}),
        penalties=penalties_of({2: {0: 1, VOCAB - 1: 2}}, 1.3, 0.5, 0.5),
        banned=(whole([4, 4]), whole([0, VOCAB - 1])),
        mask=Mask(whole([5]), packed([{1, 99}], 4)),
    )
    changed = adjusted(logits, everything)
    for row in (0, 3):
        assert torch.equal(changed[row], logits[row])
    assert (changed != logits).sum(-1).tolist() == [0, 2, 2, 0, 2, VOCAB - 2]
    assert changed[5].argmax() in (1, 99)


def test_bans_and_masks_come_last() -> None:
    """No bias brings back what cannot be drawn."""
    last = Adjustments(
        bias=bias_of({0: {5: 100.0, 6: 100.0}}),
        banned=(whole([0]), whole([5])),
        mask=Mask(whole([0]), packed([{5, 7}], 4)),
    )
    changed = adjusted(logits_of(1), last)
    assert torch.isfinite(changed[0]).nonzero()[:, 0].tolist() == [7]
