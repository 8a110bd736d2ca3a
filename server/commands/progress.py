"""Draws the progress of downloads and conversions: a bar in a terminal that can, a line a phase elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from model.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

_LINE_SECONDS = 15.0  # between two lines of a phase
_BYTES = 2**20  # a phase of at least this total is counted in bytes, a smaller one in percent


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A Progress on standard error; the bar is gone afterwards."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    shown = _Terminal()
    try:
        yield shown
    finally:
        shown.close()


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


class _Terminal:
    """A bar, or lines where the terminal is a dumb one. rich, which knows, is imported only when there is
    something to draw."""

    def __init__(self) -> None:
        self._drawn: _Bar | _Lines | None = None

    def start(self, label: str, total: int | None) -> None:
        if self._drawn is None:
            from rich.console import Console

            console = Console(stderr=True)
            self._drawn = _Bar(console) if console.is_interactive else _Lines()
        self._drawn.start(label, total)

    def update(self, done: int) -> None:
        if self._drawn is not None:
            self._drawn.update(done)

    def close(self) -> None:
        if isinstance(self._drawn, _Bar):
            self._drawn.close()


class _Bar:
    """A bar drawn by rich."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def start(self, label: str, total: int | None) -> None:
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
            console=self._console,
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
