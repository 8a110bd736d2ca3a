"""Step 2 of a request's trip: an ask becomes a `Request` that cannot be wrong, or a `RequestError`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.engine.request import Request
from server.text.asks import ChatAsk, CompletionAsk, SamplingAsk
from server.text.served import ServedModel, ServedVariant

if TYPE_CHECKING:
    from server.text.chat import ChatTemplate
    from server.text.tokenizer import Tokenizer

__all__ = ["ChatAsk", "CompletionAsk", "Prepared", "Preparer", "SamplingAsk", "ServedModel", "ServedVariant"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request with what the words need to answer it.

    `request` is None where nothing has to be generated (completions with max_tokens 0): `generate` then
    answers without the engine. `model` is the name to echo, `prompts` the ids of each prompt, choice `i`
    belongs to prompt `i // n`. `echo` holds one text per prompt to send before its choices, or is empty.
    `prompt_tokens` counts every prompt once, whatever `n`.
    """

    request_id: str
    model: str
    variant: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    prompt_tokens: int
    request: Request | None
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    echo: tuple[str, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Preparer:
    """Checks asks against one served model; long prompts are tokenised on a small bounded thread pool."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer, chat: ChatTemplate) -> None: ...

    async def completion(self, ask: CompletionAsk) -> Prepared:
        """Raises RequestError; never blocks the loop."""
        raise NotImplementedError

    async def chat(self, ask: ChatAsk) -> Prepared:
        """Raises RequestError (no template, a template's refusal, ...); never blocks the loop."""
        raise NotImplementedError

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of any text, for /tokenize, off the loop when long."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the thread pool and the template's worker."""
        raise NotImplementedError
