"""What the experiments ask of an engine: who arrives before which step, with how many tokens in and out.

Plain arithmetic, no engine. Work is given by step index and not by the clock, so that every attention mode,
every machine and the model-free dry run get the same.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGGER = 4  # steps between two arrivals of the fixed work
_WINDOW = 24  # steps timed for one point of the curve, where the context has them


@dataclass(frozen=True, slots=True)
class Arrival:
    """One user: added before step `step`, with `prompt` tokens, and answered by `output` tokens."""

    step: int
    prompt: int
    output: int


def fixed_work(users: int, context: int) -> tuple[Arrival, ...]:
    """`users` equal users: three quarters of the context to read, one quarter to write."""
    output = max(1, context // 4)
    return tuple(Arrival(user * STAGGER, context - output, output) for user in range(users))


@dataclass(frozen=True, slots=True)
class Crowd:
    """Equal users who come all at once and all fill `context` tokens in the same step, the last.

    `pool` is in logical blocks of the mode.
    """

    context: int
    block_size: int
    pool: int

    @property
    def window(self) -> int:
        """The last steps of the answers, in which everybody decodes near the full context: those timed."""
        return max(1, min(_WINDOW, self.context // 4))

    @property
    def prompt(self) -> int:
        """Tokens that each user brings. They end well before the last block of the context: the scheduler
        lets nobody in without a block of head-room for each."""
        last_block = (
            (self.context - 2) // self.block_size * self.block_size
        )  # the last token is never written
        return max(1, min(self.context - self.window - 1, last_block - min(8, self.block_size // 2)))

    def arrivals(self, users: int) -> tuple[Arrival, ...]:
        """`users` users, all before the first step."""
        return (Arrival(0, self.prompt, self.context - self.prompt),) * users

    def overfull(self, users: int) -> tuple[Arrival, ...]:
        """As many, where they do not all fit: with prompts so short that all are let in and the pool runs out
        while they write, as far as that can be."""
        room = (self.pool - users + 1) // users - 1  # a block less: those who come first have begun to write
        prompt = min(self.prompt, room * self.block_size) if room > 0 else self.prompt
        return (Arrival(0, prompt, self.context - prompt),) * users

    def batch_tokens(self, users: int) -> int:
        """What a step must hold for all to start in the first one: a block of prompt at most, the rest being
        known to the prefix index."""
        return users * (self.block_size + 1)


def powers_of_two(users: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `users`, which is the last."""
    return (*(1 << n for n in range(users.bit_length()) if 1 << n < users), users)
