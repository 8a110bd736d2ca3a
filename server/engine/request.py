"""What crosses between the words and the engine: frozen, picklable, made of ids and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a choice ended; STOP covers end-of-sequence ids, stop ids and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; temperature 0 is greedy, ties go to the lowest id.

    `top_k` 0 means all; `top_p` in (0, 1]; `min_p` in [0, 1]; `seed` is an unsigned 64-bit number.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One API call's worth of work: `len(prompts) * n` choices, choice `i` = prompt `i // n`, copy `i % n`.

    Built by `server.text.prepare`, which guarantees: at least one prompt, each with at least one id,
    every id below the embedding rows, prompt + max_tokens within the variant's context, max_tokens >= 1.
    `stop_ids` end a choice (finish `stop`) once it has `min_tokens` output tokens; before that they
    cannot be drawn. `cache_root` (32 bytes) is the root of the prefix index for this request.
    Lower `priority` runs first.
    """

    id: str
    variant: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: int
    sampling: SamplingParams
    cache_root: bytes
    min_tokens: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KVPeak:
    """Cache held by a request (all its choices) at its peak so far, in physical blocks and tokens.

    `tokens` are token slots filled in those blocks, a block shared within the request counted once;
    `exclusive` counts the blocks nobody else held; `cached_tokens` are prompt tokens served by the
    prefix index at first admission (recompute after preemption is not a hit).
    """

    blocks: int
    exclusive: int
    tokens: int
    cached_tokens: int


NOTHING_HELD = KVPeak(blocks=0, exclusive=0, tokens=0, cached_tokens=0)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One output token of one choice, or its end, or both.

    `token` is None only where a choice ends without one (abort, error). `error` is set with
    FinishReason.ERROR. `kv` is the request's peak as of this token; `cached_tokens` there is summed
    over the request's prompts.
    """

    request_id: str
    index: int
    token: int | None
    finish: FinishReason | None
    kv: KVPeak
    error: str | None = None


def failed(request_id: str, index: int, error: str) -> TokenEvent:
    """The end of a choice whose cache nobody can account for any more."""
    return TokenEvent(request_id, index, None, FinishReason.ERROR, NOTHING_HELD, error)
