"""What runs: a request in flight (`Work`) and its choices (`Sequence`)."""

from __future__ import annotations

import sys

from torch import Tensor

from cache.chain import TokenChain
from server.engine.constraint import Matcher
from server.engine.drafting import Drafting
from server.engine.prompt_scores import PromptScores
from server.engine.request import FinishReason, Request, TokenScore
from server.engine.seen import Seen


class Sequence:
    """One choice of a request: its ids so far, and how much of them the cache holds.

    `computed` tokens have their K and V in the cache, the others are still to run. With exactly one to run
    a sequence decodes, with more it prefills: nothing else tells the two apart.
    """

    __slots__ = (
        "_chain", "_matcher", "computed", "drafting", "finish", "index", "key", "last", "length", "most",
        "output", "prompt", "prompt_scores", "ran", "seen", "slot", "work",
    )  # fmt: skip

    def __init__(self, work: Work, index: int) -> None:
        self.work = work
        self.index = index
        # Who goes first: priority, then arrival, then the choice. Kept for life, through every preemption.
        self.key = (work.request.priority, work.arrival, index)
        self.prompt = work.request.prompts[index // work.request.n]  # its ids
        self.slot: int | None = None  # its place in the cache manager while it runs
        self.computed = 0
        self.output = 0  # tokens generated
        self.last = self.prompt[-1]  # of its ids
        self.length = len(self.prompt)  # tokens known: prompt and output
        self.most = min(work.request.max_tokens, work.capacity - self.length)  # that it may generate
        self.ran = False  # admitted at least once
        self.finish: FinishReason | None = None
        self._chain: TokenChain | None = None
        self._matcher: Matcher | None = None
        self.seen: Seen | None = None  # what its penalties look at; made at first need
        self.drafting: Drafting | None = None  # likewise, where the engine speculates
        # A prompt is scored by its first choice, which holds the scores until its first event.
        asks = work.request.prompt_logprobs is not None and self.copy == 0
        self.prompt_scores = PromptScores(len(self.prompt)) if asks else None

    @property
    def copy(self) -> int:
        """Which of the `n` answers to its prompt this is; with the seed it fixes every draw."""
        return self.index % self.work.request.n

    @property
    def chain(self) -> TokenChain:
        """Prompt and output ids with their block digests; made when first needed, as most choices wait."""
        if self._chain is None:
            self._chain = TokenChain(self.work.request.cache_root, self.work.block_size, self.prompt)
        return self._chain

    @property
    def pending(self) -> int:
        """Tokens still to run before the next one can be drawn."""
        return self.length - self.computed

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.slot is None and self.finish is None

    @property
    def readable(self) -> int | None:
        """How many of its tokens may come from the prefix index, because nothing is owed that only running
        them tells; None if any may."""
        scores = self.prompt_scores
        return None if scores is None or scores.complete else scores.run

    def owed(self, start: int, count: int) -> range:
        """Those of its positions `[start, start + count)` whose run tells a prompt score."""
        return range(0) if self.prompt_scores is None else self.prompt_scores.owed(start, start + count)

    def told(self) -> tuple[TokenScore | None, ...] | None:
        """All scores of its prompt, once; None if there are none to tell, or not all are known."""
        scores = self.prompt_scores
        if scores is None or not scores.complete:
            return None
        self.prompt_scores = None
        return scores.whole()

    @property
    def matcher(self) -> Matcher | None:
        """What its next token must fit, None if any will do; made when first needed, kept for life."""
        if self._matcher is None and self.work.matcher is not None:
            self._matcher = self.work.matcher.copy()
        return self._matcher

    def follow(self, token: int) -> bool:
        """Takes a drawn token through its grammar; whether the answer is whole, and nothing may follow.
        Raises ValueError if the grammar cannot be followed any further."""
        matcher = self.matcher
        if matcher is None:
            return False
        matcher.advance(token)
        return matcher.complete

    def append(self, token: int) -> None:
        """Take a drawn token."""
        self.chain.append(token)
        self.last = token
        self.output += 1
        self.length += 1

    def let_go(self) -> None:
        """It has ended: what only a running choice needs goes now, and not with its last sibling."""
        self._chain = self._matcher = self.seen = self.prompt_scores = self.drafting = None


class Work:
    """A request in flight, and the account under which the cache counts what its choices hold."""

    __slots__ = (
        "account", "arrival", "bans", "bias", "block_size", "capacity", "matcher", "request", "sequences",
        "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        arrival: int,
        account: int,
        block_size: int,
        matcher: Matcher | None = None,
        capacity: int = sys.maxsize,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.account = account
        self.block_size = block_size  # tokens
        self.capacity = capacity  # the most tokens, prompt and output, that a choice may have
        self.matcher = matcher  # at the start of the request's grammar, to be copied; None if it has none
        self.bias: tuple[Tensor, Tensor] | None = None  # ids and values on the device; made at first need
        self.bans: Tensor | None = None  # ids that would end an answer too soon, likewise
        self.sequences = tuple(Sequence(self, i) for i in range(len(request.prompts) * request.n))
        self.unfinished = len(self.sequences)

    def siblings(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """The choices with the same prompt, itself included."""
        n = self.request.n
        first = sequence.index // n * n
        return self.sequences[first : first + n]
