"""Runs the parts of a comparison, one after the other, and files what they bring."""

from __future__ import annotations

import time
from typing import cast

from model.progress import Progress
from server.tools.compare.children import in_a_process
from server.tools.compare.prepare import Part, Prepared
from server.tools.compare.results import Comparison, FixedPool, FixedWork
from server.tools.quality import QualityRow


def measure(prepared: Prepared, progress: Progress) -> None:
    """Measures every part; `prepared.comparison` holds whatever is done at any moment, so that who is
    interrupted keeps it. Raises what a part raises."""
    comparison, begin = prepared.comparison, time.monotonic()
    try:
        for number, part in enumerate(prepared.parts, start=1):
            shown = _Labelled(progress, f"{number}/{len(prepared.parts)} {part.label}")
            shown.start("loading", None)
            _file(comparison, part, in_a_process(part.job, shown))
        comparison.complete = True
    finally:
        comparison.seconds = time.monotonic() - begin


def _file(comparison: Comparison, part: Part, result: object) -> None:
    if part.kind == "fixed_work":
        comparison.fixed_work[part.mode] = cast(FixedWork, result)
    elif part.kind == "fixed_pool":
        comparison.fixed_pool[part.mode] = cast(FixedPool, result)
    else:
        comparison.quality |= {row.mode: row for row in cast("tuple[QualityRow, ...]", result)}


class _Labelled:
    """A Progress whose labels begin with what is being measured."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._label = label

    def start(self, label: str, total: int | None) -> None:
        self._progress.start(f"{self._label}: {label}" if label else self._label, total)

    def update(self, done: int) -> None:
        self._progress.update(done)
