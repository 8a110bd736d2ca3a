"""What the words can refuse, and how a running answer can fail; the API makes OpenAI error bodies of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from server.engine.units import plural


class RequestError(Exception):
    """A request that cannot be served as asked; the client's fault, and the message says what to change.

    `param` is the field of the request body (None if it is the body as a whole), `code` is OpenAI's machine
    word for it, `status` the HTTP status. Messages name the limit and the value.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class GenerationError(Exception):
    """The engine gave up on an answer that had already begun (status 500, or one SSE error event)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def shown(value: object) -> str:
    """A refused JSON value for a message: short, and never a number that Python refuses to print (over 4300
    digits)."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() if abs(value) >= 10**30:
            return "a number of more than 30 digits"
        case str():
            return repr(value) if len(value) <= 60 else f"{value[:60]!r}... ({len(value)} characters)"
        case Mapping():
            return f"an object with {_entries(value)}"
        case Sequence():
            return f"a list with {_entries(value)}"
        case _:
            return repr(value)[:80]


def _entries(value: Collection[object]) -> str:
    return plural(len(value), "entry", "entries")
