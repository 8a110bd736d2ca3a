"""Ids to text while they arrive: the joined pieces equal the full decode, and no character comes in halves.

A tokenizer's decoder is one of two things here. *Bytes* (GPT-2's byte-level alphabet): pieces are bytes,
text is their UTF-8 reading, so only an unfinished character waits. *Pieces* (sentencepiece): pieces are
text, except that a run of byte tokens (`<0xF0>`) is text only as a whole: valid UTF-8, or one U+FFFD per
byte. What follows can spoil what came before, so the whole run waits for its end.

What the decoders do: https://github.com/huggingface/tokenizers, `decoders/`, `pre_tokenizers/byte_level.rs`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""What the library reads as a byte token (its number parser takes a plus sign)."""


def byte_alphabet() -> dict[str, int]:
    """GPT-2's 256 printable stand-ins for bytes: printable Latin-1 stands for itself, the rest is moved
    up from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Unsupported(ValueError):
    """A decoder that cannot be followed token by token; the message names it."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """What a tokenizer's decoder does. `byte_level`: pieces are GPT-2 bytes. Otherwise `replacements` are
    made in each piece, `byte_fallback` joins byte tokens, up to `strip` leading `strip_text` are dropped at
    the start of the text, `metaspace` drops that mark in the first piece and makes it a space elsewhere,
    and `separator` stands between two pieces."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: int = 0
    strip_text: str = " "
    metaspace: str | None = None
    separator: str = ""


def read_decoder(decoder: Mapping[str, Any] | None) -> DecoderPlan:
    """The plan of a decoder as tokenizer.json describes it. Raises Unsupported."""
    if decoder is None:
        return DecoderPlan(separator=" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderPlan(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        if steps[0].get("prepend_scheme", "always") == "never":
            return DecoderPlan(replacements=((mark, " "),))
        return DecoderPlan(metaspace=mark)
    order = [kind for kind in kinds if kind != "Replace"]
    if kinds != ["Replace"] * (len(kinds) - len(order)) + order or not _followable(order):
        raise Unsupported(f"decoder {' + '.join(kinds)}")
    no_strip: Mapping[str, Any] = {"start": 0, "stop": 0, "content": " "}
    strip = steps[-1] if order[-1:] == ["Strip"] else no_strip
    if strip["stop"]:
        raise Unsupported("decoder Strip at the end of the text")
    return DecoderPlan(
        replacements=tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
        byte_fallback="ByteFallback" in order,
        strip=strip["start"],
        strip_text=strip["content"],
    )


def _followable(order: list[str]) -> bool:
    """Fuse alone changes nothing for a stream; Strip needs it before, or it would act on every piece."""
    return [kind for kind in order if kind != "ByteFallback"] in ([], ["Fuse"], ["Fuse", "Strip"]) and (
        "ByteFallback" not in order[1:]
    )


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if "String" not in step["pattern"]:
        raise Unsupported("decoder Replace with a regular expression")
    return step["pattern"]["String"], step["content"]


Piece = str | bytes | None
"""A token ready to join: text, bytes (byte-level, or one byte token), None if decoding leaves it out."""


class PieceReader:
    """Turns pieces of the vocabulary into `Piece`, once each."""

    def __init__(self, plan: DecoderPlan, piece_of: Callable[[int], str | None]) -> None:
        """`piece_of(id)` is the vocabulary's text, None for ids that decoding leaves out."""
        self._plan = plan
        self._piece_of = piece_of
        self._alphabet = byte_alphabet()
        self._known: dict[int, Piece] = {}

    def __call__(self, token: int) -> Piece:
        """The piece of one id."""
        try:
            return self._known[token]
        except KeyError:
            piece = self._known[token] = self._read(self._piece_of(token))
            return piece

    def _read(self, text: str | None) -> Piece:
        if text is None:
            return None
        if self._plan.byte_level:
            # A piece with any other character (an added token) is taken as it is.
            if all(char in self._alphabet for char in text):
                return bytes(self._alphabet[char] for char in text)
            return text.encode()
        for old, new in self._plan.replacements:
            text = text.replace(old, new)
        if self._plan.byte_fallback and (match := _BYTE_PIECE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text


class IncrementalDetokenizer(Protocol):
    """`push` ids in order, `finish` once; what they return, joined, is the full decode."""

    def push(self, token: int) -> str:
        """Text that this token completes; never half a character."""
        ...

    def finish(self) -> str:
        """What was held back, as the full decode gives it (U+FFFD for bytes that stayed incomplete)."""
        ...

    def fork(self) -> IncrementalDetokenizer:
        """Another that has read the same ids, and goes its own way from here."""
        ...


class ByteLevelDetokenizer:
    """UTF-8 over the joined bytes; an invalid sequence is U+FFFD, as in the full decode."""

    def __init__(self, read: PieceReader) -> None:
        self._read = read
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character is half read

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        piece = self._read(token)
        if not isinstance(piece, bytes):
            return ""
        if self._between:  # as it mostly is, and most tokens are whole characters
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(piece)
        self._between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """U+FFFD if a character stayed incomplete."""
        return self._utf8.decode(b"", final=True)

    def fork(self) -> ByteLevelDetokenizer:
        """One with the same half of a character."""
        other = ByteLevelDetokenizer(self._read)
        other._utf8.setstate(self._utf8.getstate())
        other._between = self._between
        return other


class PieceDetokenizer:
    """Text pieces at once, runs of byte tokens when they end; leading spaces as the decoder strips them."""

    def __init__(self, plan: DecoderPlan, read: PieceReader, continuing: bool) -> None:
        self._plan = plan
        self._read = read
        self._run = bytearray()
        self._strip = 0 if continuing else plan.strip
        self._first = not continuing

    def push(self, token: int) -> str:
        """A run of byte tokens that this token ends, and its own text."""
        piece = self._read(token)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._start(self._end_run() + self._joined(piece))

    def finish(self) -> str:
        """The last run of byte tokens."""
        return self._start(self._end_run())

    def fork(self) -> PieceDetokenizer:
        """One in the same run of byte tokens, as far from the start."""
        other = copy(self)
        other._run = self._run.copy()
        return other

    def _joined(self, piece: str) -> str:
        first, self._first = self._first, False
        if self._plan.metaspace is not None:
            return piece.replace(self._plan.metaspace, "" if first else " ")
        return piece if first else self._plan.separator + piece

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _start(self, text: str) -> str:
        """Drops what the decoder strips at the very start of the text."""
        while self._strip and text:
            if not text.startswith(self._plan.strip_text):
                self._strip = 0
                break
            text = text[len(self._plan.strip_text) :]
            self._strip -= 1
        return text


def detokenizer(plan: DecoderPlan, read: PieceReader, continuing: bool) -> IncrementalDetokenizer:
    """`continuing`: the text goes on from another (an echoed prompt), so its leading space stays."""
    if plan.byte_level:
        return ByteLevelDetokenizer(read)
    return PieceDetokenizer(plan, read, continuing)
