"""Checks of everything a client may turn: each error names the parameter, the limit and the value.

Types are checked too (a bool is no integer, a whole float is none either), so the checks hold whoever builds
the ask.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.engine.request import SamplingParams
from server.text.asks import SamplingAsk
from server.text.defaults import SamplingDefaults
from server.text.errors import RequestError, shown

MAX_CHOICES = 128
"""Choices of one request, over all its prompts."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_SALT_CHARS = 128
MAX_TEMPERATURE = 2.0
SEED_LOW, SEED_HIGH = -(2**63), 2**64 - 1
PRIORITY_LOW, PRIORITY_HIGH = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """The checked fields that both endpoints share. `stops` end a choice by its text, `stop_ids` by its
    token; neither acts before `min_tokens` tokens. Lower `priority` runs first."""

    n: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    cache_salt: str
    priority: int


def terms(
    ask: SamplingAsk,
    salt: Any,
    *,
    prompts: int,
    eos_ids: frozenset[int],
    vocab_rows: int,
    defaults: SamplingDefaults,
) -> Terms:
    """Checks everything that needs no token of the prompt. `ignore_eos` drops the checkpoint's end marks,
    never the client's own stop ids."""
    if ask.ignore_eos is not None and not isinstance(ask.ignore_eos, bool):
        raise refuse("ignore_eos", ask.ignore_eos, "must be true or false")
    own = _stop_ids(ask.stop_token_ids, vocab_rows)
    stop_ids = own if ask.ignore_eos else own | eos_ids
    min_tokens = 0 if ask.min_tokens is None else integer("min_tokens", ask.min_tokens, 0)
    if min_tokens and len(stop_ids) == vocab_rows:
        rule = f"must be 0 where each of the {vocab_rows} tokens ends the answer: there is none to begin with"
        raise refuse("min_tokens", min_tokens, rule)
    return Terms(
        n=_choices(ask.n, prompts),
        sampling=_sampling(ask, defaults, vocab_rows),
        stops=_stop_strings(ask.stop),
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        cache_salt=_cache_salt(salt),
        priority=_priority(ask.priority),
    )


def refuse(param: str, value: object, rule: str, code: str | None = None) -> RequestError:
    """The error of one parameter: `temperature: must be a number from 0 to 2, got 3.`"""
    return RequestError(f"{param}: {rule}, got {shown(value)}.", param, code)


def integer(param: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` itself if it is an integer of the range."""
    rule = (
        f"must be an integer of at least {low}"
        if high is None
        else f"must be an integer from {low} to {high}"
    )
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(param, value, rule)
    if value < low or (high is not None and value > high):
        raise refuse(param, value, rule)
    return value


def number(param: str, value: Any, low: float, high: float) -> float:
    """`value` as a float if it is a finite number of the range."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not good:  # NaN compares false
        raise refuse(param, value, f"must be a number from {low:g} to {high:g}")
    return float(value)


def text(param: str, value: Any) -> str:
    """`value` itself if it is a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise refuse(param, value, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: character {error.start} is half of a surrogate pair, which is not valid Unicode.",
            param,
            "invalid_unicode",
        ) from None
    return value


def _choices(asked: Any, prompts: int) -> int:
    """`n`, 1 if left out; prompts times n is limited, because each choice holds cache of its own."""
    n = 1 if asked is None else integer("n", asked, 1, MAX_CHOICES)
    if n * prompts > MAX_CHOICES:
        raise RequestError(
            f"n: {prompts} prompts times n={n} make {n * prompts} choices; the limit is {MAX_CHOICES}.", "n"
        )
    return n


def _sampling(ask: SamplingAsk, defaults: SamplingDefaults, vocab_rows: int) -> SamplingParams:
    """What is left out comes from `defaults`, and the seed is drawn here. top_p 0 keeps only the likeliest
    token, so it is greedy; top_k 0, -1 and more than the vocabulary mean all; seeds are taken modulo 2^64."""
    top_p = number("top_p", _given(ask.top_p, defaults.top_p), 0, 1)
    top_k = integer("top_k", _given(ask.top_k, defaults.top_k), -1)
    temperature = number("temperature", _given(ask.temperature, defaults.temperature), 0, MAX_TEMPERATURE)
    if ask.seed is None:
        seed = secrets.randbits(64)
    else:
        seed = integer("seed", ask.seed, SEED_LOW, SEED_HIGH) % 2**64
    return SamplingParams(
        temperature=temperature if top_p > 0 else 0.0,
        top_p=top_p or 1.0,
        top_k=top_k if 0 < top_k < vocab_rows else 0,
        min_p=number("min_p", _given(ask.min_p, defaults.min_p), 0, 1),
        seed=seed,
    )


def _given(asked: Any, default: float) -> Any:
    return default if asked is None else asked


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


def _priority(value: Any) -> int:
    """0 if left out."""
    return 0 if value is None else integer("priority", value, PRIORITY_LOW, PRIORITY_HIGH)


def _cache_salt(value: Any) -> str:
    """Up to MAX_SALT_CHARS characters; empty if left out."""
    if value is None:
        return ""
    if len(text("cache_salt", value)) > MAX_SALT_CHARS:
        raise refuse("cache_salt", len(value), f"at most {MAX_SALT_CHARS} characters are allowed")
    return str(value)


def is_list(value: Any) -> bool:
    """Whether `value` is what a JSON list becomes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
