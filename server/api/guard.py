"""The door: which hosts, origins and keys may pass, before any route is looked at, and which headers every
answer has (pure ASGI).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError, internal_error, shutting_down
from server.api.identity import HEADER, Identity, identify
from server.api.state import ApiSettings

KEY_ID = "headroom.key_id"  # in the ASGI scope: which key was used, "" without keys
DIRECT = "headroom.send"  # what the server gave for sending: for bodies, which nothing between changes

_log = logging.getLogger(__name__)
_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")  # of headers
_OPEN_PATHS = frozenset({"/health"})
_WILDCARDS = frozenset({"", "0.0.0.0", "::", "[::]"})


class Guard:
    """Checks Host, then Origin (CORS), then the API key; turns what still escapes the routes into a 500."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._host = _bare(settings.host)
        self._names = frozenset(_bare(name) for name in settings.allowed_hosts)
        self._origins = frozenset(settings.cors_origins)
        self._keys = tuple((hashlib.sha256(key.encode()).digest(), key_id(key)) for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request: passed on, refused (403, 401), or answered here (a preflight)."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        identity = identify(scope)
        scope[DIRECT] = send
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *_common(identity, message)]}
            await send(message)

        origin = next(iter(_values(scope["headers"], b"origin")), None)
        allowed = origin is not None and (origin in self._origins or "*" in self._origins)
        answer = _with_origin(watched, origin) if allowed and origin is not None else watched
        try:
            await self._checked(scope, receive, answer, allowed)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        except asyncio.CancelledError:  # the server ends before this request has: its body never came, say
            if not started:
                await shutting_down().response()(scope, receive, answer)
            raise
        except Exception:
            _log.exception("%s %r failed, request %s", scope["method"], scope["path"], identity)
            if not started:
                await internal_error().response()(scope, receive, answer)

    async def _checked(self, scope: Scope, receive: Receive, send: Send, allowed_origin: bool) -> None:
        headers = scope["headers"]
        self._check_host(_values(headers, b"host"))
        if allowed_origin and scope["method"] == "OPTIONS":
            await _preflight(send, _values(headers, b"access-control-request-headers"))
            return
        scope[KEY_ID] = ""
        if self._keys and scope["path"] not in _OPEN_PATHS:
            scope[KEY_ID] = self._key_id(_values(headers, b"authorization"))
        await self._app(scope, receive, send)

    def _check_host(self, hosts: list[str]) -> None:
        for host in hosts:
            name = _bare(host)
            if name not in (self._host, "localhost") and not self._is_named(name):
                raise ApiError(
                    403,
                    "The Host header names a host that is not served here; allow it with --allowed-hosts.",
                    code="host_not_allowed",
                )

    def _is_named(self, name: str) -> bool:
        if name in self._names or "*" in self._names:
            return True
        try:
            address = ip_address(name.strip("[]"))
        except ValueError:
            return False
        # An address cannot be pointed elsewhere by its owner, as a name can (DNS rebinding).
        return address.is_loopback or self._host in _WILDCARDS

    def _key_id(self, authorization: list[str]) -> str:
        scheme, _, given = (authorization[0] if len(authorization) == 1 else "").partition(" ")
        # Headers are latin-1 on the wire; going back to bytes keeps keys of any script comparable.
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        found = ""
        for known, name in self._keys:  # every key is compared, so that time tells nothing
            found = name if hmac.compare_digest(known, digest) else found
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401,
                "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found


def key_id(key: str) -> str:
    """A name for a key that does not give it away; separates the prefix caches of different keys."""
    return hashlib.sha256(b"headroom key id " + key.encode()).hexdigest()[:16]


def _common(identity: Identity, message: Message) -> Iterator[tuple[bytes, bytes]]:
    """The headers of every answer: no browser guesses that JSON is a page, and a page loads nothing but what
    this server sends, and runs no script that is written into it."""
    yield HEADER, identity.shown.encode("ascii")
    yield b"x-content-type-options", b"nosniff"
    kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
    if any(kind.lower().startswith(b"text/html") for kind in kinds):
        yield b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'"
        yield b"referrer-policy", b"no-referrer"


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _bare(host: str) -> str:
    """A host without its port, in lower case; `[::1]:80` and `::1` both give `::1`."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.rstrip(".")


def _with_origin(send: Send, origin: str) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "retry-after, x-request-id"
            headers.add_vary_header("Origin")
        await send(message)

    return wrapped


async def _preflight(send: Send, wanted: list[str]) -> None:
    """What a browser asks before a cross-origin POST; `_with_origin` adds the allowed origin, whose pages may
    send what they like: clients add headers of their own."""
    names = ",".join(wanted)
    allowed = names if _NAMES.fullmatch(names) else "authorization, content-type, x-request-id"
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", allowed.encode("ascii")),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
