"""The parts of `make bench` that need no server, each in a process of its own.

python -m loadtest.bench_parts PART --model MODEL --seed N --json FILE [--texts FILE] [--requests N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.bench_cost import longer_context, model_cost, work_cost
from loadtest.bench_engine import drive, folder_of, kernels, make_engine, request_of
from loadtest.bench_rows import Answer, BenchError, record, row, said
from loadtest.bench_work import WARM_UP, WORKLOADS, Ask, Work, asks, mixed, repetitive, uniform_like
from loadtest.ceiling import ceiling
from loadtest.http_bench import few, tell
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.options import EngineOptions

QUANTISED = ("none", "int8", "int4")  # of --weights
QUANTISED_WORKS = ("decode1", "decode16", "decode64")
MIXED_REQUESTS, MIXED_CONCURRENCY, MIXED_GAP = 64, 16, 0.05
CONTEXTS, CONTEXT_BATCH = (512, 2048), 8
QUEUED, QUEUE_BATCH, QUEUE_STEPS, QUEUE_TURNS = 10_000, 16, 40, 5
REPETITIVE = (Work("repetitive1", 4, 1, 128, 128), Work("repetitive16", 32, 16, 128, 128))
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number
_SETTLE = 3  # steps after a change that are not counted


@dataclass(frozen=True, slots=True)
class Setup:
    """What a part is given: the model's folder, the prompts' seed, and the most requests of a workload."""

    folder: Path
    seed: int
    requests: int | None = None
    works: tuple[str, ...] = tuple(WORKLOADS)  # of the part `engine`
    weights: str = "none"  # of the part `engine`, as --weights has them

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return found

    def asks(self, work: Work) -> list[Ask]:
        """The requests of a workload."""
        return asks(work, self.seed, self.vocab)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])


Found = tuple[dict[str, Any], dict[str, Any]]  # figures, and answers by workload


def measured_ceiling(setup: Setup) -> Found:
    """What the machine can do, before and beside what we do."""
    return asdict(ceiling()), {}


def engine_part(setup: Setup) -> Found:
    """All workloads in process, with the bytes and operations that they take."""
    engine, facts = _warm(setup, weights=setup.weights)
    cost = model_cost(setup.config, _ITEMSIZE[facts.dtype])
    rows, texts = {}, {}
    for work in few([WORKLOADS[name] for name in setup.works], setup.requests):
        found, answers, steps = _run(engine, facts, work, setup)
        spent = work_cost(cost, work, steps, facts.max_batch_tokens)
        rows[work.name] = found | {"steps": steps, "bytes": spent.bytes, "flops": spent.flops}
        texts[work.name] = answers
    return {"rows": rows, "backends": _backends(facts)}, texts


def mixed_part(setup: Setup) -> Found:
    """Mixed lengths beside as many equal requests with the same tokens altogether."""
    engine, facts = _warm(setup)
    given = mixed(setup.requests or MIXED_REQUESTS, setup.seed, MIXED_GAP, setup.vocab)
    found: dict[str, Any] = {"requests": len(given), "concurrency": MIXED_CONCURRENCY}
    for name, each in (("uniform", uniform_like(given, setup.seed, setup.vocab)), ("mixed", given)):
        answers, wall = drive(engine, facts, each, MIXED_CONCURRENCY)
        _all_there(each, answers)
        tokens = sum(len(ask.prompt) + ask.output for ask in each)
        found[name] = {"tokens": tokens, "wall_s": wall, "tok_s": tokens / wall}
    found["ratio"] = found["mixed"]["tok_s"] / found["uniform"]["tok_s"]
    return found, {}


def context_part(setup: Setup) -> Found:
    """A decode step of 8 sequences with 512 and with 2,048 tokens before them, in turn, twice."""
    engine, facts = _warm(setup)
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
            _clear(engine)
    short, long = (1e3 * statistics.median(times[context]) for context in CONTEXTS)
    more = longer_context(model_cost(setup.config, _ITEMSIZE[facts.dtype]), CONTEXT_BATCH, *CONTEXTS)
    return {
        "sequences": CONTEXT_BATCH, "contexts": CONTEXTS, "step_ms": [short, long],
        "more_ms": long - short, "more_bytes": more.bytes, "more_flops": more.flops,
    }, {}  # fmt: skip


def queue_part(setup: Setup) -> Found:
    """A decode step of 16 sequences with nobody waiting and with 10,000 requests waiting, in turn."""
    engine, facts = _warm(setup, max_num_seqs=QUEUE_BATCH)
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


def quantised_part(setup: Setup) -> Found:
    """Decoding with each kind of weights, and the perplexity that it has."""
    rows: dict[str, Any] = {}
    for kind in QUANTISED:
        engine, facts = _warm(setup, weights=kind)
        found = {
            work.name: _run(engine, facts, work, setup)[0]
            for work in few([WORKLOADS[name] for name in QUANTISED_WORKS], setup.requests)
        }
        del engine
        rows[kind] = {"weight_bytes": facts.weight_bytes, "rows": found, **_perplexity(setup.folder, kind)}
    return {"rows": rows}, {}


def _perplexity(folder: Path, kind: str) -> dict[str, Any]:
    from server.engine.scoring import load_scoring
    from server.text.tokenizer import Tokenizer
    from server.tools.quality import WINDOW, measure_quality, shipped_text

    options = EngineOptions(weights=kind)
    text = shipped_text(Tokenizer.from_folder(folder), WINDOW)
    (found,) = measure_quality(load_scoring(options, folder, WINDOW, native=kernels()), [text])
    return {"perplexity": found.perplexity, "text": found.text, "positions": found.positions}


def speculation_part(setup: Setup) -> Found:
    """A repetitive workload without and with n-gram speculation."""
    rows: dict[str, Any] = {}
    for kind in ("off", "ngram"):
        engine, facts = _warm(setup, speculate=kind)
        for work in few(REPETITIVE, setup.requests):
            before = asdict(engine.stats())
            answers, wall = drive(
                engine, facts, repetitive(work, setup.seed, vocab=setup.vocab), work.concurrency
            )
            gone = {key: value - before[key] for key, value in asdict(engine.stats()).items()}
            found = record(row(work, answers, wall)) | _guesses(gone)
            rows.setdefault(work.name, {})[kind] = found
        del engine
    return {"rows": rows}, {}


def _guesses(gone: dict[str, int]) -> dict[str, int]:
    """Steps, and whatever the engine counts of its drafts."""
    return {key: value for key, value in gone.items() if key == "steps" or "draft" in key or "accept" in key}


def _warm(setup: Setup, **options: Any) -> tuple[Engine, EngineFacts]:
    engine, facts = make_engine(setup.folder, **options)
    drive(engine, facts, setup.asks(WARM_UP), 1)
    return engine, facts


def _run(
    engine: Engine, facts: EngineFacts, work: Work, setup: Setup
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """A workload's figures, its answers, and the steps it took."""
    given = setup.asks(work)
    if work.shared:
        drive(engine, facts, given[:1], 1)
    before = engine.stats().steps
    answers, wall = drive(engine, facts, given, work.concurrency)
    found = row(work, answers, wall)
    tell(found)
    return record(found), said(given, answers), engine.stats().steps - before


def _all_there(given: list[Ask], answers: list[Answer]) -> None:
    if [ask.output for ask in given] != [answer.tokens for answer in answers]:
        raise BenchError("an answer has fewer tokens than were asked for, or more")


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


def _clear(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _backends(facts: EngineFacts) -> dict[str, str]:
    return {"attention": facts.attention_backend, "linear": facts.linear_backend, "dtype": facts.dtype}


PARTS: dict[str, Callable[[Setup], Found]] = {
    "ceiling": measured_ceiling,
    "engine": engine_part,
    "mixed": mixed_part,
    "context": context_part,
    "queue": queue_part,
    "quantised": quantised_part,
    "speculation": speculation_part,
}


def main() -> int:
    """Measure one part; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_parts")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--weights", default="none")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    options = parser.parse_args()
    works = tuple(options.workloads.split(","))
    setup = Setup(folder_of(options.model), options.seed, options.requests, works, options.weights)
    try:
        found, texts = PARTS[options.part](setup)
    except BenchError as error:
        print(f"{options.part}: {error}", file=sys.stderr)
        return 1
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.texts:
        options.texts.write_text(json.dumps(texts) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
