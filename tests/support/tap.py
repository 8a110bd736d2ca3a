"""Listens to the decoder inside an engine: the logits of every token that it runs, asked for or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.base import AttentionMeta
from model.attention.native import NativeAttention
from model.attention.reference import ReferenceAttention
from model.decoder import Decoder
from tests.support.equality import assert_same_logits


@dataclass
class Run:
    """Tokens that one place in the cache computed one after the other: `ids` at positions `start`, ..."""

    start: int
    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [n, V] each
    chunks: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass
class Tap:
    """What was heard. A sequence that was pushed out and computed again shows up as several runs."""

    runs: list[Run] = field(default_factory=list)
    steps: int = 0
    _open: dict[int, Run] = field(default_factory=dict)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def hear(self, meta: AttentionMeta, ids: Tensor, logits: Tensor) -> None:
        """One step: ids `[T]`, logits `[T, V]`."""
        self.steps += 1
        starts, tokens = meta.host_query_start.tolist(), ids.tolist()
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            place = int(meta.row_slot[int(meta.host_row_start[i])])
            position = int(meta.positions[first])
            run = self._open.get(place)
            if run is None or run.stop != position:
                run = self._open[place] = Run(position)
                self.runs.append(run)
            run.ids += tokens[first:last]
            run.logits.append(logits[first:last].clone())
            run.chunks += 1

    def check(self, text: Sequence[int], reference: Tensor, where: str = "") -> list[Run]:
        """Every run that computed part of `text` gave the reference's logits `[len(text), V]`; those runs."""
        found = [run for run in self.runs if list(text[run.start : run.stop]) == run.ids]
        assert found, f"{where}: nothing was computed for this text"
        for run in found:
            rows = reference[run.start : run.stop]
            assert_same_logits(
                torch.cat(run.logits), rows, f"{where}, positions {run.start} to {run.stop - 1}"
            )
        return found


@contextmanager
def listen() -> Iterator[Tap]:
    """Every decoder of this process is heard while the context lasts; what it returns does not change."""
    tap = Tap()
    hidden = Decoder.hidden
    metas: list[AttentionMeta] = []

    def heard(begin: Callable[[Any, AttentionMeta], Any]) -> Callable[[Any, AttentionMeta], Any]:
        def heard_begin(self: Any, meta: AttentionMeta) -> Any:
            metas[:] = [meta]
            return begin(self, meta)

        return heard_begin

    def heard_hidden(
        self: Decoder, ids: Tensor, positions: Tensor, segments: Any, attention: Any, kv: Any, wanted: Tensor
    ) -> Tensor:
        everything = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device)
        states = hidden(self, ids, positions, segments, attention, kv, everything)
        tap.hear(metas[0], ids, self.logits(states))
        return states.index_select(0, wanted)

    patch = pytest.MonkeyPatch()
    for backend in (ReferenceAttention, NativeAttention):
        patch.setattr(backend, "begin", heard(backend.begin))
    patch.setattr(Decoder, "hidden", heard_hidden)
    try:
        yield tap
    finally:
        patch.undo()
