"""Attention in C++ on a CPU: one kernel for prefill and decode, over the blocks where they lie, no gather.

The arena's tensors are shaped `[N, B, D]` as everywhere, but the bytes of a block lie as the kernel reads
them: with P numbers to 4 bytes (2 of bfloat16, 1 of float32), K is `[D / P, B, P]` and V is `[B / P, D, P]`
(`native/csrc/blocks.h`). Only this backend reads and writes them so; copies of blocks move bytes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.attention.base import AttentionMeta, AttentionStep, LayerKV
from model.native.library import DTYPES, LANES, NativeLibrary


def unfit(dtype: torch.dtype, block_size: int, head_dim: int) -> str | None:
    """Why the kernels do not read such a cache, in a few words; None if they do."""
    if dtype not in DTYPES:
        return f"native kernels are for bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if block_size % LANES:
        return f"native kernels read blocks of a multiple of {LANES} tokens, not {block_size}"
    if head_dim % LANES:
        return f"native kernels need a head_dim that is a multiple of {LANES}, not {head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step as the kernels read it, all on the CPU."""

    row_tables: Tensor  # [max_rows, max_blocks] int32
    row_slot: Tensor  # [R] int64
    row_start: Tensor  # [S + 1] int32
    query_start: Tensor  # [S + 1] int32
    seq_len: Tensor  # [S] int32

    @classmethod
    def of(cls, meta: AttentionMeta) -> StepArrays:
        """No copies: the host arrays of `meta` are read where they are."""
        return cls(
            row_tables=meta.row_tables,
            row_slot=meta.row_slot,
            row_start=torch.from_numpy(meta.host_row_start),
            query_start=torch.from_numpy(meta.host_query_start),
            seq_len=torch.from_numpy(meta.host_seq_len),
        )


class NativeAttention:
    """The `AttentionBackend` of CPUs where the C++ operators are."""

    def __init__(self, library: NativeLibrary) -> None:
        self.name = "native"
        self.reason = f"C++ kernels, {library.about}"
        self._ops = library.ops

    def begin(self, meta: AttentionMeta) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        return NativeStep(self._ops, meta)

    def write(self, k: Tensor, v: Tensor, layer: LayerKV, slots: Tensor) -> None:
        """k, v `[N, D]` into slots `[N]` int64 (block id * B + offset), in the arena's dtype."""
        dtype = layer.k.dtype
        self._ops.write(k.to(dtype).contiguous(), v.to(dtype).contiguous(), layer.k, layer.v, slots)


class NativeStep:
    """One step; what a decoder in C++ needs of it is in `meta` and `arrays`."""

    def __init__(self, ops: Any, meta: AttentionMeta) -> None:
        self.meta = meta
        self.arrays = StepArrays.of(meta)
        self._ops = ops

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerKV, window: int | None) -> Tensor:
        """See `AttentionStep.forward`."""
        arrays, dtype = self.arrays, layer.k.dtype
        attended: Tensor = self._ops.attend(
            _heads_together(q.to(dtype)),
            k.to(dtype).contiguous(),
            v.to(dtype).contiguous(),
            layer.k,
            layer.v,
            arrays.row_tables,
            arrays.row_slot,
            arrays.row_start,
            arrays.query_start,
            arrays.seq_len,
            window or 0,
        )
        return attended.to(q.dtype)


def _heads_together(q: Tensor) -> Tensor:
    """q `[T, Hq, D]` with the heads of each token contiguous; tokens may lie apart, as in a fused q, k, v."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
