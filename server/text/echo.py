"""A prompt at the head of its answer (`echo`): the two join as if they were decoded together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.text.detokenizer import IncrementalDetokenizer
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`text` may be sent at once. `read` has read the prompt, and holds the half of a character that it may
    end in; each choice goes on from a fork of it."""

    text: str
    read: IncrementalDetokenizer

    @property
    def whole(self) -> str:
        """The prompt where nothing follows it."""
        return self.text + self.read.fork().finish()


def echo_of_text(text: str, tokenizer: Tokenizer) -> Echo:
    """A text comes back byte for byte, whatever its tokens decode to."""
    return Echo(text, tokenizer.detokenizer(continuing=True))


def echo_of_ids(ids: Sequence[int], tokenizer: Tokenizer) -> Echo:
    """Ids are decoded; O(1) each."""
    read = tokenizer.detokenizer()
    return Echo("".join([read.push(token) for token in ids]), read)
