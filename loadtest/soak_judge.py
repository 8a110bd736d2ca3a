"""Whether an answer from the crowd is the one that its request gets alone.

The rule, in fp32: texts, reasons and counts are the same, or, on a real model, the first token that differs
was a near tie, alone: the two best were less than 1e-3 apart, or the number that draws a token lay within
1e-3 of a border between two. Such cases are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from loadtest.soak_catalogue import COMPLETIONS, Ask
from loadtest.soak_client import Heard

NEAR_TIE = 1e-3  # nats between the two best; for draws a share of 1
SCORE_TOLERANCE = 5e-3  # nats; fp32 logits may differ by 1e-4 of the largest, which is about 40


@dataclass
class Judgement:
    """What the comparisons came to."""

    answers: int = 0
    choices: int = 0
    scores: int = 0
    worst_score: float = 0.0
    differing: list[tuple[Ask, Heard]] = field(default_factory=list)

    def take(self, ask: Ask, heard: Heard, truth: Heard) -> None:
        """Compare an answer with its solo run."""
        self.answers += 1
        self.choices += len(heard.texts)
        if not self._same(heard, truth):
            self.differing.append((ask, heard))

    def _same(self, heard: Heard, truth: Heard) -> bool:
        if (heard.texts, heard.reasons) != (truth.texts, truth.reasons):
            return False
        if (heard.prompt_tokens, heard.completion_tokens) != (truth.prompt_tokens, truth.completion_tokens):
            return False
        worst = 0.0
        for index, values in truth.scores.items():
            others = heard.scores.get(index, [])
            if len(others) != len(values):
                return False
            errors = [abs(one - other) for one, other in zip(values, others, strict=True)]
            self.scores += len(errors)
            worst = max(worst, *errors, 0.0)
        self.worst_score = max(self.worst_score, worst)
        return worst <= SCORE_TOLERANCE


def scored_body(ask: Ask) -> dict[str, Any]:
    """The request with the best scores of every token, as many as may be had, to look for a tie with."""
    more = {"logprobs": 5} if ask.path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    return {**ask.body, **more}


def tie_gap(ask: Ask, scored: dict[str, Any], other: Heard) -> float | None:
    """How near the choice was, alone, where `other` first differs from the scored solo answer.

    Greedy: nats between the two best. Seeded: no less than the distance of the draw from a border between
    tokens, as a share of 1 (see `_reach`). None if it cannot be told: the choices are not the model's own, or
    the texts do not differ.
    """
    if not ask.exact:
        return None
    heat = float(ask.body["temperature"])
    gaps = [_gap(choice, other.texts.get(choice["index"], ""), heat) for choice in scored["choices"]]
    known = [gap for gap in gaps if gap is not None]
    return max(known) if known else None


def _gap(choice: dict[str, Any], other: str, heat: float) -> float | None:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if text == other:
        return None
    tokens = _tokens(choice["logprobs"])
    texts = accumulate(token for token, _, _ in tokens)
    for so_far, (_, own, best) in zip(texts, tokens, strict=True):
        if not other.startswith(so_far):
            if own is None or len(best) < 2:
                return None
            return best[0] - best[1] if heat == 0 else _reach(own, best, heat)
    return None


def _reach(own: float, best: Sequence[float], heat: float) -> float:
    """The furthest from a border that a draw can have been, as a share of all draws: half of what its token
    has. `own` is the token's score, `best` the highest, all before temperature.

    Whatever top_k, top_p or min_p left out is less likely than the token, so those of `best` that are
    likelier were kept: the token's share is at most its weight over theirs.
    """
    kept = [score for score in best if score >= own]
    weights = sum(math.exp(score / heat) for score in kept) + (0.0 if own in kept else math.exp(own / heat))
    return math.exp(own / heat) / weights / 2


def _tokens(found: dict[str, Any]) -> list[tuple[str, float | None, list[float]]]:
    """The tokens of a choice: text, score, and the best scores there, high to low."""
    if found.get("content") is not None:
        return [
            (entry["token"], entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]])
            for entry in found["content"]
        ]
    best = [sorted((top or {}).values(), reverse=True) for top in found["top_logprobs"]]
    return list(zip(found["tokens"], found["token_logprobs"], best, strict=True))
