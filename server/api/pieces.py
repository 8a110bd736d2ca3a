"""JSON of answers that may be tens of megabytes: written a piece at a time, so that the thread that does it
holds up no other for long (one call of the library's encoder would, from its beginning to its end)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import Response

_DEPTH = 5  # an answer, its choices, one of them, its logprobs, their list; a piece is an entry of that


def large_response(body: dict[str, Any]) -> Response:
    """`body` as compact JSON; iterators in it are lists that are made as they are written."""
    return Response(large_json(body).encode("utf-8"), media_type="application/json")


def large_json(body: dict[str, Any], ascii_only: bool = False) -> str:
    """The same as a text; `ascii_only` escapes whatever else there is."""
    encoder = json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"), default=list)
    return "".join(_pieces(body, _DEPTH, encoder.encode))


def _pieces(value: Any, depth: int, small: Callable[[Any], str]) -> Iterator[str]:
    if depth and isinstance(value, dict):
        before = "{"
        for name, entry in value.items():
            yield f"{before}{small(name)}:"
            yield from _pieces(entry, depth - 1, small)
            before = ","
        yield "}" if value else "{}"
    elif depth and isinstance(value, list | Iterator):
        before = "["
        for entry in value:
            yield before
            yield from _pieces(entry, depth - 1, small)
            before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield small(value)
