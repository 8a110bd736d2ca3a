"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.answer import Answer, outcome_of
from server.api.body import read_object
from server.api.call import Call
from server.api.deadline import Deadline
from server.api.describe import accepts, answers
from server.api.guard import KEY_ID
from server.api.identity import identity_of, own_id
from server.api.shapes import ChatShape, CompletionShape, Shape
from server.api.state import ApiState
from server.api.stream import until_gone
from server.api.unsupported import CHAT, COMPLETION, Harmless, refuse, refuse_in_streams
from server.api.wire import ChatBody, CompletionBody, SamplingBody, validate
from server.text.asks import ChatAsk, CompletionAsk
from server.text.prepare import Prepared, Preparer


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """What one of the two routes does differently."""

    body: type[SamplingBody]
    unsupported: Harmless
    shape: Shape
    ids: str  # what the ids of its answers begin with
    prepare: Callable[[Preparer, Any, str, str], Awaitable[Prepared]]  # (..., wire body, its id, key id)


def routes(state: ApiState) -> APIRouter:
    """The two endpoints that run the model."""
    router = APIRouter()

    completions = _Endpoint(CompletionBody, COMPLETION, CompletionShape(), "cmpl", _completion)
    chats = _Endpoint(ChatBody, CHAT, ChatShape(), "chatcmpl", _chat)

    @router.post(
        "/v1/completions",
        summary="Continue a text",
        openapi_extra=accepts(CompletionBody),
        responses=answers("The continuation, or with `stream` its events.", stream=True),
    )
    async def create_completion(request: Request) -> Response:
        """One choice (or `n`) for each prompt; `usage.kv_cache` tells in bytes what the cache took.

        Lengths are in tokens. 400 `context_length_exceeded` where prompt and output cannot fit, 429 when the
        queue is full, 503 while the server cannot take work. After OpenAI's legacy completions API.
        """
        return await _run(state, completions, request)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=accepts(ChatBody),
        responses=answers("The answer, or with `stream` its events.", stream=True),
    )
    async def create_chat_completion(request: Request) -> Response:
        """One answer (or `n`) to `messages`, rendered by the checkpoint's own chat template.

        Errors as for completions; 400 `chat_template_missing` or `chat_template_error` where the template is
        absent or refuses. After OpenAI's chat completions API.
        """
        return await _run(state, chats, request)

    return router


async def _completion(preparer: Preparer, body: CompletionBody, name: str, key: str) -> Prepared:
    return await preparer.completion(
        CompletionAsk(
            request_id=name,
            prompt=body.prompt,
            model=body.model,
            max_tokens=body.max_tokens,
            echo=body.echo,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            sampling=body.sampling(),
            cache_salt=body.cache_salt,
            key_id=key,
        )
    )


async def _chat(preparer: Preparer, body: ChatBody, name: str, key: str) -> Prepared:
    return await preparer.chat(
        ChatAsk(
            request_id=name,
            messages=body.messages,
            model=body.model,
            max_tokens=body.max_tokens,
            max_completion_tokens=body.max_completion_tokens,
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            sampling=body.sampling(),
            cache_salt=body.cache_salt,
            key_id=key,
        )
    )


async def _run(state: ApiState, endpoint: _Endpoint, request: Request) -> Response:
    identity = identity_of(request.scope)
    identity.own = own_id(endpoint.ids)
    call = Call(identity, state.metrics.clock(), Deadline(state.settings.request_seconds))
    try:
        async with call.deadline.limit():
            prepared, streams, include_usage = await _prepared(state, endpoint, request, identity.own)
        answer = Answer(state, prepared, endpoint.shape, call)
        if streams:
            return await answer.stream(request, include_usage)
        return await answer.whole(request)
    except Exception as error:
        state.metrics.outcome(outcome_of(error))
        raise


async def _prepared(
    state: ApiState, endpoint: _Endpoint, request: Request, name: str
) -> tuple[Prepared, bool, bool]:
    """What to answer, whether as a stream, and whether that ends with the usage. The body, which may be
    large, is gone before the answer begins."""
    async with read_object(request, state.settings) as raw:
        body = validate(endpoint.body, raw)
        refuse(raw, endpoint.unsupported)
        refuse_in_streams(raw)
        # It may wait for its turn with what others have sent; who leaves meanwhile is not to be waited for.
        preparing = endpoint.prepare(state.preparer, body, name, request.scope[KEY_ID])
        prepared = await until_gone(request.receive, preparing)
        return prepared, bool(body.stream), body.include_usage
