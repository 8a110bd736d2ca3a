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
    `repetition_penalty` sees prompt and output, `presence_penalty` and `frequency_penalty` the output alone;
    `logit_bias` are (id, bias) pairs, each id once.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must look like; equal bytes mean the same grammar."""

    grammar: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One API call's worth of work: `len(prompts) * n` choices, choice `i` = prompt `i // n`, copy `i % n`.

    Built by `server.text.prepare`, which guarantees: at least one prompt, each with at least one id,
    every id below the embedding rows, prompt + max_tokens within the variant's context, max_tokens >= 1
    (0 where only `prompt_logprobs` are wanted).
    `stop_ids` end a choice (finish `stop`) once it has `min_tokens` output tokens; before that they
    cannot be drawn. `cache_root` (32 bytes) is the root of the prefix index for this request.
    Lower `priority` runs first. `logprobs` is how many of the likeliest tokens are told beside each drawn
    one, `prompt_logprobs` the same of each prompt token but the first; None tells nothing.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def weight(self) -> int:
        """Ids that it holds while it is in flight, and log-probabilities that it may come to hold."""
        ids = sum(len(prompt) for prompt in self.prompts)
        read = 0 if self.prompt_logprobs is None else ids * (self.prompt_logprobs + 1)
        written = len(self.prompts) * self.n * self.max_tokens
        return ids + read + (0 if self.logprobs is None else written * (self.logprobs + 1))


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
class TokenScore:
    """The log-probability of a token under the raw logits (before bias, penalties, temperature and masks),
    and the likeliest ids there with theirs, from high to low, ties by lowest id."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One output token of one choice, or its end, or both.

    `token` is None only where a choice ends without one (abort, error). `error` is set with
    FinishReason.ERROR. `kv` is the request's peak as of this token; `cached_tokens` there is summed
    over the request's prompts. `score` belongs to `token`; `prompt_scores`, on the first event of the first
    choice of each prompt, has an entry for each prompt token, the first of them None.
    """

    request_id: str
    index: int
    token: int | None
    finish: FinishReason | None
    kv: KVPeak
    error: str | None = None
    score: TokenScore | None = None
    prompt_scores: tuple[TokenScore | None, ...] | None = None


def failed(request_id: str, index: int, error: str) -> TokenEvent:
    """The end of a choice whose cache nobody can account for any more."""
    return TokenEvent(request_id, index, None, FinishReason.ERROR, NOTHING_HELD, error)
