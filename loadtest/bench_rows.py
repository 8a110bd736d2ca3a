"""What an answer is to a benchmark, and what many of them come to. Standard library only, as for the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.bench_work import Ask, Work


class BenchError(Exception):
    """The work was not done as asked, so that its time means nothing."""


@dataclass(slots=True)
class Answer:
    """One answer: when it was asked for, when each piece of it came (seconds, any clock), and what it was:
    ids where the engine gave them, text where a server did."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A workload's figures. Rates are tokens a second; TTFT and ITL (between two pieces) in ms."""

    workload: str
    requests: int
    concurrency: int
    prompt: int
    output: int
    wall_s: float
    out_tok_s: float
    total_tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


def row(work: Work, answers: Sequence[Answer], wall: float) -> Row:
    """The figures. Raises BenchError unless every answer has exactly the tokens that were asked for."""
    wrong = [answer.tokens for answer in answers if answer.tokens != work.output]
    if wrong or len(answers) != work.requests:
        raise BenchError(
            f"{work.name}: {len(answers)} answers of {work.requests}, "
            f"{len(wrong)} of them with other than {work.output} tokens ({wrong[:5]})"
        )
    waits = [1e3 * (answer.arrivals[0] - answer.started) for answer in answers if answer.arrivals]
    gaps = [
        1e3 * (later - earlier)
        for answer in answers
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    out = work.requests * work.output
    return Row(
        workload=work.name,
        requests=work.requests,
        concurrency=work.concurrency,
        prompt=work.prompt,
        output=work.output,
        wall_s=wall,
        out_tok_s=out / wall,
        total_tok_s=(out + work.requests * work.prompt) / wall,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        itl_p50=quantile(gaps, 0.5),
        itl_p99=quantile(gaps, 0.99),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """A value that was measured, with a share `q` of the others below it; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def told(found: Row) -> dict[str, Any]:
    """For the JSON, after a line on the terminal: four digits are more than the machine repeats."""
    values = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in asdict(found).items()
    }
    print(" ".join(f"{key}={value}" for key, value in values.items()), flush=True)
    return values


def said(given: Sequence[Ask], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Prompts with what came back, for the check."""
    return [
        {"prompt": list(ask.prompt), "tokens": answer.tokens, "ids": answer.ids, "text": answer.text}
        for ask, answer in zip(given, answers, strict=True)
    ]


def closed_loop(
    given: Sequence[Ask],
    concurrency: int,
    add: Callable[[int, Ask], None],
    step: Callable[[], Sequence[tuple[int, Sequence[int], bool]]],
) -> tuple[list[Answer], float]:
    """Drive an engine that is stepped by its caller: whoever has arrived is added while fewer than
    `concurrency` are in flight. Returns an answer for each request, and the seconds that all took.

    `add(i, ask)` queues request `i`; `step()` returns, for each request with news, its number, its new ids
    and whether it has ended.
    """
    answers = [Answer(0.0) for _ in given]
    begin, next_one, running = time.perf_counter(), 0, 0
    while next_one < len(given) or running:
        now = time.perf_counter()
        while next_one < len(given) and running < concurrency and begin + given[next_one].arrival <= now:
            answers[next_one].started = time.perf_counter()
            add(next_one, given[next_one])
            next_one, running = next_one + 1, running + 1
        if not running:
            time.sleep(max(0.0, begin + given[next_one].arrival - now))
            continue
        news = step()
        now = time.perf_counter()
        for index, ids, ended in news:
            if ids:
                answers[index].arrivals.append(now)
                answers[index].ids += ids
                answers[index].tokens += len(ids)
            running -= ended
    return answers, time.perf_counter() - begin
