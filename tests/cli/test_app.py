"""Names: what a model is called, and which values of `model` reach which attention mode."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.app import model_name, served_names
from server.engine.facts import EngineFacts


def facts(*variants: tuple[str, int]) -> EngineFacts:
    """A checkpoint of 9 query and 3 KV heads, served in `variants` (canonical name, KV heads)."""
    served: Any = [SimpleNamespace(name=name, kv_heads=heads, lossy=heads < 3) for name, heads in variants]
    return cast(EngineFacts, SimpleNamespace(q_heads=9, kv_heads=3, variants=served))


def test_native_alone() -> None:
    names = served_names("m", facts(("native", 3)))
    assert names == {"m": "native", "m@native": "native", "m@gqa3": "native"}
    assert next(iter(names)) == "m"


def test_several_modes_in_the_order_given() -> None:
    names = served_names("m", facts(("mqa", 1), ("native", 3), ("mha", 9)))
    assert list(names)[:3] == ["m@mqa", "m", "m@mha"]
    assert names["m@gqa1"] == "mqa"
    assert names["m@gqa9"] == names["m@mha"] == "mha"
    assert names["m@gqa3"] == names["m@native"] == names["m"] == "native"


def test_the_bare_name_without_native_is_the_first_mode() -> None:
    names = served_names("m", facts(("mha", 9), ("mqa", 1)))
    assert names["m"] == "mha"
    assert "m@native" not in names
    assert next(iter(names)) == "m@mha"


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert model_name(str(folder), folder) == "my-model"
    monkeypatch.chdir(folder)
    assert model_name(".", Path(".")) == "my-model"
    assert model_name("smollm2-135m", tmp_path) == "smollm2-135m"
    assert model_name("organisation/model", tmp_path) == "organisation/model"
