"""What the tables of docs/benchmarks.md are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadtest.page import Found, number, table
from server.engine.units import format_bytes


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise about a number: at least, or at most, so much."""

    least: float | None = None
    most: float | None = None

    def held(self, value: float) -> bool:
        """Whether `value` keeps it."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def verdict(bar: Bar, value: float) -> str:
    """A word that is easily seen."""
    return "held" if bar.held(value) else "**missed**"


def where(found: Found) -> str:
    """One sentence: which model, which machine, which software."""
    machine = found["machine"]
    memory = "" if machine["memory_bytes"] is None else f", {format_bytes(machine['memory_bytes'])} of memory"
    return (
        f"{found['model']} on {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])})"
        f"{memory}; {machine['system']}, Python {machine['python']}, PyTorch {machine['torch']}, Headroom "
        f"{machine['headroom']}."
    )


def works(row: Found) -> str:
    """A workload in figures."""
    return f"{row['requests']} × {row['prompt']:,} → {row['output']}, {row['concurrency']}"


def spread(row: Found, what: str) -> str:
    """Median and 99th percentile; dashes where they are not known."""
    return ", ".join(number(row.get(f"{what}_{share}", math.nan)) for share in ("p50", "p99"))


def tallies(found: Found) -> str:
    """The answers of each server beside the reference's: the first 16 ids, or what they spell."""
    rows = [
        (
            name,
            f"`{work}`",
            *(f"{tally[kind]:,}" for kind in ("answers", "equal", "near_ties", "undecided", "wrong")),
            f"{tally['compared'] / tally['answers']:.1f}",
            f"{tally['near_tie']:.2f}",
        )
        for name, each in found.items()
        for work, tally in each.items()
    ]
    heads = (
        "", "workload", "answers", "equal", "near ties", "not decided", "wrong", "ids agreed",
        "near tie below",
    )  # fmt: skip
    return table(heads, rows)
