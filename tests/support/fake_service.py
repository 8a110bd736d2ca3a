"""A stand-in for `EngineService`: scripted tokens at a chosen pace, no model, no threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from cache.audit import Audit
from cache.report import Amount, BlockPage, CacheReport, PoolReport, States, VariantReport
from server.engine.request import FinishReason, KVPeak, Request, TokenEvent, TokenScore
from server.engine.stats import EngineStats, Health, Status
from server.engine.stream import TokenStream

KV_HEADS, Q_HEADS, BLOCK_SIZE, BLOCK_BYTES, TOTAL = 2, 4, 16, 1024, 1000
FIRST_LETTER, ROWS = 67, 384
Script = Callable[[Request, int, int], int]


def count_up(request: Request, index: int, position: int) -> int:
    """The alphabet in the tokenizer of `tests/api`, over and over, whatever was asked."""
    return FIRST_LETTER + position % 26


def logprob_of(token: int) -> float:
    """`a` is always the likeliest, then `b`, and so on through all ids."""
    return -(1 + (token - FIRST_LETTER) % ROWS) / 8


def score_of(token: int, best: int) -> TokenScore:
    """What a real engine would tell."""
    return TokenScore(logprob_of(token), tuple((67 + i, logprob_of(67 + i)) for i in range(best)))


@dataclass
class FakeService:
    """`script(request, choice, position)` is the next token; `pace` the seconds between two steps.

    `error` is raised by the next submit; a choice whose position reaches `fail_at` ends in an error.
    """

    script: Script = count_up
    pace: float = 0.0
    error: Exception | None = None
    fail_at: int | None = None
    status: Status = Status.OK
    requests: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    checks: int = 0
    check_seconds: float = 0.0
    draining: bool = False
    _live: dict[str, set[int]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def running(self) -> int:
        """Choices that have not ended."""
        return sum(len(choices) for choices in self._live.values())

    async def submit(self, request: Request) -> TokenStream:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        choices = len(request.prompts) * request.n
        self._live[request.id] = set(range(choices))
        stream = TokenStream(choices, lambda: self.abort(request.id))
        task = asyncio.get_running_loop().create_task(self._run(request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run(self, request: Request, stream: TokenStream) -> None:
        ended: set[int] = set()
        for position in range(max(1, request.max_tokens)):
            await asyncio.sleep(self.pace)
            live = self._live[request.id]
            events = [
                TokenEvent(request.id, index, None, FinishReason.ABORT, self._peak(request, position))
                for index in range(len(request.prompts) * request.n)
                if index not in live and index not in ended
            ]
            ended |= {event.index for event in events}
            for index in sorted(live):
                events.append(self._event(request, index, position))
                if events[-1].finish is not None:
                    live.discard(index)
                    ended.add(index)
            if events:
                stream.push(events)
            if not live:
                break
        del self._live[request.id]

    def _event(self, request: Request, index: int, position: int) -> TokenEvent:
        peak = self._peak(request, position)
        if position == self.fail_at:
            return TokenEvent(request.id, index, None, FinishReason.ERROR, peak, "The step failed.")
        told = None
        if request.prompt_logprobs is not None and position == 0 and index % request.n == 0:
            _, *others = request.prompts[index // request.n]
            told = (None, *(score_of(token, request.prompt_logprobs) for token in others))
        if request.max_tokens == 0:
            length = FinishReason.LENGTH
            return TokenEvent(request.id, index, None, length, peak, prompt_scores=told)
        token = self.script(request, index, position)
        score = None if request.logprobs is None else score_of(token, request.logprobs)
        finish = None
        if token in request.stop_ids:
            finish = FinishReason.STOP
        elif position == request.max_tokens - 1:
            finish = FinishReason.LENGTH
        return TokenEvent(request.id, index, token, finish, peak, score=score, prompt_scores=told)

    def _peak(self, request: Request, position: int) -> KVPeak:
        tokens = sum(len(prompt) for prompt in request.prompts) + position
        blocks = -(-tokens // BLOCK_SIZE) * KV_HEADS
        return KVPeak(blocks, blocks, tokens, 0)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        self.aborted.append((request_id, index))
        live = self._live.get(request_id)
        if live is not None:
            live -= live if index is None else {index}

    async def report(self, check: bool = False) -> CacheReport:
        self.checks += check
        await asyncio.sleep(self.check_seconds)
        live = 2 * self.running
        amounts = [Amount(n, n * BLOCK_BYTES) for n in (live, 0, TOTAL - live)]
        tokens = BLOCK_BYTES * KV_HEADS // BLOCK_SIZE
        variant = VariantReport("native", KV_HEADS, tokens, 0, live, live * BLOCK_BYTES, 0, 0, 0.0)
        pool = PoolReport(TOTAL * BLOCK_BYTES, TOTAL, BLOCK_BYTES, BLOCK_SIZE, "float32", "cpu")
        return CacheReport(pool, States(*amounts), 0, (variant,), (), Audit(0, 0, None))

    async def blocks(self, offset: int, limit: int) -> BlockPage:
        shown = max(0, min(limit, TOTAL - offset))
        return BlockPage(
            offset,
            TOTAL,
            ("free",) * shown,
            ((),) * shown,
            (None,) * shown,
            (None,) * shown,
            (0,) * shown,
            (0,) * shown,
        )

    def health(self) -> Health:
        return Health(self.status, "because the test says so", 0, self.running)

    def live_bytes(self) -> dict[str, int]:
        return {"native": 2 * self.running * BLOCK_BYTES}

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running, prompt_tokens=7, output_tokens=5, finished_stop=3)
