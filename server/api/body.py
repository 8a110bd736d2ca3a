"""From the bytes of a request to one JSON object, before any of it is believed.

Strict: UTF-8 without a byte order mark, one object, finite numbers, whole characters; bounded in bytes,
in depth and in how much it holds. A refusal never repeats the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from server.api.errors import ApiError, ClientGone
from server.api.room import Room
from server.api.state import ApiSettings
from server.api.structure import MAX_OBJECTS, MAX_VALUES, structure

MAX_DEPTH = 64  # containers inside containers; the deepest field we know needs 4
_PATIENCE = 10  # times `body_seconds`: the whole body must be there by then, however it drips
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextlib.asynccontextmanager
async def read_object(request: Request, settings: ApiSettings) -> AsyncIterator[dict[str, Any]]:
    """The JSON object in the request's body, and room for it in memory for as long as it is needed.

    Raises ApiError 415 (content type or encoding), 413 (more than `settings.max_body` bytes, found before
    parsing), 503 (too many large ones at once), 408 (no bytes for `settings.body_seconds`, or not all in
    ten times that), 400 (anything else); ClientGone.
    """
    _check_headers(request)
    with request.app.state.bodies.room() as room:
        yield parse_object(await _read(request, settings, room))


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises ApiError 400 if `body` is not one strict JSON object."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"the body is not valid UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise _refused("the body is empty; send a JSON object")
    if text.startswith("\ufeff"):
        raise _refused("the body starts with a byte order mark; send plain UTF-8")
    _check_structure(body)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _refused(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise _refused("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _refused("the body must be a JSON object")
    surrogates = _SURROGATE.search(text) is not None
    if surrogates or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_tree(value, surrogates)
    return value


def _check_structure(body: bytes) -> None:
    found = structure(body)
    if found.bearable:
        return
    raise ApiError(
        413,
        f"The body holds {found.values} values and {found.objects} lists, objects and names; the limits are "
        f"{MAX_VALUES} and {MAX_OBJECTS}. Split the request.",
        code="body_too_large",
    )


def _check_headers(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise ApiError(415, "Send the body as JSON, with the header `Content-Type: application/json`.")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8"):
        raise ApiError(415, "Send the body in UTF-8; no other charset is read.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Send the body uncompressed; `Content-Encoding` is not supported.")


async def _read(request: Request, settings: ApiSettings, room: Room) -> bytes:
    limit = settings.max_body
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:19]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    stream = request.stream()
    clock = asyncio.get_running_loop().time
    end = clock() + _PATIENCE * settings.body_seconds
    try:
        while True:
            async with asyncio.timeout_at(min(clock() + settings.body_seconds, end)):
                part = await anext(stream, None)
            if part is None:
                return b"".join(parts)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            room.take(len(part))
            parts.append(part)
    except TimeoutError:
        most = _PATIENCE * settings.body_seconds
        told = f"No part of the body came for {settings.body_seconds:g} s, or not all of it in {most:g} s."
        raise ApiError(408, told) from None
    except ClientDisconnect:
        raise ClientGone from None


def _check_tree(value: Any, surrogates: bool) -> None:
    """Refuse more than MAX_DEPTH levels, and halves of surrogate pairs, which no tokenizer can encode."""
    level = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            children += [item for item in items if isinstance(item, (dict, list))]
            if surrogates:
                strings = [item for item in items if isinstance(item, str)]
                strings += [name for name in container if isinstance(name, str)]
                for text in strings:
                    _check_characters(text)
        if not children:
            return
        level = children
    raise _too_deep()


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _refused(
            "a string holds half of a surrogate pair (\\ud800 to \\udfff), not a character"
        ) from None


def _no_constant(name: str) -> NoReturn:
    raise _refused(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _refused("a number is too large")
    return value


def _refused(why: str) -> ApiError:
    return ApiError(400, f"The request could not be read: {why}.", code="invalid_json")


def _too_deep() -> ApiError:
    return _refused(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than the limit of {limit} bytes.", code="body_too_large")
