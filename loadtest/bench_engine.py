"""Our engine without its server: requests go straight in, and whoever measures lends the thread."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_rows import Answer, BenchError, closed_loop
from loadtest.bench_work import Ask
from model.fetch import default_cache_dir, resolve_model
from model.progress import Silent
from server.engine.build import build_engine
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.kernels import NativeSource, native_source
from server.engine.options import EngineOptions
from server.engine.request import FinishReason, Request, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_names = itertools.count()


def folder_of(model: str) -> Path:
    """Where the model is, fetched if it must be. Raises ModelError."""
    return resolve_model(model, cache_dir=default_cache_dir(os.environ))


def make_engine(folder: Path, **options: Any) -> tuple[Engine, EngineFacts]:
    """An engine as `serve` makes it, but for `options` (those of EngineOptions)."""
    return build_engine(EngineOptions(**options), folder, native=kernels())


def kernels() -> NativeSource:
    """The operators in C++, from the user's cache or compiled into it, as `serve` has them."""
    return native_source(default_cache_dir(os.environ), Silent(), os.environ.get("CXX"))


def request_of(ask: Ask, variant: str) -> Request:
    """Greedy, and with no end but its last token."""
    return Request(
        id=f"bench-{next(_names)}",
        variant=variant,
        prompts=(ask.prompt,),
        n=1,
        max_tokens=ask.output,
        sampling=_GREEDY,
        cache_root=bytes(32),
    )


def drive(
    engine: Engine, facts: EngineFacts, given: Sequence[Ask], concurrency: int
) -> tuple[list[Answer], float]:
    """The answers to `given`, `concurrency` at a time, and the seconds they took. Raises BenchError."""
    variant, numbers = facts.variants[0].name, dict[str, int]()

    def add(index: int, ask: Ask) -> None:
        request = request_of(ask, variant)
        numbers[request.id] = index
        engine.add(request)

    def step() -> list[tuple[int, list[int], bool]]:
        news: dict[int, tuple[list[int], bool]] = {}
        for event in engine.step():
            if event.finish not in (None, FinishReason.LENGTH):
                raise BenchError(f"an answer ended with {event.finish}: {event.error}")
            ids, _ = news.get(numbers[event.request_id], ([], False))
            if event.token is not None:
                ids.append(event.token)
            news[numbers[event.request_id]] = (ids, event.finish is not None)
        if engine.dead is not None:
            raise BenchError(f"the engine has stopped: {engine.dead}")
        return [(index, ids, ended) for index, (ids, ended) in news.items()]

    return closed_loop(given, concurrency, add, step)
