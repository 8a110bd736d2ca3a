"""Streams of ids: the joined deltas are the full decode, and no delta ends inside a character."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from server.text.detokenizer import Unsupported, byte_alphabet, read_decoder
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import FOLDERS, byte_level

KINDS = (
    "bytes-plain",
    "bytes-added",
    "bytes-declared",
    "sp-llama",
    "sp-no-prefix",
    "sp-declared",
    "sp-plain-no-fallback",
    "sp-plain-unigram",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for name in KINDS:
        folder = tmp_path_factory.mktemp(name)
        FOLDERS[name](folder)
        found[name] = Tokenizer.from_folder(folder)
    return found


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.detokenizer()
    return [*(stream.push(token) for token in ids), stream.finish()]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Ids of any kind, special and unknown ones too, mixed with whole texts and halves of them."""
    name = draw(st.sampled_from(KINDS))
    loose = st.lists(st.integers(0, 420) | st.integers(0, 260), max_size=8)
    text = st.text(alphabet="aé 🦙你\n<0x41>\u2581€\u0301", max_size=8)
    return name, draw(st.lists(loose | st.tuples(text, st.integers(0, 3)), max_size=5))  # type: ignore[return-value]


@settings(max_examples=300, deadline=None)
@given(sequences())
def test_joined_deltas_are_the_full_decode(
    tokenizers: dict[str, Tokenizer], case: tuple[str, list[Any]]
) -> None:
    name, parts = case
    tokenizer = tokenizers[name]
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else tokenizer.encode(part[0])[part[1] :]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["bytes-plain", "sp-llama"])
@pytest.mark.parametrize(
    "text", ["I am a cat. It's 3.5 !", "x != y and 'ok' .", "🦙🦙 你好, 世界! é\u0301", "a\n\n b"]
)
def test_no_delta_of_a_valid_text_has_a_replacement_mark(
    tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    pieces = deltas(tokenizers[name], tokenizers[name].encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_waits_and_is_flushed_as_decode_gives_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    for name in ("bytes-plain", "sp-llama"):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode("a🦙")[:-1]
        pieces = deltas(tokenizer, ids)
        assert "".join(pieces[:-1]) == "a"
        assert pieces[-1] == tokenizer.decode(ids)[1:] != ""


def test_a_run_of_byte_tokens_is_text_only_as_a_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sp-llama"]
    byte = {value: value + 3 for value in range(256)}
    llama = [byte[value] for value in "🦙".encode()]
    after = tokenizer.encode("the")[1:]
    assert len(after) == 1
    assert deltas(tokenizer, [*llama, *after]) == ["", "", "", "", "🦙 the", ""]
    spoilt = [*llama, byte[0xFF], *after]
    assert deltas(tokenizer, spoilt)[-2] == "\ufffd" * 5 + " the" == tokenizer.decode(spoilt)
    # A special token is no part of the text, so it does not end the run.
    assert "".join(deltas(tokenizer, [*llama[:2], 2, *llama[2:]])) == "🦙"


def test_a_continuation_keeps_its_leading_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sp-llama"]
    ids = tokenizer.encode("rain")[1:]
    for continuing, want in ((False, "rain"), (True, " rain")):
        stream = tokenizer.detokenizer(continuing=continuing)
        assert "".join(stream.push(token) for token in ids) + stream.finish() == want


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    for name in ("bytes-plain", "sp-llama"):
        tokenizer = tokenizers[name]
        ids = tokenizer.encode("The old clockmaker mends the broken letters. 🦙") * 2000
        stream = tokenizer.detokenizer()
        started = time.perf_counter()
        text = "".join(stream.push(token) for token in ids) + stream.finish()
        assert time.perf_counter() - started < 2  # decoding the whole text at each token takes minutes
        assert text == tokenizer.decode(ids)


def test_the_byte_alphabet_is_the_librarys() -> None:
    decoder = decoders.ByteLevel()
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    for char, byte in alphabet.items():
        if byte < 0x80:
            assert decoder.decode([char]) == chr(byte)
        else:  # behind a lead byte: é is C3 A9
            lead, tail = ({v: k for k, v in alphabet.items()}[b] for b in chr(byte).encode())
            assert decoder.decode([lead, tail]) == chr(byte)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
        },
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_a_decoder_that_a_stream_cannot_follow_is_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        read_decoder(decoder)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Metaspace", "replacement": "e", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "e", "prepend_scheme": "never", "split": True},
        {"type": "Fuse"},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "e"}, "content": " "},
                {"type": "Replace", "pattern": {"String": "a"}, "content": "  "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        },
        None,
    ],
)
def test_rarer_decoders_stream_as_they_decode(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    byte_level()(tmp_path)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text(encoding="utf-8")) | {"decoder": decoder}
    path.write_text(json.dumps(parts), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("every second sailor", "aeae", "e", "", "before the rain"):
        for ids in (tokenizer.encode(text), [999, 0, *tokenizer.encode(text)]):
            assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)
