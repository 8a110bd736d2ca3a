"""`make bench`: all workloads on our side, in process and over HTTP, and what is promised beside them.

    python -m loadtest.bench [--model MODEL] [--parts engine,http,check] [--requests N] [--check N]

Each part runs in a process of its own, and is written to loadtest/results/bench.json when it is done, with
its time and commit: an interrupted run keeps what it has, and `--parts` measures some of them again. At the
end docs/benchmarks.md is written anew. Wants an idle machine; the load before each part is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest import bench_answers, bench_page
from loadtest.bench_answers import Origin
from loadtest.bench_engine import folder_of
from loadtest.bench_http import server_part
from loadtest.bench_machine import about
from loadtest.bench_rows import BenchError
from loadtest.bench_work import WORKLOADS, works_of
from loadtest.command import ROOT, parser_of, read_json, replace_json
from loadtest.own_server import ServerFault, leave_when_told
from loadtest.stream import StreamError
from server.tools.compare.machine import commit, now

RESULT = "loadtest/results/bench.json"
OUT = "loadtest/out/bench"  # answers, until they are checked
ALL = ("ceiling", "engine", "http", "mixed", "context", "queue", "quantised", "speculation", "check")


FAULTS = (BenchError, StreamError, ServerFault, OSError, TimeoutError, SystemExit)  # end a part, not the run


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, of which model, with which prompts, and where the results go."""

    model: str
    parts: tuple[str, ...]
    seed: int
    requests: int | None
    check: int | None
    flags: tuple[str, ...]
    result: Path


def run(plan: Plan, texts: Path) -> int:
    """Every part in turn; `texts` is a folder for the answers between their part and the check. Returns how
    many parts failed, the check with a wrong answer among them; the others are kept."""
    folder, failed = folder_of(plan.model), 0
    version = commit()  # before results are written into the clone
    for part in plan.parts:
        if part == "check" and plan.check == 0:
            continue
        print(f"== {part}", flush=True)
        load = os.getloadavg()[0]
        try:
            found, answers = _measure(part, plan, folder, texts)
        except FAULTS as error:
            tell_fault(part, error)
            failed += 1
            continue
        if answers:
            bench_answers.write(texts / f"{part}.json", Origin(plan.model, plan.seed, version), answers)
        stamp = {"commit": version, "date": now(), "load": load, "seed": plan.seed}
        keep(plan.result, plan.model, {part: stamp | found})
        failed += part == "check" and tell_wrong(found["tallies"], found["tallies"])
    return failed


def tell_fault(name: str, error: BaseException) -> None:
    """A line on stderr; a SystemExit that is no server's last words is raised again, as a signal's is."""
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        raise error
    print(f"{name}: {error}", file=sys.stderr)


def tell_wrong(tallies: dict[str, Any], ours: Collection[str]) -> bool:
    """Say which answers of `ours` are wrong; whether there are any."""
    found = bench_answers.wrong(tallies, ours)
    for line in found:
        print(line, file=sys.stderr)
    return bool(found)


