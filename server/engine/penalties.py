"""Which ids a sequence's penalties see, and how often it generated each: counted once, then kept up to date.

A step sends one entry for each sequence, its last token's, and never looks at the text before it again; so
what a step costs the host does not depend on how long prompts and answers are. The tables belong to their
sequences: neither a preemption nor a failed step changes what a sequence has generated, and an abort lets
them go.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt
import torch

from model.adjust import Penalties
from server.engine.seen import Seen
from server.engine.sequence import Sequence

_FP32 = np.finfo(np.float32)
_News = list[tuple[int, int, int]]  # what is to be written into one table: (place, id, times generated)


def is_penalised(sequence: Sequence) -> bool:
    """Whether what it was told, or has said, changes its logits."""
    p = sequence.work.request.sampling
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


def make_penalties(
    sequences: Several[Sequence], rows: npt.NDArray[np.int64], vocab: int, device: torch.device
) -> Penalties | None:
    """For sequences of which `is_penalised` says so; `rows` `[P]` are theirs. None if no id is concerned."""
    tables = _up_to_date(sequences, vocab, device)
    sizes = np.array([seen.size for seen in tables], dtype=np.int64)
    total = int(sizes.sum())
    if total == 0:
        return None
    whole = torch.from_numpy(np.stack([rows, sizes])).to(device=device, dtype=torch.int64)
    params = [sequence.work.request.sampling for sequence in sequences]
    reals = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]).T
    reals[0] = reals[0].clip(_FP32.tiny, _FP32.max)  # in fp32 it must be neither 0 nor infinite
    sent = torch.from_numpy(reals.astype(np.float32)).to(device=device, dtype=torch.float32)
    entries = torch.cat([seen.entries for seen in tables], dim=1)
    each = torch.arange(len(tables), dtype=torch.int64, device=device)
    return Penalties(
        rows=whole[0],
        owner=torch.repeat_interleave(each, whole[1], output_size=total),
        ids=entries[0],
        counts=entries[1],
        repetition=sent[0],
        frequency=sent[1],
        presence=sent[2],
    )


def _up_to_date(sequences: Several[Sequence], vocab: int, device: torch.device) -> list[Seen]:
    """Each sequence's table, with all that it has generated in it. While it is being changed a sequence does
    not have it: if anything fails on the way, the next step makes it anew."""
    tables: list[Seen] = []
    news: list[_News] = []
    for sequence in sequences:
        seen = sequence.seen or _table(sequence, vocab, device)
        sequence.seen = None
        tokens = sequence.chain.tokens[len(sequence.prompt) + seen.taken : sequence.length].tolist()
        seen.taken += len(tokens)
        news.append(seen.count([token for token in tokens if 0 <= token < vocab]))
        tables.append(seen)
    _write(tables, news, device)
    for sequence, seen in zip(sequences, tables, strict=True):
        sequence.seen = seen
    return tables


def _table(sequence: Sequence, vocab: int, device: torch.device) -> Seen:
    """A new one; with the prompt's ids where a repetition penalty looks at them."""
    ids = np.zeros(0, dtype=np.int64)
    if sequence.work.request.sampling.repetition_penalty != 1.0:
        ids = np.unique(np.array(sequence.prompt, dtype=np.int64))
    return Seen(ids[(ids >= 0) & (ids < vocab)], device)


def _write(tables: Several[Seen], news: Several[_News], device: torch.device) -> None:
    """All new entries in one upload; then each table takes its own."""
    every = np.array([entry for one in news for entry in one], dtype=np.int64).reshape(-1, 3)
    if not len(every):
        return
    sent = torch.from_numpy(every[:, 1:].T.copy()).to(device=device, dtype=torch.int64)
    first = 0
    for seen, one in zip(tables, news, strict=True):
        if one:
            seen.write([place for place, _, _ in one], sent[:, first : first + len(one)])
            first += len(one)
