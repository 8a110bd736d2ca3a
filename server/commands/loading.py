"""From the model flags to a loaded model, with progress shown and the slow parts side by side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from model.fetch import resolve_model
from server.commands.interrupts import importing
from server.commands.progress import progress
from server.config import ModelOptions

if TYPE_CHECKING:
    from server.app import Loaded


def load_model(options: ModelOptions, meanwhile: Callable[[], object] | None = None) -> Loaded:
    """Fetch if need be, then load. Raises ModelError or ConfigError; a wrong name costs no import of torch.

    `meanwhile` runs on another thread while the weights are read.
    """
    with progress() as shown:
        folder = resolve_model(
            options.model, cache_dir=options.cache_dir, progress=shown, hub_endpoint=options.hub_endpoint
        )
    _read_ahead(folder)
    with importing():
        from server.app import load

    with progress() as shown:
        return load(options, folder, meanwhile, shown)


def _read_ahead(folder: Path) -> None:
    """Ask the system to have the weights in memory by the time torch is imported."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
