"""What the commands here have in common: the clone they are in, their parser, JSON in files. Standard library
only, as a peer's own Python runs one of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    """Of `python -m loadtest.name`; `doc` is its module's, whose first line says what it is for."""
    return argparse.ArgumentParser(prog=f"python -m loadtest.{name}", description=doc.partition("\n")[0])


def add_json(parser: argparse.ArgumentParser, result: str) -> None:
    """`--json`, of a run that is kept in `result` if it is as long as by default."""
    words = f"default: {result} of a run as long as the default, none of a shorter"
    parser.add_argument("--json", type=Path, metavar="FILE", help=words)


def read_json(path: Path) -> dict[str, Any]:
    """What a file has. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_json(path: Path, found: Any) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_both(options: argparse.Namespace, found: Any, texts: Any) -> None:
    """Figures and answers, where `--json` and `--texts` say."""
    for path, content in ((options.json, found), (options.texts, texts)):
        if path:
            write_json(path, content)


def replace_json(path: Path, found: Any) -> None:
    """The same in place of what is there, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    write_json(fresh, found)
    fresh.replace(path)
