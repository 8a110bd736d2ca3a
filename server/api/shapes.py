"""What tells /v1/completions from /v1/chat/completions in an answer: the objects of its choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from server.api.logprobs import Scored, chat_logprobs, completion_logprobs

Tokens = Iterable[Scored] | None
"""What an answer tells of its tokens: None where it was not asked to."""


class Shape(Protocol):
    """One of the two endpoints' ways to show a choice."""

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first choice object of a choice in a stream, if it has one before its text."""
        ...

    def delta(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """A choice object in a stream: the next text, and what is told of the next tokens, whose text may be
        held back still."""
        ...

    def ending(self, index: int, finish: str) -> dict[str, Any]:
        """The last choice object of a choice in a stream, which has no text."""
        ...

    def whole(self, index: int, text: str, finish: str, tokens: Tokens) -> dict[str, Any]:
        """The choice object of an answer in one piece."""
        ...


class CompletionShape:
    """`text_completion` objects: a choice carries its text."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: the text comes at once."""
        return None

    def delta(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """A choice with the next piece of its text."""
        return self._choice(index, text, None, tokens)

    def ending(self, index: int, finish: str) -> dict[str, Any]:
        """The reason, with an empty text."""
        return self._choice(index, "", finish, None)

    def whole(self, index: int, text: str, finish: str, tokens: Tokens) -> dict[str, Any]:
        """The whole text."""
        return self._choice(index, text, finish, tokens)

    def _choice(self, index: int, text: str, finish: str | None, tokens: Tokens) -> dict[str, Any]:
        logprobs = None if tokens is None else completion_logprobs(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatShape:
    """`chat.completion` objects: a choice carries a message, or what is added to it."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, before any text."""
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def delta(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """The next piece of the message."""
        return self._choice(index, {"content": text}, None, tokens)

    def ending(self, index: int, finish: str) -> dict[str, Any]:
        """The reason; the message stays as it is."""
        return self._choice(index, {}, finish, None)

    def whole(self, index: int, text: str, finish: str, tokens: Tokens) -> dict[str, Any]:
        """The whole message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        logprobs = None if tokens is None else chat_logprobs(tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _choice(
        self, index: int, delta: dict[str, Any], finish: str | None, tokens: Tokens
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else chat_logprobs(tokens)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
