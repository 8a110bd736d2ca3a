"""Prompts that their answers begin with: wherever the ids are cut in two, the text is that of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.engine.request import FinishReason
from server.text.echo import echo_of_ids, echo_of_text
from server.text.tokenizer import Tokenizer
from tests.support.tokenizer_folders import byte_level
from tests.text.test_detokenizer import FOLDERS, KINDS
from tests.text.test_generate import Script, play, prepared, text

SAID = "The \N{LLAMA} and \u4f60\u597d,  \N{LLAMA}\n<0x0A>"


@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_gives_the_same_text(tmp_path: Path, kind: str) -> None:
    FOLDERS[kind](tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    ids = words.encode(SAID)
    for cut in range(len(ids) + 1):
        echo = echo_of_ids(ids[:cut], words)
        assert echo.whole == words.decode(ids[:cut])
        one, other = echo.read.fork(), echo.read.fork()
        for read, rest in (
            (one, ids[cut : cut + 1]),
            (other, ids[cut:]),
        ):  # what one choice reads is nothing to another
            told = "".join([read.push(token) for token in rest]) + read.finish()
            assert echo.text + told == words.decode([*ids[:cut], *rest])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    FOLDERS[kind](tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    for said in (SAID, " x != y ", "\ufeff\0", "</s>"):
        assert echo_of_text(said, words).whole == said


async def test_choices_complete_the_prompts_last_character(tmp_path: Path) -> None:
    """The character counts as generated: a stop string may hold it."""
    byte_level()(tmp_path)
    words = Tokenizer.from_folder(tmp_path)
    ids, end = words.encode("a\N{LLAMA}b"), FinishReason.LENGTH
    for cut in range(2, len(ids) - 1):
        echo = echo_of_ids(ids[:cut], words)
        assert echo.text == "a"
        rest = [[(0, token, None), (1, ids[0], None)] for token in ids[cut:]]
        script = Script(*rest, [(0, None, end), (1, None, end)])
        deltas, _ = await play(script, prepared(n=2, echo=(echo,)), words)
        assert text(deltas, 0) == "a\N{LLAMA}b"
        assert text(deltas, 1) == words.decode([*ids[:cut], *[ids[0]] * len(rest)])
        deltas, _ = await play(
            Script(*([(0, t, None)] for t in ids[cut:])), prepared(stops=["\N{LLAMA}"], echo=(echo,)), words
        )
        assert (text(deltas), deltas[-1].finish_reason) == ("a", FinishReason.STOP)
