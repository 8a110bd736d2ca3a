"""What changes logits before a token is drawn from them: bans, so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """`banned`: (row, token id) pairs that cannot be drawn, int64 each."""

    banned: tuple[Tensor, Tensor]


def make_adjustments(banned: tuple[IdArray, IdArray] | None, device: torch.device) -> Adjustments | None:
    """Host arrays to one upload; None if nothing is to be changed."""
    if banned is None:
        return None
    both = torch.from_numpy(np.stack(banned)).to(device=device, dtype=torch.int64)
    return Adjustments(banned=(both[0], both[1]))


def adjust(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """logits `[S, V]` fp32 -> the same with every change made, as a copy."""
    nothing = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.index_put(adjustments.banned, nothing)
