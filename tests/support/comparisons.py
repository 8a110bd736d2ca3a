"""Comparisons without a run: of a tiny config, filled in by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from server.tools.compare.options import CompareOptions
from server.tools.compare.prepare import prepare
from server.tools.compare.results import Comparison, FixedPool, FixedWork, Point, Spread
from server.tools.quality import QualityRow


def comparison_of(
    folder: Path, *, attention: tuple[str, ...] = (), quality: bool = True, done: bool = True
) -> Comparison:
    """Modes of the config in `folder`, which may have 9 query heads or 32 (default: the default ones); with
    `done`, made-up results for each."""
    options = CompareOptions(attention=attention, head_map="mean", context=64, device="cpu", quality=False)
    found = prepare(options, "tiny", folder, folder).comparison
    found.setup = replace(found.setup, quality=quality)
    if done:
        for mode in found.modes:
            peak = mode.kv_heads * 65536
            found.fixed_work[mode.mode] = FixedWork(
                mode.mode, peak, peak, peak, peak + 4096, 10**6, 0, Spread(10.5, 20.25), Spread(1.5, 2.5),
                64, (100.0, 200.0, 300.0), 200.0,
            )  # fmt: skip
            users = 4 * mode.group
            curve = (Point(1, 50.0), Point(users, 12345.0 / mode.kv_heads))
            found.fixed_pool[mode.mode] = FixedPool(mode.mode, 589824, users, "preempted", curve)
            if quality:
                lossy = (31.5, 1.25, 0.5) if mode.lossy else (14.0, 0.0, 1.0)
                found.quality[mode.mode] = QualityRow(
                    mode.mode, mode.kv_heads, "a|b.txt", "CC0", 1000, *lossy
                )
        found.complete, found.seconds = True, 12.3
    return found
