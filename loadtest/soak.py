"""`make soak`: half an hour of a crowd, and every finished answer is the one that its request gets alone.

    python -m loadtest.soak [--minutes N] [--clients N] [--model MODEL] [--seed N] [--json FILE]

A server of its own, in fp32, with three attention modes and a pool too small for the crowd. First each
request of the catalogue is asked alone; then clients ask them at random, and leave a third of them. Exit
code 1 if an answer differs, something is refused, a block stays, the books do not balance, or memory grows.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.command import ROOT, add_json, parser_of, write_json
from loadtest.own_server import OwnServer, ServerFault, leave_when_told, own_server
from loadtest.soak_catalogue import MODES, Ask, catalogue
from loadtest.soak_client import ANSWER_SECONDS, Heard, Refused, ask, leave
from loadtest.soak_judge import NEAR_TIE, Judgement, scored_body, tie_gap
from loadtest.soak_memory import Sample, growth
from server.tools.compare.machine import commit, now, this_machine

RESULT = "loadtest/results/soak.json"
SHARE_LEFT = 1 / 3
PRIORITIES = (0, 0, 0, 0, -1, 1, 5)
SAMPLE_SECONDS = 1.0
SAY_SECONDS = 60.0
KEPT_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served and how hard it is tried. The pool must hold the longest request, not the crowd."""

    model: str = "smollm2-135m"
    kv_memory: str = "48MiB"
    max_model_len: int = 512
    max_num_seqs: int = 16
    block_size: int = 8  # tokens; small, so that sequences ask for blocks often and meet a full pool
    clients: int = 32
    minutes: float = 30.0
    seed: int = 1
    threads: int | None = None
    patience: float = 3.0  # seconds; who leaves has waited up to so long

    def flags(self) -> list[str]:
        """For `headroom serve`."""
        flags = ["--dtype", "float32", "--attention", ",".join(MODES), "--head-map", "mean"]
        flags += ["--kv-memory", self.kv_memory, "--max-model-len", str(self.max_model_len)]
        flags += ["--max-num-seqs", str(self.max_num_seqs), "--block-size", str(self.block_size)]
        flags += ["--log-level", "warning"]
        return flags + ([] if self.threads is None else ["--threads", str(self.threads)])


@dataclass
class Course:
    """What has happened so far."""

    judgement: Judgement = field(default_factory=Judgement)
    left: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    streamed: int = 0
    tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    ends: float = 0.0  # on the monotonic clock; moved forward if the server is gone

    @property
    def requests(self) -> int:
        """Answered, left and refused."""
        return self.judgement.answers + self.left.total() + self.refused.total()


def solo(server: OwnServer, asks: Sequence[Ask]) -> dict[str, Heard]:
    """Each request asked alone, whole, one after the other: the right answers. Raises ServerFault."""

    async def alone() -> dict[str, Heard]:
        found = {}
        for one in asks:
            try:
                found[one.name] = await ask(server.port, one.path, one.body, stream=False)
            except Refused as error:
                raise ServerFault(f"{one.name}, alone: {error}\n{server.log()[-3000:]}") from None
        return found

    return asyncio.run(alone())


async def crowd(server: OwnServer, setup: Setup, asks: Sequence[Ask], truth: dict[str, Heard]) -> Course:
    """Clients ask at random until the time is up, then wait for what they have asked."""
    course = Course(ends=time.monotonic() + setup.minutes * 60)
    watch = asyncio.create_task(_watch(server, course))
    try:
        numbers = range(setup.clients)
        clients = [_client(server.port, setup, number, asks, truth, course) for number in numbers]
        await asyncio.gather(*clients)
    finally:
        watch.cancel()
    return course


async def _client(
    port: int, setup: Setup, number: int, asks: Sequence[Ask], truth: dict[str, Heard], course: Course
) -> None:
    draw = random.Random(f"soak-{setup.seed}-{number}")
    while time.monotonic() < course.ends:
        one = draw.choice(asks)
        body = {**one.body, "priority": draw.choice(PRIORITIES)}
        try:
            if not one.whole and draw.random() < SHARE_LEFT:
                wait = draw.uniform(0, setup.patience) if draw.random() < 0.5 else ANSWER_SECONDS
                course.left[await leave(port, one.path, body, wait, draw.randrange(24))] += 1
                continue
            stream = not one.whole and draw.random() < 0.7
            heard = await ask(port, one.path, body, stream)
        except (Refused, TimeoutError, ValueError) as error:
            course.refused[f"{one.name}: {type(error).__name__} {error}"[:300]] += 1
            await asyncio.sleep(0.2)
            continue
        course.judgement.take(one, heard, truth[one.name])
        course.by_kind[one.name.rpartition(", ")[0]] += 1
        course.streamed += stream
        course.tokens += heard.completion_tokens


async def _watch(server: OwnServer, course: Course) -> None:
    """Samples memory, and says now and then how things stand."""
    began = said = time.monotonic()
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        try:
            course.samples.append(Sample(course.requests, server.memory()))
        except ServerFault as error:
            course.refused[str(error)] += 1
            course.ends = 0.0
            return
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            judged, mib = course.judgement, course.samples[-1].bytes / 2**20
            words = (
                f"{judged.answers:,} answers, {course.left.total():,} left, {len(judged.differing)} differ"
            )
            print(
                f"{(said - began) / 60:.0f} min: {words}, {course.refused.total()} refused, {mib:.0f} MiB",
                flush=True,
            )


