"""Progress where there is no terminal: lines for a log, not too many."""

from __future__ import annotations

import sys
import time

import pytest

from server.commands.progress import progress


def test_a_long_phase_says_how_far_it_is_every_quarter_of_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress() as told:
        told.start("Fitting mqa", 30)
        for done in range(31):
            now += 2.0
            told.update(done)
        told.start("Waiting", None)
        now += 60.0
        told.update(5)
    assert capsys.readouterr().err.splitlines() == [
        "Fitting mqa",
        *(f"Fitting mqa: {100 * done // 30} %" for done in (7, 15, 23)),
        "Waiting",
    ]


@pytest.mark.parametrize(("term", "drawn"), [("dumb", False), ("xterm", True)])
def test_a_terminal_that_cannot_draw_gets_lines(
    term: str, drawn: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress() as told:
        told.start("Compiling", None)
        told.start("Loading", 30)
        told.update(7)
    said = capsys.readouterr().err
    assert ("\x1b[" in said) == drawn
    assert drawn or said == "Compiling\nLoading\n"
