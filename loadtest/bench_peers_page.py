"""The part of docs/benchmarks.md that shows what others do on the same machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench_tables import Bar, spread, tallies, verdict, where, works
from loadtest.page import Found, lines, number, table

OURS = {"http": "Headroom", "engine": "Headroom, engine only", "quantised": "Headroom, int4"}


@dataclass(frozen=True, slots=True)
class Goal:
    """What is promised of one figure of a workload, as a ratio of ours to the best peer's, or (`alone`) of
    ours itself. Of rates the best is the highest, of times (`ttft`, `itl`) the lowest."""

    workload: str
    figure: str
    bar: Bar
    alone: bool = False
    over: tuple[str, ...] = ("http", "engine")

    @property
    def time(self) -> bool:
        """Whether less is better."""
        return not self.figure.endswith("tok_s")


GOALS = (
    Goal("decode1", "out_tok_s", Bar(least=1.05)),
    Goal("decode16", "out_tok_s", Bar(least=1.25)),
    Goal("decode64", "out_tok_s", Bar(least=1.15)),
    Goal("prefill", "ttft_p50", Bar(most=0.9)),
    Goal("long8", "out_tok_s", Bar(least=1.05)),
    Goal("long8", "ttft_p50", Bar(most=1.0)),
    Goal("long8", "itl_p99", Bar(most=250.0), alone=True),
    Goal("prefix", "out_tok_s", Bar(least=1.5)),
    Goal("decode1", "out_tok_s", Bar(least=0.8), over=("quantised",)),
)
_FIGURES = {"out_tok_s": "output tok/s", "ttft_p50": "TTFT p50, ms", "itl_p99": "ITL p99, ms"}
_OVER = {"http": "over HTTP", "engine": "in process", "quantised": "in 4 bits"}


def peers_block(found: Found) -> str:
    """Ratios with their bars, then everybody's medians, then the answers."""
    rounds = len(found["rounds"])
    times = "one round" if rounds == 1 else f"{rounds} rounds"
    seen = sorted({name for each in found["rounds"] for name in each["peers"]})
    made = [
        lines(
            f"{where(found)} Measured {found['date'][:10]} at {_commits(found)}; {times}, in each of which "
            "all run in turn, with the same prompts, of a fresh seed. Figures are medians over the rounds; "
            "the load is the machine's, just before a server was started."
        ),
        table(("server", "version", "command to ready", "load", "rounds a workload"), _servers(found, seen)),
    ]
    made += [lines(_failed(found))] if _failed(found) else []
    made += [lines(note) for note in found.get("notes", ())]
    for over, how in _OVER.items():
        heads = ("workload", "figure", "Headroom", "best of the others", "ratio", "bar", "")
        made += [f"### Ratios, {how}", table(heads, _ratios(found, over))]
    if "perplexity" in found:
        made.append(lines(_perplexity(found["perplexity"])))
    made += ["### Everybody's figures", table(_HEADS, _all(found, seen))]
    checks = [each["check"] for each in found["rounds"] if each.get("check")]
    if checks:
        made += ["### Answers checked, all rounds", tallies(_summed(checks))]
    return "\n\n".join(made)


_HEADS = ("workload", "requests × in → out, at once", "server", "output tok/s", "TTFT p50, p99 ms",
          "ITL p50, p99 ms")  # fmt: skip


def medians(found: Found, name: str, work: str) -> dict[str, float] | None:
    """The medians of a server's figures for a workload, over the rounds that it ran it in."""
    rows = [
        each["peers"][name]["rows"][work]
        for each in found["rounds"]
        if work in each["peers"].get(name, {}).get("rows", {})
    ]
    if not rows:
        return None
    return {
        key: statistics.median(row[key] for row in rows)
        for key, value in rows[0].items()
        if isinstance(value, int | float)
    }


def best_peer(found: Found, goal: Goal, over: str) -> tuple[str, float] | None:
    """Who of the others is best at it, and how good; None if nobody ran it."""
    values = {}
    for name in {name for each in found["rounds"] for name in each["peers"]}:
        if name in OURS.values() or _over(found, name) != over:
            continue
        figures = medians(found, name, goal.workload)
        if figures is not None:
            values[name] = figures[goal.figure]
    if not values:
        return None
    name = (min if goal.time else max)(values, key=values.__getitem__)
    return name, values[name]


