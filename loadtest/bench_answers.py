"""Answers of a benchmark in files, until they are checked, and what the check says of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.command import read_json, write_json


@dataclass(frozen=True, slots=True)
class Origin:
    """Which run answers are of: the model, the seed of the prompts, the commit that was measured."""

    model: str
    seed: int
    commit: str | None


def write(path: Path, origin: Origin, works: Mapping[str, Any]) -> None:
    """The answers to each workload, with their origin."""
    write_json(path, asdict(origin) | {"works": works})


def read(path: Path) -> dict[str, Any]:
    """The answers in a file, by workload."""
    return dict(read_json(path)["works"])


def of_this_run(files: Mapping[str, Path], origins: Mapping[str, Origin]) -> dict[str, Path]:
    """Those of `files` that are there and whose answers are of the run that `origins` has under their name;
    what is left out is said."""
    kept: dict[str, Path] = {}
    for name, path in files.items():
        try:
            found = read_json(path)
            origin = Origin(found["model"], found["seed"], found["commit"])
        except (OSError, ValueError, KeyError, TypeError):
            origin = None
        if origin is not None and origin == origins.get(name):
            kept[name] = path
        elif path.exists():
            print(f"{name}: answers of another run are not checked ({path.name})", file=sys.stderr)
    return kept


def wrong(tallies: Mapping[str, Mapping[str, Mapping[str, Any]]], ours: Collection[str]) -> list[str]:
    """A line for each workload in which one of `ours` gave a wrong answer."""
    return [
        f"{name}, {work}: {tally['wrong']} of {tally['answers']} answers are wrong, as "
        + "; ".join(tally["examples"])
        for name, works in tallies.items()
        if name in ours
        for work, tally in works.items()
        if tally["wrong"]
    ]
