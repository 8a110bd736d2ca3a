"""Where the text of each token begins, as its text is written token by token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.text.tokenizer import Tokenizer


class TextOffsets:
    """Counts the characters of one text. A token that goes on with a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer, at: int = 0) -> None:
        """`at` characters stand there already."""
        self._tokenizer = tokenizer
        self._written = at
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._waiting = 0  # characters of byte tokens that are text only when their run ends

    def push(self, token: int, text: str) -> int:
        """The offset of `token`, whose push to the detokenizer gave `text`. That text may begin with what
        waited for this token, which is not the token's own."""
        before = self._written
        self._written += len(text)
        own = self._tokenizer.token_text(token)
        if not text:
            offset = before + self._waiting
            self._waiting += len(self._utf8.decode(own.raw))
            return offset
        self._utf8.reset()
        offset, self._waiting = before + self._waiting, 0
        return max(before, self._written - len(own.name)) if own.whole else offset


def prompt_offsets(ids: Sequence[int], tokenizer: Tokenizer, length: int) -> tuple[int, ...]:
    """Of a prompt that is `length` characters long, as written by its ids; O(1) each. A text that its tokens
    do not spell (normalised, say) gets the nearest offsets there are."""
    read, offsets = tokenizer.detokenizer(), TextOffsets(tokenizer)
    return tuple([min(offsets.push(token, read.push(token)), length) for token in ids])
