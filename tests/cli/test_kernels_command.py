"""`headroom kernels`: what it cannot do is one line that says why."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from server.commands.kernels import kernels
from server.engine.errors import ConfigError


def test_portable_is_for_x86_64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError) as caught:
        kernels(tmp_path, None, portable=True)
    assert str(caught.value) == "--portable compiles for x86-64 only; this is aarch64"


def test_a_compiler_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.native.build.loaded", lambda *_: None)
    monkeypatch.setattr("model.native.build._prebuilt", lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        kernels(tmp_path, "c++ '", portable=False)
    assert str(caught.value) == """CXX="c++ '": No closing quotation; serve computes without them"""
