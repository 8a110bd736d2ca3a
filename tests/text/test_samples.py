"""The shipped texts: disjoint, of the stated size and licence, and cut into full windows."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from model.errors import ModelError
from server.text.samples import WINDOW, calibration_windows, held_out, sample_text
from server.text.tokenizer import Tokenizer

NAMES = ("calibration", "prose", "code")


def readme() -> str:
    return resources.files("server.text").joinpath("samples", "README.md").read_text(encoding="utf-8")


def word_runs(text: str, length: int) -> set[tuple[str, ...]]:
    """All runs of `length` words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_no_sentence_is_in_two_texts() -> None:
    runs = {name: word_runs(sample_text(name), 8) for name in NAMES}
    assert all(len(found) > 1000 for found in runs.values())
    for first, second in (("calibration", "prose"), ("calibration", "code"), ("prose", "code")):
        assert not runs[first] & runs[second]


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_source_and_licence_of_each(name: str) -> None:
    text = readme()
    assert f"\n`{name}.txt`:" in text
    paragraph = text[text.index(f"\n`{name}.txt`:") :]
    assert re.search(r"Public\s+domain|Apache-2\.0", paragraph)


def test_the_notice_of_code_by_others_is_there() -> None:
    assert "Nathaniel J. Smith" in readme()
    assert "WARRANTIES OF MERCHANTABILITY" in re.sub(r"\s+", " ", readme())


@pytest.mark.model
def test_token_counts_and_windows_are_those_the_readme_states(smol: Path) -> None:
    tokenizer = Tokenizer.from_folder(smol)
    windows = {
        "calibration": calibration_windows(tokenizer, 8192),
        "prose": held_out("prose", tokenizer),
        "code": held_out("code", tokenizer),
    }
    for name in NAMES:
        text = sample_text(name)
        row = f"| {len(text.encode()):,} | {len(tokenizer.encode(text)):,} | {len(windows[name])} |"
        assert f"| `{name}.txt` {row}" in readme()
        assert {len(window) for window in windows[name]} == {WINDOW}
    assert len(windows["calibration"]) * WINDOW >= 9216
    assert min(len(windows["prose"]), len(windows["code"])) * WINDOW >= 4096
    # SmolLM2 begins a text with no mark, so the windows are the text itself.
    start = tokenizer.decode(windows["prose"][0] + windows["prose"][1])
    assert sample_text("prose").startswith(start)


def test_short_contexts_get_short_windows(tiny_served: Path) -> None:
    windows = calibration_windows(Tokenizer.from_folder(tiny_served), 100)
    assert {len(window) for window in windows} == {100}


def test_each_window_begins_with_the_checkpoints_mark(sp_served: Path) -> None:
    tokenizer = Tokenizer.from_folder(sp_served)
    mark = tokenizer.encode("")
    assert len(mark) == 1
    assert {window[0] for window in held_out("code", tokenizer)} == set(mark)
    assert held_out("code", tokenizer)[1][1:] == tokenizer.encode_rendered(sample_text("code"))[511:1022]


def test_what_cannot_be_is_one_line(tiny_served: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_served)
    with pytest.raises(ModelError, match="held-out texts are prose, code"):
        held_out("poems", tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="less than one window"):
        calibration_windows(tokenizer, 0)
