"""`make reliability-page`: write what `make soak` and `make fuzz` found into docs/reliability.md.

    python -m loadtest.reliability_page

Nothing is run: the numbers come from the JSON files in loadtest/results/, and go between the page's markers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest import fuzz, page, soak
from loadtest.command import read_json
from loadtest.page import Found, lines, table
from server.engine.units import format_bytes

PAGE = "docs/reliability.md"
BEGIN = "<!-- measured: `make reliability-page` writes what follows -->"
USED = (
    "greedy and seeded sampling, penalties, biases, stop strings, several choices, several prompts, echo, "
    "log-probabilities of outputs and prompts, JSON schemas, regular expressions, priorities and shared "
    "prefixes"
)
CLASSES = {"2xx": "answered", "4xx": "refused, in words", "none": "closed in silence", "5xx": "5xx"}


def block(held: Found, tried: Found) -> str:
    """The measured part of the page. Raises ValueError for a run that did not pass, or was not whole."""
    for name, found in (("soak", held), ("fuzz", tried)):
        if not found["passed"]:
            raise ValueError(f"the last run of `make {name}` did not pass; run it again")
    shots = [
        (source, *(f"{counts.get(name, 0):,}" for name in CLASSES))
        for source, counts in tried["by_source"].items()
    ]
    return "\n\n".join(
        [
            "### Load held, and nothing lost",
            lines(_course(held)),
            table(("", "number"), _load_rows(held)),
            "### Bad inputs tried",
            lines(_shots(tried)),
            table(("made by", *CLASSES.values()), shots),
            lines(_after(tried)),
        ]
    )


def _course(held: Found) -> str:
    setup = held["setup"]
    minutes, pool = held["loaded_seconds"] / 60, setup["kv_memory"].replace("MiB", " MiB")
    return (
        f"{_where(held)} {setup['clients']} clients for {minutes:.0f} minutes, {setup['model']} in "
        f"float32 as native, mha and mqa at once, at most {setup['max_num_seqs']} sequences in a step, a "
        f"pool of {pool} that is too small for them. The {held['catalogue']} different requests use {USED}; "
        f"each was asked alone first, and every finished answer is compared with that: text, reasons, counts "
        f"of tokens, scores."
    )


def _load_rows(held: Found) -> list[tuple[str, str]]:
    memory, left = held["memory"], held["left"]
    answers, ties = held["answers"], held["near_ties"]
    rows = [
        ("requests", f"{held['requests']:,}"),
        ("answers finished, of which streamed", f"{answers:,}, {held['streamed']:,}"),
        ("tokens in them", f"{held['tokens']:,}"),
        ("answers equal to their solo runs", f"{answers - ties - held['wrong']:,}"),
        ("near ties (see [above](#how-they-are-tried))", f"{ties:,}"),
        ("wrong answers", f"{held['wrong']:,}"),
        ("requests refused or failed", f"{sum(held['refused'].values()):,}"),
        ("left by their client while waiting", f"{left.get('while waiting', 0):,}"),
        ("left by their client in mid-stream", f"{left.get('in mid-stream', 0):,}"),
        ("sequences preempted and resumed", f"{held['preemptions']:,}"),
        ("log-probabilities compared", f"{held['scores']:,}"),
        ("largest difference among them, in nats", f"{held['worst_score']:.1e}"),
        ("blocks still held when all were gone", f"{held['live_blocks']:,}"),
    ]
    if memory["judged"]:
        rows += [
            ("memory after warm-up, bytes a request (least squares)", f"{memory['slope']:,.0f}"),
            ("memory after warm-up, bytes a request (last quarter − first)", f"{memory['quarters']:,.0f}"),
        ]
    return rows


def _shots(tried: Found) -> str:
    minutes = tried["seconds"] / 60
    return (
        f"{_where(tried)} {tried['requests']:,} requests of {len(tried['kinds'])} kinds in {minutes:.1f} "
        f"minutes, to a tiny model. schemathesis makes some from the server's own OpenAPI document; the rest "
        f"are our lists of broken bodies and of broken HTTP on a bare socket. A refusal counts only in the "
        f"promised shape, silence only where the bytes were no HTTP."
    )


def _after(tried: Found) -> str:
    after, named = tried["after"], tried["by_design"].items()
    design = "".join(f" {count:,} answers were {status}, by design." for status, count in named)
    return (
        f"Faults of the server: {tried['faults']}.{design} Afterwards a plain request has the same answer as "
        f"before, {after['live_blocks']} blocks are held, the recount of all blocks agrees, no exception was "
        f"logged, and the server's memory is {_signed(after['memory_growth'])} from where it was after a "
        f"tenth of the run (the largest body has 17 MiB)."
    )


def _signed(count: int) -> str:
    return ("-" if count < 0 else "+") + format_bytes(abs(count))


def _where(found: Found) -> str:
    machine = found["machine"]
    version = f"PyTorch {machine['torch']}" + (f", commit `{found['commit']}`" if found["commit"] else "")
    return f"On {machine['cpu']} ({machine['cores']} cores); {version}, {found['date'][:10]}."


def render(root: Path) -> None:
    """Write the page under `root` from its JSON. Raises ValueError as `block` does."""
    held, tried = (read_json(root / name) for name in (soak.RESULT, fuzz.RESULT))
    page.fill(root / PAGE, block(held, tried), BEGIN)


if __name__ == "__main__":
    sys.exit(page.main("reliability_page", __doc__, render))
