"""The fields that say where a choice ends, checked: end marks, stop ids, stop strings, `min_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.text.asks import SamplingAsk
from server.text.checks import flag, integer, is_list, refuse, text
from server.text.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """`strings` end a choice by its text, `ids` by its token; neither acts before `min_tokens` tokens.

    `shown_ids` are the stop ids whose text belongs to the answer; `include` says the same of the strings.
    """

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    include: bool = False
    shown_ids: frozenset[int] = frozenset()


def read_ends(ask: SamplingAsk, eos_ids: frozenset[int], vocab_rows: int) -> Ends:
    """Raises RequestError. `ignore_eos` drops the checkpoint's end marks (`eos_ids`), never the client's own
    stop ids; an end mark is never shown, even where the client names it too."""
    own = _stop_ids(ask.stop_token_ids, vocab_rows)
    ids = own if flag("ignore_eos", ask.ignore_eos) else own | eos_ids
    min_tokens = 0 if ask.min_tokens is None else integer("min_tokens", ask.min_tokens, 0)
    if min_tokens and len(ids) == vocab_rows:
        rule = f"must be 0 where each of the {vocab_rows} tokens ends the answer: there is none to begin with"
        raise refuse("min_tokens", min_tokens, rule)
    include = flag("include_stop_str_in_output", ask.include_stop_str_in_output)
    return Ends(
        strings=_stop_strings(ask.stop),
        ids=ids,
        min_tokens=min_tokens,
        include=include,
        shown_ids=own - eos_ids if include else frozenset(),
    )


def _stop_ids(value: Any, vocab_rows: int) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not is_list(value):
        raise refuse("stop_token_ids", value, "must be a list of token ids")
    if len(value) > MAX_STOP_IDS:
        raise refuse("stop_token_ids", len(value), f"at most {MAX_STOP_IDS} ids are allowed")
    return frozenset(
        integer(f"stop_token_ids[{i}]", token, 0, vocab_rows - 1) for i, token in enumerate(value)
    )


def _stop_strings(value: Any) -> tuple[str, ...]:
    """One string, or up to MAX_STOPS; an empty one would stop everything at once, so it is an error."""
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not is_list(listed):
        raise refuse("stop", value, "must be a string or a list of strings")
    if len(listed) > MAX_STOPS:
        raise refuse("stop", len(listed), f"at most {MAX_STOPS} stop strings are allowed")
    stops = []
    for index, stop in enumerate(listed):
        param = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not text(param, stop):
            raise RequestError(f"{param}: a stop string must not be empty.", "stop")
        if len(stop) > MAX_STOP_CHARS:
            raise refuse(param, len(stop), f"at most {MAX_STOP_CHARS} characters are allowed")
        stops.append(stop)
    return tuple(stops)
