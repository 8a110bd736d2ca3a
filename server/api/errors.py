"""Every error a client sees, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from cache.errors import CacheError
from server.engine.errors import Draining, EngineDead, EngineError, QueueFull, ReadTooSlowly
from server.text.errors import GenerationError, RequestError

_TYPES = {429: "rate_limit_error", **dict.fromkeys((500, 503, 504), "server_error")}

_RETRY_SECONDS = "5"  # for who cannot be served now, where nobody knows better


class ApiError(Exception):
    """An HTTP error: `status`, a message fit for a client, and the field and machine word it belongs to."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", _RETRY_SECONDS)

    def body(self) -> dict[str, Any]:
        """The JSON of the error, also used for an error event in a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer, status and headers included."""
        return json_response(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client closed its connection; whatever ran for it has been aborted and nobody reads an answer."""


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as compact JSON. Non-finite numbers are a bug of ours and raise ValueError."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8"), status, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError | None:
    """What a client is told about an error of the rooms behind the API; None for a bug of ours."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(error.status, error.message, error.param, error.code)
        case GenerationError():
            return ApiError(500, error.message, code="generation_failed")
        case CacheError():
            return ApiError(500, f"The cache does not add up: {error}.", code="cache_check_failed")
        case QueueFull():
            retry = {"retry-after": str(max(1, error.retry_after))}
            return ApiError(429, _sentence(error), code="queue_full", headers=retry)
        case Draining():
            return shutting_down()
        case ReadTooSlowly():
            return ApiError(408, _sentence(error), code="read_too_slowly")
        case EngineDead():
            return ApiError(503, _sentence(error), code="engine_dead")
        case EngineError():
            return ApiError(503, _sentence(error), code="engine_unavailable")
        case _:
            return None


def shutting_down() -> ApiError:
    """What a client is told that came too late."""
    return ApiError(503, _sentence(Draining()), code="shutting_down")


def internal_error() -> ApiError:
    """What a client is told when the fault is ours; the log has the rest."""
    return ApiError(500, "Internal error; the server's log says more.", code="internal_error")


def _sentence(error: Exception) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + "."