def _measure(part: str, plan: Plan, folder: Path, texts: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A part's figures, and its answers by workload if they are to be checked."""
    if part == "check":
        return _checked_here(plan, folder, texts), {}
    if part == "http":
        works = works_of(list(WORKLOADS), plan.requests)
        return server_part(plan.model, folder, works, plan.seed, plan.flags)
    more = [] if plan.requests is None else ["--requests", str(plan.requests)]
    words = ["loadtest.bench_parts", part, "--model", plan.model, "--seed", str(plan.seed), *more]
    return answered(words) if part == "engine" else (child(words), {})


def _checked_here(plan: Plan, folder: Path, texts: Path) -> dict[str, Any]:
    """The tallies of the answers that belong to the figures in the results."""
    kept = read_json(plan.result) if plan.result.exists() else {"parts": {}}
    origins = {
        name: Origin(kept["model"], part["seed"], part["commit"])
        for name, part in kept["parts"].items()
        if kept["model"] == plan.model
    }
    files = {path.stem: path for path in sorted(texts.glob("*.json"))}
    return checked(folder, bench_answers.of_this_run(files, origins), plan.check)


def child(words: Sequence[str], python: str = sys.executable) -> dict[str, Any]:
    """The JSON that a module of ours writes in a process of its own; our own parts wait for work as `serve`
    does, without turning in circles. Raises BenchError."""
    ours = {"OMP_WAIT_POLICY": "PASSIVE"} if python == sys.executable else {}
    with tempfile.TemporaryDirectory(prefix="headroom-bench-") as name:
        result = Path(name) / "found.json"
        done = subprocess.run(
            [python, "-m", *words, "--json", str(result)], cwd=ROOT, env=ours | os.environ, check=False
        )
        if done.returncode or not result.exists():
            raise BenchError(f"{words[0]} ended with code {done.returncode}")
        return read_json(result)


def answered(words: Sequence[str], python: str = sys.executable) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with the answers, by workload."""
    with tempfile.TemporaryDirectory(prefix="headroom-bench-") as name:
        answers = Path(name) / "answers.json"
        return child([*words, "--texts", str(answers)], python), read_json(answers)


def checked(folder: Path, files: dict[str, Path], most: int | None) -> dict[str, Any]:
    """The tallies of all answers in `files`. Raises BenchError."""
    if not files:
        raise BenchError("no answers to check: the parts engine and http give them")
    named = [f"{name}={path}" for name, path in files.items()]
    more = [] if most is None else ["--check", str(most)]
    return {"tallies": child(["loadtest.bench_check", "--model", str(folder), "--texts", *named, *more])}


def keep(path: Path, model: str, parts: dict[str, Any]) -> None:
    """Add parts to the results, in place of older ones; results of another machine or model are dropped."""
    machine = json.loads(json.dumps(asdict(about())))
    found = read_json(path) if path.exists() else {}
    if found.get("machine") != machine or found.get("model") != model:
        found = {"model": model, "machine": machine, "parts": {}}
    found["parts"] |= parts
    replace_json(path, found)


def add_flags(parser: argparse.ArgumentParser, result: str) -> None:
    """What `make bench` and `make bench-peers` are both told."""
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="of the prompts (default: a fresh one)")
    parser.add_argument("--requests", type=int, metavar="N", help="at most so many a workload: a quick look")
    parser.add_argument(
        "--check", type=int, metavar="N", help="check so many answers each (default: all; 0: none)"
    )
    parser.add_argument(
        "--serve", default="", metavar="FLAGS", help='more flags for our server, as --serve="--threads 2"'
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {result}; with --requests, none")


def finish(to_page: bool) -> None:
    """Write the page, if the results are those that it shows."""
    if to_page:
        bench_page.render(ROOT)
        print(f"written: {bench_page.PAGE}")


def main() -> int:
    """Measure, write JSON and page; the exit code."""
    parser = parser_of("bench", __doc__)
    parser.add_argument("--parts", default=",".join(ALL), help="default: %(default)s")
    add_flags(parser, RESULT)
    options = parser.parse_args()
    parts = tuple(options.parts.split(","))
    unknown = set(parts) - set(ALL)
    if unknown:
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    leave_when_told()
    with tempfile.TemporaryDirectory(prefix="headroom-bench-") as folder:
        quick = Path(folder) / "quick.json"
        result = options.json or (ROOT / RESULT if options.requests is None else quick)
        plan = Plan(
            model=options.model,
            parts=parts,
            seed=random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed,
            requests=options.requests,
            check=options.check,
            flags=tuple(shlex.split(options.serve)),
            result=result,
        )
        texts = Path(folder) / "texts" if result == quick else ROOT / OUT
        texts.mkdir(parents=True, exist_ok=True)
        failed = run(plan, texts)
        if result == quick and quick.exists():
            print(bench_page.own_block(read_json(quick)))
    finish(result == ROOT / RESULT)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
