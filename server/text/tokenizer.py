"""Strings to ids and back, exactly as transformers' tokenizer of the same folder does it.

`tokenizers` does the work for both kinds of file; see `server.text.backend` for how it is set up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.errors import ModelError
from server.text.backend import Backend, load_backend
from server.text.detokenizer import (
    IncrementalDetokenizer,
    PieceReader,
    Unsupported,
    detokenizer,
    read_decoder,
)
from server.text.token_bytes import token_bound


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token by itself: `raw`, the bytes that it adds to a text, and a `name` for people.

    The name is those bytes read as UTF-8, with U+FFFD where they are a part of a character only. A special
    token adds no bytes, and its name is that of the vocabulary.
    """

    name: str
    raw: bytes

    @property
    def whole(self) -> bool:
        """Whether the name is the text: not half a character, no special token."""
        return self.name.encode() == self.raw


class Tokenizer:
    """One checkpoint's tokenizer; safe to use from several threads."""

    def __init__(self, backend: Backend, name: str = "tokenizer") -> None:
        """`name` is what errors call it. Raises ModelError if its decoder is of a kind not known here."""
        self._tokenizer = backend.tokenizer
        self._special_texts = {
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        }
        decoder = self._tokenizer.decoder
        try:
            self._plan = read_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        except Unsupported as error:
            raise ModelError(
                f"{name}: {error} is not supported; byte-level and sentencepiece tokenizers are"
            ) from None
        self._read = PieceReader(self._plan, self._visible_piece)
        self._token_texts: dict[int, TokenText] = {}  # of those that were asked for
        self.special: Mapping[str, str] = backend.special.texts()
        """Role (`bos_token`, `eos_token`, ...) to text."""
        eos = self._tokenizer.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None
        self.eos_ids: frozenset[int] = frozenset() if eos is None else frozenset({eos})
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._bound = token_bound(self._tokenizer)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, or sentencepiece's tokenizer.model. Raises ModelError."""
        return cls(load_backend(folder), str(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with the BOS or EOS that the checkpoint adds: transformers'
        `tokenizer(text).input_ids`. The text must be encodable as UTF-8 (no lone surrogates)."""
        return self._encode(text, add_special=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that already contains its marks (a rendered chat): nothing is added."""
        return self._encode(text, add_special=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The whole text; special tokens are left out unless asked for, ids beyond the vocabulary always.
        Spaces are not cleaned up, whatever tokenizer_config.json says: a stream could not do it."""
        known = [token for token in ids if 0 <= token < 2**32]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special)

    def detokenizer(self, *, continuing: bool = False) -> IncrementalDetokenizer:
        """A fresh stream whose joined text equals `decode(ids)`; costs O(1) a token, over the whole text.
        `continuing`: the text follows another, so a sentencepiece leading space is kept."""
        return detokenizer(self._plan, self._read, continuing)

    def min_tokens(self, text: bytes) -> int:
        """A lower bound on the tokens of a UTF-8 text, without tokenising it; 0 where none can be given."""
        return self._bound.min_tokens(text)

    def piece(self, token: int) -> str | None:
        """The vocabulary's own spelling of an id, None beyond the vocabulary."""
        return self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None

    @property
    def separator(self) -> str:
        """What decoding puts between two tokens: nothing, unless the tokenizer has no decoder."""
        return self._plan.separator

    def token_text(self, token: int) -> TokenText:
        """The token by itself; both parts are empty beyond the vocabulary. In its place at the head of a text
        it may lose a space (sentencepiece)."""
        known = self._token_texts.get(token)
        if known is None:
            known = self._token_texts[token] = self._lone(token)
        return known

    def _lone(self, token: int) -> TokenText:
        piece = self._read(token)
        if piece is None:
            return TokenText(self.piece(token) or "", b"")
        if isinstance(piece, bytes):
            return TokenText(piece.decode("utf-8", "replace"), piece)
        if self._plan.metaspace is not None:
            piece = piece.replace(self._plan.metaspace, " ")
        return TokenText(piece, piece.encode())

    def _visible_piece(self, token: int) -> str | None:
        piece = self.piece(token)
        return None if piece in self._special_texts else piece

    def _encode(self, text: str, add_special: bool) -> list[int]:
        # The batch call leaves out offsets, which nobody reads, and holds the interpreter for less time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
