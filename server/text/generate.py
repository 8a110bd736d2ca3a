"""Step 9 of a request's trip: token events become text deltas; a stop string ends its choice.

Usage ends at the token that completed a stop: what the engine drew before it heard of it is not counted.
Stop strings are looked for in the text of token number `min_tokens` and after, never in the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from server.engine.request import NOTHING_HELD, FinishReason, KVPeak, Request, TokenEvent, TokenScore
from server.text.errors import GenerationError
from server.text.offsets import TextOffsets
from server.text.prepare import Prepared
from server.text.stops import StopMatcher
from server.text.tokenizer import Tokenizer

PromptScores = tuple[TokenScore | None, ...]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice in one hand-over of the engine.

    `text` may be empty while a character or a possible stop string is held back. `tokens` are the ids that
    count towards usage. `finish_reason` is set once, on the choice's last delta. Where scores are asked for,
    `scores` and `offsets` (where each token begins in the choice's text, in characters, before a stop string
    is cut off) go in step with `tokens`; `prompt_scores`, one for each token of the prompt, come with the
    first delta.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    scores: tuple[TokenScore, ...] = ()
    offsets: tuple[int, ...] = ()
    prompt_scores: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The last item of every generation: usage in tokens, and the request's peak of cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv: KVPeak


class EventStream(Protocol):
    """What `submit` gives: a list of events per hand-over, until every choice has ended."""

    async def __anext__(self) -> list[TokenEvent]: ...

    async def aclose(self) -> None:
        """Aborts what still runs; may be called twice."""
        ...


class TokenService(Protocol):
    """The part of `EngineService` that generation needs."""

    async def submit(self, request: Request) -> EventStream:
        """Raises QueueFull, Draining or EngineDead; the stream ends after every choice has ended."""
        ...

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """Ends one choice or the whole request, as `reason`; unknown or ended ids are ignored."""
        ...


async def generate(service: TokenService, prepared: Prepared, tokenizer: Tokenizer) -> Generation:
    """Submits now (so QueueFull, Draining and EngineDead are raised here, before any header is sent) and
    returns the answer to iterate: `generation = await generate(...)`, `async for item in generation`,
    `await generation.aclose()` in a finally."""
    stream = await service.submit(prepared.request) if prepared.request is not None else None
    return Generation(service, stream, prepared, tokenizer)


class Generation:
    """An async iterator of ChoiceDelta, then one Done. `aclose()` aborts whatever still runs."""

    def __init__(
        self, service: TokenService, stream: EventStream | None, prepared: Prepared, tokenizer: Tokenizer
    ) -> None:
        """`stream` None: there is nothing to generate, every choice ends at once with `length`."""
        self._service = service
        self._stream = stream
        self._prepared = prepared
        self._kv = NOTHING_HELD
        self._choices = [_Choice(prepared, tokenizer, index) for index in range(prepared.num_choices)]
        self._running = 0 if stream is None else len(self._choices)
        self._failure: Exception | None = None  # raised once what came before it has been taken
        self._items: deque[ChoiceDelta | Done] = deque()
        self._changed: dict[int, _Choice] = {}  # choices with a delta to give
        for index, choice in enumerate(self._choices):
            if stream is None:
                choice.end(FinishReason.LENGTH)
            if choice.ended or (choice.has_text and not choice.waits):
                self._items.append(choice.delta(index))
        if stream is None:
            self._items.append(self._done())

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> ChoiceDelta | Done:
        """Raises GenerationError if the engine gave up on a choice (the rest is aborted), or what else went
        wrong, after all that came before it."""
        while not self._items:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self._stream is None:
                raise StopAsyncIteration
            try:
                self._hand_over(await anext(self._stream))
            except StopAsyncIteration:
                self._failure = GenerationError("The engine ended this answer before it was complete.")
            if self._failure is not None or not self._running:
                await self._leave()
        return self._items.popleft()

    async def aclose(self) -> None:
        """Aborts whatever still runs; safe to call twice, and after the end."""
        self._items.clear()
        self._failure = None
        await self._leave()

    async def _leave(self) -> None:
        """Ends the stream. Whatever still runs is aborted."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._running:
            self._service.abort(self._prepared.request_id)
        await stream.aclose()

    def _hand_over(self, events: Iterable[TokenEvent]) -> None:
        """One step's events to at most one delta a choice, then Done or the failure, if it was the last.

        A choice whose answer begins with scores of its prompt is held back until they are there."""
        for event in events:
            if event.prompt_scores is not None:
                self._tell_prompt(event.index, event.prompt_scores)
            choice = self._choices[event.index]
            if choice.finish is not None:
                continue  # drawn, or aborted, after the stop string
            if event.finish is FinishReason.ERROR:
                self._failure = GenerationError(event.error or "The engine failed on this answer.")
                continue
            self._kv = event.kv
            self._changed[event.index] = choice
            try:
                ended = choice.take(event)
            except Exception as error:  # a fast engine hands over several tokens at once: the first were good
                self._failure = error
                break
            if ended:
                self._running -= 1
                if event.finish is None:
                    self._service.abort(self._prepared.request_id, event.index, FinishReason.STOP)
        over = self._failure is not None or not self._running
        for index, choice in list(self._changed.items()):
            if over or not choice.waits:
                del self._changed[index]
                self._items.append(choice.delta(index))
        if self._failure is None and over:
            self._items.append(self._done())

    def _tell_prompt(self, index: int, scores: PromptScores) -> None:
        """To all choices of the prompt that choice `index` belongs to."""
        n = self._prepared.n
        first = index // n * n
        for choice in self._choices[first : first + n]:
            choice.tell_prompt(scores)

    def _done(self) -> Done:
        return Done(
            prompt_tokens=self._prepared.prompt_tokens,
            completion_tokens=sum(choice.count for choice in self._choices),
            cached_tokens=self._kv.cached_tokens,
            kv=self._kv,
        )


