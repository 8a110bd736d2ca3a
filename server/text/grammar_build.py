"""Grammars in the library's own language, and their matchers; the worker and the server build them alike.

llguidance parses (Earley) over a lexer of lazily made states. Every step of it is bounded by the numbers
here, so that a grammar which was let in cannot hold up the engine's thread later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_AT_LEAST = 100_000
"""How often anything may have to be repeated: more than that, no answer here could hold."""
MAX_STATES = 50_000
"""Of a lexer, of 1 KiB or more each; all answers within the same grammar share them."""
MAX_REASON = 500
"""Characters of the library's words that a client gets to see."""

# Where a text is the only one possible, each token that begins it stays allowed: the library would else
# spell out the whole text at every step, which may be 64 KiB long.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# One space after a comma or colon, no other white space: what `json.dumps` writes, and models have read.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is for the client."""


class GrammarTimeout(GrammarError):
    """The machine gave no answer about it; another time it may."""


def to_lark(kind: str, source: str) -> str:
    """The grammar of a `json` schema, a `regex`, a `choice` (a JSON list of strings) or a `grammar` (Lark, or
    GBNF where it has `::=`) in llguidance's dialect of Lark. Raises GrammarError."""
    match kind:
        case "json":
            return f"start: %json {json.dumps(json.loads(source) | {'x-guidance': _JSON})}{_OPTIONS}"
        case "regex":
            _check_repeats(source)
            return f"start: /{regex_to_lark(source)}/{_OPTIONS}"
        case "choice":
            return f"start: /{regex_to_lark('|'.join(map(re.escape, json.loads(source))))}/{_OPTIONS}"
        case _:
            return _from_ebnf(source) + _OPTIONS


def _check_repeats(source: str) -> None:
    """Refuses what no answer could be long enough for."""
    for number in re.findall(r"(?<!\\)\{\s*(\d+)", source):
        if len(number) > 9 or int(number) > MAX_AT_LEAST:
            raise GrammarError(f"repeats more than {MAX_AT_LEAST} times, which no answer could")


def _from_ebnf(source: str) -> str:
    _check_repeats(source)
    bare = _without_literals(source)
    if "<[" in bare:
        raise GrammarError("tokens by number (`<[...]>`) are not allowed")
    if "::=" not in bare:
        return source
    try:
        return str(gbnf_to_lark(source))
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the converter's own kinds
        raise GrammarError(f"not GBNF: {error}") from None


def _without_literals(source: str) -> str:
    """The grammar without its strings, regular expressions, character classes and comments."""
    return re.sub(
        r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|\[(?:\\.|[^\]\\\n])*\](?!>)|(?://|#)[^\n]*', " ", source
    )


def make_tokenizer(pieces: Sequence[bytes | None]) -> LLTokenizer:
    """A vocabulary of which id `i` adds `pieces[i]` to a text; None and nothing at all are never allowed.

    One id more, the last, stands for the end: wherever the mask has it, the text is whole. Which of the
    model's tokens then end an answer is the request's affair.
    """
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(pieces)), n_vocab=len(pieces) + 1, eos_token=len(pieces), slices=None
    )


class _Vocabulary:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.tokens = [piece or b"" for piece in pieces] + [b"\xff end"]
        self.eos_token_id = len(pieces)
        self.special_token_ids = [len(pieces)]

    def __call__(self, text: bytes) -> list[int]:
        """Asked for forced texts only, which are switched off; the library tries it once when it starts."""
        return []


def make_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises GrammarError with the library's words."""
    matcher = LLMatcher(tokenizer, lark, log_level=0, limits=_limits())
    if matcher.is_error():
        raise GrammarError(reason(matcher))
    return matcher


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=20_000,  # about 1 ms
        max_lexer_states=MAX_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def is_full(matcher: LLMatcher) -> bool:
    """Whether it failed because the states are used up that it shares with its copies."""
    return "too many states" in matcher.get_error()


def reason(matcher: LLMatcher) -> str:
    """The library's words for what is wrong, without its excerpts of the grammar."""
    lines = matcher.get_error().split("<backtrace>")[0].replace("<non-verbose/>", "").splitlines()
    kept = [line for line in lines if not re.match(r"\s*(\d+ \|.*|\^\s*)$", line)]
    text = " ".join(" ".join(kept).split()).replace("failed to compile JSON schema: ", "")
    if text.startswith("NoExtension"):
        return "no text fits it"
    text = text.split(" Enable '")[0]  # an option of the library's that is not offered here
    return shortened(text or "the library gives no reason")


def shortened(text: str) -> str:
    """At most MAX_REASON characters."""
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."
