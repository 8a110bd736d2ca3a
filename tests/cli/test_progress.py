"""Progress where there is no terminal: lines for a log, not too many."""

from __future__ import annotations

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
