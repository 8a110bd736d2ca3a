"""Step 4 of a request's trip: who runs, and how many tokens each.

One order rules everything: (priority, arrival, choice). Blocks are taken in that order and taken away from
its end, so the first sequence always progresses, and one that was pushed out comes back before its juniors.
The head of the queue is never skipped: a large request cannot be starved by small ones behind it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from cache.manager import CacheManager
from server.engine.sequence import Sequence, Work
from server.engine.speculation import Speculation
from server.engine.stats import Counters

_ORDER = attrgetter("key")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part of a step: tokens `[start, start + count)` of its ids, and after them `drafts`,
    ids that it may turn out to say next. Only a sequence that draws has any."""

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many go through the model."""
        return self.count + len(self.drafts)

    @property
    def draws(self) -> bool:
        """Whether all its tokens are in after this step, so that the next one can be drawn."""
        return self._completes and self.sequence.work.request.max_tokens > 0

    @property
    def ends(self) -> bool:
        """Whether all its tokens are in after this step, and none is to be drawn."""
        return self._completes and self.sequence.work.request.max_tokens == 0

    @property
    def owed(self) -> range:
        """Positions after which the next token of the prompt is to be scored."""
        return self.sequence.owed(self.start, self.count)

    @property
    def _completes(self) -> bool:
        return self.start + self.count == self.sequence.length


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, the entries of each variant together. `refused` are requests whose admission went wrong."""

    entries: tuple[Scheduled, ...]
    refused: tuple[tuple[Sequence, Exception], ...]
    preempted: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold."""

    max_batch_tokens: int
    max_num_seqs: int

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs its token in every step"
            )


class Scheduler:
    """First come, first served within a priority; prompts are admitted whole, blocks taken by the chunk."""

    def __init__(
        self,
        manager: CacheManager,
        limits: Limits,
        kv_heads: Mapping[str, int],
        block_size: int,
        counters: Counters,
        speculation: Speculation | None = None,
    ) -> None:
        """`kv_heads` maps each variant's canonical name to its number of KV heads; `block_size` in tokens.
        Without `speculation` nobody gets drafts."""
        self._speculation = speculation
        self._manager = manager
        self._block_size = block_size
        self._counters = counters
        self._limits = limits
        self._kv_heads = kv_heads
        self.waiting: list[Sequence] = []  # both in order
        self.running: list[Sequence] = []
        self.unstarted: set[Work] = set()  # none of whose choices has run

    def add(self, work: Work) -> None:
        """Queue all choices of a request."""
        self.unstarted.add(work)
        for sequence in work.sequences:
            insort(self.waiting, sequence, key=_ORDER)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is. The one place where blocks go back."""
        if sequence.slot is None:
            _take_out(self.waiting, sequence)
            return
        self._manager.close(sequence.slot)
        sequence.slot = None
        sequence.computed = 0
        _take_out(self.running, sequence)

    def forget(self, work: Work) -> None:
        """A request whose choices have all been released."""
        self.unstarted.discard(work)

    def clear(self) -> None:
        """Forget everybody; no block goes back, as nobody uses the cache after this."""
        self.waiting.clear()
        self.running.clear()
        self.unstarted.clear()

    def plan(self) -> Plan:
        """Decide a step and own the blocks it writes. Every running decode comes first, then running prefills
        in order, then the queue's head while its whole prompt fits."""
        entries: list[Scheduled] = []
        refused: list[tuple[Sequence, Exception]] = []
        budget = self._limits.max_batch_tokens - sum(sequence.pending == 1 for sequence in self.running)
        before = len(self.running)
        for sequence in tuple(self.running):
            if sequence.slot is None:
                break  # pushed out by one before it, and so is everything behind
            count = 1 if sequence.pending == 1 else _chunk(sequence, budget)
            if count == 0:
                continue
            if self._make_room(sequence, sequence.computed + count):
                entries.append(Scheduled(sequence, sequence.computed, count))
                budget -= count if sequence.pending > 1 else 0
        preempted = before - len(self.running)
        self._counters.preemptions += preempted
        if not preempted:
            self._admit(entries, refused, budget)
        if self._speculation is not None:
            self._add_drafts(self._speculation, entries)
        entries.sort(key=lambda entry: entry.sequence.work.request.variant)  # stable: order within a variant
        return Plan(tuple(entries), tuple(refused), preempted)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Own blocks for its first `tokens` tokens, if need be those of sequences behind it. If there are
        none behind, it keeps what it holds and sits this step out: those before it finish, or take it."""
        assert sequence.slot is not None
        while not self._manager.extend(sequence.slot, tokens):
            victim = self.running[-1]
            if victim is sequence:
                return False
            self._push_out(victim)
        return True

    def _push_out(self, sequence: Sequence) -> None:
        """Back to the queue, to its own place in the order; what it held is computed again later."""
        self.release(sequence)
        insort(self.waiting, sequence, key=_ORDER)

    def _admit(
        self, entries: list[Scheduled], refused: list[tuple[Sequence, Exception]], budget: int
    ) -> None:
        """Take in the head of the queue for as long as there is a place, and room for the whole of it."""
        reserve: int | None = None
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting[0]
            if reserve is None:
                reserve = self._reserve(entries)
            try:
                opened = self._open(sequence, reserve)
            except Exception as error:
                refused.append((sequence, error))
                return
            if not opened:
                return
            count = _chunk(sequence, budget)
            assert sequence.slot is not None
            if not self._manager.extend(sequence.slot, sequence.computed + count):
                self._push_out(sequence)  # it was said to fit; another try, another step
                return
            entries.append(Scheduled(sequence, sequence.computed, count))
            budget -= count
            reserve += self._still_needs(sequence, sequence.computed + count)

    def _add_drafts(self, speculation: Speculation, entries: list[Scheduled]) -> None:
        """Once everybody has what is theirs: in what is left of the step, and in blocks that are free."""
        tokens = sum(entry.count for entry in entries)
        decoding = {
            entry.sequence: at for at, entry in enumerate(entries) if entry.count == 1 and entry.draws
        }
        drafted = speculation.propose(list(decoding), tokens, self._limits.max_batch_tokens - tokens)
        for sequence, drafts in drafted:
            at = decoding[sequence]
            own = sequence.computed + 1
            fits = self._own_free(sequence, own, own + len(drafts)) - own
            entries[at] = replace(entries[at], drafts=tuple(drafts[:fits]))

    def _own_free(self, sequence: Sequence, least: int, tokens: int) -> int:
        """Own blocks for `tokens` tokens if they are free; it has those of `least`. How many it has room for.
        What somebody may yet ask for, the prefix index, is not given up for a guess."""
        assert sequence.slot is not None
        more = self._blocks(tokens) - self._blocks(least)
        if more * self._kv_heads[sequence.work.request.variant] > self._manager.free_blocks:
            return min(tokens, self._blocks(least) * self._block_size)
        self._manager.extend(sequence.slot, tokens)
        return tokens

    def _reserve(self, entries: list[Scheduled]) -> int:
        """Physical blocks that a newcomer must leave: what running prefills still need, and one logical block
        of head-room for each running sequence, so that what comes in is not pushed out at once."""
        after = {id(entry.sequence): entry.start + entry.count for entry in entries}
        return sum(self._still_needs(s, after.get(id(s), s.computed)) for s in self.running)

    def _still_needs(self, sequence: Sequence, owned: int) -> int:
        """Physical blocks it will ask for soon if it owns those of its first `owned` tokens now."""
        blocks = self._blocks(sequence.length) - self._blocks(owned)
        return (blocks + 1) * self._kv_heads[sequence.work.request.variant]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _open(self, sequence: Sequence, reserve: int) -> bool:
        """Give the head of the queue its place: beside a sibling that knows the prompt, or by itself."""
        shared = len(sequence.prompt) - 1  # the last prompt token runs again, to give its logits
        siblings = [s for s in sequence.work.siblings(sequence) if s.slot is not None] if shared else []
        parent = next((s for s in siblings if s.computed >= shared), None)
        if parent is None and siblings:
            return False  # one of them is in its prefill; sharing it is cheaper than doing it again
        if parent is None:
            opened = self._open_alone(sequence, reserve)
        else:
            opened = self._open_beside(sequence, parent, shared, reserve)
        if opened:
            _take_out(self.waiting, sequence)
            insort(self.running, sequence, key=_ORDER)
            sequence.ran = True
            self.unstarted.discard(sequence.work)
        return opened

    def _open_beside(self, sequence: Sequence, parent: Sequence, shared: int, reserve: int) -> bool:
        """Share the parent's blocks of the first `shared` tokens; a partly filled one will be copied."""
        work = sequence.work
        blocks = self._blocks(sequence.length) - shared // self._block_size
        need = blocks * self._kv_heads[work.request.variant]
        if need + reserve > self._manager.free_blocks + self._manager.cached_blocks:
            return False
        assert parent.slot is not None
        sequence.slot = self._manager.fork(parent.slot, shared, work.account)
        sequence.computed = shared
        return True

    def _open_alone(self, sequence: Sequence, reserve: int) -> bool:
        """Reuse what the prefix index knows. Only a prompt's first admission counts as a hit or a miss."""
        work = sequence.work
        chain, length, variant = sequence.chain, sequence.length, work.request.variant
        # A prompt that is scored reads nothing from the prefix index but what has been scored already.
        known = length if sequence.readable is None else min(length, sequence.readable + 1)
        if not self._manager.admissible(chain, length, variant, reserve, known):
            return False
        first = not any(s.ran for s in work.siblings(sequence))
        opened = self._manager.open(work.account, chain, known, recompute=not first)
        sequence.slot, sequence.computed = opened.slot, opened.cached_tokens
        if first:
            self._counters.prompt_tokens += len(sequence.prompt)
            self._counters.cached_tokens += opened.cached_tokens
        return True


def _chunk(sequence: Sequence, budget: int) -> int:
    """How many of its pending tokens run in a step that has room for `budget`.

    A prompt's last token stays for the next step if other choices wait for that prompt: so all of them draw
    at once, and an answer of one token is not over before the others could share its blocks.
    """
    count = min(sequence.pending, budget)
    draws = count == sequence.pending and sequence.output == 0 and sequence.work.request.max_tokens > 0
    if count > 1 and draws and any(s.waits for s in sequence.work.siblings(sequence)):
        count -= 1
    return count


def _take_out(line: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list in order; keys are unique, so this is a search, not a scan."""
    at = bisect_left(line, sequence.key, key=_ORDER)
    if line[at : at + 1] != [sequence]:
        raise RuntimeError(f"choice {sequence.index} of {sequence.work.request.id!r} is not in its line")
    del line[at]
