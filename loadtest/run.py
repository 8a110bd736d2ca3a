"""`make load`: a server of its own, a minute of locust, and latency beside the cache it took.

    python -m loadtest.run [--model MODEL] [--users N] [--seconds N] [--seed N] [--rate R] [--serve "FLAGS"]
                            [--url URL]

With `--url` a server that already runs is loaded instead, and left running. Exit code 1 if a stream
failed or none was finished.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.command import ROOT, parser_of
from loadtest.own_server import leave_when_told, own_server

SAMPLE_SECONDS = 0.2
SATURATED = 0.9  # share of a core from which the client is part of what it measures


@dataclass(frozen=True, slots=True)
class Measured:
    """What the locust run saw: values in ms (rates in tokens a second), failures, refusals, seconds.

    `asked` requests were sent, `offered` a second were due (None: each user asks when it has its answer);
    `cpu` is the share of its one core that the client took, second by second.
    """

    values: dict[str, list[float]]
    failures: dict[str, int]
    refused: int
    seconds: float
    asked: int = 0
    offered: float | None = None
    cpu: tuple[float, ...] = ()


class CacheWatch:
    """Reads `/v1/kv` a few times a second and keeps the report with the most live bytes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cache-watch", daemon=True)
        self.peak: dict[str, Any] | None = None

    def __enter__(self) -> CacheWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                report = get_json(f"{self._url}/v1/kv")
            except OSError:
                continue  # one missed sample; a dead server shows in the streams
            if self.peak is None or live_bytes(report) > live_bytes(self.peak):
                self.peak = report


def live_bytes(report: dict[str, Any]) -> int:
    """Bytes held by running and waiting sequences in a `/v1/kv` report."""
    return int(report["states"]["live"]["bytes"])


