"""What a request holds, and the most it has held: one account for all its choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cache.arrays import Int32, Int64
from cache.errors import CacheError


class Peak(NamedTuple):
    """A request at the most blocks it has held so far: physical blocks, those of them nobody else
    held, tokens in them (a shared block counted once), and prompt tokens that came from the cache."""

    blocks: int
    exclusive: int
    tokens: int
    cached_tokens: int


class Holding(NamedTuple):
    """What an account holds now, each block once: physical blocks, unshared ones, tokens in them."""

    blocks: int
    exclusive: int
    tokens: int


@dataclass(slots=True)
class Account:
    """One request's running totals.

    `blocks`, `exclusive` and `tokens` grow step by step at O(1); they are measured anew only when
    `stale` (which blocks the account holds, or shares within itself, has changed) and, for
    `exclusive`, at a new peak after sharing has changed anywhere (`epoch` is behind the book's).
    """

    request_id: str
    variant: int
    heads: int
    slots: set[int] = field(default_factory=set)
    blocks: int = 0
    exclusive: int = 0
    tokens: int = 0
    stale: bool = False
    epoch: int = 0
    peak_blocks: int = 0
    peak_exclusive: int = 0
    peak_tokens: int = 0
    cached_tokens: int = 0

    def grow(self, blocks: int) -> None:
        """The account took `blocks` fresh physical blocks or, below zero, gave up so many of its own."""
        self.blocks += blocks
        self.exclusive += blocks

    def raise_peak(self) -> None:
        """Records the present as the peak if it is at least as high."""
        if self.blocks > self.peak_blocks:
            self.peak_blocks = self.blocks
            self.peak_exclusive = self.exclusive
            self.peak_tokens = self.tokens
        elif self.blocks == self.peak_blocks and self.tokens > self.peak_tokens:
            self.peak_tokens = self.tokens

    @property
    def has_held(self) -> bool:
        """Whether it holds, or has held, anything: not so while a request waits for its first step."""
        return bool(self.slots) or self.peak_blocks > 0

    @property
    def peak(self) -> Peak:
        """The account at the most blocks it has held, as last brought up to date."""
        return Peak(self.peak_blocks, self.peak_exclusive, self.peak_tokens, self.cached_tokens)


class AccountBook:
    """Open accounts by number. Numbers are used again after an account is closed."""

    def __init__(self) -> None:
        self._accounts: list[Account | None] = []
        self._unused: list[int] = []
        self.epoch = 0  # counts the events that change which blocks are shared

    def open(self, request_id: str, variant: int, heads: int) -> int:
        """A new account's number."""
        account = Account(request_id, variant, heads, epoch=self.epoch)
        if self._unused:
            number = self._unused.pop()
            self._accounts[number] = account
            return number
        self._accounts.append(account)
        return len(self._accounts) - 1

    def close(self, number: int) -> None:
        """Ends an account; raises `CacheError` while it still has an open sequence."""
        account = self[number]
        if account.slots:
            raise CacheError(f"account {number} closed with {len(account.slots)} open sequences")
        self._accounts[number] = None
        self._unused.append(number)

    def __getitem__(self, number: int) -> Account:
        account = self._accounts[number] if 0 <= number < len(self._accounts) else None
        if account is None:
            raise CacheError(f"account {number} is not open")
        return account

    def numbered(self) -> Iterator[tuple[int, Account]]:
        """(number, account) of every open account."""
        return ((number, a) for number, a in enumerate(self._accounts) if a is not None)


def measure(held: list[Int32], tokens: list[int], refs: Int32, heads: int, block_size: int) -> Holding:
    """Counts what an account holds, from scratch.

    `held` are its sequences' logical blocks and `tokens` the tokens written in each; `refs` says how
    many sequences hold a logical block; `heads` physical blocks make a logical one.
    """
    if not held:
        return Holding(0, 0, 0)
    if len(held) == 1:
        alone = int(np.count_nonzero(refs[held[0]] == 1))
        return Holding(len(held[0]) * heads, alone * heads, tokens[0])
    fills = [fill_of(len(blocks), count, block_size) for blocks, count in zip(held, tokens, strict=True)]
    blocks, inverse, counts = np.unique(np.concatenate(held), return_inverse=True, return_counts=True)
    fill = np.zeros(len(blocks), dtype=np.int64)
    np.maximum.at(fill, inverse, np.concatenate(fills))
    alone = int(np.count_nonzero(refs[blocks] == counts))
    return Holding(len(blocks) * heads, alone * heads, int(fill.sum()))


def fill_of(blocks: int, tokens: int, block_size: int) -> Int64:
    """Tokens in each block of a sequence: full ones, a partial one, empty ones."""
    return np.clip(tokens - np.arange(blocks, dtype=np.int64) * block_size, 0, block_size)
