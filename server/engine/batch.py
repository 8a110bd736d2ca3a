"""Step 5 of a request's trip: a plan becomes flat arrays, and each array one upload at most.

Everything here is numpy over whole steps; the only Python loop is over sequences, never over tokens or rows.
Host arrays of one dtype are packed into one buffer, sent once, and split into views on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.attention.base import AttentionMeta, IntArray
from model.heads import Segment, Variant
from model.sampler import make_sampling
from server.engine.draws import Draws, Wish, how_to_draw
from server.engine.scheduler import Scheduled

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptWish:
    """Prompt tokens that are to be scored, each under the logits after the one before it."""

    positions: Tensor  # [M] int64, on the token axis: the ones before
    ids: Tensor  # [M] int64
    best: int  # how many of the likeliest tokens beside them, the most that any of them wants


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All that the runner needs for one step of `T` tokens, `N` of whose positions are drawn from."""

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    meta: AttentionMeta
    wanted: Tensor  # [N] int64, positions on the token axis
    draws: Draws | None  # None if N is 0
    prompt: PromptWish | None  # None if M is 0
    drawn: tuple[int, ...]  # which entries of the plan the N rows belong to; one with drafts has several


@dataclass(frozen=True, slots=True)
class Shape:
    """What is the same in every step."""

    block_size: int
    q_heads: int
    variants: Mapping[str, Variant]
    device: torch.device
    vocab: int  # logits of a row


def build_batch(
    entries: Sequence[Scheduled], first_rows: Sequence[int], row_tables: Tensor, shape: Shape
) -> ForwardBatch:
    """`first_rows[i]` is the first row of `row_tables` that belongs to `entries[i]`'s sequence."""
    count = np.array([entry.tokens for entry in entries], dtype=np.int64)
    start = np.array([entry.start for entry in entries], dtype=np.int64)
    heads = np.array([_variant(entry, shape).kv_heads for entry in entries], dtype=np.int64)
    query_start = _starts(count)
    ids = np.concatenate([_ids(entry) for entry in entries])
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], count)
    meta = _meta(count, start, heads, query_start, positions, first_rows, row_tables, shape)
    drawing = [entry for entry in entries if entry.draws]
    drawn = tuple(i for i, entry in enumerate(entries) if entry.draws for _ in range(1 + len(entry.drafts)))
    rows = np.array(drawn, dtype=np.int64)
    # A sequence's rows are its last tokens: counted from the end of its run to the end of its rows.
    wanted = query_start[1:][rows] - _from_the_end(rows)
    draws = how_to_draw(drawing, shape.vocab, shape.device) if drawing else None
    ids_d, wanted_d = _upload([ids, wanted], torch.int64, shape.device)
    return ForwardBatch(
        ids=ids_d,
        positions=meta.positions,
        segments=_segments(entries, query_start, shape),
        meta=meta,
        wanted=wanted_d,
        draws=draws,
        prompt=_prompt_wish(entries, query_start, shape.device),
        drawn=drawn,
    )


def lone_batch(
    variant: str, ids: Int64Array, start: int, wanted: int, row_tables: Tensor, shape: Shape
) -> ForwardBatch:
    """A step of one sequence whose rows are the first of `row_tables`: `ids` at positions `start` and after.

    The logits after each of the last `wanted` ones are asked for, and nothing is drawn.
    """
    one = np.array([len(ids)], dtype=np.int64)
    heads = np.array([shape.variants[variant].kv_heads], dtype=np.int64)
    positions = np.arange(start, start + len(ids), dtype=np.int64)
    meta = _meta(
        one, np.array([start], dtype=np.int64), heads, _starts(one), positions, [0], row_tables, shape
    )
    last = np.arange(len(ids) - wanted, len(ids), dtype=np.int64)
    flat, rows = _upload([ids, last], torch.int64, shape.device)
    segments = (Segment(shape.variants[variant].head_map, 0, len(ids)),)
    return ForwardBatch(flat, meta.positions, segments, meta, rows, None, None, ())


def made_up_batch(
    variant: str,
    start: int,
    count: int,
    wanted: int,
    row_tables: Tensor,
    shape: Shape,
    best: int | None = None,
) -> ForwardBatch:
    """A step that belongs to nobody, to try the engine or to measure it.

    Tokens `[start, start + count)` of one sequence, all of id 0, whose rows are the first of `row_tables`;
    after each of the last `wanted` ones a token is drawn at temperature 1. With `best` each of them
    is scored, and so is each of the `count` tokens, as a prompt's are, beside so many of the likeliest.
    """
    ids = np.zeros(count, dtype=np.int64)
    ones, zeros = np.ones(wanted), np.zeros(wanted)
    sampling = make_sampling(
        temperature=ones,
        top_p=ones,
        top_k=zeros.astype(np.int64),
        min_p=zeros,
        key=zeros.astype(np.int64),
        device=shape.device,
    )
    batch = lone_batch(variant, ids, start, wanted, row_tables, shape)
    if best is None:
        return replace(batch, draws=Draws(sampling, None, None))
    rows, every = (torch.arange(n, dtype=torch.int64, device=shape.device) for n in (wanted, count))
    draws = Draws(sampling, None, Wish(rows, best))
    return replace(batch, draws=draws, prompt=PromptWish(every, batch.ids, best))


