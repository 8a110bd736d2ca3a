"""What can be asked without running the model: models, version, health, metrics, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.body import read_object
from server.api.describe import accepts, answers
from server.api.errors import ApiError, json_response
from server.api.state import ApiState, ModelCard
from server.api.stream import until_gone
from server.api.unsupported import TOKENIZE, refuse
from server.api.wire import DetokenizeBody, TokenizeBody, validate
from server.engine.errors import EngineDead
from server.metrics import CONTENT_TYPE
from server.text.prompts import check_ids

_DETOKENIZED = 2**17  # ids; the library holds the interpreter while it decodes, a second for 2**20


def routes(state: ApiState) -> APIRouter:
    """The routes that only tell."""
    router = APIRouter()

    @router.get("/health", summary="Whether the server can serve", responses=answers("It can."))
    async def health() -> Response:
        """200 if a request sent now would be taken; 503 with the reason while starting, draining or dead.

        Needs no key and never waits for the model. `running` counts choices, `waiting` requests.
        """
        now = state.service.health()
        if not now.ok:
            detail = f"{now.status}: {now.detail}" if now.detail else str(now.status)
            raise ApiError(503, f"The server cannot serve now ({detail}).", code=str(now.status))
        return json_response({"status": str(now.status), "running": now.running, "waiting": now.queued})

    @router.get("/version", summary="The version of the server", responses=answers("The version."))
    async def version() -> Response:
        """The version as `headroom --version` tells it."""
        return json_response({"version": state.version})

    @router.get(
        "/metrics", summary="Numbers for Prometheus", responses=answers("The text format.", kind="text/plain")
    )
    async def metrics() -> Response:
        """Prometheus' text format: seconds, tokens, blocks, bytes. Without the cache of a dead engine."""
        try:
            report = await state.service.report()
        except EngineDead:
            report = None
        return Response(state.metrics.render(state.service.stats(), report), media_type=CONTENT_TYPE)

    @router.get("/v1/models", summary="What is served", responses=answers("All served names."))
    async def models() -> Response:
        """Each attention mode under its own name, with what it costs: `bytes_per_token` in bytes of cache,
        `max_model_len` in tokens, `live_bytes` as of the last step; `group` query heads read one KV head,
        which `head_map` makes. Never waits for the model."""
        live = state.service.live_bytes()
        return json_response({"object": "list", "data": [_card(card, live) for card in state.cards]})

    @router.get("/v1/models/{model:path}", summary="One served model", responses=answers("The model."))
    async def model(model: str) -> Response:
        """The same for one name or alias; 404 `model_not_found` lists the others."""
        name, variant = state.served.resolve(model)
        live = state.service.live_bytes()
        card = next(card for card in state.cards if card.variant == variant.name)
        return json_response(_card(card, live) | {"id": name})

    return router


def token_routes(state: ApiState) -> APIRouter:
    """Text to ids and back."""
    router = APIRouter()

    @router.post(
        "/tokenize",
        summary="The ids of a text or a conversation",
        openapi_extra=accepts(TokenizeBody),
        responses=answers("The ids and how many they are."),
    )
    async def tokenize(request: Request) -> Response:
        """The ids that completions would see for `prompt`, or chat for `messages`; `count` of them."""
        async with read_object(request, state.settings) as raw:
            body = validate(TokenizeBody, raw)
            refuse(raw, TOKENIZE)
            _, variant = state.served.resolve(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise ApiError(400, "prompt: send either a prompt or messages.", "prompt", "missing_field")
            if body.messages is not None:
                if body.add_special_tokens:
                    message = "add_special_tokens: not supported with messages, whose template has its own."
                    raise ApiError(400, message, "add_special_tokens", "unsupported_parameter")
                tokenizing = state.preparer.tokenize_chat(body.messages)
            else:
                special = body.add_special_tokens is not False
                tokenizing = state.preparer.tokenize(body.prompt or "", special=special)
            ids = await until_gone(request.receive, tokenizing)
        counts = {"count": len(ids), "max_model_len": variant.max_len}
        return json_response({**counts, "tokens": ids, "token_strs": None})

    @router.post(
        "/detokenize",
        summary="The text of ids",
        openapi_extra=accepts(DetokenizeBody),
        responses=answers("The text."),
    )
    async def detokenize(request: Request) -> Response:
        """The text of `tokens`, special tokens included; 400 for an id that the model does not have."""
        async with read_object(request, state.settings) as raw:
            body = validate(DetokenizeBody, raw)
        _, variant = state.served.resolve(body.model)
        most = max(_DETOKENIZED, variant.max_len)
        if len(body.tokens) > most:
            raise ApiError(
                400, f"tokens: at most {most} ids at once, got {len(body.tokens)}.", "tokens", "invalid_value"
            )
        ids = check_ids("tokens", body.tokens, state.served.vocab_rows)
        return json_response(
            {"prompt": await asyncio.to_thread(state.tokenizer.decode, ids, skip_special=False)}
        )

    return router


def _card(card: ModelCard, live_bytes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "headroom",
        "max_model_len": card.max_model_len,
        "kv_heads": card.kv_heads,
        "group": card.group,
        "bytes_per_token": card.bytes_per_token,
        "lossy": card.lossy,
        "head_map": card.head_map,
        "live_bytes": live_bytes.get(card.variant, 0),
    }
