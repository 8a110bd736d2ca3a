"""How the tokens of a step are drawn: each sequence's parameters, as arrays over the rows that draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model.adjust import Adjustments, make_adjustments
from model.randomness import uniform
from model.sampler import SamplingBatch, make_sampling
from server.engine.scheduler import Scheduled


def how_to_draw(
    entries: Sequence[Scheduled], device: torch.device
) -> tuple[SamplingBatch, Adjustments | None]:
    """For the entries of a step that draw, a row each and in order."""
    sequences = [entry.sequence for entry in entries]
    params = [sequence.work.request.sampling for sequence in sequences]
    banned = [
        (row, sorted(sequence.work.request.stop_ids))
        for row, sequence in enumerate(sequences)
        if sequence.output < sequence.work.request.min_tokens and sequence.work.request.stop_ids
    ]
    pairs = None
    if banned:
        rows = np.repeat([row for row, _ in banned], [len(ids) for _, ids in banned])
        pairs = rows.astype(np.int64), np.concatenate([np.array(ids, dtype=np.int64) for _, ids in banned])
    sampling = make_sampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float64),
        top_p=np.array([p.top_p for p in params], dtype=np.float64),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        min_p=np.array([p.min_p for p in params], dtype=np.float64),
        u=uniform(
            np.array([p.seed for p in params], dtype=np.uint64),
            np.array([sequence.copy for sequence in sequences], dtype=np.uint64),
            np.array([sequence.output for sequence in sequences], dtype=np.uint64),
        ),
        device=device,
    )
    return sampling, make_adjustments(pairs, device)
