"""The bound that refuses a hopeless prompt before it is tokenised: never above the true number of tokens."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.token_bytes import NO_BOUND
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import FOLDERS, byte_level

BOUNDED = ("bytes-plain", "bytes-added", "bytes-qwen2", "sp-llama", "sp-plain-not-legacy")
UNBOUNDED = ("bytes-swallowing", "sp-plain-no-fallback", "sp-plain-normalised", "sp-plain-unigram")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for name in BOUNDED + UNBOUNDED:
        folder = tmp_path_factory.mktemp(name)
        FOLDERS[name](folder)
        found[name] = Tokenizer.from_folder(folder)
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(BOUNDED),
    st.text(max_size=30),
    st.sampled_from(["\u212a", "seven small lanterns ", "ᄀ\u1161\u11a8"]),
)
def test_never_more_than_there_are(
    tokenizers: dict[str, Tokenizer], name: str, text: str, repeated: str
) -> None:
    whole = text + repeated * 20
    bound = tokenizers[name].min_tokens(whole.encode())
    assert 0 < bound <= len(tokenizers[name].encode_rendered(whole))


def test_no_promise_where_text_may_vanish(tokenizers: dict[str, Tokenizer]) -> None:
    for name in UNBOUNDED:
        assert tokenizers[name].min_tokens(b"x" * 1000) == 0


def test_bytes_that_the_vocabulary_lacks_do_not_count(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text(encoding="utf-8"))
    # U+0104 stands for the control character 4; without it the library leaves the character out.
    vocab = parts["model"]["vocab"]
    vocab["not a byte"] = vocab.pop("\u0104")
    path.write_text(json.dumps(parts), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("\x04" * 500) == []
    assert tokenizer.min_tokens(b"\x04" * 500) == 0
    assert 0 < tokenizer.min_tokens(b"\x04x" * 500) <= 500


def test_composing_is_allowed_for(tmp_path: Path) -> None:
    FOLDERS["bytes-qwen2"](tmp_path)
    path = tmp_path / "tokenizer.json"
    parts = json.loads(path.read_text(encoding="utf-8"))
    for size in (1, 2, 4, 8, 16):
        parts["model"]["vocab"]["K" * 2 * size] = 400 + size
        parts["model"]["merges"].append(["K" * size, "K" * size])
    path.write_text(json.dumps(parts), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    kelvin = "\u212a" * 32  # Kelvin signs: 96 bytes that become 32 Ks, one token
    assert tokenizer.encode(kelvin) == [416]
    assert tokenizer.min_tokens(kelvin.encode()) == 1


def test_composing_shrinks_utf8_by_at_most_four() -> None:
    """Over all characters: the longest spelling, each part by its longest equivalent, against that."""
    composed = [char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(char)]
    parts = {char: unicodedata.normalize("NFD", char) for char in [*composed, "\uac01"]}  # a Hangul syllable
    longest: dict[str, int] = {}
    for char, decomposed in parts.items():
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(char.encode()))
    for char, decomposed in parts.items():
        spelled = sum(longest.get(part, len(part.encode())) for part in decomposed)
        assert spelled <= 4 * len(unicodedata.normalize("NFC", char).encode()), hex(ord(char))


def test_nothing_is_promised_by_default() -> None:
    assert NO_BOUND.min_tokens(b"x" * 100) == 0
