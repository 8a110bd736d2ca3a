"""Checkpoint folders that a test of this room may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import sampling


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A one-file checkpoint that the test may change."""
    return shutil.copytree(tiny(), tmp_path / "one")


@pytest.fixture
def sharded(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of several files that the test may change."""
    return shutil.copytree(tiny(shards=True), tmp_path / "many")


@pytest.fixture(params=sampling.SAMPLERS)
def draw(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """`draw(logits, rows, ...)` of `tests.support.sampling`, by each sampler that can run here."""
    return partial(sampling.draw, sampler=sampling.sampler_of(request.param))
