"""`headroom kernels`: compile the operators in C++ now, not at the first start."""

from __future__ import annotations

import platform
from pathlib import Path

from model.native.build import Recipe, load_native, prebuild
from model.native.library import NativeUnavailable
from model.native.target import X86
from server.commands.progress import progress
from server.engine.errors import ConfigError


def kernels(cache_dir: Path, compiler: str | None, portable: bool) -> int:
    """Compile them for this CPU unless they are in the cache, and print their file; or with `portable` for
    x86-64 CPUs, into the package. Raises ConfigError, one line, where that cannot be."""
    if portable and platform.machine() not in X86:
        raise ConfigError(f"--portable compiles for x86-64 only; this is {platform.machine()}")
    recipe = Recipe(compiler=compiler)
    try:
        with progress() as shown:

            def say(text: str) -> None:
                shown.start(text, None)

            if portable:
                paths = list(prebuild(recipe, say=say))
            else:
                paths = [load_native(cache_dir, recipe, say=say).path]
    except NativeUnavailable as error:
        raise ConfigError(f"{error}; serve computes without them") from error
    for path in paths:
        print(path)
    return 0
