"""What the words can refuse, and how a running answer can fail; the API makes OpenAI error bodies of both."""

from __future__ import annotations


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
