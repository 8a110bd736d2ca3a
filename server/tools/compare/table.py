"""One table on the terminal, a column for each mode: it fits 80 characters with the usual three.

Where all columns are wider than the terminal, the table goes on below with those that are left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.tools.compare.lines import Section, ending, headline, sections
from server.tools.compare.results import Comparison, ModeFacts

_WIDTH = 100  # where standard output is no terminal and so has no width of its own
_GAP = 2  # characters between two columns


def print_table(found: Comparison) -> None:
    """What was measured, on standard output."""
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width, highlight=False, emoji=False, markup=False)
    for line in headline(found):
        console.print(line)
    parts = sections(found)
    for modes in _side_by_side(found.modes, parts, console.width):
        console.print(_table(modes, parts))
        console.print()
    for part in parts:
        if part.about:
            console.print(f"{part.title}: {part.about}.", style="dim")
    for line in ending(found):
        console.print(line, style="dim")


def _table(modes: Sequence[ModeFacts], parts: Sequence[Section]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for mode in modes:
        table.add_column(mode.mode, justify="right", no_wrap=True)
    for part in parts:
        table.add_row()
        table.add_row(Text(part.title, style="bold cyan"))
        for row in part.rows:
            table.add_row("  " + row.name, *(row.cell(mode) for mode in modes))
    return table


def _side_by_side(modes: Sequence[ModeFacts], parts: Sequence[Section], width: int) -> list[list[ModeFacts]]:
    """The modes in groups whose columns fit `width` characters beside the names of the rows; at least one
    in each."""
    rows = [row for part in parts for row in part.rows]
    names = max(cell_len("  " + row.name) for row in rows)
    groups: list[list[ModeFacts]] = []
    room = 0
    for mode in modes:
        need = _GAP + max(cell_len(mode.mode), *(cell_len(row.cell(mode)) for row in rows))
        if not groups or need > room:
            groups.append([])
            room = width - names
        groups[-1].append(mode)
        room -= need
    return groups
