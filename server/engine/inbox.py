"""What the event loop may ask of the engine's thread, and the queue it goes through.

`SimpleQueue.put` never waits and is safe in a destructor and in a signal handler; its `get` sleeps in the
kernel, so an idle engine costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from server.engine.engine import Engine
from server.engine.errors import EngineDead
from server.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End one choice of a request, or all; `reason` is what the end counts as."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that is answered between two steps."""

    question: Callable[[Engine], Any]
    answer: Future[Any]

    def put_to(self, engine: Engine) -> None:
        """Answers with what the question returns or raises; called on the engine's thread."""
        if not self.answer.set_running_or_notify_cancel():
            return  # whoever asked has left
        try:
            self.answer.set_result(self.question(engine))
        except Exception as error:
            self.answer.set_exception(error)

    def refuse(self, reason: str) -> None:
        """Answers with EngineDead."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(EngineDead(reason))


@dataclass(frozen=True, slots=True)
class Stop:
    """The thread ends here."""


Command = Submit | Abort | Ask | Stop
Inbox = SimpleQueue[Command]


def take(inbox: Inbox, *, wait: bool) -> Command | None:
    """The next command; None if there is none and `wait` is false."""
    try:
        return inbox.get(block=wait)
    except Empty:
        return None


def refuse_asks(inbox: Inbox, reason: str) -> None:
    """Answers every question that is left with EngineDead, and drops the rest. Each side may call it."""
    with contextlib.suppress(Empty):
        while True:
            command = inbox.get_nowait()
            if isinstance(command, Ask):
                command.refuse(reason)
