"""The part of `make bench` that goes through our own server: its start, its memory, and the workloads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_cost import model_cost
from loadtest.bench_work import Work
from loadtest.command import read_json
from loadtest.http_bench import run
from loadtest.own_server import OwnServer, own_server

STARTS = 3  # the median of them; the first may still compile, or read the model from the disk


def server_part(
    model: str, folder: Path, works: Sequence[Work], seed: int, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and answers. Raises BenchError, StreamError, OSError, TimeoutError, ServerFault."""
    config = read_json(folder / "config.json")
    weights, ready = model_cost(config).weight_bytes, list[float]()
    for _ in range(STARTS - 1):
        with own_server(model, flags) as server:
            ready.append(server.ready_s)
    with own_server(model, flags) as server:
        ready.append(server.ready_s)
        idle = memory(server, weights)
        name = server.get("/v1/models")["data"][0]["id"]
        rows, texts = run(server.url, name, works, seed, config["vocab_size"])
        busy = memory(server, weights)
    found = {"ready_s": ready, "ready_median_s": statistics.median(ready), "idle": idle, "busy": busy}
    return found | {"rows": rows}, texts


def memory(server: OwnServer, weight_bytes: int) -> dict[str, int]:
    """Bytes of the server's own memory (RssAnon and what is swapped out), of the weights by arithmetic, of
    the pool's pages that are in memory, and of the rest."""
    arena = server.get("/v1/kv")["audit"]["resident_bytes"] or 0
    whole = server.memory()
    return {"own": whole, "weights": weight_bytes, "pool": arena, "rest": whole - weight_bytes - arena}
