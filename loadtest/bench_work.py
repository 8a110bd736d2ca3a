"""What the benchmarks ask for: prompts of token ids, drawn from a seed, and how long each answer is.

Every server gets the same work: a seed and a workload's name settle it. Nothing but the standard library is
needed here, so that a peer's own Python can make the same work.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

VOCAB = 49152  # of the default model
_LOWEST, _HIGHEST = 300, 40000  # ids drawn: above the special ones, below the rarest
_PHRASE = 16  # tokens that a repetitive prompt repeats


@dataclass(frozen=True, slots=True)
class Work:
    """`requests` equal requests, `concurrency` of them in flight at any time: `prompt` tokens in, `output`
    out. The first `shared` tokens of all prompts are the same, and were read before the clock starts."""

    name: str
    requests: int
    concurrency: int
    prompt: int
    output: int
    shared: int = 0


WORKLOADS = {
    work.name: work
    for work in (
        Work("decode1", 4, 1, 128, 128),
        Work("decode16", 48, 16, 128, 128),
        Work("decode64", 128, 64, 64, 64),
        Work("prefill", 6, 1, 2048, 8),
        Work("long8", 16, 8, 2048, 64),
        Work("prefix", 24, 8, 1056, 32, 1024),
    )
}
WARM_UP = Work("warm-up", 1, 1, 32, 16)


def few(works: Sequence[Work], requests: int | None) -> list[Work]:
    """The workloads cut to `requests` requests each, for a quick look; None leaves them whole."""
    return [
        work if requests is None else replace(work, requests=min(requests, work.requests)) for work in works
    ]


def works_of(names: Sequence[str], requests: int | None) -> list[Work]:
    """The same, of workloads by name."""
    return few([WORKLOADS[name] for name in names], requests)


def add_flags(parser: ArgumentParser, *, kept: bool = False) -> None:
    """What is told to a command that does some of the work, and where it writes what came of it. It must be
    told where, if that is only `kept` and not shown."""
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="at most so many a workload: a quick look")
    parser.add_argument("--json", type=Path, metavar="FILE", required=kept, help="write the figures")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="write the answers")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt's ids, how many tokens answer it, when it comes (seconds after the start)."""

    prompt: tuple[int, ...]
    output: int
    arrival: float = 0.0


def asks(work: Work, seed: int | str, vocab: int = VOCAB) -> list[Ask]:
    """The requests of a workload. The same seed gives the same ids to every server."""
    draw = random.Random(f"{seed}-{work.name}")
    head = _ids(draw, work.shared, vocab)
    return [
        Ask((*head, *_ids(draw, work.prompt - work.shared, vocab)), work.output) for _ in range(work.requests)
    ]


def mixed(requests: int, seed: int, gap: float, vocab: int = VOCAB) -> list[Ask]:
    """Prompts of 16 to 2,000 tokens, answers of 1 to 300, each length as likely as any other; the time
    between two arrivals is exponential with a mean of `gap` seconds."""
    draw, arrival, made = random.Random(f"{seed}-mixed"), 0.0, []
    for _ in range(requests):
        arrival += draw.expovariate(1 / gap)
        made.append(Ask(_ids(draw, draw.randint(16, 2000), vocab), draw.randint(1, 300), arrival))
    return made


def uniform_like(others: Sequence[Ask], seed: int, vocab: int = VOCAB) -> list[Ask]:
    """As many requests as `others`, with the same tokens in and out altogether, all of the same lengths (to
    one token) and all there from the start."""
    draw = random.Random(f"{seed}-uniform")
    prompts = _shares(sum(len(ask.prompt) for ask in others), len(others))
    outputs = _shares(sum(ask.output for ask in others), len(others))
    return [Ask(_ids(draw, tokens, vocab), out) for tokens, out in zip(prompts, outputs, strict=True)]


def repetitive(work: Work, seed: int, vocab: int = VOCAB) -> list[Ask]:
    """Prompts that say one phrase of random tokens over and over: what n-gram speculation is for."""
    draw = random.Random(f"{seed}-repetitive")
    made = []
    for _ in range(work.requests):
        words = _ids(draw, _PHRASE, vocab)
        made.append(Ask((words * -(-work.prompt // _PHRASE))[: work.prompt], work.output))
    return made


def _ids(draw: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(draw.randrange(_LOWEST, min(vocab, _HIGHEST)) for _ in range(count))


def _shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by one at most."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]
