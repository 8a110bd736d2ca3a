"""Whether an answer from the crowd is the one that its request gets alone.

The rule, in fp32: texts, reasons and counts are the same, or, on a real model, the first token that differs
was a near tie, alone: the two best were less than 1e-3 apart. Such cases are counted. A seeded draw has no
such excuse: rounding turns one in about a million.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from loadtest.equality import FP32_NEAR_TIE
from loadtest.soak_catalogue import COMPLETIONS, Ask
from loadtest.soak_client import Heard

NEAR_TIE = FP32_NEAR_TIE  # nats between the two best
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
    """Nats between the two best, alone, where `other` first differs from the scored solo answer.

    None if there is no such excuse: the choices are drawn, or are not the model's own, or do not differ.
    """
    if not ask.exact or ask.body["temperature"] != 0:
        return None
    gaps = [_gap(choice, other.texts.get(choice["index"], "")) for choice in scored["choices"]]
    known = [gap for gap in gaps if gap is not None]
    return max(known) if known else None


def _gap(choice: dict[str, Any], other: str) -> float | None:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if text == other:
        return None
    tokens = _tokens(choice["logprobs"])
    texts = accumulate(token for token, _ in tokens)
    for so_far, (_, best) in zip(texts, tokens, strict=True):
        if not other.startswith(so_far):
            return best[0] - best[1] if len(best) > 1 else None
    return None


def _tokens(found: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """The tokens of a choice: text, and the best scores there, high to low."""
    if found.get("content") is not None:
        return [
            (entry["token"], [top["logprob"] for top in entry["top_logprobs"]]) for entry in found["content"]
        ]
    best = [sorted((top or {}).values(), reverse=True) for top in found["top_logprobs"]]
    return list(zip(found["tokens"], best, strict=True))
