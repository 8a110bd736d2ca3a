"""Step 9 of a request's trip: token events become text deltas; a stop string ends its choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from server.engine.request import FinishReason, KVPeak, Request, TokenEvent
from server.text.prepare import Prepared

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice in one hand-over of the engine.

    `text` may be empty while a character or a possible stop string is held back. `tokens` are the ids that
    count towards usage. `finish_reason` is set once, on the choice's last delta.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The last item of every generation: usage in tokens, and the request's peak of cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv: KVPeak


class TokenService(Protocol):
    """The part of `EngineService` that generation needs."""

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        """Raises QueueFull, Draining or EngineDead; the stream ends after every choice has ended."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice or the whole request; unknown or ended ids are ignored."""
        ...


class Generation:
    """An async iterator of ChoiceDelta, then one Done. `aclose()` (or an exception) aborts the request."""

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> ChoiceDelta | Done:
        """Raises GenerationError if the engine gave up on a choice (the rest is aborted)."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Frees whatever still runs; safe to call twice, and after the end."""
        raise NotImplementedError


async def generate(service: TokenService, prepared: Prepared, tokenizer: Tokenizer) -> Generation:
    """Submits now (so QueueFull, Draining and EngineDead are raised here, before any header is sent) and
    returns the answer to iterate: `generation = await generate(...)`, `async for item in generation`,
    `await generation.aclose()` in a finally."""
    raise NotImplementedError
