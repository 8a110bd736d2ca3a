"""What the parts of `make bench` in process are given, and how an engine is warmed up and put to work."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench_engine import drive, make_engine
from loadtest.bench_rows import row, said, told
from loadtest.bench_work import WARM_UP, WORKLOADS, Ask, Work, asks
from loadtest.command import read_json
from server.engine.engine import Engine
from server.engine.facts import EngineFacts

Found = tuple[dict[str, Any], dict[str, Any]]  # figures, and answers by workload


@dataclass(frozen=True, slots=True)
class Setup:
    """What a part is given: the model's folder, the prompts' seed, and the most requests of a workload."""

    folder: Path
    seed: int
    requests: int | None = None
    works: tuple[str, ...] = tuple(WORKLOADS)  # of the part `engine`
    weights: str = "none"  # of the part `engine`, as --weights has them

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return read_json(self.folder / "config.json")

    def asks(self, work: Work) -> list[Ask]:
        """The requests of a workload."""
        return asks(work, self.seed, self.vocab)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])


def warm(setup: Setup, **options: Any) -> tuple[Engine, EngineFacts]:
    """An engine that has answered once. As `serve` does, the collector is told to leave alone what is there
    by then."""
    gc.unfreeze()  # an earlier engine may go
    engine, facts = make_engine(setup.folder, **options)
    drive(engine, facts, setup.asks(WARM_UP), 1)
    gc.collect()
    gc.freeze()
    return engine, facts


def run_work(
    engine: Engine, facts: EngineFacts, work: Work, setup: Setup
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """A workload's figures, its answers, and the steps it took."""
    given = setup.asks(work)
    if work.shared:
        drive(engine, facts, given[:1], 1)
    before = engine.stats().steps
    answers, wall = drive(engine, facts, given, work.concurrency)
    return told(row(work, answers, wall)), said(given, answers), engine.stats().steps - before
