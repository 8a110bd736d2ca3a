"""Who is drawn, once it is known which tokens are kept: a race in two heats.

The vocabulary stands in blocks of BLOCK ids. Each block that has kept tokens runs for as long as its own
exponential noise (`model/randomness.py`) divided by what its kept tokens weigh, and the first to arrive wins;
then the kept tokens of that block run the same way. The least of exponential times falls on each with
probability proportional to its rate, so that a token wins with its share of the whole weight.

An inverse of the running sum would do that too, but not calmly: logits of the same sequence differ in their
last bits from one batch to another, and where thousands of tokens are nearly as likely, that moves thousands
of boundaries, or tokens past each other. It gave another token in one draw of 200 at temperature 1 over
49,152 tokens. Here another token wins only if the times of two were that close: one draw in about a million.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.randomness import exponential

BLOCK = 256
_TOKENS = 2**32  # what a token's counter adds to its id; a block's counter is its number


def block_count(vocab: int) -> int:
    """Blocks of a vocabulary; the last may be short."""
    return -(-vocab // BLOCK)


def block_sums(units: Tensor) -> Tensor:
    """units `[D, V]` int64 -> what each block weighs, `[D, blocks]`."""
    short = -units.shape[1] % BLOCK
    if short:
        units = torch.nn.functional.pad(units, (0, short))
    return units.view(units.shape[0], -1, BLOCK).sum(-1)


def race_of_blocks(key: Tensor, sums: Tensor) -> Tensor:
    """key `[D, 1]` int64, sums `[D, blocks]` -> each row's block `[D, 1]` int64."""
    block = torch.arange(sums.shape[1], dtype=torch.int64, device=sums.device)
    return _times(key, block, sums).argmin(-1, keepdim=True)


def race_of_tokens(key: Tensor, token: Tensor, units: Tensor) -> Tensor:
    """token, units `[D, n]` int64 of one block of each row -> the place `[D, 1]` of the winner among the n.

    Tokens that weigh nothing do not run.
    """
    return _times(key, token + _TOKENS, units).argmin(-1, keepdim=True)


def _times(key: Tensor, counter: Tensor, units: Tensor) -> Tensor:
    return exponential(key, counter) / units  # by zero: never