def get_json(url: str) -> Any:
    """GET and decode; raises OSError if there is no answer within 5 s or it is an error."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        return json.load(reply)


def run_locust(url: str, users: int, seconds: int, seed: int, rate: float | None = None) -> Measured:
    """Run the locustfile without its web page; raises SystemExit with locust's words if it broke."""
    model = get_json(f"{url}/v1/models")["data"][0]["id"]
    with tempfile.TemporaryDirectory(prefix="headroom-load-") as folder:
        samples = Path(folder) / "samples.json"
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json"]
        command += ["--host", url, "-u", str(users), "-r", str(users), "-t", f"{seconds}s", "--skip-log"]
        command += ["--model", model, "--seed", str(seed), "--samples", str(samples)]
        command += ["--rate", str(rate)] if rate else []
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if not samples.is_file():
            raise SystemExit(f"locust ended with code {done.returncode}:\n{done.stderr}")
        kept = json.loads(samples.read_text())
    return Measured(
        kept["values"], kept["failures"], kept["refused"], float(seconds), kept["asked"], rate,
        tuple(kept["cpu"]),
    )  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    """The smallest value that at least the share `q` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(q * 1000) // 1000) - 1)]


def latency_table(measured: Measured) -> Table:
    """Times of whole streams only: one that failed lends its times to no average."""
    table = Table(title="Streams", title_justify="left")
    for heading in ("", "p50", "p99", "values"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = (
        ("first text (TTFT)", "ttft", "ms"),
        ("between texts (ITL)", "itl", "ms"),
        ("whole stream", "total", "ms"),
    )
    for label, name, unit in (*rows, ("output rate (p50, p1)", "rate", "tok/s")):
        values = measured.values.get(name, [])
        if values:
            # Of a rate, the slow end is the low one.
            ends = (0.5, 0.01) if name == "rate" else (0.5, 0.99)
            cells = [f"{quantile(values, q):,.1f} {unit}" for q in ends]
            table.add_row(label, *cells, f"{len(values):,}")
    return table


def totals_table(measured: Measured, peak: dict[str, Any] | None) -> Table:
    """Throughput, what went wrong, and the cache at the moment of most live bytes."""
    tokens = sum(measured.values.get("output_tokens", []))
    table = Table(title="Totals", title_justify="left", show_header=False)
    table.add_row("finished streams", f"{len(measured.values.get('total', [])):,}")
    table.add_row("failed streams", f"{sum(measured.failures.values()):,}")
    table.add_row("refused (429)", f"{measured.refused:,}")
    table.add_row("requests a second", rates(measured))
    if measured.cpu:
        mean = sum(measured.cpu) / len(measured.cpu)
        table.add_row("client's core", f"{mean:.0%} busy, {max(measured.cpu):.0%} in its busiest second")
    table.add_row("output", f"{tokens / measured.seconds:,.1f} tok/s in finished streams")
    if peak is None:
        table.add_row("peak live cache", "never seen: /v1/kv gave no answer")
        return table
    pool, variants = peak["pool"], peak["variants"]
    live = live_bytes(peak)
    table.add_row(
        "peak live cache", f"{mib(live)}, {live / pool['bytes']:.1%} of the pool of {mib(pool['bytes'])}"
    )
    table.add_row("  of it tail waste", mib(peak["tail_waste_bytes"]))
    table.add_row("  as MHA it were", mib(sum(variant["mha_equivalent_bytes"] for variant in variants)))
    return table


def rates(measured: Measured) -> str:
    """Requests a second: due, sent, and answered whole."""
    sent, whole = measured.asked, len(measured.values.get("total", []))
    words = "" if measured.offered is None else f"{measured.offered:,.1f} offered, "
    return f"{words}{sent / measured.seconds:,.1f} sent, {whole / measured.seconds:,.1f} answered whole"


def warnings(measured: Measured) -> list[str]:
    """What makes the figures less than they seem."""
    found = []
    if measured.cpu and max(measured.cpu) >= SATURATED:
        found.append(
            f"the client's one core was {max(measured.cpu):.0%} busy at times: it waited for itself, and the "
            f"times above are too long; use fewer users, or a machine of its own"
        )
    if measured.offered is not None and measured.asked < 0.9 * measured.offered * measured.seconds:
        found.append(
            f"only {measured.asked / measured.seconds:,.1f} of {measured.offered:,.1f} requests a second "
            f"could be sent, as all users waited for answers: the server, or their number, is the limit"
        )
    return found


def mib(count: int) -> str:
    """Bytes in MiB with one decimal."""
    return f"{count / 2**20:,.1f} MiB"


def report(measured: Measured, peak: dict[str, Any] | None, console: Console) -> bool:
    """Print the two tables; whether every stream was whole and there was one."""
    console.print(latency_table(measured))
    console.print(totals_table(measured, peak))
    for warning in warnings(measured):
        console.print(f"warning: {warning}", markup=False, highlight=False)
    for message, times in sorted(measured.failures.items()):
        console.print(f"failed {times}x: {message}", markup=False, highlight=False)
    return not measured.failures and bool(measured.values.get("total"))


def main() -> int:
    """Run the load test; the exit code."""
    parser = parser_of("run", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what to serve (default: %(default)s)")
    parser.add_argument("--users", type=int, default=8, help="users at once (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and sampling (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, help="requests a second of all users (default: each asks when it is answered)"
    )
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags for headroom serve")
    parser.add_argument("--url", help="load this server instead of starting one")
    options = parser.parse_args()
    leave_when_told()
    console = Console(highlight=False)
    if options.url:
        good = load(options.url.rstrip("/"), options, console)
    else:
        with own_server(options.model, shlex.split(options.serve), shown=True) as server:
            good = load(server.url, options, console)
    return 0 if good else 1


def load(url: str, options: argparse.Namespace, console: Console) -> bool:
    """Load the server at `url` and report; whether all went well."""
    console.print(f"{options.users} users for {options.seconds} s against {url}")
    with CacheWatch(url) as watch:
        measured = run_locust(url, options.users, options.seconds, options.seed, options.rate)
    return report(measured, watch.peak, console)


if __name__ == "__main__":
    sys.exit(main())
