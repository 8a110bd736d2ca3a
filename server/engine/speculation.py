"""Drafts: ids that a sequence may be about to say, run together with the one that it has said.

Guessing is free of risk: a draft counts only if it is the id that is drawn there, with the noise of its own
position, so that an answer is the same with and without. What it costs is a row in the step, and so a step
gets no more of them than pay: each must promise more tokens for its time than the step gives without it.
"""

from __future__ import annotations

from heapq import heapify, heapreplace
from heapq import heappop as take_first

from server.engine.drafting import Drafting
from server.engine.errors import ConfigError
from server.engine.sequence import Sequence
from server.engine.step_cost import StepCost

LONGEST = 8
"""Drafts of one sequence in one step."""

_SHARE = (
    0.02  # a row costs at least this share of what a step gives, however flat its time: draws, table entries
)
_PAUSE = 32  # steps without drafts after which a sequence that says nothing old is tried once more


class Speculation:
    """Prompt lookup: the last ids of a sequence are sought in its own text, and what followed there is the
    draft (A. Saxena, 2023). `cost` says what tokens of a step take."""

    def __init__(self, cost: StepCost | None = None, longest: int = LONGEST) -> None:
        self.cost = cost or StepCost()
        self._longest = longest

    def propose(self, decoding: list[Sequence], tokens: int, room: int) -> list[tuple[Sequence, list[int]]]:
        """Drafts for some of the `decoding` sequences of a step that has `tokens` tokens without them, and
        room for so many more. Whose K and V they are to become is the caller's care."""
        if room < 1 or not decoding or not self._pays(1.0, tokens, float(tokens)):
            return []
        found = [(sequence, drafts) for sequence in decoding if (drafts := self._look(sequence, tokens))]
        return self._share_out(found, tokens, room) if found else []

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        if sequence.drafting is not None:
            sequence.drafting.learn(drafted, accepted)

    def _look(self, sequence: Sequence, tokens: int) -> list[int]:
        """What it may say next, if a first draft of it is worth its row."""
        most = min(self._longest, draftable(sequence))
        if most < 1:
            return []
        drafting = sequence.drafting
        if drafting is None:
            drafting = sequence.drafting = Drafting()
        if not self._pays(drafting.rate, tokens, float(tokens)):
            drafting.waited += 1
            if drafting.waited < _PAUSE:
                return []
            most = 1
        drafts = drafting.grams.follow(sequence.chain.tokens, most)
        stops = sequence.work.request.stop_ids
        end = next((at for at, token in enumerate(drafts) if token in stops), len(drafts))
        return drafts[:end]  # after a stop nothing is said, and the stop itself needs no draft to be drawn

    def _share_out(
        self, found: list[tuple[Sequence, list[int]]], tokens: int, room: int
    ) -> list[tuple[Sequence, list[int]]]:
        """The likeliest drafts first, while the next one pays; the `j`-th of a sequence counts only if all
        before it are right."""
        rates = [1.0 if s.drafting is None else s.drafting.rate for s, _ in found]
        # A probe is not held to the account: it is one draft, and rare.
        probes = [s.drafting is not None and s.drafting.waited >= _PAUSE for s, _ in found]
        line = [
            (-1.0 if probe else -rate, at) for at, (rate, probe) in enumerate(zip(rates, probes, strict=True))
        ]
        counts = [0] * len(found)
        gain = float(tokens)
        heapify(line)
        while line and room > 0:
            value, at = line[0]
            if not probes[at] and not self._pays(-value, tokens, gain):
                break
            counts[at] += 1
            tokens, room = tokens + 1, room - 1
            gain += rates[at] if probes[at] else -value
            if counts[at] < len(found[at][1]):
                heapreplace(line, (value * rates[at], at))
            else:
                take_first(line)
        return [(s, drafts[:count]) for (s, drafts), count in zip(found, counts, strict=True) if count]

    def _pays(self, value: float, tokens: int, gain: float) -> bool:
        """Whether a row that gives `value` tokens belongs into a step that gives `gain` with `tokens` rows:
        whether the step then gives more for its time."""
        longer = self.cost.seconds(tokens + 1) / self.cost.seconds(tokens) - 1.0
        return value > gain * max(longer, _SHARE)


def draftable(sequence: Sequence) -> int:
    """How many drafts it may have: with the id that is drawn after them its answer must not grow too long.
    None where what may be drawn next depends on what was drawn before: in a grammar, with penalties, and
    where stop ids are still forbidden."""
    request = sequence.work.request
    p = request.sampling
    if (
        request.constraint is not None
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or (sequence.output < request.min_tokens and request.stop_ids)
    ):
        return 0
    return sequence.most - sequence.output - 1


def choose_speculation(kind: str) -> Speculation | None:
    """What `--speculate` asks for."""
    if kind == "off":
        return None
    if kind == "ngram":
        return Speculation()
    raise ConfigError(f"--speculate {kind}: must be ngram or off")
