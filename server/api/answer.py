"""Step 10 of a request's trip: a generation becomes one JSON answer or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.api.call import Call
from server.api.chunks import DONE, Chunks, event
from server.api.errors import ApiError, ClientGone, as_api_error, internal_error, json_response
from server.api.logprobs import prompt_logprobs, scored
from server.api.pieces import large_response
from server.api.shapes import Shape, Tokens
from server.api.state import ApiState
from server.api.stream import KEEP_ALIVE, EventStream, end, until_gone
from server.engine.errors import EngineError, QueueFull, ReadTooSlowly
from server.engine.request import FinishReason
from server.text.errors import RequestError
from server.text.generate import ChoiceDelta, Done, Generation, generate
from server.text.prepare import Prepared

_log = logging.getLogger(__name__)


class Answer:
    """One call's answer: constant id, time and model, whatever form it takes."""

    def __init__(self, state: ApiState, prepared: Prepared, shape: Shape, call: Call) -> None:
        self._state = state
        self._prepared = prepared
        self._shape = shape
        self._clock = call.clock
        self._identity = call.identity
        self._deadline = call.deadline
        self._recorded = False
        self._head = {
            "id": prepared.request_id,
            "created": int(time.time()),
            "model": prepared.model,
            "system_fingerprint": state.fingerprint,
        }

    async def whole(self, request: Request) -> Response:
        """The answer in one piece; ClientGone, with everything freed, if the client leaves before it."""
        generation = await self._begun()
        try:
            response = await until_gone(request.receive, self._collect(generation))
        finally:
            await self._over(generation)
        self._record("ok")
        return response

    async def stream(self, request: Request, include_usage: bool) -> Response:
        """The answer as events. What fails before the first token is still an ordinary HTTP error, unless the
        client has waited for so long that he had to be told that he is not forgotten."""
        settings = self._state.settings
        generation = await self._begun()
        first = asyncio.ensure_future(anext(generation))
        try:
            soon = asyncio.wait({first}, timeout=settings.keep_alive_seconds)
            await until_gone(request.receive, soon)
            if first.done():
                self._check(first.result())
        except BaseException:
            await self._over(generation, first)
            raise
        events = self._events(generation, first, include_usage)
        return EventStream(events, settings, self._left, partial(self._over, generation, first))

    async def _begun(self) -> Generation:
        generation = await generate(self._state.service, self._prepared, self._state.tokenizer)
        self._deadline.then(partial(self._state.service.abort, self._prepared.request_id))
        return generation

    async def _over(self, generation: Generation, *tasks: asyncio.Future[Any]) -> None:
        """Whatever still runs for this answer ends, and nothing is left that could hold it."""
        self._deadline.stop()
        await end(*tasks)
        await generation.aclose()

    def _left(self) -> None:
        self._record("client_gone")

    def _record(self, outcome: str) -> None:
        """The first outcome counts: a client may close its end just as the last event reaches it."""
        if not self._recorded:
            self._recorded = True
            self._state.metrics.outcome(outcome)

    async def _collect(self, generation: Generation) -> Response:
        """Taken apart here, put together on a thread where there may be a million log-probabilities."""
        texts: list[list[str]] = [[] for _ in range(self._prepared.num_choices)]
        told: list[list[ChoiceDelta]] = [[] for _ in texts]
        reasons: dict[int, str] = {}
        usage: dict[str, Any] = {}
        async for item in generation:
            if isinstance(item, Done):
                usage = self._usage(item)
                continue
            self._clock.tokens(item.index, len(item.tokens))
            texts[item.index].append(item.text)
            if item.scores or item.prompt_scores is not None:
                told[item.index].append(item)
            if item.finish_reason is not None:
                reasons[item.index] = self._finish(item.finish_reason)

        def put_together() -> Response:
            choices = [
                self._whole(index, "".join(texts[index]), reasons[index], told[index])
                for index in range(len(texts))
            ]
            head = {**self._head, "object": self._shape.whole_object}
            body = {**head, "choices": choices, "usage": usage}
            return large_response(body) if any(told) else json_response(body)

        return await asyncio.to_thread(put_together) if any(told) else put_together()

    def _whole(self, index: int, text: str, finish: str, told: list[ChoiceDelta]) -> dict[str, Any]:
        scores, tokenizer = self._prepared.scores, self._state.tokenizer
        tokens: Tokens = None
        if scores.output is not None:
            tokens = chain.from_iterable(scored(self._prepared, tokenizer, news) or () for news in told)
        choice = self._shape.whole(index, text, finish, tokens)
        if scores.prompt is None:
            return choice
        ids = self._prepared.prompts[index // self._prepared.n]
        read = next((news.prompt_scores for news in told if news.prompt_scores is not None), ())
        return choice | {"prompt_logprobs": prompt_logprobs(ids, read, scores.prompt, tokenizer)}

    async def _events(
        self, generation: Generation, first: asyncio.Future[ChoiceDelta | Done], include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head, self._shape, include_usage)
        try:
            if not first.done():
                yield KEEP_ALIVE
            item = await first
            if news := b"".join(map(chunks.opening, range(self._prepared.num_choices))):
                yield news
            while not isinstance(item, Done):
                self._clock.tokens(item.index, len(item.tokens))
                if item.prompt_scores is None:
                    news = self._news(chunks, item)
                else:  # of an echoed prompt: they take seconds, which the others' streams must not wait for
                    news = await asyncio.to_thread(self._news, chunks, item)
                if news:
                    yield news
                item = await anext(generation)
            last = chunks.usage(self._usage(item)) if include_usage else b""
            self._record("ok")
            yield last + DONE
        except Exception as error:
            yield event(self._failure(error).body()) + DONE

    def _news(self, chunks: Chunks, item: ChoiceDelta) -> bytes:
        """One choice's news as events; none, while a character or a possible stop string is held back."""
        tokens = scored(self._prepared, self._state.tokenizer, item)
        if tokens is not None:
            tell = chunks.scored if item.prompt_scores is None else chunks.large
            news = tell(item.index, item.text, tokens)
        else:
            news = chunks.text(item.index, item.text) if item.text else b""
        if item.finish_reason is not None:
            news += chunks.ending(item.index, self._finish(item.finish_reason))
        return news

    def _check(self, item: ChoiceDelta | Done) -> None:
        if isinstance(item, ChoiceDelta) and item.finish_reason is not None:
            self._finish(item.finish_reason)

    def _finish(self, reason: FinishReason) -> str:
        """`stop` or `length`; an answer that was cut off by the server is an error, never a finish."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            return reason.value
        if self._deadline.passed:
            raise self._deadline.error()
        raise ApiError(503, "The server shut down before the answer was complete.", code="aborted")

    def _failure(self, error: Exception) -> ApiError:
        self._record(outcome_of(error))
        known = as_api_error(error)
        if known is None:
            _log.error("answer %s failed", self._identity, exc_info=error)
        return known or internal_error()

    def _usage(self, done: Done) -> dict[str, Any]:
        return {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "total_tokens": done.prompt_tokens + done.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
            "kv_cache": dict(self._state.kv_usage(self._prepared.variant, done.kv)),
        }


def outcome_of(error: BaseException) -> str:
    """The metric label of a call that ended in `error`."""
    match error:
        case QueueFull():
            return "queue_full"
        case ReadTooSlowly():
            return "client_gone"
        case EngineError() | RequestError(status=503) | ApiError(status=503):
            return "unavailable"
        case RequestError() | ApiError() if error.status < 500:
            return "invalid"
        case ClientGone():
            return "client_gone"
        case ApiError(code="deadline_exceeded"):
            return "timeout"
        case _:
            return "error"
