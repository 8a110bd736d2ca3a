"""What a decoder asks of an attention backend, and what a backend may know of a step.

Blocks and tables are those of PagedAttention (arXiv 2309.06180), but a block belongs to one KV head.
Attention sees **rows**. A row is one (sequence, KV head): a list of block ids and a length, read by
the `G` query heads of its group. Rows of different attention modes sit in the same step.

Two phases: `AttentionBackend.begin(meta)` once per step, `AttentionStep.forward` once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int32]


class LayerKV(Protocol):
    """One layer's view of the arena; `N` counts every block, the scratch block included."""

    @property
    def k(self) -> Tensor:
        """Keys `[N, B, D]`."""
        ...

    @property
    def v(self) -> Tensor:
        """Values `[N, B, D]`."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """One step, as attention sees it: `S` sequences, `R` rows, `T` query tokens on one flat axis.

    The rows of a sequence are contiguous and in the order of its KV heads; its tokens are contiguous
    on the token axis. `N` new K/V vectors are written: one per (token, KV head of its sequence),
    token-major, heads inner.

    `row_tables` is the persistent device table `[max_rows, max_blocks]`; row `r` of the step reads
    `row_tables[row_slot[r]]`. Entries past the row's length name blocks that are not the row's (0, or what
    an earlier row of that slot held): a backend that gathers them has to mask what it got, NaN included.
    `host_*` are host copies for code that must decide shapes without a device round trip.
    """

    block_size: int
    row_tables: Tensor  # [max_rows, max_blocks] int32
    row_slot: Tensor  # [R] int64, which row of row_tables
    row_len: Tensor  # [R] int32, KV tokens after this step's write
    row_seq: Tensor  # [R] int32, which sequence of the step
    row_kv_head: Tensor  # [R] int32
    row_layer_group: Tensor  # [R] int32
    row_q_head0: Tensor  # [R] int32, first query head that reads the row
    row_q_heads: Tensor  # [R] int32, how many do (G)
    query_start: Tensor  # [S + 1] int32, token range of each sequence
    positions: Tensor  # [T] int64, position of each query token
    kv_row: Tensor  # [N] int64, row of the step that each new K/V vector belongs to
    kv_pos: Tensor  # [N] int64, its position in that row
    host_row_start: IntArray  # [S + 1], row range of each sequence
    host_query_start: IntArray  # [S + 1]
    host_seq_len: IntArray  # [S], KV tokens after this step's write


class AttentionStep(Protocol):
    """A step in flight: metadata is ready, layers follow."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerKV, window: int | None) -> Tensor:
        """Write this step's K/V of one layer, then attend.

        q `[T, Hq, D]`; k, v `[N, D]` (see `AttentionMeta`); returns `[T, Hq, D]` in q's dtype.
        Causal; with a window, key j is visible to query i iff 0 <= i - j < window.
        """
        ...


class AttentionBackend(Protocol):
    """Reads and writes one arrangement of a block's bytes; the arena's tensors are `[N, B, D]` for all."""

    @property
    def name(self) -> str:
        """What reports and the start table call it."""
        ...

    @property
    def reason(self) -> str:
        """Why this backend was chosen, in a few words for the start table."""
        ...

    def begin(self, meta: AttentionMeta) -> AttentionStep:
        """What the step needs in every layer, worked out once."""
        ...

    def write(self, k: Tensor, v: Tensor, layer: LayerKV, slots: Tensor) -> None:
        """The only writer of tokens: k, v `[N, D]` into slots `[N]` int64 (block id * B + offset)."""
        ...


def as_device(array: npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host array as a device tensor of an explicit dtype (one copy)."""
    return torch.from_numpy(array).to(device=device, dtype=dtype)
