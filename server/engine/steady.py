"""Batches of an engine, one after the other: where everybody decodes, little differs from the step before.

What stays the same while the same sequences decode (rows, heads, segments, sampling parameters) is kept, and
only ids, positions, lengths and keys are made anew. After a model has run, no cache of the processor holds
what a step's bookkeeping needs, so each array that is not made is half a dozen misses less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cache.manager import CacheManager
from model.attention.base import AttentionMeta, IntArray, as_device
from model.randomness import keys_at, row_states
from model.sampler import GREEDY_TEMPERATURE, SamplingBatch
from server.engine.adjustments import changes_logits, make_adjustments
from server.engine.batch import ForwardBatch, Int64Array, Shape, build_batch
from server.engine.draws import Draws
from server.engine.scheduler import Scheduled


class Batches:
    """Builds what `build_batch` builds; quicker where only lengths have changed since the last one."""

    def __init__(self, manager: CacheManager, shape: Shape) -> None:
        self._manager = manager
        self._shape = shape
        self._steady: _Steady | None = None

    def build(self, entries: Sequence[Scheduled]) -> ForwardBatch:
        """The batch of a step."""
        steady = self._steady
        if steady is not None and steady.fits(entries):
            return steady.next(entries)
        self._steady = None
        rows = [self._first_row(entry) for entry in entries]
        batch = build_batch(entries, rows, self._manager.row_tables, self._shape)
        if all(_decodes(entry) for entry in entries):
            self._steady = _Steady(entries, batch, self._shape)
        return batch

    def forget(self) -> None:
        """Keep nothing of the last batch: its sequences have ended, and would live until the next one."""
        self._steady = None

    def _first_row(self, entry: Scheduled) -> int:
        assert entry.sequence.slot is not None
        return self._manager.table_rows(entry.sequence.slot).start


def _decodes(entry: Scheduled) -> bool:
    """One token runs, which is its last, and the next one is drawn."""
    return entry.count == 1 and entry.draws and not entry.drafts


class _Steady:
    """A step in which everybody decodes, and the next ones of the same sequences in the same slots."""

    def __init__(self, entries: Sequence[Scheduled], batch: ForwardBatch, shape: Shape) -> None:
        assert batch.draws is not None
        self._sequences = [entry.sequence for entry in entries]
        self._slots = [entry.sequence.slot for entry in entries]
        self._batch = batch
        self._shape = shape
        self._row_seq = np.repeat(np.arange(len(entries)), np.diff(batch.meta.host_row_start))
        self._plain = not any(changes_logits(sequence) for sequence in self._sequences)
        params = [sequence.work.request.sampling for sequence in self._sequences]
        racing = [row for row, p in enumerate(params) if p.temperature >= GREEDY_TEMPERATURE]
        self._racing = [self._sequences[row] for row in racing]
        self._states = row_states(
            np.array([params[row].seed for row in racing], dtype=np.uint64),
            np.array([sequence.copy for sequence in self._racing], dtype=np.uint64),
        )

    def fits(self, entries: Sequence[Scheduled]) -> bool:
        """Whether it is the turn of the same sequences again, where they were."""
        return len(entries) == len(self._sequences) and all(
            entry.sequence is sequence and sequence.slot == slot and _decodes(entry)
            for entry, sequence, slot in zip(entries, self._sequences, self._slots, strict=True)
        )

    def next(self, entries: Sequence[Scheduled]) -> ForwardBatch:
        """The batch of these entries; its parts that stay are those of the first."""
        first = self._batch
        ids = np.array([sequence.last for sequence in self._sequences], dtype=np.int64)
        start = np.array([entry.start for entry in entries], dtype=np.int64)
        places = start[self._row_seq]
        count = len(start)
        sent = as_device(np.concatenate([ids, start, places]), torch.int64, self._shape.device)
        meta = self._meta(sent[count : 2 * count], sent[2 * count :], (places + 1).astype(np.int32), start)
        return ForwardBatch(
            ids=sent[:count],
            positions=meta.positions,
            segments=first.segments,
            meta=meta,
            wanted=first.wanted,
            draws=self._draws(),
            prompt=None,
            drawn=first.drawn,
        )

    def _meta(
        self,
        positions: Tensor,
        kv_pos: Tensor,
        row_len: IntArray,
        start: Int64Array,
    ) -> AttentionMeta:
        """A token each, so that each row gets one new K and V, in the order of the rows."""
        old = self._batch.meta
        return AttentionMeta(
            block_size=old.block_size,
            row_tables=old.row_tables,
            row_slot=old.row_slot,
            row_len=as_device(row_len, torch.int32, self._shape.device),
            row_seq=old.row_seq,
            row_kv_head=old.row_kv_head,
            row_layer_group=old.row_layer_group,
            row_q_head0=old.row_q_head0,
            row_q_heads=old.row_q_heads,
            query_start=old.query_start,
            positions=positions,
            kv_row=old.kv_row,
            kv_pos=kv_pos,
            host_row_start=old.host_row_start,
            host_query_start=old.host_query_start,
            host_seq_len=(start + 1).astype(np.int32),
        )

    def _draws(self) -> Draws:
        first = self._batch.draws
        assert first is not None
        if self._plain and not self._racing:
            return first
        adjustments = None
        if not self._plain:
            adjustments = make_adjustments(self._sequences, self._shape.vocab, self._shape.device)
        return Draws(self._sampling(first.sampling), adjustments, first.scored)

    def _sampling(self, first: SamplingBatch) -> SamplingBatch:
        """The same parameters, each at its next position."""
        if not self._racing:
            return first
        keys = keys_at(self._states, np.array([s.output for s in self._racing], dtype=np.uint64))
        return SamplingBatch(
            rows=first.rows,
            temperature=first.temperature,
            top_p=first.top_p,
            min_p=first.min_p,
            top_k=first.top_k,
            key=as_device(keys, torch.int64, self._shape.device)[:, None],
        )
