"""How many bytes of text one token can stand for, so that a hopeless prompt is refused before it is cut up."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from server.text.detokenizer import byte_alphabet

_NFC_SHRINK = 4
"""Composing shrinks UTF-8 by no more than this. The worst known cases are 3: a Kelvin sign (3 bytes)
becomes a K (1 byte), three Hangul jamo (9 bytes) one syllable (3 bytes)."""

_KEEPS_TEXT = {"ByteLevel", "Metaspace", "Digits"}


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """The most UTF-8 bytes of input that one token can cover; None where nothing can be promised (text may
    be dropped, unknown characters may be fused, or spaces around added tokens swallowed)."""
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    shrink = _shrink(_state(tokenizer.normalizer))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pre_tokenizer = _state(tokenizer.pre_tokenizer)
    if shrink is None or not _keeps_text(pre_tokenizer) or not _covers_every_byte(tokenizer, vocab):
        return None
    return shrink * max(len(piece.encode()) for piece in vocab)


def _state(part: Any) -> dict[str, Any] | None:
    """A pipeline part as tokenizer.json writes it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _covers_every_byte(tokenizer: Tokenizer, vocab: dict[str, int]) -> bool:
    """No character is unknown: byte tokens for all, or GPT-2's whole alphabet."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return _has_byte_level(_state(tokenizer.pre_tokenizer)) and all(char in vocab for char in byte_alphabet())


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
