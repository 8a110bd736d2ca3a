"""`make bench-page`: write docs/benchmarks.md from the results of `make bench` and `make bench-peers`.

    python -m loadtest.bench_page

Nothing is run: the numbers come from the JSON files in loadtest/results/, and go between the page's markers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtest import page
from loadtest.bench_peers_page import peers_block
from loadtest.bench_tables import Bar, spread, tallies, verdict, where, works
from loadtest.command import read_json
from loadtest.page import Found, lines, number, table
from server.engine.units import format_bytes

PAGE = "docs/benchmarks.md"
OWN, PEERS = "loadtest/results/bench.json", "loadtest/results/peers.json"
BEGIN = "<!-- measured: `make bench` and `make bench-peers` write what follows -->"

MIXED, QUEUE, SPECULATION = Bar(least=0.85), Bar(most=1.02), Bar(least=0.97)
READY, REST, CONTEXT = Bar(most=3.0), Bar(most=500e6), Bar(most=1.0)


def block(own: Found | None, peers: Found | None) -> str:
    """The measured part of the page: what others do beside us, then our side alone."""
    parts = [
        "## Beside others",
        "Not measured yet: `make bench-peers`." if peers is None else peers_block(peers),
        "## Our side",
        "Not measured yet: `make bench`." if own is None else own_block(own),
    ]
    return "\n\n".join(parts)


def own_block(own: Found) -> str:
    """What the parts of `make bench` found; a part that did not run is left out."""
    parts = own["parts"]
    made = [lines(where(own))]
    for name, write in _WRITERS.items():
        if name in parts:
            made.append(write(parts[name], parts))
    made += _promises(parts)
    if "check" in parts:
        made += ["### Answers checked", tallies(parts["check"]["tallies"])]
    made.append(lines(_stamps(parts)))
    return "\n\n".join(made)


def _ceiling(found: Found, parts: Found) -> str:
    return lines(
        f"What this machine can do, measured just before: it reads {found['read_gb_s']:.1f} GB/s "
        f"({found['read_by']}) and multiplies {found['matrix_gflop_s']:.0f} GFLOP/s ({found['matrix_by']}), "
        f"with {found['threads']} threads. Shares below are of these."
    )


def _engine(found: Found, parts: Found) -> str:
    top = parts.get("ceiling")
    rows = []
    for name, row in found["rows"].items():
        gb, gflop = row["bytes"] / row["wall_s"] / 1e9, row["flops"] / row["wall_s"] / 1e9
        rows.append(
            (
                *_figures(name, row),
                f"{gb:.1f}" + (f" ({gb / top['read_gb_s']:.0%})" if top else ""),
                f"{gflop:.0f}" + (f" ({gflop / top['matrix_gflop_s']:.0%})" if top else ""),
            )
        )
    backends = found["backends"]
    return "\n\n".join(
        [
            "### In process",
            lines(
                f"The engine alone, {backends['dtype']}, attention `{backends['attention']}`, linear "
                f"`{backends['linear']}`. GB/s and GFLOP/s are of what the work needs by arithmetic "
                "(`loadtest/bench_cost.py`): weights once a step, and the cache that attention reads."
            ),
            table((*_HEADS, "GB/s", "GFLOP/s"), rows),
        ]
    )


_HEADS = ("workload", "requests × in → out, at once", "output tok/s", "TTFT p50, p99 ms", "ITL p50, p99 ms")


def _figures(name: str, row: Found) -> tuple[str, ...]:
    return (
        f"`{name}`", works(row), number(row["out_tok_s"]), spread(row, "ttft"), spread(row, "itl")
    )  # fmt: skip


def _http(found: Found, parts: Found) -> str:
    rows = [_figures(name, row) for name, row in found["rows"].items()]
    return "\n\n".join(["### Over HTTP", table(_HEADS, rows)])


def _quantised(found: Found, parts: Found) -> str:
    names = list(next(iter(found["rows"].values()))["rows"])
    rows = [
        (
            f"`{kind}`", format_bytes(row["weight_bytes"]), f"{row['perplexity']:.2f}",
            *(number(row["rows"][name]["out_tok_s"]) for name in names),
        )
        for kind, row in found["rows"].items()
    ]  # fmt: skip
    text = next(iter(found["rows"].values()))
    return "\n\n".join(
        [
            "### Quantised weights",
            lines(
                f"Output tokens/s of the engine with `--weights`; perplexity on {text['text']}, "
                f"{text['positions']:,} positions."
            ),
            table(("weights", "held", "perplexity", *(f"`{name}`" for name in names)), rows),
        ]
    )


def _speculation(found: Found, parts: Found) -> str:
    rows = []
    for name, kinds in found["rows"].items():
        off, on = kinds["off"], kinds["ngram"]
        drafted, right = on.get("draft_tokens", 0), on.get("accepted_tokens", 0)
        ratio, repeats = on["out_tok_s"] / off["out_tok_s"], name.startswith("repetitive")
        rows.append(
            (
                f"`{name}`", works(on), number(off["out_tok_s"]), number(on["out_tok_s"]), f"{ratio:.3f} ×",
                "" if repeats else "≥ 0.97 ×", "" if repeats else verdict(SPECULATION, ratio),
                f"{right:,} of {drafted:,}" + (f" ({right / drafted:.0%})" if drafted else ""),
            )
        )  # fmt: skip
    heads = (
        "workload", _HEADS[1], "tok/s without", "tok/s with", "ratio", "bar", "", "drafted tokens accepted",
    )  # fmt: skip
    return "\n\n".join(
        [
            "### N-gram speculation",
            lines(
                "Without and with `--speculate ngram`, in turn, the medians: prompts that repeat one phrase, "
                "and random ones, where only what the model itself repeats can be guessed. It is on in no "
                "other table."
            ),
            table(heads, rows),
        ]
    )


_WRITERS: Mapping[str, Callable[[Found, Found], str]] = {
    "ceiling": _ceiling, "engine": _engine, "http": _http, "quantised": _quantised,
    "speculation": _speculation,
}  # fmt: skip


def _promises(parts: Found) -> list[str]:
    rows: list[Sequence[str]] = []
    if "http" in parts:
        http = parts["http"]
        rest = max(http["idle"]["rest"], http["busy"]["rest"])
        rows += [
            ("command to ready, model on disk", f"{http['ready_median_s']:.2f} s", "≤ 3 s",
             verdict(READY, http["ready_median_s"])),
            ("memory beside weights and pool", format_bytes(rest), "≤ 500 MB", verdict(REST, rest)),
        ]  # fmt: skip
    if "mixed" in parts:
        ratio = parts["mixed"]["ratio"]
        rows.append(("mixed lengths, of a uniform batch's tokens/s", f"{ratio:.1%}", "≥ 85 %",
                     verdict(MIXED, ratio)))  # fmt: skip
    if "queue" in parts:
        queue = parts["queue"]
        rows.append((f"median step with {queue['queued']:,} waiting, of one with none",
                     f"{queue['ratio']:.3f} ×", "≤ 1.02 ×", verdict(QUEUE, queue["ratio"])))  # fmt: skip
    if "context" in parts and "ceiling" in parts:
        rows.append(_context(parts["context"], parts["ceiling"]))
    if not rows:
        return []
    return ["### Promises", table(("", "found", "bar", ""), rows)]


def _context(found: Found, top: Found) -> Sequence[str]:
    """What four times the context costs more, beside what its bytes and operations take at the ceiling."""
    least = 1e3 * (
        found["more_bytes"] / 1e9 / top["read_gb_s"] + found["more_flops"] / 1e9 / top["matrix_gflop_s"]
    )
    short, long = found["contexts"]
    return (
        f"a step of {found['sequences']} at {long:,} tokens over one at {short:,} "
        f"({found['step_ms'][0]:.1f} ms)",
        f"+{found['more_ms']:.1f} ms",
        f"≤ {least:.1f} ms",
        verdict(CONTEXT, found["more_ms"] / least),
    )


def _stamps(parts: Found) -> str:
    each = "; ".join(
        f"{name} {part['date'][:16].replace('T', ' ')} at `{part['commit']}`, load {part['load']:.1f}"
        for name, part in parts.items()
    )
    return f"Measured (UTC): {each}."


def render(root: Path) -> None:
    """Write the page under `root` from its JSON; what was not measured is said."""
    own, peers = (read_json(root / name) if (root / name).exists() else None for name in (OWN, PEERS))
    page.fill(root / PAGE, block(own, peers), BEGIN)


if __name__ == "__main__":
    sys.exit(page.main("bench_page", __doc__, render))
