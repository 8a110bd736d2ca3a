"""Where each token begins: against the full decode of what comes before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.text.echo import echo_of_text
from server.text.offsets import prompt_offsets
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level, sentencepiece_file
from tests.text.test_detokenizer import FOLDERS, KINDS

SAID = "The \N{LLAMA} and \u4f60\u597d,  \N{LLAMA}\n<0x0A> end"


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_the_lengths_of_the_text_before(tmp_path: Path, kind: str) -> None:
    """In characters; one that goes on with a character stands at that character's beginning."""
    FOLDERS[kind](tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    ids = words.encode(SAID)
    text = words.decode(ids)
    offsets = prompt_offsets(ids, words, len(text))
    assert len(offsets) == len(ids) and offsets[0] == 0
    assert list(offsets) == sorted(offsets)
    raw = [words.token_text(token).raw for token in ids]
    dropped = int(b"".join(raw).startswith(b" ") and not text.startswith(" "))  # the decoder's leading space
    for index, offset in enumerate(offsets):
        before = b"".join(raw[:index]).decode("utf-8", "ignore")
        assert offset == max(0, len(before) - dropped), index


def test_a_token_that_ends_a_run_of_bytes_begins_after_it(tmp_path: Path) -> None:
    """sentencepiece's bytes are text only when the run ends, with the next token's push."""
    sentencepiece_file()(tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    llama = [byte + 3 for byte in "🦙".encode()]
    rain = words.encode("rain")[1:]
    ids = [*llama, *rain]
    offsets = prompt_offsets(ids, words, 100)
    assert offsets[:4] == (0, 0, 0, 0) and offsets[4] == 1
    broken = prompt_offsets([*llama[:3], *rain], words, 100)  # three U+FFFD
    assert broken[:4] == (0, 0, 0, 3)


def test_special_tokens_take_no_room(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    a = words.encode("a")[0]
    assert prompt_offsets([1, a, 2, a, 5000, a], words, 3) == (0, 0, 1, 1, 2, 2)


def test_a_text_that_its_tokens_do_not_spell_stays_the_measure(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    assert echo_of_text("ab", words, words.encode("abcd")).offsets[-1] <= 2


def test_a_token_by_itself(tmp_path: Path) -> None:
    byte_level()(tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    (a,), (first, *_) = words.encode("a"), words.encode("🦙")
    told = [words.token_text(token) for token in (a, first, 1, 5000)]
    assert [(text.name, text.raw, text.whole) for text in told] == [
        ("a", b"a", True),
        ("\ufffd", b"\xf0", False),
        ("<|im_start|>", b"", False),
        ("", b"", True),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_by_themselves_join_to_the_text(tmp_path: Path, kind: str) -> None:
    FOLDERS[kind](tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    ids = words.encode(SAID)
    joined = b"".join(words.token_text(token).raw for token in ids).decode()
    assert joined.removeprefix(" ") == words.decode(ids).removeprefix(" ")
