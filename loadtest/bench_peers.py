"""`make bench-peers`: the same work for other servers and for ours, in turn, on this machine.

    python -m loadtest.bench_peers --peers FOLDER [--rounds 3] [--only vllm,headroom] [--resume] [--check N]

In each round all get the same prompts, of a fresh seed, one server after the other, and each round begins
with another. Where a server is far behind, once is enough (`--once`). The results are kept in
loadtest/results/peers.json after each server; `--resume` goes on where a run was broken off.
loadtest/PEERS.md says how peers are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest import bench_page, peers
from loadtest.bench import FAULTS, add_flags, answered, checked, finish, tell_fault, tell_wrong
from loadtest.bench_answers import Origin, of_this_run, write
from loadtest.bench_engine import folder_of
from loadtest.bench_machine import about
from loadtest.bench_peers_page import OURS, peers_block
from loadtest.bench_peers_record import Record, resumed
from loadtest.bench_perplexity import perplexity
from loadtest.bench_rows import BenchError
from loadtest.bench_work import WORKLOADS, works_of
from loadtest.command import ROOT, parser_of, read_json
from loadtest.http_bench import run
from loadtest.own_server import free_port, leave_when_told, own_server, running
from server import __version__
from server.tools.compare.machine import commit, now

RESULT = bench_page.PEERS
OUT = "loadtest/out/peers"  # answers, until they are checked
ONCE = "llama:decode16,llama:decode64,llama:prefill,llama:long8,llama:prefix"

LIMITED = {"int4": ("decode1",), "q4": ("decode1",)}  # workloads, where not all are run

Found = tuple[dict[str, Any], dict[str, Any]]  # a server's entry, and its answers


@dataclass(frozen=True, slots=True)
class Plan:
    """What every server is asked: `works` with prompts of `seed`. `flags` are ours alone."""

    model: str
    folder: Path
    places: peers.Places
    requests: int | None
    flags: tuple[str, ...]
    works: tuple[str, ...] = ()
    seed: int = 0

    @property
    def vocab(self) -> int:
        """Rows of the model's embedding."""
        return int(read_json(self.folder / "config.json")["vocab_size"])


def headroom(plan: Plan) -> Found:
    """Our server, as `make bench` has it."""
    with own_server(plan.model, plan.flags) as server:
        served = server.get("/v1/models")["data"][0]["id"]
        rows, texts = _http(server.url, served, plan)
    return {"version": __version__, "ready_s": server.ready_s, "over": "http", "rows": rows}, texts


def engine(plan: Plan) -> Found:
    """Our engine alone."""
    words = ["loadtest.bench_parts", "engine", "--model", plan.model]
    found, texts = _child(words, plan)
    return {"version": __version__, "over": "engine", "rows": found["rows"]}, texts


def vllm(plan: Plan) -> Found:
    """vLLM's server."""
    port = free_port()
    return _peer(peers.vllm(plan.places, plan.folder, port), port, plan)


def llama(plan: Plan) -> Found:
    """llama.cpp's server."""
    port = free_port()
    return _peer(peers.llama(plan.places, port), port, plan)


def openvino(plan: Plan) -> Found:
    """OpenVINO's engine, in its own Python."""
    python, weights = peers.openvino(plan.places)
    words = ["loadtest.peer_openvino", "--gguf", str(weights), "--vocab", str(plan.vocab)]
    found, texts = _child(words, plan, str(python))
    return found | {"over": "engine"}, texts


def int4(plan: Plan) -> Found:
    """Our engine with weights in 4 bits; its answers are another model's, and are not checked."""
    words = ["loadtest.bench_parts", "engine", "--model", plan.model, "--weights", "int4"]
    found, _ = _child(words, plan)
    return {"version": __version__, "over": "quantised", "rows": found["rows"]}, {}


