"""The files of a comparison: JSON with documented names, and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server.tools.compare.lines import Section, ending, headline, sections
from server.tools.compare.results import Comparison, ModeFacts

FORMAT = 1  # raised when a name of the JSON changes its meaning or goes


def write_json(found: Comparison, path: Path) -> None:
    """See `as_json`."""
    path.write_text(json.dumps(as_json(found), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, as docs/tools.md describes it; a part that was not measured is null."""
    return {
        "format": FORMAT,
        "complete": found.complete,
        "headroom": found.headroom,
        "commit": found.commit,
        "date": found.date,
        "seconds": round(found.seconds, 1),
        "machine": asdict(found.machine),
        "setup": asdict(found.setup),
        "modes": [_mode(found, mode) for mode in found.modes],
        "notes": found.notes,
    }


def _mode(found: Comparison, mode: ModeFacts) -> dict[str, Any]:
    parts: dict[str, Mapping[str, Any]] = {
        "fixed_work": found.fixed_work,
        "fixed_pool": found.fixed_pool,
        "quality": found.quality,
    }
    measured: dict[str, Any] = {}
    for kind, done in parts.items():
        result: Any = done.get(mode.mode)
        measured[kind] = None if result is None else asdict(result)
        if result is not None:
            del measured[kind]["mode"]  # said once
    return asdict(mode) | measured


def write_markdown(found: Comparison, path: Path) -> None:
    """See `as_markdown`."""
    path.write_text(as_markdown(found), encoding="utf-8")


def as_markdown(found: Comparison) -> str:
    """A heading, a table for each part with a row for each mode, and the notes."""
    lines = [f"# {found.setup.model}: attention modes compared", ""]
    lines += [f"{line}  " for line in headline(found)]
    for part in sections(found):
        lines += ["", *_table(part, found)]
    lines += ["", *(f"- {line}" for line in ending(found))]
    return "\n".join(lines) + "\n"


def _table(part: Section, found: Comparison) -> list[str]:
    lines = [f"## {part.title}", ""]
    if part.about:
        lines += [part.about[0].upper() + part.about[1:] + ".", ""]
    lines += [
        _row(["mode", *(row.name for row in part.rows)]),
        "|---|" + "---:|" * len(part.rows),
    ]
    return lines + [_row([mode.mode, *(row.cell(mode) for row in part.rows)]) for mode in found.modes]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
