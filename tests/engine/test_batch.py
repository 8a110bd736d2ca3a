"""The vectorised batch against a plain one built token by token, row by row."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.heads import NativeHeads, RepeatHeads, Variant
from server.engine.batch import Shape, build_batch, made_up_batch
from server.engine.request import Request, SamplingParams, TokenScore
from server.engine.scheduler import Scheduled
from server.engine.sequence import Work

VARIANTS = {"mha": Variant("mha", RepeatHeads(8)), "mqa": Variant("mqa", NativeHeads(1)),
            "native": Variant("native", NativeHeads(4))}  # fmt: skip
SHAPE = Shape(block_size=16, q_heads=8, variants=VARIANTS, device=torch.device("cpu"), vocab=100)


def random_entries(seed: int) -> list[Scheduled]:
    """In the order of their modes, as a plan has them; chunks, whole prompts and decodes."""
    dice = random.Random(seed)
    entries = []
    for name in sorted(VARIANTS):
        for _ in range(dice.randrange(0 if entries else 1, 5)):
            prompt = tuple(dice.randrange(100) for _ in range(dice.randrange(1, 50)))
            stops = frozenset(dice.sample(range(100), dice.randrange(4)))
            request = Request(
                id=str(dice.random()), variant=name, prompts=(prompt,), n=2, max_tokens=9,
                sampling=SamplingParams(dice.choice([0.0, 0.8]), seed=dice.randrange(2**64)),
                cache_root=bytes(32), min_tokens=dice.choice([0, 3]), stop_ids=stops,
                logprobs=dice.choice([None, 0, 3]), prompt_logprobs=dice.choice([None, 0, 5]),
            )  # fmt: skip
            sequence = Work(request, 0, 0, 16).sequences[dice.randrange(2)]
            for _ in range(dice.randrange(5)):
                sequence.append(dice.randrange(100))
            start = dice.randrange(sequence.length)
            if sequence.prompt_scores is not None:  # some are known, and what is not known runs
                start = min(start, len(prompt) - 1)
                sequence.prompt_scores.extend([TokenScore(0.0)] * dice.randrange(start, len(prompt)))
            entries.append(Scheduled(sequence, start, dice.randrange(1, sequence.length - start + 1)))
    return entries


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_plain_batch(seed: int) -> None:
    entries = random_entries(seed)
    first_rows = [100 * i + 7 for i in range(len(entries))]
    tables = torch.zeros(1, 1, dtype=torch.int32)
    batch = build_batch(entries, first_rows, tables, SHAPE)
    ids: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    rows: list[tuple[int, ...]] = []  # slot, len, seq, kv head, group, q_head0, q_heads
    kv: list[tuple[int, int]] = []
    query_start, row_start, lengths = [0], [0], []
    for number, entry in enumerate(entries):
        heads = VARIANTS[entry.sequence.work.request.variant].kv_heads
        tokens = entry.sequence.chain.tokens.tolist()
        for position in range(entry.start, entry.start + entry.count):
            ids.append(tokens[position])
            positions.append(position)
            kv += [(row_start[-1] + head, position) for head in range(heads)]
        if entry.start + entry.count == len(tokens):
            wanted.append(len(ids) - 1)
        length = entry.start + entry.count
        rows += [
            (first_rows[number] + head, length, number, head, 0, head * 8 // heads, 8 // heads)
            for head in range(heads)
        ]
        query_start.append(len(ids))
        row_start.append(row_start[-1] + heads)
        lengths.append(length)
    meta = batch.meta
    columns = (meta.row_slot, meta.row_len, meta.row_seq, meta.row_kv_head, meta.row_layer_group,
               meta.row_q_head0, meta.row_q_heads)  # fmt: skip
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == rows
    assert batch.ids.tolist() == ids
    assert batch.positions.tolist() == meta.positions.tolist() == positions
    assert batch.wanted.tolist() == wanted
    assert list(zip(meta.kv_row.tolist(), meta.kv_pos.tolist(), strict=True)) == kv
    assert meta.query_start.tolist() == meta.host_query_start.tolist() == query_start
    assert meta.host_row_start.tolist() == row_start
    assert meta.host_seq_len.tolist() == lengths
    assert batch.drawn == tuple(i for i, entry in enumerate(entries) if entry.draws)
    assert_segments(batch, entries)
    assert_dtypes(meta)
    assert_banned(batch, entries)
    assert_scored(batch, entries, query_start)


def assert_segments(batch: Any, entries: list[Scheduled]) -> None:
    covered = [
        segment.head_map.kv_heads for segment in batch.segments for _ in range(segment.stop - segment.start)
    ]
    assert covered == [
        VARIANTS[entry.sequence.work.request.variant].kv_heads
        for entry in entries
        for _ in range(entry.count)
    ]
    names = [entry.sequence.work.request.variant for entry in entries]
    assert len(batch.segments) == len(set(names))


def assert_dtypes(meta: Any) -> None:
    int64 = {"row_slot", "positions", "kv_row", "kv_pos"}
    for name in type(meta).__slots__:
        value = getattr(meta, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == (torch.int64 if name in int64 else torch.int32), name
        elif name.startswith("host_"):
            assert value.dtype == "int32", name


def assert_banned(batch: Any, entries: list[Scheduled]) -> None:
    drawn = [entries[i].sequence for i in batch.drawn]
    expected = [
        (row, token)
        for row, sequence in enumerate(drawn)
        if sequence.output < sequence.work.request.min_tokens
        for token in sorted(sequence.work.request.stop_ids)
    ]
    if batch.draws is None:
        assert not drawn
    elif batch.draws.adjustments is None:
        assert not expected
    else:
        assert list(zip(*(part.tolist() for part in batch.draws.adjustments.banned), strict=True)) == expected


def assert_scored(batch: Any, entries: list[Scheduled], query_start: list[int]) -> None:
    drawn = [entries[i].sequence.work.request.logprobs for i in batch.drawn]
    wishes = [(row, best) for row, best in enumerate(drawn) if best is not None]
    if batch.draws is None or batch.draws.scored is None:
        assert not wishes
    else:
        assert batch.draws.scored.rows.tolist() == [row for row, _ in wishes]
        assert batch.draws.scored.best == max(best for _, best in wishes)
    owed: list[
        tuple[int, int, int]
    ] = []  # position on the token axis, the id to score there, how many beside
    for number, entry in enumerate(entries):
        scores, request = entry.sequence.prompt_scores, entry.sequence.work.request
        for position in range(entry.start, entry.start + entry.count):
            if scores is not None and scores.run <= position < len(entry.sequence.prompt) - 1:
                at = query_start[number] + position - entry.start
                owed.append((at, entry.sequence.prompt[position + 1], request.prompt_logprobs or 0))
    if batch.prompt is None:
        assert not owed
    else:
        assert batch.prompt.positions.tolist() == [at for at, _, _ in owed]
        assert batch.prompt.ids.tolist() == [token for _, token, _ in owed]
        assert batch.prompt.best == max(best for _, _, best in owed)


def test_made_up_batch_is_the_end_of_one_long_sequence() -> None:
    tables = torch.zeros(8, 40, dtype=torch.int32)
    batch = made_up_batch("mha", 600, 20, 3, tables, SHAPE)
    meta = batch.meta
    assert batch.positions.tolist() == list(range(600, 620))
    assert batch.wanted.tolist() == [17, 18, 19]
    assert meta.host_seq_len.tolist() == [620] and meta.row_len.tolist() == [620] * 8
    assert meta.host_query_start.tolist() == [0, 20] and meta.row_slot.tolist() == list(range(8))
    assert batch.draws is not None and batch.draws.sampling.key.shape == (3, 1)
    assert SimpleNamespace(start=0, stop=20, kv_heads=8) == SimpleNamespace(
        start=batch.segments[0].start, stop=batch.segments[0].stop,
        kv_heads=batch.segments[0].head_map.kv_heads,
    )  # fmt: skip