def _over(found: Found, name: str) -> str:
    return next(str(each["peers"][name]["over"]) for each in found["rounds"] if name in each["peers"])


def _ratios(found: Found, over: str) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for goal in (goal for goal in GOALS if over in goal.over):
        ours, best = medians(found, OURS[over], goal.workload), best_peer(found, goal, over)
        value = None if ours is None else ours[goal.figure]
        ratio = None if value is None or best is None else value / best[1]
        judged = value if goal.alone else ratio
        rows.append(
            (
                f"`{goal.workload}`", _FIGURES[goal.figure], "-" if value is None else number(value),
                "-" if best is None else f"{number(best[1])} ({best[0]})",
                "-" if ratio is None else f"{ratio:.3f} ×", _bar(goal),
                "not measured" if judged is None else verdict(goal.bar, judged),
            )
        )  # fmt: skip
    return rows


def _bar(goal: Goal) -> str:
    sign, value = ("≥", goal.bar.least) if goal.bar.least is not None else ("≤", goal.bar.most)
    return f"{sign} {value:g} ms" if goal.alone else f"{sign} {value:g} ×"


def _servers(found: Found, seen: Sequence[str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name in seen:
        runs = [each["peers"][name] for each in found["rounds"] if name in each["peers"]]
        ready = [run["ready_s"] for run in runs if run.get("ready_s") is not None]
        counts = [n for n in (sum(work in run["rows"] for run in runs) for work in _works(found)) if n]
        times = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else str(counts[0])
        rows.append(
            (
                name, str(runs[-1]["version"]),
                f"{statistics.median(ready):.1f} s" if ready else "", _loads(runs), times,
            )
        )  # fmt: skip
    return rows


def _loads(runs: Sequence[Found]) -> str:
    loads = [run["load"] for run in runs]
    return f"{min(loads):.1f}" + (f" to {max(loads):.1f}" if len(loads) > 1 else "")


def _commits(found: Found) -> str:
    """The commits that were measured, in order; more than one where a run was resumed."""
    entries = [entry for each in found["rounds"] for entry in each["peers"].values()]
    names = list(dict.fromkeys(f"`{entry['commit']}`" for entry in entries))
    return ("commit " if len(names) == 1 else "commits ") + ", ".join(names)


def _failed(found: Found) -> str:
    """Who of the servers that were to run did not, and in which rounds."""
    rounds: dict[tuple[str, str], list[str]] = {}
    for count, each in enumerate(found["rounds"], 1):
        for name, why in each.get("failed", {}).items():
            rounds.setdefault((name, why), []).append(str(count))
    said = [f"{name} {why} (round {', '.join(numbers)})" for (name, why), numbers in rounds.items()]
    return f"Not measured: {'; '.join(said)}." if said else ""


def _perplexity(found: Found) -> str:
    """What the weights in 4 bits cost."""
    plain, small = found["none"], found["int4"]
    return (
        f"Perplexity on {small['text']}, {small['positions']:,} positions: {small['perplexity']:.2f} with "
        f"`--weights int4`, {plain['perplexity']:.2f} as the model is."
    )


def _works(found: Found) -> list[str]:
    peers = (peer for each in found["rounds"] for peer in each["peers"].values())
    return list(dict.fromkeys(work for peer in peers for work in peer["rows"]))


def _all(found: Found, seen: Sequence[str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for work in _works(found):
        for name in seen:
            figures = medians(found, name, work)
            if figures is not None:
                whole = {key: int(figures[key]) for key in ("requests", "prompt", "output", "concurrency")}
                rows.append(
                    (
                        f"`{work}`", works(whole), name, number(figures["out_tok_s"]),
                        spread(figures, "ttft"), spread(figures, "itl"),
                    )
                )  # fmt: skip
    return rows


def _summed(checks: Sequence[Found]) -> dict[str, dict[str, dict[str, Any]]]:
    """Tallies of all rounds together; the near tie shown is the widest of them."""
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for check in checks:
        for name, each in check.items():
            for work, tally in each.items():
                sums = made.setdefault(name, {}).setdefault(
                    work, dict.fromkeys(_COUNTS, 0) | {"near_tie": 0.0}
                )
                for key in _COUNTS:
                    sums[key] += tally[key]
                sums["near_tie"] = max(sums["near_tie"], tally["near_tie"])
    return made


_COUNTS = ("answers", "equal", "near_ties", "undecided", "wrong", "compared")
