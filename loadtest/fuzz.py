"""`make fuzz`: twenty thousand requests that nobody should send, and a server that must not mind.

    python -m loadtest.fuzz [--requests N] [--seed N] [--json FILE]

A server of its own with a tiny checkpoint gets requests that schemathesis makes from its OpenAPI document,
bodies that are broken in every way we know, and broken HTTP. Exit code 1 if any answer is a fault.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.command import ROOT, add_json, parser_of, write_json
from loadtest.fuzz_bodies import body_calls
from loadtest.fuzz_checks import attack_fault, fault
from loadtest.fuzz_schema import schema_calls
from loadtest.fuzz_sockets import socket_attacks
from loadtest.fuzz_wire import Answer, Attack, Call, Wire
from loadtest.own_server import OwnServer, ServerFault, leave_when_told, own_server
from loadtest.tiny import make_tiny
from server.tools.compare.machine import commit, now, this_machine

RESULT = "loadtest/results/fuzz.json"
REQUESTS = 20_000
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--kv-memory", "4MiB", "--max-model-len", "128"),
    *("--attention", "native,mha,mqa", "--head-map", "mean", "--log-level", "warning"),
)
SHARE_SCHEMA, SHARE_SOCKETS = 0.25, 0.05
WORKERS = 4
LOOK_EVERY = 500  # requests between two looks at the server's health
GROWTH_LIMIT = 64 << 20  # bytes from the first tenth of the run to its end
PROBE = {"prompt": "The letter had been opened", "max_tokens": 12, "temperature": 0}
KEPT_FAULTS = 40

Shot = Call | Attack


@dataclass
class Tally:
    """What came back, by source and status class (0: no words), and what should not have."""

    classes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    notes: Counter[str] = field(default_factory=Counter)
    by_design: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, shot: Shot, answer: Answer, wrong: str | None) -> None:
        """Count one answer; called from several threads."""
        source = shot.source if isinstance(shot, Call) else "sockets"
        with self.lock:
            self.classes[source][f"{answer.status // 100}xx" if answer.status else "none"] += 1
            self.notes[f"{source}: {shot.note}"] += 1
            if answer.status >= 500 and wrong is None:
                self.by_design[str(answer.status)] += 1
            if wrong is not None:
                self.faults.append({"what": wrong, "shot": described(shot)})

    @property
    def requests(self) -> int:
        """All that were sent."""
        return sum(sum(counts.values()) for counts in self.classes.values())


def described(shot: Shot) -> str:
    """Enough of a shot to send it again by hand."""
    if isinstance(shot, Attack):
        return f"{shot.note}: {shot.data[:300]!r}"
    return f"{shot.note}: {shot.method} {shot.path[:200]} {shot.headers} {shot.body[:600]!r}"


def shots(document: dict[str, Any], start: int, count: int) -> Iterator[Shot]:
    """`count` shots of the three sources, mixed evenly, the same for the same document and start."""
    schema: list[Shot] = [*schema_calls(document, start, int(count * SHARE_SCHEMA))]
    sockets: list[Shot] = [*socket_attacks(start, int(count * SHARE_SOCKETS))]
    schema = schema[:count]
    bodies: list[Shot] = [*body_calls(document, start, count - len(schema) - len(sockets))]
    placed = [
        ((number + 0.5) / len(group), which, shot)
        for which, group in enumerate((schema, sockets, bodies))
        for number, shot in enumerate(group)
    ]
    return (shot for _, _, shot in sorted(placed, key=lambda entry: entry[:2]))


def fire(server: OwnServer, wanted: Sequence[Shot], tally: Tally) -> None:
    """Send them all from a few threads; ServerFault as soon as the server is no server any more."""
    wires = threading.local()

    def one(shot: Shot) -> None:
        if not hasattr(wires, "wire"):
            wires.wire = Wire(server.port)
        if isinstance(shot, Attack):
            answer = wires.wire.attack(shot)
            tally.take(shot, answer, attack_fault(answer))
        else:
            answer = wires.wire.send(shot)
            tally.take(shot, answer, fault(shot, answer))

    truth = probe(server)
    with ThreadPoolExecutor(WORKERS) as pool:
        for begin in range(0, len(wanted), LOOK_EVERY):
            list(pool.map(one, wanted[begin : begin + LOOK_EVERY]))
            server.get("/health")
            tally.memory.append(server.memory())
            if probe(server) != truth:
                raise ServerFault("a plain greedy request has another answer than before")


def probe(server: OwnServer) -> str:
    """The text of a plain greedy request."""
    return str(server.post("/v1/completions", PROBE)["choices"][0]["text"])


def look_over(server: OwnServer, tally: Tally) -> dict[str, Any]:
    """The end: idle, every block recounted, no traceback logged, memory bounded. ServerFault otherwise."""
    waited = server.wait_idle(30.0)
    states = server.checked()["states"]
    if server.tracebacks():
        raise ServerFault(
            f"the server logged {server.tracebacks()} exceptions, the last:\n{server.log()[-3000:]}"
        )
    early = tally.memory[len(tally.memory) // 10]
    grown = tally.memory[-1] - early
    if grown > GROWTH_LIMIT:
        raise ServerFault(f"the server's memory grew by {grown:,} bytes")
    return {
        "idle_seconds": round(waited, 2),
        "live_blocks": states["live"]["blocks"],
        "memory_growth": grown,
        "memory": tally.memory,
    }


def run(model: str, requests: int, start: int, folder: Path) -> dict[str, Any]:
    """Fuzz a server of its own; the whole result, with `passed`. Without a model, one is made in `folder`."""
    began = time.monotonic()
    tally, after, broke = Tally(), {}, None
    with own_server(model or str(make_tiny(folder / "tiny")), FLAGS) as server:
        wanted = list(shots(server.get("/openapi.json"), start, requests))
        try:
            fire(server, wanted, tally)
            after = look_over(server, tally)
        except ServerFault as error:
            broke = str(error)
    return {
        "format": 1,
        "date": now(),
        "commit": commit(),
        "machine": asdict(this_machine("cpu", 1)),
        "seconds": round(time.monotonic() - began, 1),
        "seed": start,
        "requests": tally.requests,
        "by_source": {
            source: dict(sorted(counts.items())) for source, counts in sorted(tally.classes.items())
        },
        "kinds": dict(sorted(tally.notes.items())),
        "by_design": dict(tally.by_design),
        "faults": len(tally.faults),
        "examples": tally.faults[:KEPT_FAULTS],
        "broke": broke,
        "after": after,
        "passed": broke is None and not tally.faults,
    }


def summary(found: dict[str, Any]) -> str:
    """One line: requests by source and status class, and the verdict."""
    parts = [
        f"{source} " + ", ".join(f"{count:,} {name}" for name, count in counts.items())
        for source, counts in found["by_source"].items()
    ]
    verdict = "passed" if found["passed"] else f"{found['faults']} faults"
    return f"{found['requests']:,} requests in {found['seconds']:.0f} s: {'; '.join(parts)}: {verdict}"


def main() -> int:
    """Fuzz, print the summary, write the JSON; the exit code."""
    parser = parser_of("fuzz", __doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="the same seed, the same requests (default: %(default)s)"
    )
    parser.add_argument("--model", default="", help="what to serve (default: a tiny checkpoint made for it)")
    add_json(parser, RESULT)
    options = parser.parse_args()
    leave_when_told()
    with tempfile.TemporaryDirectory(prefix="headroom-fuzz-") as folder:
        found = run(options.model, options.requests, options.seed, Path(folder))
    kept = options.json or (ROOT / RESULT if options.requests >= REQUESTS else None)
    if kept:
        write_json(kept, found)
    print(summary(found))
    for example in found["examples"][:10]:
        print(f"- {example['what']}\n  {example['shot'][:400]}")
    if found["broke"]:
        print(f"the server: {found['broke']}")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
