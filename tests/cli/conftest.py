"""Commands without a process of their own."""

from __future__ import annotations

import pytest

from tests.support.command import InProcess


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """`here("serve", "folder", ...)`: what the command printed and its exit code."""
    return InProcess(capsys, monkeypatch)
