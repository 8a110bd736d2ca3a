"""When an answer counts as the reference's, where rounding differs: DESIGN.md, "Numbers".

The reference is transformers in fp32. If no logit of another implementation is further than `e` from it, the
id that it draws greedily is less than `2 e` below the reference's best: nothing else can have come first. So
an id that differs from the reference's passes at such a near tie only, and the case is counted; past it the
two answers are different texts, and nothing more is compared. In fp32 a near tie is 1e-3 and the two ids must
be the reference's two best; in bf16 it is twice the error, measured.
"""

from __future__ import annotations

from collections.abc import Sequence

FP32_LOGIT_TOLERANCE = 1e-4  # times max(1, max|logit|)
FP32_NEAR_TIE = 1e-3


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first place where both have an id and the ids differ; None if there is none."""
    return next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), None)


def near_ties(best: Sequence[tuple[int, float]], near_tie: float) -> list[int]:
    """The ids that may stand for the best one: those less than `near_tie` below it. `best`: ids and logits,
    high to low."""
    return [token for token, logit in best[1:] if best[0][1] - logit < near_tie]