def settle(server: OwnServer, course: Course) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Near ties, and answers that are wrong: what differed is asked again alone, with scores."""
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    scored: dict[str, dict[str, Any]] = {}
    for one, heard in course.judgement.differing:
        gap = None
        if one.exact:
            if one.name not in scored:
                scored[one.name] = server.post(one.path, scored_body(one))
            gap = tie_gap(one, scored[one.name], heard)
        found = {"request": one.name, "gap": gap, "heard": asdict(heard)}
        (ties if gap is not None and gap < NEAR_TIE else wrong).append(found)
    return ties, wrong


def run(setup: Setup) -> dict[str, Any]:
    """The whole soak: its result, with `passed` and, if it did not, `problems`. Raises ServerFault if the
    server is gone, or refuses what is asked alone."""
    began = time.monotonic()
    with own_server(setup.model, setup.flags()) as server:
        asks = catalogue(server.get("/v1/models")["data"][0]["id"].partition("@")[0])
        truth = solo(server, asks)
        warm = time.monotonic()
        print(f"{len(truth)} requests asked alone in {warm - began:.0f} s", flush=True)
        preempted = server.counter("headroom:num_preemptions_total")
        course = asyncio.run(crowd(server, setup, asks, truth))
        loaded = time.monotonic() - warm
        result = _end(server, course, truth, preempted)
    problems = result.pop("problems")
    return {
        "format": 1,
        "date": now(),
        "commit": commit(),
        "machine": asdict(this_machine("cpu", setup.threads)),
        "setup": asdict(setup),
        "seconds": round(time.monotonic() - began, 1),
        "loaded_seconds": round(loaded, 1),
        "catalogue": len(asks),
        **result,
        "passed": not problems,
        "problems": problems,
    }


def _end(server: OwnServer, course: Course, truth: dict[str, Heard], preempted: int) -> dict[str, Any]:
    """What the server looks like when the crowd has gone, and all figures."""
    problems: list[str] = []
    live = None
    try:
        server.wait_idle(60.0)
        live = server.checked()["states"]["live"]["blocks"]
    except ServerFault as error:
        problems.append(str(error))
    preemptions = server.counter("headroom:num_preemptions_total") - preempted
    ties, wrong = settle(server, course)
    grown = growth(course.samples)
    judged = course.judgement
    checks = (
        (bool(wrong), f"{len(wrong)} answers differ from their solo runs"),
        (bool(course.refused), f"{course.refused.total()} requests got no answer"),
        (not grown.flat, f"memory grew by {grown.slope:,.0f} (or {grown.quarters:,.0f}) bytes a request"),
        (preemptions == 0, "nothing was preempted: the pool is too large for the crowd"),
        (server.tracebacks() > 0, f"the server logged exceptions:\n{server.log()[-3000:]}"),
        (judged.answers == 0, "nothing was answered"),
    )
    problems += [words for failed, words in checks if failed]
    return {
        "requests": course.requests,
        "answers": judged.answers,
        "choices": judged.choices,
        "tokens": course.tokens,
        "streamed": course.streamed,
        "left": dict(course.left),
        "refused": dict(course.refused.most_common(KEPT_EXAMPLES)),
        "by_kind": dict(sorted(course.by_kind.items())),
        "solo_tokens": sum(heard.completion_tokens for heard in truth.values()),
        "near_ties": len(ties),
        "ties": ties[:KEPT_EXAMPLES],
        "wrong": len(wrong),
        "wrong_examples": wrong[:KEPT_EXAMPLES],
        "scores": judged.scores,
        "worst_score": judged.worst_score,
        "preemptions": preemptions,
        "live_blocks": live,
        "memory": asdict(grown) | {"judged": grown.judged, "samples": len(course.samples)},
        "problems": problems,
    }


def main() -> int:
    """Soak, say how it went, write the JSON; the exit code."""
    default = Setup()
    parser = parser_of("soak", __doc__)
    parser.add_argument(
        "--minutes", type=float, default=default.minutes, help="of load (default: %(default)s)"
    )
    parser.add_argument("--clients", type=int, default=default.clients, help="default: %(default)s")
    parser.add_argument("--model", default=default.model, help="what to serve (default: %(default)s)")
    parser.add_argument("--kv-memory", default=default.kv_memory, help="the pool (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of the server (default: its own choice)")
    parser.add_argument("--seed", type=int, default=default.seed, help="who asks what (default: %(default)s)")
    add_json(parser, RESULT)
    options = parser.parse_args()
    leave_when_told()
    given = ("model", "kv_memory", "clients", "minutes", "seed", "threads")
    setup = Setup(**{name: getattr(options, name) for name in given})
    try:
        found = run(setup)
    except ServerFault as error:
        print(f"the soak failed: {error}", file=sys.stderr)
        return 1
    kept = options.json or (ROOT / RESULT if options.minutes >= default.minutes else None)
    if kept:
        write_json(kept, found)
    print(
        f"{found['answers']:,} answers of {found['requests']:,} requests in "
        f"{found['loaded_seconds'] / 60:.1f} min: "
        f"{found['wrong']} wrong, {found['near_ties']} near ties, {sum(found['left'].values()):,} left, "
        f"{found['preemptions']:,} preemptions, {found['memory']['slope']:,.0f} bytes a request"
    )
    for problem in found["problems"]:
        print(f"- {problem}")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
