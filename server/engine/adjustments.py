"""What the requests of a step ask to have changed in their rows of logits; who asks for nothing pays nothing.

What a request asks for all its life, its biases and the ids that end it, is sent to the device once. An id
outside the vocabulary is left out: in a flat view of all rows it would be an entry of somebody else's.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.adjust import Adjustments, Bias, Mask
from server.engine.penalties import is_penalised, make_penalties
from server.engine.sequence import Sequence, Work


def changes_logits(sequence: Sequence) -> bool:
    """Whether its logits are changed now or may come to be; if not, they never will."""
    request = sequence.work.request
    return (
        bool(request.sampling.logit_bias)
        or is_penalised(sequence)
        or request.constraint is not None
        or (sequence.output < request.min_tokens and bool(request.stop_ids))
    )


def make_adjustments(sequences: Several[Sequence], vocab: int, device: torch.device) -> Adjustments | None:
    """For the sequences that draw, a row of `vocab` logits each and in order; None if nothing is changed."""
    biased, banned, penalised, masked = [], [], [], []
    for row, sequence in enumerate(sequences):
        request = sequence.work.request
        if request.sampling.logit_bias:
            biased.append(row)
        if sequence.output < request.min_tokens and request.stop_ids:
            banned.append(row)
        if is_penalised(sequence):
            penalised.append(row)
        if request.constraint is not None:
            masked.append(row)
    if not (biased or banned or penalised or masked):
        return None
    chosen = [sequences[row] for row in penalised]
    return Adjustments(
        bias=_bias(sequences, biased, vocab, device) if biased else None,
        penalties=make_penalties(chosen, _array(penalised), vocab, device) if penalised else None,
        banned=_banned(sequences, banned, vocab, device) if banned else None,
        mask=_mask(sequences, masked, vocab, device) if masked else None,
    )


def _bias(sequences: Several[Sequence], rows: list[int], vocab: int, device: torch.device) -> Bias:
    parts = []
    for row in rows:
        work = sequences[row].work
        if work.bias is None:
            work.bias = _sent_bias(work, vocab, device)
        parts.append(work.bias)
    ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return Bias(_spread(rows, [part[0] for part in parts], device), ids, values)


def _sent_bias(work: Work, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids int64 and what is added to them fp32."""
    pairs = [(token, value) for token, value in work.request.sampling.logit_bias if 0 <= token < vocab]
    ids = torch.from_numpy(_array([token for token, _ in pairs]))
    values = torch.from_numpy(np.array([value for _, value in pairs], dtype=np.float32))
    return ids.to(device=device, dtype=torch.int64), values.to(device=device, dtype=torch.float32)


def _banned(
    sequences: Several[Sequence], rows: list[int], vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows and ids: what would end an answer that is too short yet."""
    parts = []
    for row in rows:
        work = sequences[row].work
        if work.bans is None:
            ids = _array([token for token in sorted(work.request.stop_ids) if 0 <= token < vocab])
            work.bans = torch.from_numpy(ids).to(device=device, dtype=torch.int64)
        parts.append(work.bans)
    return _spread(rows, parts, device), torch.cat(parts)


def _mask(sequences: Several[Sequence], rows: list[int], vocab: int, device: torch.device) -> Mask:
    """What each sequence's grammar allows next."""
    bits = np.zeros((len(rows), -(-vocab // 32)), dtype=np.int32)
    for row, words in zip(rows, bits, strict=True):
        matcher = sequences[row].matcher
        assert matcher is not None
        matcher.fill(words)
    numbers = torch.from_numpy(_array(rows)).to(device=device, dtype=torch.int64)
    return Mask(numbers, torch.from_numpy(bits).to(device=device, dtype=torch.int32))


def _spread(rows: list[int], parts: list[Tensor], device: torch.device) -> Tensor:
    """Each row as often as its part has entries."""
    sizes = [len(part) for part in parts]
    whole = torch.from_numpy(np.stack([_array(rows), _array(sizes)])).to(device=device, dtype=torch.int64)
    return torch.repeat_interleave(whole[0], whole[1], output_size=sum(sizes))


def _array(numbers: list[int]) -> npt.NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)
