"""The HTTP application: routes behind the guard, and one shape for every error."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cache.errors import CacheError
from server.api import generation, info, kv
from server.api.describe import describe
from server.api.errors import ApiError, ClientGone, as_api_error, internal_error
from server.api.guard import Guard
from server.api.room import Bodies
from server.api.state import ApiState
from server.engine.errors import EngineError
from server.text.errors import GenerationError, RequestError, shown

_log = logging.getLogger(__name__)
_GONE = 499  # the client closed its connection; nobody reads this


def create_api(state: ApiState) -> ASGIApp:
    """The ASGI application that serves `state`; starting and stopping the service is the caller's."""
    app = FastAPI(
        title="Headroom",
        version=state.version,
        summary="An OpenAI-compatible server that shows where the KV cache went",
        docs_url=None,  # their scripts come from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.bodies = Bodies(state.settings.max_bodies)
    for router in (generation.routes(state), info.routes(state), info.token_routes(state), kv.routes(state)):
        app.include_router(router)
    for kind in (ApiError, RequestError, GenerationError, EngineError, CacheError):
        app.add_exception_handler(kind, _told)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(RequestValidationError, _query)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _told)  # and the guard logs it

    def document() -> dict[str, object]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    return Guard(app, state.settings)


async def _told(request: Request, error: Exception) -> Response:
    return (as_api_error(error) or internal_error()).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_GONE)


async def _query(request: Request, error: Exception) -> Response:
    """A query parameter of the wrong type or out of range (bodies are checked by `wire.validate`)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    rule = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
    return ApiError(400, f"{name}: {rule}, got {shown(first['input'])}.", name, "invalid_value").response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        told = ApiError(404, "There is nothing at this path; see /openapi.json.", code="not_found")
    elif error.status_code == 405:
        told = ApiError(
            405,
            f"This path does not answer {request.method}.",
            code="method_not_allowed",
            headers=error.headers,
        )
    else:
        told = ApiError(error.status_code, str(error.detail), headers=error.headers)
    return told.response()
