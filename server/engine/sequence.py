"""What runs: a request in flight (`Work`) and its choices (`Sequence`)."""

from __future__ import annotations

from cache.chain import TokenChain
from server.engine.request import FinishReason, Request


class Sequence:
    """One choice of a request: its ids so far, and how much of them the cache holds.

    `computed` tokens have their K and V in the cache, the others are still to run. With exactly one to run
    a sequence decodes, with more it prefills: nothing else tells the two apart.
    """

    __slots__ = ("_chain", "computed", "finish", "index", "key", "output", "ran", "slot", "work")

    def __init__(self, work: Work, index: int) -> None:
        self.work = work
        self.index = index
        # Who goes first: priority, then arrival, then the choice. Kept for life, through every preemption.
        self.key = (work.request.priority, work.arrival, index)
        self.slot: int | None = None  # its place in the cache manager while it runs
        self.computed = 0
        self.output = 0  # tokens generated
        self.ran = False  # admitted at least once
        self.finish: FinishReason | None = None
        self._chain: TokenChain | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its prompt's ids."""
        return self.work.request.prompts[self.index // self.work.request.n]

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
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + self.output

    @property
    def pending(self) -> int:
        """Tokens still to run before the next one can be drawn."""
        return self.length - self.computed

    def append(self, token: int) -> None:
        """Take a drawn token."""
        self.chain.append(token)
        self.output += 1


class Work:
    """A request in flight, and the account under which the cache counts what its choices hold."""

    __slots__ = ("account", "arrival", "block_size", "request", "sequences", "unfinished")

    def __init__(self, request: Request, arrival: int, account: int, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.account = account
        self.block_size = block_size  # tokens
        self.sequences = tuple(Sequence(self, i) for i in range(len(request.prompts) * request.n))
        self.unfinished = len(self.sequences)

    def siblings(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """The choices with the same prompt, itself included."""
        n = self.request.n
        first = sequence.index // n * n
        return self.sequences[first : first + n]