def _ids(entry: Scheduled) -> npt.NDArray[np.integer]:
    known = entry.sequence.chain.tokens[entry.start : entry.start + entry.count]
    return np.concatenate([known, np.array(entry.drafts, dtype=known.dtype)]) if entry.drafts else known


def _from_the_end(runs: Int64Array) -> Int64Array:
    """For ascending numbers: 1 for the last of each run of equals, 2 for the one before it, and so on."""
    return np.searchsorted(runs, runs, side="right") - np.arange(len(runs))


def _prompt_wish(
    entries: Sequence[Scheduled], query_start: Int64Array, device: torch.device
) -> PromptWish | None:
    owing = [
        (entry, first) for entry, first in zip(entries, query_start.tolist(), strict=False) if entry.owed
    ]
    if not owing:
        return None
    positions, ids = [], []
    for entry, first in owing:
        owed = entry.owed
        positions.append(np.arange(owed.start, owed.stop, dtype=np.int64) + (first - entry.start))
        ids.append(entry.sequence.chain.tokens[owed.start + 1 : owed.stop + 1])
    where, what = _upload([np.concatenate(positions), np.concatenate(ids)], torch.int64, device)
    return PromptWish(
        where, what, max(entry.sequence.work.request.prompt_logprobs or 0 for entry, _ in owing)
    )


def _meta(
    count: Int64Array,
    start: Int64Array,
    heads: Int64Array,
    query_start: Int64Array,
    positions: Int64Array,
    first_rows: Sequence[int],
    row_tables: Tensor,
    shape: Shape,
) -> AttentionMeta:
    """Rows of a sequence are contiguous and in head order; new K/V vectors are token-major, heads inner."""
    row_start = _starts(heads)
    row_seq = np.repeat(np.arange(len(heads)), heads)
    row_head = np.arange(row_start[-1]) - row_start[row_seq]
    row_slot = np.asarray(first_rows, dtype=np.int64)[row_seq] + row_head
    row_len = (start + count)[row_seq]
    group = shape.q_heads // heads[row_seq]
    token_heads = np.repeat(heads, count)  # of each token's sequence
    token_row = np.repeat(row_start[:-1], count)
    inner = np.arange(token_heads.sum()) - np.repeat(_starts(token_heads)[:-1], token_heads)
    kv_row = np.repeat(token_row, token_heads) + inner
    kv_pos = np.repeat(positions, token_heads)
    wide = _upload([row_slot, positions, kv_row, kv_pos], torch.int64, shape.device)
    narrow = _upload(
        [row_len, row_seq, row_head, np.zeros_like(row_seq), row_head * group, group, query_start],
        torch.int32,
        shape.device,
    )
    return AttentionMeta(
        block_size=shape.block_size,
        row_tables=row_tables,
        row_slot=wide[0],
        row_len=narrow[0],
        row_seq=narrow[1],
        row_kv_head=narrow[2],
        row_layer_group=narrow[3],
        row_q_head0=narrow[4],
        row_q_heads=narrow[5],
        query_start=narrow[6],
        positions=wide[1],
        kv_row=wide[2],
        kv_pos=wide[3],
        host_row_start=_narrow(row_start),
        host_query_start=_narrow(query_start),
        host_seq_len=_narrow(start + count),
    )


def _segments(entries: Sequence[Scheduled], query_start: Int64Array, shape: Shape) -> tuple[Segment, ...]:
    segments = []
    first = 0
    for name, group in groupby(entry.sequence.work.request.variant for entry in entries):
        last = first + sum(1 for _ in group)
        start, stop = int(query_start[first]), int(query_start[last])
        segments.append(Segment(shape.variants[name].head_map, start, stop))
        first = last
    return tuple(segments)


def _variant(entry: Scheduled, shape: Shape) -> Variant:
    return shape.variants[entry.sequence.work.request.variant]


def _starts(counts: Int64Array) -> Int64Array:
    """`[n + 1]`: where each of `n` runs of these lengths begins, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts)])


def _narrow(array: Int64Array) -> IntArray:
    return array.astype(np.int32)


def _upload(
    arrays: Sequence[npt.NDArray[np.integer]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Several host arrays as one buffer, one copy, and views of it."""
    packed = np.concatenate(arrays)
    host = torch.from_numpy(packed.astype(np.int64 if dtype == torch.int64 else np.int32, copy=False))
    sent = host.to(device=device, dtype=dtype)
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    return tuple(sent[end - len(array) : end] for array, end in zip(arrays, ends, strict=True))
