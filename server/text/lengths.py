"""How many tokens a request may ask for: prompt + max_tokens must fit, and nothing is cut down silently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.units import plural
from server.text.errors import RequestError, shown

CODE = "context_length_exceeded"


def too_long(name: str, length: int, limit: int, *, at_least: bool = False) -> RequestError:
    """A prompt that fills the context, or more, whatever is asked for; it may be longer than was counted."""
    way = "Shorten it."
    if limit < 2:  # one token in, one out; some modes of a small pool have not even that
        way = "No prompt fits: there is too little room for this attention mode. Ask for another mode."
    return RequestError(
        f"{name} has {'at least ' if at_least else ''}{plural(length, 'token')}; prompt and output "
        f"together may have {limit}. {way}",
        name,
        CODE,
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """`limit` tokens of context for a prompt and its output; `asked` is what the field `name` says, None if
    it was left out: then the output may have `default` tokens (None: as many as fit), less where the prompt
    leaves less."""

    limit: int
    asked: int | None
    name: str
    default: int | None

    def max_tokens(self, names: Sequence[str], lengths: Sequence[int]) -> int:
        """The most output tokens of each choice; `names` and `lengths` (in tokens) of the prompts go
        together. Raises RequestError `context_length_exceeded`, or for an empty prompt."""
        for name, length in zip(names, lengths, strict=True):
            if length == 0:
                raise RequestError(f"{name}: must have at least one token.", name)
            if length + (1 if self.asked is None else self.asked) > self.limit:
                raise self._exceeded(name, length)
        if self.asked is not None:
            return self.asked
        room = self.limit - max(lengths)
        return room if self.default is None else min(self.default, room)

    def _exceeded(self, name: str, length: int) -> RequestError:
        if length >= self.limit or self.asked is None:
            return too_long(name, length, self.limit)
        return RequestError(
            f"{self.name}: {name} has {plural(length, 'token')} and {self.name} is {shown(self.asked)}, "
            f"{shown(length + self.asked)} in all; prompt and output together may have {self.limit}. "
            f"Shorten the prompt or lower {self.name}.",
            self.name,
            CODE,
        )
