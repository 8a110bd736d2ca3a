"""When two answers count as the same: no test says so otherwise. Benchmarks share the rule's numbers, which
are in loadtest/equality.py.

fp32: logits within 1e-4 * max(1, max|logit|) of the reference, ids identical. On real models a differing id
passes only where the reference, re-scoring the common text alone, finds a near tie (its two best logits are
less than 1e-3 apart, and they are the two ids in question); each such case is counted.

bf16: the error against the fp32 reference is no larger than the bf16 reference's own; ids may differ at a
near tie of twice that error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loadtest.equality import FP32_LOGIT_TOLERANCE, FP32_NEAR_TIE, first_difference

Rescore = Callable[[Sequence[int]], Tensor]  # ids -> [V] fp32 logits after the last of them, computed alone


@dataclass
class Tally:
    """What a comparison of many answers came to; tests print it."""

    answers: int = 0
    ids: int = 0
    near_ties: int = 0
    smallest_gap: float = float("inf")
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.answers} answers, {self.ids} ids equal, {self.near_ties} near ties"


def logit_error(ours: Tensor, reference: Tensor) -> float:
    """max|ours - reference|; both `[.., V]`, of the same shape and finite."""
    assert ours.shape == reference.shape, f"shape {tuple(ours.shape)}, expected {tuple(reference.shape)}"
    assert bool(torch.isfinite(ours).all()), "our logits are not finite"
    return float((ours.to(torch.float64) - reference.to(torch.float64)).abs().max())


def assert_same_logits(ours: Tensor, reference: Tensor, where: str = "") -> float:
    """The fp32 rule for logits; returns the largest error as a share of what is allowed."""
    error = logit_error(ours, reference)
    allowed = FP32_LOGIT_TOLERANCE * max(1.0, float(reference.abs().max()))
    assert error <= allowed, f"{where}: logits differ by {error:.3g}, {allowed:.3g} is allowed"
    return error / allowed


def assert_same_ids(
    ours: Sequence[int],
    reference: Sequence[int],
    prompt: Sequence[int] = (),
    rescore: Rescore | None = None,
    tally: Tally | None = None,
    near_tie: float = FP32_NEAR_TIE,
    where: str = "",
) -> None:
    """Ids identical; with `rescore` (real models only) the first difference may be a counted near tie.

    After a near tie the two answers are different texts, so nothing past it is compared.
    """
    tally = tally if tally is not None else Tally()
    tally.answers += 1
    same = first_difference(ours, reference)
    if same is None:
        assert len(ours) == len(reference), f"{where}: {len(ours)} ids, expected {len(reference)}"
        tally.ids += len(ours)
        return
    tally.ids += same
    message = f"{where}: id {same} is {ours[same]}, expected {reference[same]}; before it {list(ours[:same])}"
    assert rescore is not None, message
    gap = _gap(rescore([*prompt, *reference[:same]]), ours[same], reference[same], message)
    tally.smallest_gap = min(tally.smallest_gap, gap)
    assert gap < near_tie, f"{message}; the gap between the two best is {gap:.3g}, no near tie"
    tally.near_ties += 1
    tally.notes.append(f"{where}: id {same}, gap {gap:.2g}")


def _gap(logits: Tensor, a: int, b: int, message: str) -> float:
    best = logits.topk(2)
    assert {a, b} == set(best.indices.tolist()), f"{message}; the two best alone are {best.indices.tolist()}"
    return float(best.values[0] - best.values[1])


def assert_bf16_logits(
    ours: Tensor, reference_bf16: Tensor, reference_fp32: Tensor, where: str = ""
) -> float:
    """The bf16 rule for logits; returns twice the error: the near tie to give to `assert_same_ids`.

    The error is the root mean square over all logits, which single roundings do not move.
    """
    allowed = _rms(reference_bf16, reference_fp32)
    error = _rms(ours, reference_fp32)
    assert error <= allowed, f"{where}: bf16 error {error:.4g}, transformers' own in bf16 is {allowed:.4g}"
    return 2 * logit_error(ours, reference_fp32)


def _rms(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and bool(torch.isfinite(a).all())
    return float((a.to(torch.float64) - b.to(torch.float64)).square().mean().sqrt())
