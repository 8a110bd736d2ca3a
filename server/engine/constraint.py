"""How the engine keeps an answer within a grammar; what a grammar is, `server.text` knows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from server.engine.request import Constraint

BitArray = npt.NDArray[np.int32]


class Matcher(Protocol):
    """One choice's way through its grammar. Used by the engine's thread only."""

    @property
    def complete(self) -> bool:
        """The answer is whole, and no token may follow."""
        ...

    def fill(self, bits: BitArray) -> None:
        """Sets `bits` `[ceil(V / 32)]` to the ids that may come next: id `i` is bit `i % 32` of word
        `i // 32`."""
        ...

    def advance(self, token: int) -> None:
        """Takes a drawn token. Raises ValueError if the grammar does not allow it."""
        ...

    def copy(self) -> Matcher:
        """Another that stands at the same place, and goes its own way from here."""
        ...


class MatcherSource(Protocol):
    """Makes matchers for one tokenizer."""

    def matcher(self, constraint: Constraint) -> Matcher:
        """One at the start of its grammar; quick, as the constraint was compiled before."""
        ...
