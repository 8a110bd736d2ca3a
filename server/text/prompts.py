"""The prompts of a completion: texts or ids, one or several, every id one that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.text.checks import is_list, refuse, text
from server.text.errors import RequestError

_KINDS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Either `texts` or `ids`, one entry a prompt; `ids` are not yet checked one by one."""

    texts: tuple[str, ...] = ()
    ids: tuple[Sequence[Any], ...] = ()

    def __len__(self) -> int:
        return len(self.texts) + len(self.ids)


def read_prompts(value: Any, max_prompts: int) -> Prompts:
    """Sorts out the four shapes. Raises RequestError for any other, and for more than `max_prompts`."""
    if isinstance(value, str):
        return Prompts(texts=(text("prompt", value),))
    if not is_list(value):
        raise refuse("prompt", value, _KINDS)
    if not value:
        raise RequestError("prompt: must not be empty.", "prompt")
    first = value[0]
    if _is_number(first):
        return Prompts(ids=(value,))
    if len(value) > max_prompts:
        raise refuse("prompt", len(value), f"at most {max_prompts} prompts are allowed")
    if isinstance(first, str):
        return Prompts(texts=tuple(text(f"prompt[{i}]", entry) for i, entry in enumerate(value)))
    for index, entry in enumerate(value):
        if not is_list(entry):
            raise refuse(f"prompt[{index}]", entry, "a list of token ids was expected here")
    return Prompts(ids=tuple(value))


def check_ids(param: str, ids: Sequence[Any], vocab_rows: int) -> tuple[int, ...]:
    """`ids` if each is an embedding row, the last included. Cost: one pass."""
    for index, token in enumerate(ids):
        if not (type(token) is int and 0 <= token < vocab_rows):
            raise refuse(
                f"{param}[{index}]",
                token,
                f"must be a token id from 0 to {vocab_rows - 1}",
                "invalid_token_id",
            )
    return tuple(ids)


def _is_number(value: Any) -> bool:
    """Bools and floats count: they are refused later, by position."""
    return isinstance(value, int | float)
