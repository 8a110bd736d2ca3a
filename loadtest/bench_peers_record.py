"""The file of results of `make bench-peers`, rewritten after each server, and how a run goes on with it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench_rows import BenchError
from loadtest.command import read_json, replace_json


@dataclass(slots=True)
class Record:
    """The results so far, and where they are kept."""

    path: Path
    found: dict[str, Any]

    def save(self) -> None:
        """Whole or not at all."""
        replace_json(self.path, self.found)

    def round(self, number: int, seed: int | None) -> dict[str, Any]:
        """Round `number`, counted from 0, made with a fresh seed if it is not there."""
        rounds: list[dict[str, Any]] = self.found["rounds"]
        if number == len(rounds):
            fresh = random.SystemRandom().randrange(1 << 31) if seed is None else seed + number
            rounds.append({"seed": fresh, "peers": {}})
        return rounds[number]


def resumed(path: Path, model: str, machine: Mapping[str, Any]) -> Record:
    """The results in `path`, to go on with. Raises BenchError if they are of another model or machine."""
    found = read_json(path)
    if found["model"] != model:
        raise BenchError(f"--resume: {path.name} is of the model {found['model']}, not {model}")
    here = json.loads(json.dumps(machine))
    other = [key for key in here if here[key] != found["machine"].get(key)]
    if other:
        words = ", ".join(f"{key} {found['machine'].get(key)!r}, here {here[key]!r}" for key in other)
        raise BenchError(f"--resume: {path.name} is of another machine or software ({words}); begin anew")
    return Record(path, found)
