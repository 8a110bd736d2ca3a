"""What the reference backend gathers in a step: planned once from host arrays, used by every layer.

A layer's window decides which blocks are needed, so a step has one plan per window. Positions count
from the start of the gathered blocks where a mask is built, from the start of the row elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.attention.base import AttentionMeta, as_device

# K and V of one gather in fp32. A CPU wants the copy to stay in its caches (8 MiB is 4 times faster than 64
# for 16 sequences of 512 tokens and 9 KV heads); elsewhere a chunk costs a launch, so it may be large.
_CPU_DECODE_BYTES = 8 << 20
_DECODE_BYTES = 64 << 20
_PREFILL_BYTES = 64 << 20  # and the bound of one prefill mask in fp32
_ALIKE_TOKENS = 256  # rows that differ by less share a chunk: padding them costs less than another call

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """`R` rows that bring one query token each, padded to `L` gathered positions."""

    kv_heads: int
    rows: Tensor  # [R] int64 into the queries seen as [T * kv_heads, G, D]
    blocks: Tensor  # [R * L / B] int64 block ids
    hidden: Tensor  # [R, 1, L] bool: outside the row or its window
    stale: Tensor  # [n] int64 into the gathered [R * L]: past the end of the row


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Tokens `[start, stop)` of one sequence and its KV heads `[head_start, head_stop)`."""

    kv_heads: int
    start: int
    stop: int
    head_start: int
    head_stop: int
    blocks: Tensor  # [heads * blocks] int64 block ids
    length: int  # keys of each gathered row; the rest of its last block is cut off
    visible: Tensor | None  # [tokens, length] bool; None = plain causal


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The gathers of one step for the layers of one window."""

    decodes: tuple[DecodeChunk, ...]
    prefills: tuple[PrefillPart, ...]


def plan_step(meta: AttentionMeta, window: int | None, head_dim: int, device: torch.device) -> StepPlan:
    """The gathers of a step for layers of this window (tokens, None = full attention)."""
    planner = _Planner(meta, window, head_dim, device)
    return StepPlan(tuple(planner.decodes()), tuple(planner.prefills()))


class _Planner:
    def __init__(self, meta: AttentionMeta, window: int | None, head_dim: int, device: torch.device) -> None:
        self.meta = meta
        self.window = window
        self.device = device
        self.decode_bytes = _CPU_DECODE_BYTES if device.type == "cpu" else _DECODE_BYTES
        self.token_bytes = 2 * head_dim * torch.float32.itemsize
        self.row_start = meta.host_row_start.astype(np.int64)
        self.query_start = meta.host_query_start.astype(np.int64)
        self.seq_len = meta.host_seq_len.astype(np.int64)
        self.queries = np.diff(self.query_start)
        self.kv_heads = np.diff(self.row_start)

    def first_visible(self, position: Ints) -> Ints:
        """The earliest key that the query at `position` sees."""
        if self.window is None:
            return np.zeros_like(position)
        return np.maximum(position - self.window + 1, 0)

    def decodes(self) -> Iterator[DecodeChunk]:
        """Rows of one-token sequences, KV head counts apart, in chunks of like length."""
        single = np.flatnonzero(self.queries == 1)
        for kv_heads in np.unique(self.kv_heads[single]):
            sequences = single[self.kv_heads[single] == kv_heads]
            heads = np.tile(np.arange(kv_heads), len(sequences))
            sequences = np.repeat(sequences, kv_heads)
            length = self.seq_len[sequences]
            first_block = self.first_visible(length - 1) // self.meta.block_size
            span = -(-length // self.meta.block_size) - first_block
            for rows in _alike(span, self.meta.block_size, self.decode_bytes // self.token_bytes):
                yield self._decode_chunk(
                    int(kv_heads), sequences[rows], heads[rows], first_block[rows], int(span[rows].max())
                )

    def _decode_chunk(
        self, kv_heads: int, sequences: Ints, heads: Ints, first_block: Ints, blocks: int
    ) -> DecodeChunk:
        block = self.meta.block_size
        base = first_block * block
        length = self.seq_len[sequences]
        positions = np.arange(blocks * block)
        ends = (length - base)[:, None]
        starts = (self.first_visible(length - 1) - base)[:, None]
        stale = positions >= ends
        hidden = stale | (positions < starts)
        return DecodeChunk(
            kv_heads=kv_heads,
            rows=as_device(self.query_start[sequences] * kv_heads + heads, torch.int64, self.device),
            blocks=self._block_ids(self.row_start[sequences] + heads, first_block, blocks),
            hidden=as_device(hidden[:, None, :], torch.bool, self.device),
            stale=as_device(np.flatnonzero(stale), torch.int64, self.device),
        )

    def _block_ids(self, rows: Ints, first_block: Ints, blocks: int) -> Tensor:
        """Entries `[first_block, first_block + blocks)` of the rows' tables, flat `[R * blocks]` int64.

        A column past the table stands for one past the row's end: any block will do.
        """
        tables = self.meta.row_tables
        columns = np.minimum(first_block[:, None] + np.arange(blocks), tables.shape[1] - 1)
        slots = self.meta.row_slot.index_select(0, as_device(rows, torch.int64, self.device))
        ids = tables[slots.unsqueeze(1), as_device(columns, torch.int64, self.device)]
        return ids.flatten().long()

    def prefills(self) -> Iterator[PrefillPart]:
        """Sequences of several tokens, cut so that a mask and a gather stay within their bound."""
        for sequence in np.flatnonzero(self.queries > 1):
            length, kv_heads = int(self.seq_len[sequence]), int(self.kv_heads[sequence])
            stop = int(self.query_start[sequence + 1])
            shift = length - stop  # position of a token minus its place on the token axis
            tokens = max(1, _PREFILL_BYTES // (torch.float32.itemsize * length))
            heads = max(1, _PREFILL_BYTES // (self.token_bytes * length))
            for start in range(int(self.query_start[sequence]), stop, tokens):
                end = min(start + tokens, stop)
                for head in range(0, kv_heads, heads):
                    head_range = (head, min(head + heads, kv_heads))
                    yield self._prefill_part(int(sequence), kv_heads, (start, end), shift, head_range)

    def _prefill_part(
        self, sequence: int, kv_heads: int, tokens: tuple[int, int], shift: int, heads: tuple[int, int]
    ) -> PrefillPart:
        block = self.meta.block_size
        positions = np.arange(tokens[0] + shift, tokens[1] + shift)
        end = int(positions[-1]) + 1
        first_block = int(self.first_visible(positions)[0]) // block
        blocks = -(-end // block) - first_block
        keys = np.arange(first_block * block, end)
        visible = None
        if len(positions) != len(keys) or (self.window is not None and len(keys) > self.window):
            seen = keys <= positions[:, None]
            if self.window is not None:
                seen &= keys > positions[:, None] - self.window
            visible = as_device(seen, torch.bool, self.device)
        rows = int(self.row_start[sequence]) + np.arange(heads[0], heads[1])
        return PrefillPart(
            kv_heads=kv_heads,
            start=tokens[0],
            stop=tokens[1],
            head_start=heads[0],
            head_stop=heads[1],
            blocks=self._block_ids(rows, np.full(len(rows), first_block), blocks),
            length=len(keys),
            visible=visible,
        )


def _alike(span: Ints, block: int, most_tokens: int) -> Iterator[Ints]:
    """Indices of rows by how many blocks they span, longest first: chunks of at most `most_tokens` padded
    tokens (but one row at least), in which no long row pads rows of less than half its length."""
    order = np.argsort(-span, kind="stable")
    start = 0
    while start < len(order):
        longest = int(span[order[start]])
        least = min(longest // 2, longest - _ALIKE_TOKENS // block)
        stop = min(start + max(1, most_tokens // (block * longest)), len(order))
        stop = start + int(np.searchsorted(-span[order[start:stop]], -least, side="right"))
        yield np.sort(order[start:stop])
        start = stop
