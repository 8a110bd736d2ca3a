"""How the tokens of a step are drawn: each sequence's parameters, as arrays over the rows that draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.adjust import Adjustments
from model.randomness import row_keys
from model.sampler import SamplingBatch, make_sampling
from server.engine.adjustments import make_adjustments
from server.engine.scheduler import Scheduled
from server.engine.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Wish:
    """Rows whose drawn tokens are to be scored."""

    rows: Tensor  # [A] int64 below N
    best: int  # how many of the likeliest tokens beside them, the most that any of them wants


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of `N` rows is drawn."""

    sampling: SamplingBatch
    adjustments: Adjustments | None  # made to the logits before that; None if there are none
    scored: Wish | None  # the rows whose drawn tokens get a score; None if there are none


def how_to_draw(entries: Sequence[Scheduled], vocab: int, device: torch.device) -> Draws:
    """For the entries of a step that draw, in order: a row of `vocab` logits each, and one more for each of
    their drafts, which is drawn as if those before it had been."""
    rows = [(entry.sequence, after) for entry in entries for after in range(1 + len(entry.drafts))]
    sequences = [sequence for sequence, _ in rows]
    params = [sequence.work.request.sampling for sequence in sequences]
    sampling = make_sampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        key=row_keys(
            np.array([p.seed for p in params], dtype=np.uint64),
            np.array([sequence.copy for sequence in sequences], dtype=np.uint64),
            np.array([sequence.output + after for sequence, after in rows], dtype=np.uint64),
        ),
        device=device,
    )
    return Draws(sampling, make_adjustments(sequences, vocab, device), _scored(sequences, device))


def _scored(sequences: Sequence[Running], device: torch.device) -> Wish | None:
    wanted = [
        (row, k)
        for row, sequence in enumerate(sequences)
        if (k := sequence.work.request.logprobs) is not None
    ]
    if not wanted:
        return None
    rows = np.array([row for row, _ in wanted], dtype=np.int64)
    return Wish(torch.from_numpy(rows).to(device=device, dtype=torch.int64), max(k for _, k in wanted))
