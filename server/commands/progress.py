"""Draws the progress of downloads and conversions: a bar in a terminal, a line for each phase elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from model.progress import Progress

_LINE_SECONDS = 15.0  # between two lines of a phase
_BYTES = 2**20  # a phase of at least this total is counted in bytes, a smaller one in percent


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A Progress on standard error; the bar is gone afterwards."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


class _Lines:
    """One line when a phase begins, and one now and then of a long one: for logs."""

    def __init__(self) -> None:
        self._label, self._total, self._said = "", 0, 0.0

    def start(self, label: str, total: int | None) -> None:
        self._label, self._total, self._said = label, total or 0, time.monotonic()
        print(label, file=sys.stderr, flush=True)

    def update(self, done: int) -> None:
        if self._total and time.monotonic() - self._said >= _LINE_SECONDS:
            self._said = time.monotonic()
            print(f"{self._label}: {100 * done // self._total} %", file=sys.stderr, flush=True)


class _Bar:
    """A bar drawn by rich, which is imported only when there is something to draw."""

    def __init__(self) -> None:
        self._begun = False

    def start(self, label: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            ProgressColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        self.close()
        count: list[ProgressColumn] = []
        if total is not None:
            count = [DownloadColumn() if total >= _BYTES else TaskProgressColumn(), TimeRemainingColumn()]
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            *count,
            console=Console(stderr=True),
            transient=True,
        )
        self._bars.start()
        self._task = self._bars.add_task(label, total=total)
        self._begun = True

    def update(self, done: int) -> None:
        self._bars.update(self._task, completed=done)

    def close(self) -> None:
        if self._begun:
            self._bars.stop()
            self._begun = False
