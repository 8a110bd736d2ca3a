"""What one HTTP request is called: by the server, and, if he likes, by the client (`X-Request-Id`).

The server's own id names the request in the engine, in `/v1/kv` and in the log; two clients may choose the
same name, and nothing but the answer's header and the log ever has theirs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

HEADER = b"x-request-id"
_SCOPE = "headroom.identity"
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True)
class Identity:
    """`own` is the server's id, which an answer's `id` is too; `given` is what the client sent, if it may be
    a name. The header of the answer is `shown`."""

    own: str
    given: str | None = None

    @property
    def shown(self) -> str:
        """What the answer's header says."""
        return self.given or self.own

    def __str__(self) -> str:
        """For the log: both."""
        return self.own if self.given is None else f"{self.own} (x-request-id {self.given})"


def own_id(kind: str = "req") -> str:
    """A new id; `kind` says what it names."""
    return f"{kind}-{uuid.uuid4().hex}"


def identify(scope: Scope) -> Identity:
    """Gives the request its identity. One header of 1 to 128 letters, digits, dots, hyphens and underscores
    is a name; anything else is ignored, since it is the client's to know and nobody's to check."""
    given = _given(scope["headers"])
    identity = scope[_SCOPE] = Identity(own_id(), given)
    return identity


def identity_of(scope: Scope) -> Identity:
    """What `identify` gave it."""
    identity = scope[_SCOPE]
    assert isinstance(identity, Identity)
    return identity


def _given(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    values = [value for name, value in headers if name == HEADER]
    if len(values) != 1 or _NAME.fullmatch(values[0]) is None:
        return None
    return values[0].decode("ascii")
