"""Digests of a token chain: which bytes go in, and that nothing else does."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.chain import TokenChain
from cache.errors import CacheError

ROOT = bytes(range(32))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def digests_of(tokens: list[int], block_size: int) -> list[bytes]:
    """By the definition: sha-256 of the parent's digest and the ids as little-endian int32."""
    digests, parent = [], ROOT
    for at in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashlib.sha256(
            parent + struct.pack(f"<{block_size}i", *tokens[at : at + block_size])
        ).digest()
        digests.append(parent)
    return digests


@given(start=TOKENS, more=TOKENS, block_size=st.integers(1, 7), data=st.data())
def test_a_chain_that_grows_has_the_digests_of_one_that_is_whole(
    start: list[int], more: list[int], block_size: int, data: st.DataObject
) -> None:
    chain = TokenChain(ROOT, block_size, start)
    for token in more:
        if data.draw(st.booleans()):
            full = len(chain) // block_size
            assert chain.digests(0, full) == digests_of(chain.tokens.tolist(), block_size)
        chain.append(token)
    assert chain.tokens.tolist() == start + more
    assert len(chain) == len(start + more)
    expected = digests_of(start + more, block_size)
    assert chain.digests(0, len(expected)) == expected
    assert chain.digests(1, len(expected)) == expected[1:]


def test_only_full_blocks_have_a_digest() -> None:
    chain = TokenChain(ROOT, 4, [1, 2, 3, 4, 5])
    with pytest.raises(CacheError, match="not full"):
        chain.digests(0, 2)


def test_a_root_is_32_bytes() -> None:
    with pytest.raises(CacheError, match="32 bytes"):
        TokenChain(b"short", 4, [])
