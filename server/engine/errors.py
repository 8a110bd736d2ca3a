"""What the engine's callers may have to tell a user: each error says what to do next."""

from __future__ import annotations

from server.engine.units import plural


class EngineError(Exception):
    """The engine refused or could not do something; the message is fit for a client."""


class QueueFull(EngineError):
    """Too many requests wait already; `retry_after` is an estimate in whole seconds (HTTP 429)."""

    def __init__(self, queued: int, limit: int, retry_after: int) -> None:
        super().__init__(
            f"{plural(queued, 'request is', 'requests are')} waiting already and "
            f"the limit is {limit} (--max-queued); try again in about {retry_after} s"
        )
        self.retry_after = retry_after


class MemoryFull(QueueFull):
    """What is in flight holds too much already beside the cache (HTTP 429, as for a full queue)."""

    def __init__(self, held: int, limit: int, retry_after: int) -> None:
        EngineError.__init__(
            self,
            f"requests in flight hold {held} prompt ids and log-probabilities; the limit for all of them is "
            f"{limit}; try again in about {retry_after} s",
        )
        self.retry_after = retry_after


class Draining(EngineError):
    """The server is shutting down and takes no new work (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests")


class EngineDead(EngineError):
    """The engine stopped for good; only a restart helps (HTTP 503)."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has stopped: {reason}; restart the server")
        self.reason = reason


class ReadTooSlowly(EngineError):
    """Too much of an answer waits to be read; it was ended so that it cannot fill the memory."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer was read too slowly: {limit} of its tokens and scores were waiting")


class ConfigError(ValueError):
    """A start-up setting that cannot work: one line that names it, its value and what to turn."""
