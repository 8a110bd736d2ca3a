"""What `headroom compare` says of itself, and what it refuses before it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import ROOT, InProcess, check_one_line

TEXT = ROOT / "tests" / "data" / "prose.txt"


def test_help(here: InProcess) -> None:
    done = here("compare", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: headroom compare [MODEL]")
    for flag in ("--attention", "--plot", "--random-weights", "--text"):
        assert flag in done.stdout


WRONG_WORDS = [
    (["--random-weights"], "--random-weights and --config go together"),
    (["--config", "x"], "--random-weights and --config go together"),
    (["--layers", "2"], "--layers cuts random weights"),
    (["m", "--random-weights", "--config", "x"], "--random-weights needs no model"),
    (["--text", "x", "--no-quality"], "--text is for quality"),
    (["--text", "x", "--random-weights", "--config", "x"], "--text is for quality"),
    (["--attention", " ,"], "name at least one mode"),
    (["--context", "0"], "'0' is not a whole number of at least 1"),
    (["--head-map", "median"], "invalid choice: 'median'"),
    (["--weights", "int3"], "invalid choice: 'int3' (choose from"),
]


@pytest.mark.parametrize(("words", "part"), WRONG_WORDS, ids=lambda value: " ".join(value)[:30])
def test_words_that_do_not_go_together(here: InProcess, words: list[str], part: str) -> None:
    check_one_line(here("compare", *words), part, code=2)


# Before the work begins, so that nobody waits for a line that could have come at once.
REFUSALS = [
    (["--attention", "gqa4"], "attention mode gqa4: 4 KV heads cannot share 9 query heads"),
    (["--attention", "gqa2"], "gqa2"),
    (["--attention", "mha,gqa9"], "mha and gqa9 are the same here"),
    (["--attention", "half"], "attention mode 'half' is not known"),
    (["--context", "513"], "--context 513 exceeds the 512 positions"),
    (["--context", "31"], "--context 31 is too short to measure with --block-size 16; give at least 32"),
    (["--context", "128", "--block-size", "128"], "give at least 256"),
    (["--context", "512", "--users", "1000000000"], "lower --context or --users"),
    (["--plot", "out.jpg"], "--plot out.jpg: writes PNG; give it a name that ends in .png"),
    (["--plot", "/nowhere/out.png"], "--plot /nowhere/out.png: there is no folder /nowhere"),
    (["--json", "/nowhere/out.json"], "--json /nowhere/out.json: there is no folder /nowhere"),
    (["--markdown", "/"], "--markdown /: is a folder"),
    (["--json", "/proc/out.json"], "--json /proc/out.json: cannot be written"),
    (["--json", "x", "--markdown", "server/../x"], "--json and --markdown name the same file"),
    (["--text", "/nowhere.txt"], "/nowhere.txt: No such file"),
]


@pytest.mark.parametrize(("words", "part"), REFUSALS, ids=lambda value: " ".join(value)[:40])
def test_refused_before_the_work(here: InProcess, nine: Path, words: list[str], part: str) -> None:
    done = here("compare", str(nine), "--device", "cpu", "--head-map", "mean", "--text", str(TEXT), *words)
    assert done.returncode == 1 and part in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert "loading" not in done.stderr


@pytest.mark.parametrize(
    "content", [b"", b"a few words", b"caf\xe9 " * 500], ids=["empty", "short", "latin 1"]
)
def test_a_text_that_says_nothing(here: InProcess, nine: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    done = here("compare", str(nine), "--device", "cpu", "--head-map", "mean", "--text", str(path))
    assert done.returncode == 1 and str(path) in done.stderr.splitlines()[-1]
    assert "loading" not in done.stderr and "Traceback" not in done.stderr


def test_random_weights_refuse_a_fitted_map_and_too_many_layers(here: InProcess, shape: Path) -> None:
    words = ("compare", "--random-weights", "--config", str(shape), "--device", "cpu")
    done = here(*words, "--head-map", "aligned")
    assert done.returncode == 1 and "take --head-map mean" in done.stderr.splitlines()[-1]
    done = here(*words, "--layers", "33")
    assert done.returncode == 1 and "--layers 33: the model has 32" in done.stderr.splitlines()[-1]
    done = here("compare", "--random-weights", "--config", "/nowhere", "--device", "cpu")
    assert done.returncode == 1 and "/nowhere" in done.stderr.splitlines()[-1]
