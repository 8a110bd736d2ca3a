"""Log-probabilities of tokens under raw logits: of one given token a row, and of the likeliest beside it.

Nothing of the size of the vocabulary is kept: rows are worked through a few at a time, so that what is
computed of them stays in a CPU's cache. A row's scores do not depend on the other rows, nor on how the sum
of its weights was split: sums are fp64 here, and exact in C++, which does the same sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE_BYTES = 32 << 20  # of logits in fp32 that are made at once where nothing but their scores is wanted
_ROWS_AT_ONCE = 16
_NO_WEIGHT = -80.0  # e^-80 of the best token is nothing in a sum; without it exp would make slow denormals


@dataclass(frozen=True, slots=True)
class Scores:
    """Of `M` tokens, on the host; the likeliest ids of a row from high to low, ties by lowest id."""

    logprob: npt.NDArray[np.float64]  # [M]
    best_ids: npt.NDArray[np.int64]  # [M, K]
    best: npt.NDArray[np.float64]  # [M, K]


@dataclass(frozen=True, slots=True)
class ScoreTensors:
    """`Scores`, still on the device."""

    logprob: Tensor  # [M] fp64
    best_ids: Tensor  # [M, K] int64
    best: Tensor  # [M, K] fp64

    def to_host(self) -> Scores:
        """Waits for the device."""
        return Scores(*(part.cpu().numpy() for part in (self.logprob, self.best_ids, self.best)))


class Scorer(Protocol):
    """Scores tokens; chosen once for an engine."""

    def __call__(self, logits: Tensor, ids: Tensor, best: int) -> ScoreTensors:
        """logits `[M, V]` fp32, ids `[M]` int64 within V -> the scores of `ids`, and of the `best` likeliest.

        `best` 0 and more than V are allowed. A row that is not finite has NaN for its scores, and hurts no
        other.
        """
        ...


def score(logits: Tensor, ids: Tensor, best: int) -> ScoreTensors:
    """The `Scorer` of PyTorch's operators, for any device: the reference."""
    parts = [
        _score(rows, tokens, min(best, logits.shape[1]))
        for rows, tokens in zip(logits.split(_ROWS_AT_ONCE), ids.split(_ROWS_AT_ONCE), strict=True)  # type: ignore[no-untyped-call]
    ]
    return _joined(parts)


def score_hidden(
    hidden: Tensor, ids: Tensor, best: int, head: Callable[[Tensor], Tensor], vocab: int, scorer: Scorer
) -> ScoreTensors:
    """Scores by the logits `head(hidden)`, of which at most `PIECE_BYTES` exist at a time.

    hidden `[M, hidden]`, ids `[M]` int64; `head` gives `[m, vocab]` fp32 for `m` of the rows.
    """
    rows = max(1, PIECE_BYTES // (vocab * torch.float32.itemsize))
    parts = [
        scorer(head(part), tokens, best)
        for part, tokens in zip(hidden.split(rows), ids.split(rows), strict=True)  # type: ignore[no-untyped-call]
    ]
    return _joined(parts)


def _joined(parts: list[ScoreTensors]) -> ScoreTensors:
    if len(parts) == 1:
        return parts[0]
    return ScoreTensors(
        torch.cat([part.logprob for part in parts]),
        torch.cat([part.best_ids for part in parts]),
        torch.cat([part.best for part in parts]),
    )


def _score(logits: Tensor, ids: Tensor, best: int) -> ScoreTensors:
    peak = logits.amax(-1, keepdim=True)
    weight = (logits - peak).clamp_(min=_NO_WEIGHT).exp_()
    total = weight.sum(-1, keepdim=True, dtype=torch.float64).log_().add_(peak)  # log-sum-exp [m, 1]
    own = logits.gather(1, ids[:, None]).to(torch.float64)
    values, tokens = _likeliest(logits, best)
    return ScoreTensors((own - total)[:, 0], tokens, values.to(torch.float64) - total)


def _likeliest(logits: Tensor, best: int) -> tuple[Tensor, Tensor]:
    """The `best` largest logits and their ids `[m, best]`, equals by ascending id."""
    found = torch.topk(logits, best, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, found), dim=-1, descending=True, stable=True)
    tokens = found.gather(1, order)
    if best == 0:
        return values, tokens
    # Where more tokens tie for the last place than there are places, `topk` took any of them.
    unsure = torch.nonzero((logits >= values[:, -1:]).sum(-1) > best)[:, 0]
    if unsure.numel():
        whole = torch.sort(logits.index_select(0, unsure), dim=-1, descending=True, stable=True)
        values = values.index_copy(0, unsure, whole.values[:, :best])
        tokens = tokens.index_copy(0, unsure, whole.indices[:, :best])
    return values, tokens
