"""A step is tried for all its sequences at once; if that fails, for each alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Several
from dataclasses import dataclass

from cache.manager import CacheManager
from model.logprobs import Scores
from server.engine.batch import Shape, build_batch
from server.engine.request import TokenScore
from server.engine.runner import Drawn, ModelRunner
from server.engine.scheduler import Scheduled
from server.engine.sequence import Sequence
from server.engine.stats import Counters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sequence's part of a step came to; `token` is None where there was none to draw."""

    token: int | None = None
    score: TokenScore | None = None  # of the token, if the request asks for it


class Attempts:
    """Runs the entries of a plan, and finds out whose fault a fault is."""

    def __init__(self, runner: ModelRunner, manager: CacheManager, shape: Shape, counters: Counters) -> None:
        self._runner = runner
        self._manager = manager
        self._shape = shape
        self._counters = counters

    def run(self, entries: Several[Scheduled]) -> list[Outcome | Exception]:
        """The outcome of each entry. If the step raises, its sequences run once each alone: nothing has moved
        on, so each writes the same places again. If all of them fail, one token of nobody's decides who is to
        blame; what that raises is fatal."""
        try:
            return self._forward(entries)
        except Exception:
            self._counters.failed_steps += 1
            logger.exception("a step of %d sequences failed; running each alone", len(entries))
        outcomes = [self._alone(entry) for entry in entries]
        if all(isinstance(outcome, Exception) for outcome in outcomes):
            self._runner.try_out(self._shape)
        return outcomes

    def _alone(self, entry: Scheduled) -> Outcome | Exception:
        try:
            return self._forward([entry])[0]
        except Exception as error:
            logger.exception("%s fails alone", name_of(entry.sequence))
            return error

    def _forward(self, entries: Several[Scheduled]) -> list[Outcome | Exception]:
        rows = [self._first_row(entry.sequence) for entry in entries]
        batch = build_batch(entries, rows, self._manager.row_tables, self._shape)
        return _outcomes(entries, batch.drawn, self._runner.run(batch))

    def _first_row(self, sequence: Sequence) -> int:
        assert sequence.slot is not None
        return self._manager.table_rows(sequence.slot).start


def name_of(sequence: Sequence) -> str:
    """What the log calls a choice."""
    return f"request {sequence.work.request.id!r} choice {sequence.index}"


def _outcomes(entries: Several[Scheduled], drawing: Several[int], drawn: Drawn) -> list[Outcome | Exception]:
    """`drawing` are the entries that the drawn ids belong to; scores come in the same order."""
    outcomes: list[Outcome | Exception] = [Outcome()] * len(entries)
    scored = 0
    for index, token in zip(drawing, drawn.ids.tolist(), strict=True):
        best = entries[index].sequence.work.request.logprobs
        score = None
        if best is not None and drawn.scores is not None:
            score = token_score(drawn.scores, scored, best)
            scored += 1
        broken = ArithmeticError("the model's logits are not finite")
        outcomes[index] = broken if token < 0 else Outcome(token, score)
    return outcomes


def token_score(scores: Scores, row: int, best: int) -> TokenScore:
    """One row of `scores` with the `best` likeliest tokens of it."""
    ids, values = scores.best_ids[row, :best].tolist(), scores.best[row, :best].tolist()
    return TokenScore(float(scores.logprob[row]), tuple(zip(ids, values, strict=True)))
