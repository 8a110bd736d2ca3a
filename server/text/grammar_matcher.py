"""A choice's way through its grammar, as the engine asks for it, and the grammars that are kept compiled.

A matcher knows its mask before it is asked: the library works when a token is taken. So what fails there,
fails for that one choice and at a moment when nobody else is concerned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from copy import copy
from time import thread_time
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from server.engine.constraint import BitArray
from server.engine.request import Constraint
from server.text.grammar_build import GrammarError, is_full, make_matcher, make_tokenizer, reason
from server.text.tokenizer import Tokenizer

_WORD = 32
_STEP_BYTES, _MOST_BYTES = 1024, 48 * 2**20  # of states that a lexer makes, by token and at most
_QUICK_SECONDS = 0.1  # to compile, for one that may be compiled again on the engine's thread


class GrammarStuck(ValueError):
    """A choice cannot go on within its grammar; the message is for the client."""


class GrammarMatcher:
    """The engine's `Matcher` over the library's. `ends` are the ids that end an answer, as bits: allowed
    where the text is whole, and nowhere else, unless nothing but them could follow."""

    def __init__(self, compiled: Compiled, ends: BitArray) -> None:
        """At the start. Raises GrammarStuck."""
        self._compiled = compiled
        self._ends = ends
        self._inner, self._generation = compiled.fork()
        self._taken: list[int] = []
        self._mask = np.zeros_like(ends)
        self._complete = False
        self._follow()

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
        self._taken.append(token)
        self._compiled.steps += 1
        self._inner.consume_token(token)
        self._follow()

    def copy(self) -> GrammarMatcher:
        """Another at the same place."""
        other = copy(self)
        other._inner = self._inner.deep_copy()
        other._taken = self._taken.copy()
        other._mask = self._mask.copy()
        return other

    def _follow(self) -> None:
        """Asks what may come next. Copies share the states that the library's lexer has made; where these are
        full, there may still be room for this answer's alone."""
        self._look()
        for _ in range(2):  # the next generation may be full by now, another is this answer's
            if is_full(self._inner):
                self._inner, self._generation = self._compiled.renewed(self._generation)
                self._inner.consume_tokens(self._taken)
                self._look()
        if self._inner.is_error():
            raise GrammarStuck(f"the grammar could not be followed: {reason(self._inner)}")
        self._settle()

    def _look(self) -> None:
        if not self._inner.is_error():
            self._inner.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def _settle(self) -> None:
        """Puts the library's end mark in the request's terms."""
        mask, ends = self._mask.view(np.uint32), self._ends.view(np.uint32)
        word, bit = self._compiled.end // _WORD, np.uint32(1 << self._compiled.end % _WORD)
        whole = bool(mask[word] & bit)
        mask[word] &= ~bit
        text = mask & ~ends
        more = bool(text.any())
        self._complete = whole and not more
        if more:
            mask[:] = text
        elif not whole and not mask.any():
            raise GrammarStuck("the grammar allows nothing here")
        if whole:
            mask |= ends


class Compiled:
    """A grammar ready to be matched. `lark` is its text, `end` the library's id for the end of a text."""

    def __init__(self, tokenizer: LLTokenizer, lark: str, nbytes: int) -> None:
        """`nbytes` is about what it takes in memory. Raises GrammarError. Takes as long as the grammar takes
        to compile, without Python's lock."""
        self.lark = lark
        self.end = tokenizer.vocab_size - 1
        self.steps = 0  # tokens that answers have taken
        self.worn = False  # its lexer's states are full
        self._nbytes = nbytes
        self._tokenizer = tokenizer
        self._generation = 0
        began = thread_time()
        self._first = make_matcher(tokenizer, lark)
        self._seconds = thread_time() - began

    @property
    def nbytes(self) -> int:
        """About what it takes by now: each step may add to the lexer's states."""
        return self._nbytes + min(self.steps * _STEP_BYTES, _MOST_BYTES)

    def matcher(self, ends: Iterable[int]) -> GrammarMatcher:
        """One at the start, for an answer that ends at one of `ends`. Raises GrammarStuck."""
        words = np.zeros(self.end // _WORD + 1, dtype=np.int32)
        bits = words.view(np.uint32)
        for token in ends:
            if token < self.end:
                bits[token // _WORD] |= np.uint32(1 << token % _WORD)
        return GrammarMatcher(self, words)

    def fork(self) -> tuple[LLMatcher, int]:
        """The library's matcher at the start, and which generation of states it shares."""
        return self._first.deep_copy(), self._generation

    def renewed(self, generation: int) -> tuple[LLMatcher, int]:
        """The same in a later generation than the given one. Raises GrammarStuck if it takes too long to make
        one while others wait."""
        if generation == self._generation:
            self.worn = True
            if self._seconds > _QUICK_SECONDS:
                raise GrammarStuck("the grammar could not be followed: it has too many states")
            self._first = make_matcher(self._tokenizer, self.lark)
            self._generation += 1
            self.steps = 0
            self.worn = False
        return self.fork()


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

    @property
    def nbytes(self) -> int:
        """About what all grammars take that somebody holds."""
        with self._lock:
            return sum(compiled.nbytes for compiled in self._known.values())

    def pieces(self) -> list[bytes | None]:
        """Each token's bytes, None for those that an answer within a grammar never has. Raises GrammarError
        if the tokenizer's tokens have no bytes of their own."""
        tokenizer = self._tokenizer()
        if tokenizer.separator:
            raise GrammarError("this model's tokenizer has no decoder and cannot keep an answer to a grammar")
        return [tokenizer.token_text(token).raw or None for token in range(self._rows)]

    def compile(self, lark: str, nbytes: int = 0) -> Compiled:
        """The grammar, compiled if nobody holds it. It is known for as long as somebody does."""
        with self._lock:
            if self._inner is None:  # a tenth of a second
                self._inner = make_tokenizer(self.pieces())
            known = self._known.get(lark)
        if known is None or known.worn:
            known = Compiled(self._inner, lark, nbytes)
            with self._lock:
                self._known[lark] = known
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
