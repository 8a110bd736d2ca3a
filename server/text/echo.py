"""A prompt at the head of its answer (`echo`): the two join as if they were decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.text.detokenizer import IncrementalDetokenizer
from server.text.offsets import prompt_offsets
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`text` may be sent at once. `read` has read the prompt, and holds the half of a character that it may
    end in; each choice goes on from a fork of it. `offsets` say where in `text` each token of the prompt
    begins, where that is asked for."""

    text: str
    read: IncrementalDetokenizer
    offsets: tuple[int, ...] = ()

    @property
    def whole(self) -> str:
        """The prompt where nothing follows it."""
        return self.text + self.read.fork().finish()


def echo_of_text(text: str, tokenizer: Tokenizer, located: Sequence[int] = ()) -> Echo:
    """A text comes back byte for byte, whatever its tokens decode to; `located` are the tokens whose offsets
    are asked for."""
    offsets = prompt_offsets(located, tokenizer, len(text))
    return Echo(text, tokenizer.detokenizer(continuing=bool(text)), offsets)


def echo_of_ids(ids: Sequence[int], tokenizer: Tokenizer, located: bool = False) -> Echo:
    """Ids are decoded; O(1) each."""
    read = tokenizer.detokenizer()
    text = "".join([read.push(token) for token in ids])
    return Echo(text, read, prompt_offsets(ids, tokenizer, len(text)) if located else ())
