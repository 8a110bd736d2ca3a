"""Step 8 of a request's trip: what a step came to is booked, sequences grow or end, their events go out."""

from __future__ import annotations

from cache.manager import CacheManager
from server.engine.attempts import Outcome, complaint
from server.engine.request import FinishReason, KVPeak, TokenEvent, TokenScore
from server.engine.scheduler import Plan, Scheduled, Scheduler
from server.engine.sequence import Sequence, Work
from server.engine.speculation import Speculation
from server.engine.stats import Counters


class Commit:
    """Takes results in. `works` are the requests in flight by id: the engine's own, and an ended one is taken
    out of it here."""

    def __init__(
        self,
        manager: CacheManager,
        scheduler: Scheduler,
        works: dict[str, Work],
        counters: Counters,
        speculation: Speculation | None,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._works = works
        self._counters = counters
        self._speculation = speculation

    def step(self, plan: Plan, outcomes: list[Outcome | Exception], events: list[TokenEvent]) -> None:
        """Books what was written for everybody first, so that no peak depends on who comes first."""
        for entry, outcome in zip(plan.entries, outcomes, strict=True):
            self._book(entry, outcome)
        for entry, outcome in zip(plan.entries, outcomes, strict=True):
            sequence = entry.sequence
            if sequence.finish is not None:
                continue  # it ended with a sibling
            if isinstance(outcome, Exception):
                self.end(sequence, FinishReason.ERROR, events, complaint(outcome))
            elif outcome.tokens:
                self._take(sequence, outcome, events)
            elif entry.ends:  # and so do its siblings, who would only run the same prompt again
                for sibling in sequence.work.siblings(sequence):
                    if sibling.finish is None:
                        self.end(sibling, FinishReason.LENGTH, events)

    def _book(self, entry: Scheduled, outcome: Outcome | Exception) -> None:
        """What is in the cache now: the entry's own tokens, and of its drafts those that it says."""
        sequence = entry.sequence
        assert sequence.slot is not None
        if not isinstance(outcome, Exception):
            for token in outcome.tokens:
                sequence.append(token)
            # Of what it says, the last has not run, whatever it was drawn after.
            sequence.computed = entry.start + entry.count + max(len(outcome.tokens) - 1, 0)
            self._manager.advance(sequence.slot, sequence.computed, sequence.chain)
            self._counters.batched_tokens += entry.tokens
            self._counters.output_tokens += len(outcome.tokens)
            if sequence.prompt_scores is not None:
                sequence.prompt_scores.extend(outcome.prompt)
            if entry.drafts:
                self._judge(entry, len(outcome.tokens) - 1)
        if entry.drafts:
            self._manager.trim(sequence.slot)

    def _judge(self, entry: Scheduled, accepted: int) -> None:
        drafted = len(entry.drafts)
        self._counters.drafts += 1
        self._counters.draft_tokens += drafted
        self._counters.accepted_tokens += accepted
        if self._speculation is not None:
            self._speculation.learn(entry.sequence, drafted, accepted)

    def _take(self, sequence: Sequence, outcome: Outcome, events: list[TokenEvent]) -> None:
        """The tokens that it says, which are booked already; only the last of them can end it, as what was
        drafted holds no stop and stays within its length."""
        *before, token = outcome.tokens
        *earlier, score = outcome.scores
        if before:
            kv = self._peak(sequence)
            for one, its_score in zip(before, earlier, strict=True):
                events.append(_event(sequence, kv, one, None, None, its_score))
        if token in sequence.work.request.stop_ids:
            self.end(sequence, FinishReason.STOP, events, token=token, score=score)
            return
        try:
            whole = sequence.follow(token)
        except ValueError as error:  # its grammar ends there, and nobody else's does
            self.end(sequence, FinishReason.ERROR, events, str(error))
            return
        if whole:
            self.end(sequence, FinishReason.STOP, events, token=token, score=score)
        elif sequence.output >= sequence.most:
            self.end(sequence, FinishReason.LENGTH, events, token=token, score=score)
        else:
            events.append(_event(sequence, self._peak(sequence), token, None, None, score))

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        events: list[TokenEvent],
        error: str | None = None,
        token: int | None = None,
        score: TokenScore | None = None,
    ) -> None:
        """Every end of a choice, whatever the reason: its blocks go back, and its last event goes out."""
        work = sequence.work
        events.append(_event(sequence, self._peak(sequence), token, reason, error, score))
        sequence.finish = reason
        self._counters.finished[reason] += 1
        self._scheduler.release(sequence)
        sequence.let_go()
        work.unfinished -= 1
        if work.unfinished == 0:
            self._scheduler.forget(work)
            self._manager.close_account(work.account)
            del self._works[work.request.id]

    def _peak(self, sequence: Sequence) -> KVPeak:
        return KVPeak(*self._manager.peak(sequence.work.account))


def _event(
    sequence: Sequence,
    kv: KVPeak,
    token: int | None,
    finish: FinishReason | None,
    error: str | None,
    score: TokenScore | None,
) -> TokenEvent:
    """News of a choice, with its prompt's scores if they have not been told yet."""
    return TokenEvent(
        sequence.work.request.id, sequence.index, token, finish, kv, error, score, sequence.told()
    )
