"""How many bytes of text one token can stand for, so that a hopeless prompt is refused before that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from server.text.detokenizer import byte_alphabet

_NFC_SHRINK = 4
"""Composing shrinks UTF-8 by no more than this. The worst known cases are 3: a Kelvin sign (3 bytes)
becomes a K (1 byte), three Hangul jamo (9 bytes) one syllable (3 bytes)."""

_NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))

_KEEPS_TEXT = {"ByteLevel", "Metaspace", "Digits"}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """One token covers at most `max_bytes` bytes of text, not counting the bytes in `dropped`, which the
    vocabulary lacks and the library leaves out. `max_bytes` 0: nothing can be promised."""

    max_bytes: int
    dropped: bytes

    def min_tokens(self, text: bytes) -> int:
        """A text (UTF-8) has at least so many tokens; 0 where nothing can be promised. Costs a few scans."""
        if self.max_bytes == 0:
            return 0
        covered = len(text) - sum(text.count(byte) for byte in self.dropped)
        return -(-covered // self.max_bytes)


NO_BOUND = TokenBound(0, b"")


def token_bound(tokenizer: Tokenizer) -> TokenBound:
    """NO_BOUND where text may vanish: spaces swallowed around added tokens, a normaliser or pre-tokeniser
    that removes, characters that share one unknown token."""
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return NO_BOUND
    shrink = _shrink(_state(tokenizer.normalizer))
    dropped = _dropped(tokenizer)
    if shrink is None or dropped is None or not _keeps_text(_state(tokenizer.pre_tokenizer)):
        return NO_BOUND
    if shrink > 1 and dropped:
        return NO_BOUND  # composing might turn covered bytes into dropped ones
    return TokenBound(shrink * _longest(tokenizer), dropped)


def _longest(tokenizer: Tokenizer) -> int:
    """Bytes of text that the longest piece covers; a byte-level piece covers one byte a character."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    plain = tokenizer.get_vocab(with_added_tokens=False).keys() - added
    one_byte = _has_byte_level(_state(tokenizer.pre_tokenizer))
    return max(
        max((len(piece) if one_byte else len(piece.encode()) for piece in plain), default=1),
        max((len(text.encode()) for text in added), default=1),
    )


def _state(part: Any) -> dict[str, Any] | None:
    """A pipeline part as tokenizer.json writes it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _dropped(tokenizer: Tokenizer) -> bytes | None:
    """The bytes of valid UTF-8 that the vocabulary cannot spell; None if whole characters may be unknown."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if model.byte_fallback:
        return b"" if all(f"<0x{byte:02X}>" in vocab for byte in range(256)) else None
    if not _has_byte_level(_state(tokenizer.pre_tokenizer)):
        return None
    return bytes(
        byte for char, byte in byte_alphabet().items() if char not in vocab and byte not in _NEVER_IN_UTF8
    )


def _shrink(normalizer: dict[str, Any] | None) -> int | None:
    """How many times shorter (in bytes) the normaliser can make a text at most; None if unknown."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            total = 1
            for step in normalizer["normalizers"]:
                part = _shrink(step)
                if part is None:
                    return None
                total *= part
            return total
        case "Prepend":
            return 1
        case "Replace":
            old = normalizer["pattern"].get("String")
            return 1 if old is not None and len(old.encode()) <= len(normalizer["content"].encode()) else None
        case "NFC":
            return _NFC_SHRINK
        case _:
            return None


def _keeps_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_keeps_text(step) for step in pre_tokenizer["pretokenizers"])
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPS_TEXT


def _has_byte_level(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_has_byte_level(step) for step in pre_tokenizer["pretokenizers"])
    return bool(pre_tokenizer["type"] == "ByteLevel")
