"""A step is tried for all its sequences at once; if that fails, for each alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import islice
from math import isfinite

from cache.manager import CacheManager
from model.logprobs import Scores
from server.engine.batch import Shape
from server.engine.request import TokenScore
from server.engine.runner import Drawn, ModelRunner
from server.engine.scheduler import Scheduled
from server.engine.sequence import Sequence
from server.engine.stats import Counters
from server.engine.steady import Batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sequence's part of a step came to. Of its `tokens`, all but the last are drafts that were right;
    there are none where none was to be drawn."""

    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScore | None, ...] = ()  # of the tokens, if the request asks for them
    prompt: tuple[TokenScore, ...] = ()  # of the prompt's tokens that were owed


class Attempts:
    """Runs the entries of a plan, and finds out whose fault a fault is."""

    def __init__(self, runner: ModelRunner, manager: CacheManager, shape: Shape, counters: Counters) -> None:
        self._runner = runner
        self._batches = Batches(manager, shape)
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

    def forget(self) -> None:
        """Nobody is left: keep nothing of what has run."""
        self._batches.forget()

    def _alone(self, entry: Scheduled) -> Outcome | Exception:
        try:
            return self._forward([entry])[0]
        except Exception as error:
            logger.exception("%s fails alone", name_of(entry.sequence))
            return error

    def _forward(self, entries: Several[Scheduled]) -> list[Outcome | Exception]:
        return _outcomes(entries, self._runner.run(self._batches.build(entries)))


def name_of(sequence: Sequence) -> str:
    """What the log calls a choice."""
    return f"request {sequence.work.request.id!r} choice {sequence.index}"


def complaint(error: Exception) -> str:
    """What a client is told; the log has the rest."""
    if isinstance(error, ArithmeticError):
        return str(error)
    return f"the model failed on this request ({type(error).__name__})"


def _outcomes(entries: Several[Scheduled], drawn: Drawn) -> list[Outcome | Exception]:
    """Ids and scores come in the order of the entries that asked for them."""
    ids = iter(drawn.ids.tolist())
    scores = iter(()) if drawn.scores is None else token_scores(drawn.scores)
    prompts = iter(()) if drawn.prompt is None else token_scores(drawn.prompt)
    return [_outcome(entry, ids, scores, prompts) for entry in entries]


def _outcome(
    entry: Scheduled, ids: Iterator[int], scores: Iterator[TokenScore], prompts: Iterator[TokenScore]
) -> Outcome | Exception:
    """Takes what belongs to the entry off each line."""
    request = entry.sequence.work.request
    rows = 1 + len(entry.drafts) if entry.draws else 0
    tokens = _said(list(islice(ids, rows)), entry.drafts) if rows else ()
    told: tuple[TokenScore | None, ...] = (None,) * len(tokens)
    if request.logprobs is not None:
        told = tuple([_cut(score, request.logprobs) for score in islice(scores, rows)][: len(tokens)])
    prompt = tuple(_cut(next(prompts), request.prompt_logprobs or 0) for _ in entry.owed)
    if (rows and not tokens) or not all(isfinite(one.logprob) for one in prompt):
        return ArithmeticError("the model's logits are not finite")
    return Outcome(tokens, told, prompt)


def _said(drawn: list[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """What a sequence says: `drawn[i]` is worth something only if the drafts before it are what was drawn. A
    broken row (-1) that they lead to is left to the next step; if it is the first, nothing is said."""
    right = 0
    while right < len(drafts) and drawn[right] == drafts[right]:
        right += 1
    return tuple(drawn[: right + 1] if drawn[right] >= 0 else drawn[:right])


def token_scores(scores: Scores) -> Iterator[TokenScore]:
    """Row by row."""
    columns = scores.logprob.tolist(), scores.best_ids.tolist(), scores.best.tolist()
    for logprob, ids, values in zip(*columns, strict=True):
        yield TokenScore(logprob, tuple(zip(ids, values, strict=True)))


def _cut(score: TokenScore, best: int) -> TokenScore:
    """With so many of the likeliest tokens as were asked for; others of the step may want more."""
    return score if len(score.top) <= best else TokenScore(score.logprob, score.top[:best])
