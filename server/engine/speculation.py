"""Drafts: ids that a sequence may be about to say, run together with the one that it has said.

Guessing is free of risk: a draft counts only if it is the id that is drawn there, with the noise of its own
position, so that an answer is the same with and without. What it costs is a row in the step, and so a step
gets no more of them than pay: each must promise more tokens for its time than the step gives without it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from server.engine.drafting import Drafting, Source
from server.engine.errors import ConfigError
from server.engine.ngrams import NGrams
from server.engine.options import SPECULATION
from server.engine.penalties import is_penalised
from server.engine.sequence import Sequence
from server.engine.step_cost import StepCost

LONGEST = 8
"""Drafts of one sequence in one step."""

_SHARE = 0.02  # a row costs at least this share of a step, however flat its time: its draw, its table entry
_MARGIN = 1.1  # it must bring so much more than it costs, as both are estimates
_PAUSE = 32  # steps without drafts after which a sequence that says nothing old is tried once more


class _Guess(NamedTuple):
    """Drafts of one sequence; `value` is the chance that the first is right, `rate` that of each after it."""

    sequence: Sequence
    drafts: list[int]
    value: float
    rate: float


class Speculation:
    """Prompt lookup: the last ids of a sequence are sought in its own text, and what followed there is the
    draft (A. Saxena, 2023). `cost` says what tokens of a step take, `source` makes what drafts for a
    sequence."""

    def __init__(self, cost: StepCost | None = None, source: Callable[[], Source] = NGrams) -> None:
        self.cost = cost or StepCost()
        self._source = source
        self._since = 0  # steps since a draft was last tried that did not seem to pay

    def propose(self, decoding: list[Sequence], tokens: int, room: int) -> list[tuple[Sequence, list[int]]]:
        """Drafts for some of the `decoding` sequences of a step that has `tokens` tokens without them, and
        room for so many more. Whose K and V they are to become is the caller's care."""
        if room < 1 or not decoding:
            return []
        self._since += 1
        due = self._since >= _PAUSE and self.cost.is_usually_flat(tokens)
        if not self._pays(1.0, tokens, float(tokens)):
            return self._trial(decoding) if due else []
        found = [guess for sequence in decoding if (guess := self._guess(sequence, tokens)) is not None]
        return self._share_out(found, tokens, room, due)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        if sequence.drafting is not None:
            sequence.drafting.learn(drafted, accepted)

    def _trial(self, decoding: list[Sequence]) -> list[tuple[Sequence, list[int]]]:
        """One draft against what is known of costs, or a step that was slow once would settle them."""
        for sequence in decoding:
            if draftable(sequence) > 0 and (drafts := self._follow(sequence, self._drafting(sequence), 1)):
                self._since = 0
                return [(sequence, drafts)]
        return []

    def _drafting(self, sequence: Sequence) -> Drafting:
        if sequence.drafting is None:
            sequence.drafting = Drafting(self._source())
        return sequence.drafting

    def _follow(self, sequence: Sequence, drafting: Drafting, most: int) -> list[int]:
        """What the source says, up to a stop: nothing is said after that, and it is drawn without a draft."""
        drafts = drafting.source.follow(sequence.chain.tokens, most)
        stops = sequence.work.request.stop_ids
        return drafts[: next((at for at, token in enumerate(drafts) if token in stops), len(drafts))]

    def _guess(self, sequence: Sequence, tokens: int) -> _Guess | None:
        """What it may say next, if a first draft of it is worth its row, or is due to be tried again."""
        most = min(LONGEST, draftable(sequence))
        if most < 1:
            return None
        drafting = self._drafting(sequence)
        value = drafting.rate
        if not self._pays(value, tokens, float(tokens)):
            drafting.waited += 1
            if drafting.waited < _PAUSE:
                return None
            most, value = 1, 1.0
        drafts = self._follow(sequence, drafting, most)
        return _Guess(sequence, drafts, value, drafting.rate) if drafts else None

    def _share_out(
        self, found: list[_Guess], tokens: int, room: int, due: bool
    ) -> list[tuple[Sequence, list[int]]]:
        """The likeliest drafts first, while the next one pays; the `j`-th of a sequence counts only if all
        before it are right. If a trial is due, the first that does not pay has its row all the same."""
        counts = [0] * len(found)
        gain = float(tokens)
        line = [(-guess.value, at) for at, guess in enumerate(found)]
        heapify(line)
        while line and room > 0:
            value, at = line[0]
            if not self._pays(-value, tokens, gain):
                if not due or not self.cost.is_usually_flat(tokens):
                    break
                due, self._since = False, 0
            counts[at] += 1
            gain, tokens, room = gain - value, tokens + 1, room - 1
            if counts[at] < len(found[at].drafts):
                heapreplace(line, (value * found[at].rate, at))
            else:
                heappop(line)
        return [(g.sequence, g.drafts[:count]) for g, count in zip(found, counts, strict=True) if count]

    def _pays(self, value: float, tokens: int, gain: float) -> bool:
        """Whether a row that gives `value` tokens belongs into a step that gives `gain` with `tokens` rows:
        whether the step then gives more for its time."""
        longer = self.cost.seconds(tokens + 1) / self.cost.seconds(tokens) - 1.0
        return value > _MARGIN * gain * max(longer, _SHARE)


def draftable(sequence: Sequence) -> int:
    """How many drafts it may have: with the id that is drawn after them its answer must not grow too long.
    None where what may be drawn next depends on what was drawn before: in a grammar, with penalties, and
    where stop ids are still forbidden."""
    request = sequence.work.request
    if (
        request.constraint is not None
        or is_penalised(sequence)
        or (sequence.output < request.min_tokens and request.stop_ids)
    ):
        return 0
    return sequence.most - sequence.output - 1


def rows_each(kind: str) -> int:
    """The most tokens that a step may draw for one sequence."""
    return 1 if kind == "off" else 1 + LONGEST


def choose_speculation(kind: str) -> Speculation | None:
    """What `--speculate` asks for."""
    if kind == "off":
        return None
    if kind == "ngram":
        return Speculation()
    raise ConfigError(f"--speculate {kind}: must be {' or '.join(SPECULATION)}")
