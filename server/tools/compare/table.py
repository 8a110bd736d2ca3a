"""One table on the terminal, a column for each mode: it fits 80 characters with the usual three."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.tools.compare.lines import ending, headline, sections
from server.tools.compare.results import Comparison

_WIDTH = 100  # where standard output is no terminal and so has no width of its own


def print_table(found: Comparison) -> None:
    """What was measured, on standard output."""
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, emoji=False, markup=False)
    for line in headline(found):
        console.print(line)
    parts = sections(found)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    for mode in found.modes:
        table.add_column(mode.mode, justify="right", no_wrap=True)
    for part in parts:
        table.add_row()
        table.add_row(Text(part.title, style="bold cyan"))
        for row in part.rows:
            table.add_row("  " + row.name, *(row.cell(mode) for mode in found.modes))
    console.print(table)
    console.print()
    for part in parts:
        if part.about:
            console.print(f"{part.title}: {part.about}.", style="dim")
    for line in ending(found):
        console.print(line, style="dim")