def q4(plan: Plan) -> Found:
    """llama.cpp's own benchmark, which decodes 128 tokens after nothing, four times. Raises BenchError."""
    program, weights, version = peers.llama_bench(plan.places)
    threads = str(len(os.sched_getaffinity(0)))
    command = (
        str(program), "-m", str(weights), "-p", "0", "-n", "128", "-r", "4", "-t", threads, "-o", "json",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise BenchError(f"llama-bench ended with code {done.returncode}: {done.stderr[-300:]}")
    rate = float(json.loads(done.stdout)[0]["avg_ts"])
    figures = {"requests": 4, "concurrency": 1, "prompt": 0, "output": 128, "out_tok_s": rate}
    return {"version": version, "over": "quantised", "rows": {"decode1": figures}}, {}


SERVERS: dict[str, tuple[str, Callable[[Plan], Found]]] = {
    "headroom": (OURS["http"], headroom),
    "vllm": ("vLLM", vllm),
    "llama": ("llama.cpp", llama),
    "engine": (OURS["engine"], engine),
    "openvino": ("OpenVINO", openvino),
    "int4": (OURS["quantised"], int4),
    "q4": ("llama.cpp, Q4_0", q4),
}  # what they are called on the command line, and on the page


def _peer(peer: peers.Peer, port: int, plan: Plan) -> Found:
    with running(peer.command, port, peer.environment) as server:
        rows, texts = _http(server.url, peers.SERVED, plan)
    return {"version": peer.version, "ready_s": server.ready_s, "over": "http", "rows": rows}, texts


def _http(url: str, served: str, plan: Plan) -> Found:
    return run(url, served, works_of(plan.works, plan.requests), plan.seed, plan.vocab)


def _child(words: Sequence[str], plan: Plan, python: str = sys.executable) -> Found:
    more = [] if plan.requests is None else ["--requests", str(plan.requests)]
    return answered([*words, *more, "--workloads", ",".join(plan.works), "--seed", str(plan.seed)], python)


def measure(plan: Plan, keep: Record, options: argparse.Namespace) -> None:
    """All rounds; a server that fails or is missing is said and left out."""
    only, once = options.only.split(","), options.once.split(",") if options.once else []
    version = commit()
    for number in range(options.rounds):
        this = keep.round(number, options.seed)
        order = only[number % len(only) :] + only[: number % len(only)]
        for short in order:
            name, _ = SERVERS[short]
            works = tuple(
                work
                for work in options.workloads.split(",")
                if f"{short}:{work}" not in (once if number else ()) and work in LIMITED.get(short, (work,))
            )
            if name not in this["peers"] and works:
                print(f"== round {number + 1}: {name}", flush=True)
                mine = replace(plan, works=works, seed=this["seed"])
                _turn(mine, this, short, _answers(number, short), version)
                keep.save()
        _check(plan, keep, number, only, options.check)


def _turn(plan: Plan, this: dict[str, Any], short: str, path: Path, version: str | None) -> None:
    """One server's turn in the round `this`: its entry, and its answers with the commit, in a file."""
    (name, ask), load = SERVERS[short], os.getloadavg()[0]
    failed: dict[str, str] = this.setdefault("failed", {})
    try:
        found, texts = ask(plan)
    except (peers.Missing, *FAULTS) as error:
        tell_fault(name, error)
        failed[name] = "is not installed" if isinstance(error, peers.Missing) else "failed"
        return
    failed.pop(name, None)
    this["peers"][name] = found | {"load": load, "commit": version}
    write(path, Origin(plan.model, plan.seed, version), texts)


def _check(plan: Plan, keep: Record, number: int, only: Sequence[str], most: int | None) -> None:
    """The answers of a round, against the reference; `--check 0` leaves it out."""
    this = keep.found["rounds"][number]
    files = {
        SERVERS[short][0]: _answers(number, short)
        for short in only
        if SERVERS[short][0] in this["peers"] and short not in LIMITED
    }
    origins = {
        name: Origin(plan.model, this["seed"], entry["commit"]) for name, entry in this["peers"].items()
    }
    files = {} if most == 0 else of_this_run(files, origins)
    if not files or set(this.get("check", {})) >= set(files):
        return
    print(f"== round {number + 1}: checking answers", flush=True)
    this["check"] = checked(plan.folder, files, most)["tallies"]
    keep.save()


def _answers(number: int, short: str) -> Path:
    return ROOT / OUT / f"{number}-{short}.json"


def begin(path: Path, options: argparse.Namespace) -> Record:
    """The results so far with `--resume`, else empty ones. Raises BenchError."""
    once = [each.split(":") for each in options.once.split(",") if each]
    notes = [
        f"{SERVERS[short][0]} ran {', '.join(f'`{work}`' for name, work in once if name == short)} "
        "in the first round only, as it is far behind there."
        for short in dict.fromkeys(name for name, _ in once)
        if short in options.only.split(",") and options.rounds > 1
    ]
    if options.resume and path.exists():
        return resumed(path, options.model, asdict(about()))
    machine = asdict(about())
    return Record(
        path,
        {
            "model": options.model, "machine": machine, "date": now(), "notes": notes, "rounds": [],
        },
    )  # fmt: skip


def add_perplexity(plan: Plan, keep: Record) -> None:
    """Beside the figures in 4 bits, once."""
    ran = any(OURS["quantised"] in each["peers"] for each in keep.found["rounds"])
    if not ran or "perplexity" in keep.found:
        return
    try:
        found = perplexity(plan.model, measure=plan.requests is None)
    except BenchError as error:
        tell_fault("perplexity", error)
        return
    if found is not None:
        keep.found["perplexity"] = found
        keep.save()


def ours_fell_short(found: dict[str, Any]) -> bool:
    """Say what is wrong with our own side, if anything: an answer, or a server that did not run."""
    ours, bad = set(OURS.values()), False
    for each in found["rounds"]:
        bad |= tell_wrong(each.get("check", {}), ours)
        bad |= bool(ours & set(each.get("failed", {})))
    return bad


def main() -> int:
    """Measure, write JSON and page, print the ratios; the exit code."""
    parser = parser_of("bench_peers", __doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"), metavar="FOLDER", help="where they are")
    for name in ("vllm", "llama", "openvino"):
        parser.add_argument(f"--{name}", type=Path, metavar="PROGRAM", help="this one is somewhere else")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", default=",".join(SERVERS), help="default: %(default)s")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--once", default=ONCE, help="in the first round only (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what there is")
    add_flags(parser, RESULT)
    options = parser.parse_args()
    leave_when_told()
    (ROOT / OUT).mkdir(parents=True, exist_ok=True)
    result = options.json or ROOT / (RESULT if options.requests is None else f"{OUT}/quick.json")
    places = peers.Places(options.peers, options.vllm, options.llama, options.openvino)
    plan = Plan(
        options.model, folder_of(options.model), places, options.requests, tuple(shlex.split(options.serve))
    )
    try:
        keep = begin(result, options)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    measure(plan, keep, options)
    add_perplexity(plan, keep)
    print(peers_block(keep.found))
    finish(result == ROOT / RESULT)
    return 1 if ours_fell_short(keep.found) else 0


if __name__ == "__main__":
    sys.exit(main())
