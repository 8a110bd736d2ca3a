"""A token list and the chained digest of each of its full blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cache.arrays import Int32
from cache.errors import CacheError

ROOT_BYTES = 32
_TOKEN = np.dtype("<i4")  # fixed width and byte order, so that a digest is the same on every machine


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """sha-256 over the parent's digest (or the root) and the block's token ids as little-endian int32."""
    return hashlib.sha256(parent + tokens).digest()


class TokenChain:
    """The tokens of one sequence, growing, and the digests of its full blocks, each computed once.

    `root` (32 bytes) says what the tokens mean: model, variant, cache dtype, key, salt. Sequences of
    different roots share nothing. Owned by a sequence; outlives its preemptions.
    """

    __slots__ = ("_buffer", "_digests", "_length", "block_size", "root")

    def __init__(self, root: bytes, block_size: int, tokens: Sequence[int] | npt.NDArray[np.integer]) -> None:
        if len(root) != ROOT_BYTES:
            raise CacheError(f"a chain's root is {ROOT_BYTES} bytes, got {len(root)}")
        self.root = root
        self.block_size = block_size
        self._buffer = np.array(tokens, dtype=_TOKEN)
        self._length = len(self._buffer)
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Int32:
        """The token ids so far, `[len]` int32 (a view, valid until the next append)."""
        return self._buffer[: self._length]

    def append(self, token: int) -> None:
        """Adds one token id."""
        if self._length == len(self._buffer):
            grown = np.zeros(max(2 * self._length, 64), dtype=_TOKEN)
            grown[: self._length] = self._buffer
            self._buffer = grown
        self._buffer[self._length] = token
        self._length += 1

    def digests(self, first: int, last: int) -> list[bytes]:
        """Digests of the full blocks `first` to `last - 1`; all of them must be full."""
        have = len(self._digests)
        if last > have:
            size = self.block_size
            if last * size > self._length:
                raise CacheError(f"block {last - 1} of a chain of {self._length} tokens is not full")
            data = self._buffer[have * size : last * size].tobytes()
            width = size * _TOKEN.itemsize
            digest = self._digests[-1] if have else self.root
            for at in range(0, len(data), width):
                digest = block_digest(digest, data[at : at + width])
                self._digests.append(digest)
        return self._digests[first:last]
