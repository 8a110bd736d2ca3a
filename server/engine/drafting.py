"""What is known of one sequence's drafts: where they come from, and how often they were right."""

from __future__ import annotations

from typing import Protocol

from cache.arrays import Int32

_START = 0.5  # what drafts are thought to be worth before any was tried
_MEMORY = 0.15  # how much one draft more, right or wrong, moves that


class Source(Protocol):
    """Where the drafts of one sequence come from."""

    def follow(self, tokens: Int32, count: int) -> list[int]:
        """Up to `count` ids that may come after `tokens` `[L]`, which are those of the last call and what has
        come since."""
        ...


class Drafting:
    """One sequence's source, and the share of its drafts that were right; it outlives preemptions."""

    __slots__ = ("rate", "source", "waited")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rate = _START  # of drafts whose predecessors were right
        self.waited = 0  # steps since its drafts were last judged worth nothing, or tried

    def learn(self, drafted: int, accepted: int) -> None:
        """After a step: `accepted` of the `drafted` were right, and the next one, if any, was wrong."""
        for _ in range(accepted):
            self.rate += _MEMORY * (1.0 - self.rate)
        if accepted < drafted:
            self.rate -= _MEMORY * self.rate
        self.waited = 0
