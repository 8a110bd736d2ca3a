"""The operators in C++, compiled at most once for all tests: into the user's cache, as `serve` does."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

from model.fetch import default_cache_dir
from model.native.build import Recipe, load_native
from model.native.compiler import find_compiler
from model.native.library import NativeLibrary, NativeUnavailable
from model.native.target import cpu_flags


def native() -> NativeLibrary | str:
    """The library, loaded into this process, or why there can be none here. Raises NativeUnavailable where
    there should be one: sources that do not compile fail the tests, which would pass without them."""
    return _found(_load(Recipe()))


def avx2() -> NativeLibrary | str:
    """The same for any CPU with AVX2, beside the one above in this process."""
    recipe = Recipe(vector="avx2", namespace="headroom_avx2")
    if not recipe.target().runs_on(cpu_flags()):
        return "this CPU has no AVX2"
    return _found(_load(recipe))


@functools.cache
def _load(recipe: Recipe) -> NativeLibrary | str | NativeUnavailable:
    """Once, whatever comes of it."""
    try:
        return load_native(_cache(), recipe)
    except NativeUnavailable as error:
        try:
            find_compiler(recipe.compiler)
        except NativeUnavailable:
            return str(error)
        return error


def _found(outcome: NativeLibrary | str | NativeUnavailable) -> NativeLibrary | str:
    if isinstance(outcome, NativeUnavailable):
        raise outcome
    return outcome


def _cache() -> Path:
    """The user's cache, or for a home that cannot be written a folder of this run."""
    cache = default_cache_dir(os.environ)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="headroom-test-cache-"))
    return cache


def seed(cache: Path) -> None:
    """Give the empty cache folder `cache` what is compiled already, for a program that a test starts."""
    library = native()
    if isinstance(library, NativeLibrary):
        folder = cache / "native"
        folder.mkdir(mode=0o700, parents=True)
        shutil.copy2(library.path, folder / library.path.name)
