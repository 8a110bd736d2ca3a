"""The scores of one prompt's tokens, as they become known chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.request import TokenScore


class PromptScores:
    """An entry for each prompt token, in order; nothing comes before the first, so it has no score.

    The score of token `i + 1` is told by the run of token `i`. What is known stays known: a preempted prompt
    goes on where it was, and may read from the cache only what it has run before.
    """

    __slots__ = ("_entries", "_length")

    def __init__(self, length: int) -> None:
        """For a prompt of `length` tokens, at least 1."""
        self._length = length
        self._entries: list[TokenScore | None] = [None]

    @property
    def complete(self) -> bool:
        """Whether every token has its entry."""
        return len(self._entries) == self._length

    @property
    def run(self) -> int:
        """How many of the prompt's tokens need not run again for their sake."""
        return len(self._entries) - 1

    def owed(self, start: int, stop: int) -> range:
        """Those of the positions `[start, stop)` whose run tells a score that is not known yet."""
        return range(max(start, self.run), min(stop, self._length - 1))

    def extend(self, scores: Iterable[TokenScore]) -> None:
        """Takes in the scores of the positions that were owed, in order."""
        self._entries.extend(scores)

    def whole(self) -> tuple[TokenScore | None, ...]:
        """All entries."""
        return tuple(self._entries)
