"""Drives an engine without threads: requests in, whole answers out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.heads import Variant
from server.engine.build import build_engine
from server.engine.constraint import MatcherSource
from server.engine.engine import Engine
from server.engine.facts import EngineFacts
from server.engine.options import EngineOptions
from server.engine.request import FinishReason, KVPeak, Request, SamplingParams, TokenEvent, TokenScore
from server.engine.variants import CalibrationSource
from tests.support.native import native

GREEDY = SamplingParams(temperature=0.0)
_ids = itertools.count()


@dataclass
class Answer:
    """One choice, as its events told it."""

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    kv: KVPeak | None = None
    scores: list[TokenScore | None] = field(default_factory=list)  # one a token
    prompt_scores: tuple[TokenScore | None, ...] | None = None
    events: int = 0

    def take(self, event: TokenEvent) -> None:
        """The next event of this choice."""
        assert self.finish is None, f"an event after the end of {event.request_id}[{event.index}]"
        if event.token is not None:
            self.ids.append(event.token)
            self.scores.append(event.score)
        if event.prompt_scores is not None:
            assert self.events == 0, "prompt scores come with the first event"
            self.prompt_scores = event.prompt_scores
        self.finish, self.error, self.kv = event.finish, event.error, event.kv
        self.events += 1


def fp32_engine(
    folder: Path,
    variants: Sequence[Variant] = (),
    calibration: CalibrationSource | None = None,
    matchers: MatcherSource | None = None,
    **options: Any,
) -> tuple[Engine, EngineFacts]:
    """An engine on the CPU in fp32 with a 64 MiB pool, unless `options` say otherwise."""
    settings = {"device": "cpu", "dtype": "float32"} | options
    if "kv_fraction" not in settings:
        settings.setdefault("kv_memory", 64 << 20)
    return build_engine(
        EngineOptions(**settings), folder, calibration=calibration, variants=variants, matchers=matchers,
        native=native,
    )  # fmt: skip


def greedy_request(
    prompt: Sequence[int],
    tokens: int,
    *,
    variant: str = "native",
    stop_ids: Iterable[int] = (),
    n: int = 1,
    root: bytes = bytes(32),
    sampling: SamplingParams = GREEDY,
    **fields: Any,
) -> Request:
    """A request for one prompt; nothing but `tokens` and `stop_ids` ends it. Each gets an id of its own."""
    return Request(
        id=f"test-{next(_ids)}", variant=variant, prompts=(tuple(prompt),), n=n, max_tokens=tokens,
        sampling=sampling, cache_root=root, stop_ids=frozenset(stop_ids), **fields,
    )  # fmt: skip


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 20_000) -> list[list[Answer]]:
    """Add all at once, step until nothing is left; the answers of each request's choices, in order."""
    answers = {r.id: [Answer() for _ in range(len(r.prompts) * r.n)] for r in requests}
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            return [answers[r.id] for r in requests]
        for event in engine.step():
            answers[event.request_id][event.index].take(event)
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def generate(engine: Engine, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """The ids of one greedy answer, alone in the engine."""
    ((answer,),) = run(engine, [greedy_request(prompt, tokens, **options)])
    assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH), answer
    return answer.ids
