"""A sentencepiece model as a `tokenizers` pipeline, with the ids and texts that transformers 5.24 gives.

transformers has two readings of the same file. `LlamaTokenizer` takes the pieces alone and orders merges
by id (`llama_model`); the plain class follows the model's own settings, normaliser and scores included
(`from_sentencepiece`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from server.text.sentencepiece_model import UNIGRAM, PieceKind, SentencePieceModel

SPACE = "\u2581"
"""The lower block that stands for a space in sentencepiece's pieces."""


def llama_model(model: SentencePieceModel) -> BPE:
    """Merges of every two pieces that make a third; the made piece with the lower id comes first."""
    vocab = {piece: index for index, piece in enumerate(model.pieces)}
    merges = [pair for piece in model.pieces for pair in _splits(piece, vocab)]
    return BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True)


def own_tokens(model: SentencePieceModel) -> tuple[AddedToken, ...]:
    """Control pieces (special) and user-defined ones (not special), in the order of their ids."""
    kinds = (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    return tuple(
        AddedToken(piece, normalized=False, special=kind == PieceKind.CONTROL)
        for piece, kind in zip(model.pieces, model.kinds, strict=True)
        if kind in kinds
    )


def from_sentencepiece(
    model: SentencePieceModel, added: dict[int, AddedToken], legacy: bool
) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """The whole pipeline, and `added` as it must then be declared. `legacy` puts a space in front of every
    piece of text between added tokens, otherwise only in front of the first."""
    names = _renamed(model, added)
    user_defined = [names[i] for i, kind in enumerate(model.kinds) if kind == PieceKind.USER_DEFINED]
    if model.model_type == UNIGRAM:
        pairs = list(zip(names, model.scores, strict=True))
        unigram = Unigram(vocab=pairs, unk_id=model.unk_id, byte_fallback=model.byte_fallback)
        tokenizer = Tokenizer(unigram)
    else:
        tokenizer = Tokenizer(_scored_bpe(model, names, bool(user_defined)))
    tokenizer.normalizer = _normalizer(model, legacy)
    steps: list[Any] = []
    if model.add_dummy_prefix:
        scheme = "always" if legacy else "first"
        steps.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False))
        # Matched in the raw text, so that each part between two of them gets its own leading space.
        added = {index: _unnormalized(token) for index, token in added.items()}
    if user_defined:
        pattern = "|".join(re.escape(piece) for piece in sorted(user_defined, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if steps:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = _decoder(model)
    return tokenizer, added


def _splits(piece: str, vocab: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The ways to put `piece` together from two known ones, the shortest left part first."""
    return [
        (piece[:cut], piece[cut:])
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]


def _scored_bpe(model: SentencePieceModel, names: list[str], whole_pieces: bool) -> BPE:
    """Only ordinary pieces merge, the best score first (sentencepiece's own rule)."""
    normal = {names[i]: i for i, kind in enumerate(model.kinds) if kind == PieceKind.NORMAL}
    ranked = sorted(
        (-model.scores[index], index, left, right)
        for piece, index in normal.items()
        for left, right in _splits(piece, normal)
    )
    return BPE(
        vocab={name: index for index, name in enumerate(names)},
        merges=[(left, right) for _, _, left, right in ranked],
        unk_token=model.piece(model.unk_id),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=whole_pieces,
    )


def _renamed(model: SentencePieceModel, added: Mapping[int, AddedToken]) -> list[str]:
    """Pieces by id; a declared added token takes over the (placeholder) piece with its id."""
    kept = {piece for index, piece in enumerate(model.pieces) if index not in added}
    return [
        added[index].content if index in added and added[index].content not in kept else piece
        for index, piece in enumerate(model.pieces)
    ]


def _normalizer(model: SentencePieceModel, legacy: bool) -> Any:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if model.add_dummy_prefix and legacy:
        # Metaspace adds no space before one that is there; sentencepiece does.
        steps.append(normalizers.Replace(Regex(r"\A" + SPACE), SPACE * 2))
    return normalizers.Sequence(steps)


def _decoder(model: SentencePieceModel) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    if model.add_dummy_prefix or model.byte_fallback:
        steps.append(decoders.Fuse())
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


def _unnormalized(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )
