"""What the writers of measured pages share: Markdown, and its place between the page's markers."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.command import ROOT, parser_of

END = "<!-- measured: end -->"

Found = Mapping[str, Any]  # the JSON of what was measured


def main(name: str, doc: str, render: Callable[[Path], None]) -> int:
    """The command `python -m loadtest.name`, which is told nothing: write the page; the exit code."""
    parser_of(name, doc).parse_args()
    try:
        render(ROOT)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def fill(path: Path, block: str, begin: str) -> None:
    """Write the page in `path` with `block` in its place. Raises ValueError as `insert` does."""
    path.write_text(insert(path.read_text(encoding="utf-8"), block, begin), encoding="utf-8")


def insert(page: str, block: str, begin: str) -> str:
    """`page` with `block` between `begin` and END. Raises ValueError unless each is there once, in order."""
    if page.count(begin) != 1 or page.count(END) != 1 or page.index(begin) > page.index(END):
        raise ValueError(f"the page needs the lines {begin} and {END}, once each and in this order")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n\n{block}\n\n{END}{rest.partition(END)[2]}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    made = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join([*made, *("| " + " | ".join(row) + " |" for row in rows)])


def lines(text: str) -> str:
    """A paragraph in lines as long as the rest of the page's."""
    return textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False)


def number(value: float, digits: int = 1) -> str:
    """`digits` after the point, and none where they are not worth reading; a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 ** (digits + 1) else f"{value:.{digits}f}"
