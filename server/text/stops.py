"""Stop strings over text that arrives in pieces: nothing of a stop leaks, and nothing waits without need.

Rule: of all occurrences the one that is complete first wins; of several complete at the same character the
longest, so that no other stop's head is left in the text. The result does not depend on how the text was cut
into pieces. One Knuth-Morris-Pratt automaton a stop (SIAM J. Comput. 6(2), 1977): amortised O(1) a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """`text` may be sent now; `stop` is the stop string that was completed, None while there is none. It is
    at the end of `text` where it belongs to the answer, and left out where it does not."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Feed it text with `push`; after a hit, or at the end of the text, it is done."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are non-empty strings; none at all means that every text passes at once. `include`: the
        stop belongs to the answer, so nothing has to be held back."""
        self._include = include
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Text that can no longer belong to a stop, and the stop that this piece completed, if any."""
        if not self._automata or not text:
            return StopResult(text)
        pending = self._held + text
        for end in range(len(self._held), len(pending)):
            char = pending[end]
            for automaton in self._automata:  # the longest first
                automaton.step(char)
            for automaton in self._automata:
                if automaton.complete:
                    self._held = ""
                    left_out = 0 if self._include else len(automaton.stop)
                    return StopResult(pending[: end + 1 - left_out], automaton.stop)
        if self._include:
            return StopResult(pending)
        keep = len(pending) - max(automaton.matched for automaton in self._automata)
        self._held = pending[keep:]
        return StopResult(pending[:keep])

    def finish(self) -> str:
        """The text held back when the generation ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of `stop` the text read so far ends with (`matched` characters)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)  # [i]: the longest proper prefix of stop that ends stop[: i + 1]
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    @property
    def complete(self) -> bool:
        return self.matched == len(self.stop)

    def step(self, char: str) -> None:
        """Must not be called once complete."""
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != char:
            matched = self._fallback[matched - 1]
        self.matched = matched + (stop[matched] == char)