class _Choice:
    """One choice's way from tokens to text. `finish` is set once; `count` are its output tokens; `waits` says
    that its prompt's scores are to come first."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, index: int) -> None:
        self.finish: FinishReason | None = None
        self.count = 0
        request, echo = prepared.request, prepared.echo_of(index)
        self.waits = request is not None and request.prompt_logprobs is not None
        if echo is None:
            self._detokenizer = tokenizer.detokenizer(continuing=prepared.continues_text(index))
        else:
            self._detokenizer = echo.read.fork()
        self._ends = prepared.ends
        self._in_grammar = prepared.grammar is not None
        self._matcher = StopMatcher(self._ends.strings, include=self._ends.include)
        self._place = TextOffsets(tokenizer, 0 if echo is None else len(echo.text))
        self._text = [] if echo is None else [echo.text]
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._offsets: list[int] = []
        self._prompt_scores: PromptScores | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def has_text(self) -> bool:
        return any(self._text)

    def tell_prompt(self, scores: PromptScores) -> None:
        """They go with the next delta, which is the first."""
        self.waits = False
        self._prompt_scores = scores

    def take(self, event: TokenEvent) -> bool:
        """Adds one event to the pending delta; True if it ended the choice."""
        if event.token is not None:
            self.count += 1
            self._tokens.append(event.token)
            hidden = event.finish is FinishReason.STOP and self._hides(event.token)
            text = "" if hidden else self._detokenizer.push(event.token)
            if event.score is not None:
                self._scores.append(event.score)
                self._offsets.append(self._place.push(event.token, text))
            self._add(text)
        if event.finish is not None:
            self.end(event.finish)
        return self.finish is not None

    def _hides(self, last: int) -> bool:
        """Whether the token that stopped the choice is a mark and no part of it. One that completes a grammar
        is a part."""
        return (last in self._ends.ids or not self._in_grammar) and last not in self._ends.shown_ids

    def end(self, finish: FinishReason) -> None:
        """Nothing follows; a stop that came before stays the reason. What was held back may still complete a
        stop string, but not where nothing was generated: then it is the prompt's."""
        if not self.ended:
            held = self._detokenizer.finish()
            self._add(held) if self.count else self._text.append(held)
        if not self.ended:
            self._text.append(self._matcher.finish())
            self.finish = finish

    def delta(self, index: int) -> ChoiceDelta:
        """The pending delta, which starts anew."""
        news = ChoiceDelta(
            index,
            "".join(self._text),
            tuple(self._tokens),
            self.finish,
            tuple(self._scores),
            tuple(self._offsets),
            self._prompt_scores,
        )
        self._text, self._tokens, self._scores, self._offsets = [], [], [], []
        self._prompt_scores = None
        return news

    def _add(self, text: str) -> None:
        if not self._ends.strings or self.count < self._ends.min_tokens:
            self._text.append(text)
            return
        result = self._matcher.push(text)
        self._text.append(result.text)
        if result.stop is not None:
            self.finish = FinishReason.STOP
