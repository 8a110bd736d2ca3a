"""Numbers about the engine that cost nothing to read: what health checks and metrics show."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot after a step. Counters grow from 0 at start; gauges are as of the snapshot.

    `running` and `waiting` count choices, `waiting_requests` requests none of whose choices has run yet.
    `prompt_tokens` counts prompt tokens of choices at their first admission, `cached_tokens` those of them
    that the prefix index gave; recompute after a preemption counts in neither. `batched_tokens` counts every
    token that went through the model.
    """

    running: int = 0
    waiting: int = 0
    waiting_requests: int = 0
    steps: int = 0
    batched_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0


class Status(StrEnum):
    """What the service can do now; only OK answers a health check with 200."""

    STARTING = "starting"
    OK = "ok"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to a health check; `detail` says why when `ok` is false. Never runs the model."""

    status: Status
    detail: str
    queued: int  # requests that wait
    running: int  # choices that run

    @property
    def ok(self) -> bool:
        return self.status is Status.OK
