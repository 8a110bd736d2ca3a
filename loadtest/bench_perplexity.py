"""What weights in 4 bits cost in quality, to stand beside what they gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.bench import RESULT, child
from loadtest.bench_variants import BESIDE_PEERS
from loadtest.command import ROOT, read_json

_WANTED = ("perplexity", "text", "positions")


def perplexity(model: str, measure: bool, result: Path = ROOT / RESULT) -> dict[str, Any] | None:
    """By kind of weights: from `make bench` if it has measured this model, else measured now if it may be;
    None if not. Raises BenchError."""
    known = read_json(result) if result.exists() else {}
    rows: dict[str, Any] = known.get("parts", {}).get("quantised", {}).get("rows", {})
    if known.get("model") != model or not set(BESIDE_PEERS) <= set(rows):
        if not measure:
            return None
        print("== perplexity", flush=True)
        rows = child(["loadtest.bench_parts", "perplexity", "--model", model])["rows"]
    return {kind: {key: rows[kind][key] for key in _WANTED} for kind in BESIDE_PEERS}
