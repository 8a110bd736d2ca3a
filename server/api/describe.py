"""The OpenAPI document of routes that read their body themselves: what they accept and what they answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from server.api.wire import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, Wire

_BODIES: tuple[type[Wire], ...] = (ChatBody, CompletionBody, DetokenizeBody, TokenizeBody)
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def accepts(body: type[Wire]) -> dict[str, Any]:
    """`openapi_extra` for a route that parses its own body as `body`."""
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(
    text: str, *, stream: bool = False, kind: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    """`responses` for a route: its answer and the error shape of everything else."""
    content: dict[str, Any] = {
        kind: {"schema": {"type": "object" if kind == "application/json" else "string"}}
    }
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        200: {"description": text, "content": content},
        "default": {"description": "Any error.", "content": error},
    }


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document, with the schemas of the bodies that FastAPI does not see."""
    document: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for body in _BODIES:
        schema = body.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[body.__name__] = schema
    schemas["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape, which is never sent
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return document
