"""A choice's way through its grammar, as the engine asks for it, and the grammars that are kept compiled.

A matcher knows its mask before it is asked: the library works when a token is taken. So what fails there,
fails for that one choice and at a moment when nobody else is concerned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from server.engine.constraint import BitArray
from server.engine.request import Constraint
from server.text.grammar_build import make_matcher, make_tokenizer, reason
from server.text.tokenizer import Tokenizer

_WORD = 32


class GrammarStuck(ValueError):
    """A choice cannot go on within its grammar; the message is for the client."""


class GrammarMatcher:
    """The engine's `Matcher` over the library's. `ends` are the ids that end an answer, as bits: allowed
    where the text is whole, and nowhere else, unless nothing but them could follow."""

    def __init__(self, inner: LLMatcher, mask: BitArray, complete: bool, end: int, ends: BitArray) -> None:
        """`mask` is what may come next, `end` the library's id for the end of the text."""
        self._inner = inner
        self._mask = mask
        self._complete = complete
        self._end = end
        self._ends = ends

    @property
    def complete(self) -> bool:
        """The text is whole, and no text may follow."""
        return self._complete

    def fill(self, bits: BitArray) -> None:
        """As the protocol says; costs a copy."""
        words = min(len(bits), len(self._mask))
        bits[:words] = self._mask[:words]
        bits[words:] = 0

    def advance(self, token: int) -> None:
        """Takes a drawn token and finds out what may follow. Raises GrammarStuck where the token does not fit
        or nothing can follow, and where the library's limits end."""
        if not self._inner.consume_token(token):
            raise GrammarStuck(f"the grammar could not be followed: {reason(self._inner)}")
        self.look()

    def look(self) -> None:
        """Asks the library what may come next, and puts its end mark in the request's terms."""
        self._inner.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._inner.is_error():
            raise GrammarStuck(f"the grammar could not be followed: {reason(self._inner)}")
        mask = self._mask.view(np.uint32)
        word, bit = self._end // _WORD, np.uint32(1 << self._end % _WORD)
        whole = bool(mask[word] & bit)
        mask[word] &= ~bit
        text = mask & ~self._ends.view(np.uint32)
        more = bool(text.any())
        self._complete = whole and not more
        if more:
            mask[:] = text
        elif not whole and not mask.any():
            raise GrammarStuck("the grammar allows nothing here")
        if whole:
            mask |= self._ends.view(np.uint32)

    def copy(self) -> GrammarMatcher:
        """Another at the same place."""
        return GrammarMatcher(
            self._inner.deep_copy(), self._mask.copy(), self._complete, self._end, self._ends
        )


class Compiled:
    """A grammar ready to be matched. `lark` is its text, `nbytes` about what it takes in memory."""

    def __init__(self, tokenizer: LLTokenizer, lark: str, nbytes: int) -> None:
        """Raises GrammarError. Takes as long as the grammar takes to compile, without Python's lock."""
        self.lark = lark
        self.nbytes = nbytes
        self._first = make_matcher(tokenizer, lark)
        self._end = tokenizer.vocab_size - 1
        self._lock = threading.Lock()

    def matcher(self, ends: Iterable[int]) -> GrammarMatcher:
        """One at the start, for an answer that ends at one of `ends`. Raises GrammarStuck."""
        words = np.zeros(self._end // _WORD + 1, dtype=np.int32)
        bits = words.view(np.uint32)
        for token in ends:
            if token < self._end:
                bits[token // _WORD] |= np.uint32(1 << token % _WORD)
        with self._lock:  # a copy reads what another copy may share
            inner = self._first.deep_copy()
        start = GrammarMatcher(inner, np.zeros_like(words), False, self._end, words)
        start.look()
        return start


class GrammarSource:
    """The engine's `MatcherSource` for one tokenizer; safe to use from several threads.

    It knows every grammar that somebody still holds (`compile`'s result), and makes matchers of copies.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], rows: int) -> None:
        """`tokenizer()` is asked when the first grammar is; `rows` are the ids that the model can draw."""
        self._tokenizer = tokenizer
        self._rows = rows
        self._lock = threading.Lock()
        self._inner: LLTokenizer | None = None
        self._known: WeakValueDictionary[str, Compiled] = WeakValueDictionary()

    def pieces(self) -> list[bytes | None]:
        """Each token's bytes, None for those that an answer within a grammar never has. Raises GrammarError
        if the tokenizer's tokens have no bytes of their own."""
        tokenizer = self._tokenizer()
        return [tokenizer.token_text(token).raw or None for token in range(self._rows)]

    def compile(self, lark: str, nbytes: int = 0) -> Compiled:
        """The grammar, compiled if nobody holds it. It is known for as long as somebody does."""
        with self._lock:
            if self._inner is None:  # a tenth of a second
                self._inner = make_tokenizer(self.pieces())
            known = self._known.get(lark)
        if known is None:
            known = Compiled(self._inner, lark, nbytes)
            with self._lock:
                known = self._known.setdefault(lark, known)
        return known

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """One at the start: a copy, which takes microseconds, while somebody holds the grammar."""
        ends, lark = read_constraint(constraint)
        return self.compile(lark).matcher(ends)


def write_constraint(ends: Iterable[int], lark: str) -> Constraint:
    """What crosses to the engine: the ids that end the answer, and the grammar."""
    return Constraint(f"{','.join(map(str, sorted(ends)))}\n{lark}".encode())


def read_constraint(constraint: Constraint) -> tuple[list[int], str]:
    """The opposite of `write_constraint`."""
    ends, _, lark = constraint.grammar.decode().partition("\n")
    return [int(token) for token in ends.split(",") if token], lark
