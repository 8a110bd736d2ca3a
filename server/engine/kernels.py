"""Where the operators in C++ come from, and why there are none: settled once for an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from model.native.build import Recipe, load_native
from model.native.library import NativeLibrary, NativeUnavailable
from model.progress import Progress

# The library, or in a few words why there is none; slow when it must be compiled.
NativeSource = Callable[[], NativeLibrary | str]


def native_source(cache_dir: Path, progress: Progress, compiler: str | None = None) -> NativeSource:
    """A source that keeps what it compiles under `cache_dir`, the user's cache, and tells `progress` before.

    It looks once: what failed is tried again by the next start, not by the next engine. `compiler` is a
    command as `CXX` spells it, None the system's.
    """
    known: list[NativeLibrary | str] = []

    def source() -> NativeLibrary | str:
        if not known:
            known.append(_load(cache_dir, progress, compiler))
        return known[0]

    return source


def _load(cache_dir: Path, progress: Progress, compiler: str | None) -> NativeLibrary | str:
    try:
        return load_native(cache_dir, Recipe(compiler=compiler), say=lambda text: progress.start(text, None))
    except NativeUnavailable as error:
        return str(error)


def choose_native(kernels: str, device: torch.device, source: NativeSource | None) -> NativeLibrary | str:
    """What `kernels` (auto or torch) comes to on `device`: the library, or the reason for PyTorch's own."""
    if kernels == "torch":
        return "--kernels torch"
    if device.type != "cpu":
        return f"native operators are for CPUs, this is {device.type}"
    if source is None:
        return "no native operators were given"
    return source()
