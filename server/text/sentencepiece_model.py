"""Sentencepiece's `tokenizer.model`: its pieces, and the settings that its Python API does not show.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
(ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec). The library checks the file and gives piece and
score; kind and settings are read from the same bytes here, because the generated protobuf module that
comes with the library would bring protobuf along as a dependency for eleven fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import sentencepiece

from model.errors import ModelError


class PieceKind(IntEnum):
    """SentencePiece.Type of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


UNIGRAM, BPE = 1, 2
"""TrainerSpec.ModelType; words and characters are not used by language models."""


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Pieces by id, and what the trainer wrote about them; special ids are -1 where the model has none."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[PieceKind, ...]
    model_type: int
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    def piece(self, index: int) -> str | None:
        """The text of a piece, None for an id that the model lacks."""
        return self.pieces[index] if 0 <= index < len(self.pieces) else None


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ModelError if the file is not a sentencepiece model or uses a kind of model not known here."""
    try:
        data = path.read_bytes()
        if not data:
            raise ValueError("the file is empty")
        library = sentencepiece.SentencePieceProcessor(model_proto=data)
        fields = _Fields(data)
        trainer, normalizer = _Fields(fields.message(2)), _Fields(fields.message(3))
        kinds = tuple(PieceKind(_Fields(piece).number(3, PieceKind.NORMAL)) for piece in fields.messages(1))
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"{path}: not a sentencepiece model ({reason}); fetch the file again") from None
    model_type = trainer.number(3, UNIGRAM)
    if model_type not in (UNIGRAM, BPE):
        raise ModelError(
            f"{path}: sentencepiece model type {model_type} is not supported; BPE and unigram are"
        )
    ids = list(range(len(kinds)))
    return SentencePieceModel(
        pieces=tuple(library.id_to_piece(ids)),
        scores=tuple(library.get_score(ids)),
        kinds=kinds,
        model_type=model_type,
        byte_fallback=bool(trainer.number(35, 0)),
        unk_id=library.unk_id(),
        bos_id=library.bos_id(),
        eos_id=library.eos_id(),
        charsmap=normalizer.message(2),
        add_dummy_prefix=bool(normalizer.number(3, 1)),
        remove_extra_whitespaces=bool(normalizer.number(4, 1)),
        escape_whitespaces=bool(normalizer.number(5, 1)),
    )


class _Fields:
    """The fields of one protobuf message: numbers (varints) and messages (bytes, strings, sub-messages)."""

    def __init__(self, data: bytes) -> None:
        self._numbers: dict[int, int] = {}
        self._messages: dict[int, list[bytes]] = {}
        for field, value in _walk(data):
            if isinstance(value, int):
                self._numbers[field] = value
            else:
                self._messages.setdefault(field, []).append(value)

    def number(self, field: int, default: int) -> int:
        return self._numbers.get(field, default)

    def message(self, field: int) -> bytes:
        """The last value wins, as protobuf has it; empty if the field is absent."""
        return self._messages.get(field, [b""])[-1]

    def messages(self, field: int) -> list[bytes]:
        return self._messages.get(field, [])


def _walk(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of each field: https://protobuf.dev/programming-guides/encoding/."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == 0:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"field {key >> 3} runs past the end")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
