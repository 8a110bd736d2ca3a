"""Numbers about the engine that cost nothing to read: what health checks and metrics show."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from server.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot after a step. Counters grow from 0 at start; gauges are as of the snapshot.

    `running` and `waiting` count choices, `waiting_requests` requests none of whose choices has run yet.
    `prompt_tokens` counts the tokens of each prompt once, whatever `n`, when it is first admitted, and
    `cached_tokens` those of them that the prefix index gave; recompute after a preemption counts in neither.
    `batched_tokens` counts every token that went through the model, drafts included; `drafts` the runs of a
    sequence that had any, `draft_tokens` these, and `accepted_tokens` those that were right; `finished_*`
    count choices.
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
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0


@dataclass(slots=True)
class Counters:
    """The engine's own running totals, in the units of `EngineStats`."""

    steps: int = 0
    batched_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def snapshot(self, *, running: int, waiting: int, waiting_requests: int) -> EngineStats:
        """The totals now, with the gauges that the caller knows."""
        return EngineStats(
            running=running,
            waiting=waiting,
            waiting_requests=waiting_requests,
            steps=self.steps,
            batched_tokens=self.batched_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            failed_steps=self.failed_steps,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            finished_stop=self.finished[FinishReason.STOP],
            finished_length=self.finished[FinishReason.LENGTH],
            finished_abort=self.finished[FinishReason.ABORT],
            finished_error=self.finished[FinishReason.ERROR],
        )


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
        """Whether a request sent now would be taken."""
        return self.status is Status.OK
