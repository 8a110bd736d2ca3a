"""The parts of `make bench` that need no server, each in a process of its own.

python -m loadtest.bench_parts PART --model MODEL --seed N --json FILE [--texts FILE] [--requests N]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from loadtest.bench_cost import longer_context, model_cost, work_cost
from loadtest.bench_engine import drive, folder_of, request_of
from loadtest.bench_rows import BenchError
from loadtest.bench_setup import Found, Setup, run_work, warm
from loadtest.bench_variants import perplexity_part, quantised_part, speculation_part
from loadtest.bench_work import Ask, Work, add_flags, mixed, uniform_like, works_of
from loadtest.ceiling import ceiling
from loadtest.command import parser_of, write_both
from server.engine.engine import Engine
from server.engine.facts import EngineFacts

MIXED_REQUESTS, MIXED_CONCURRENCY, MIXED_GAP, MIXED_TURNS = 64, 16, 0.05, 3
CONTEXTS, CONTEXT_BATCH = (512, 2048), 8
QUEUED, QUEUE_BATCH, QUEUE_STEPS, QUEUE_TURNS = 10_000, 16, 40, 5
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number
_SETTLE = 3  # steps after a change that are not counted


def engine_part(setup: Setup) -> Found:
    """All workloads in process, with the bytes and operations that they take."""
    engine, facts = warm(setup, weights=setup.weights)
    cost = model_cost(setup.config, ITEMSIZE[facts.dtype])
    rows, texts = {}, {}
    for work in works_of(setup.works, setup.requests):
        found, answers, steps = run_work(engine, facts, work, setup)
        spent = work_cost(cost, work, steps, facts.max_batch_tokens)
        rows[work.name] = found | {"steps": steps, "bytes": spent.bytes, "flops": spent.flops}
        texts[work.name] = answers
    backends = {"attention": facts.attention_backend, "linear": facts.linear_backend, "dtype": facts.dtype}
    return {"rows": rows, "backends": backends}, texts


def mixed_part(setup: Setup) -> Found:
    """Mixed lengths beside as many equal requests with the same tokens altogether, in turn, each time with
    fresh prompts; the median ratio, and the run that has it."""
    engine, facts = warm(setup)
    runs = []
    for turn in range(MIXED_TURNS):
        seed = setup.seed + turn
        given = mixed(setup.requests or MIXED_REQUESTS, seed, MIXED_GAP, setup.vocab)
        found: dict[str, Any] = {"requests": len(given), "concurrency": MIXED_CONCURRENCY}
        for name, each in (("uniform", uniform_like(given, seed, setup.vocab)), ("mixed", given)):
            answers, wall = drive(engine, facts, each, MIXED_CONCURRENCY)
            if [ask.output for ask in each] != [answer.tokens for answer in answers]:
                raise BenchError("an answer has fewer tokens than were asked for, or more")
            tokens = sum(len(ask.prompt) + ask.output for ask in each)
            found[name] = {"tokens": tokens, "wall_s": wall, "tok_s": tokens / wall}
        runs.append(found | {"ratio": found["mixed"]["tok_s"] / found["uniform"]["tok_s"]})
    runs.sort(key=lambda run: float(run["ratio"]))
    return runs[len(runs) // 2] | {"ratios": [run["ratio"] for run in runs]}, {}


def context_part(setup: Setup) -> Found:
    """A decode step of 8 sequences with 512 and with 2,048 tokens before them, in turn, twice."""
    engine, facts = warm(setup)
    times: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    output = QUEUE_STEPS + _SETTLE + 8
    for _ in range(2):
        for context in CONTEXTS:
            work = Work(f"context-{context}", CONTEXT_BATCH, CONTEXT_BATCH, context, output)
            given = setup.asks(work)
            # Once their prompts are in the prefix cache, all begin to decode in the same step.
            drive(engine, facts, [replace(ask, output=1) for ask in given], CONTEXT_BATCH)
            _start(engine, facts, given)
            times[context] += _steps(engine, QUEUE_STEPS)
            while engine.has_work:
                engine.step()
    short, long = (1e3 * statistics.median(times[context]) for context in CONTEXTS)
    more = longer_context(model_cost(setup.config, ITEMSIZE[facts.dtype]), CONTEXT_BATCH, *CONTEXTS)
    return {
        "sequences": CONTEXT_BATCH, "contexts": CONTEXTS, "step_ms": [short, long],
        "more_ms": long - short, "more_bytes": more.bytes, "more_flops": more.flops,
    }, {}  # fmt: skip


def queue_part(setup: Setup) -> Found:
    """A decode step of 16 sequences with nobody waiting and with 10,000 requests waiting, in turn."""
    engine, facts = warm(setup, max_num_seqs=QUEUE_BATCH)
    turns = 2 * QUEUE_TURNS + 1
    output = turns * (QUEUE_STEPS + _SETTLE + 2) + 64
    _start(engine, facts, setup.asks(Work("queue", QUEUE_BATCH, QUEUE_BATCH, 16, output)))
    waiting = setup.asks(Work("waiting", QUEUED, 1, 16, 16))
    variant, times = facts.variants[0].name, ([], [])  # type: tuple[str, tuple[list[float], list[float]]]
    for turn in range(turns):  # it begins and ends with an empty queue, as steps grow with the context
        requests = [request_of(ask, variant) for ask in waiting] if turn % 2 else []
        for request in requests:
            engine.add(request)
        times[turn % 2].extend(_steps(engine, QUEUE_STEPS))
        for request in requests:
            engine.abort(request.id)
        engine.step()
    empty, full = (1e3 * statistics.median(each) for each in times)
    return {
        "sequences": QUEUE_BATCH, "queued": QUEUED, "empty_ms": empty, "full_ms": full,
        "ratio": full / empty, "steps": len(times[1]),
    }, {}  # fmt: skip


def _start(engine: Engine, facts: EngineFacts, given: list[Ask]) -> None:
    """Until all of them decode."""
    for ask in given:
        engine.add(request_of(ask, facts.variants[0].name))
    while len(engine.step()) < len(given):
        if not engine.has_work:
            raise BenchError("some had ended before all of them had begun")


def _steps(engine: Engine, count: int) -> list[float]:
    """Seconds of each of `count` steps, after a few that are not counted."""
    for _ in range(_SETTLE):
        engine.step()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return times


PARTS: dict[str, Callable[[Setup], Found]] = {
    "ceiling": lambda _: (asdict(ceiling()), {}),
    "engine": engine_part,
    "mixed": mixed_part,
    "context": context_part,
    "queue": queue_part,
    "quantised": quantised_part,
    "perplexity": perplexity_part,
    "speculation": speculation_part,
}


def main() -> int:
    """Measure one part; the exit code."""
    parser = parser_of("bench_parts", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="none")
    add_flags(parser, kept=True)
    options = parser.parse_args()
    works = tuple(options.workloads.split(","))
    setup = Setup(folder_of(options.model), options.seed, options.requests, works, options.weights)
    try:
        found, texts = PARTS[options.part](setup)
    except BenchError as error:
        print(f"{options.part}: {error}", file=sys.stderr)
        return 1
    write_both(options, found, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
