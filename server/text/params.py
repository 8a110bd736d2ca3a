"""Checks of everything a client may turn: each error names the parameter, the limit and the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.engine.request import SamplingParams
from server.engine.units import plural
from server.text.asks import SamplingAsk
from server.text.checks import integer, refuse, text
from server.text.defaults import SamplingDefaults
from server.text.ends import Ends, read_ends
from server.text.errors import RequestError
from server.text.sampling import read_sampling

MAX_CHOICES = 128
"""Choices of one request, over all its prompts."""
MAX_SALT_CHARS = 128
PRIORITY_LOW, PRIORITY_HIGH = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """The checked fields that both endpoints share. Lower `priority` runs first."""

    n: int
    sampling: SamplingParams
    ends: Ends
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
    """Checks everything that needs no token of the prompt. Raises RequestError."""
    return Terms(
        n=_choices(ask.n, prompts),
        sampling=read_sampling(ask, defaults, vocab_rows),
        ends=read_ends(ask, eos_ids, vocab_rows),
        cache_salt=_cache_salt(salt),
        priority=_priority(ask.priority),
    )


def _choices(asked: Any, prompts: int) -> int:
    """`n`, 1 if left out; prompts times n is limited, because each choice holds cache of its own."""
    n = 1 if asked is None else integer("n", asked, 1, MAX_CHOICES)
    if n * prompts > MAX_CHOICES:
        raise RequestError(
            f"n: {plural(prompts, 'prompt')} times n={n} make {n * prompts} choices; the limit is "
            f"{MAX_CHOICES}.",
            "n",
        )
    return n


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
