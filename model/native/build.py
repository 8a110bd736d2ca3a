"""The C++ operators: found in the cache and loaded, or compiled into it first.

A library is named by what it is made from: the sources, PyTorch, the C library, the flags and, for `native`,
the CPU; a change in any of these makes another name. The compiler is not among them: another one makes a
library that does the same, so a file that is there is right, and loads in milliseconds without a look at the
compiler. Libraries that are compiled ahead for kinds of CPUs may lie in the package
(`prebuild`): an image has no compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model.native.compiler import COMPILE_SECONDS, FLAGS, compile_library, find_compiler
from model.native.library import (
    NativeLibrary,
    NativeUnavailable,
    file_name,
    load,
    loaded,
    namespace_of,
    seal,
)
from model.native.target import PORTABLE, X86, Target, cpu_flags, target_of
from model.native.trust import OTHERS_WRITE, check_file, check_folder, make_folder
from model.publish import locked, publish_file

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
SOURCES = _HERE / "csrc"
PREBUILT = _HERE / "prebuilt"
_KEPT = 8  # libraries of one namespace in a cache: other versions, machines and branches


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to compile, and for what. `sources` is a folder: `ops.cpp` and what it includes."""

    sources: Path = SOURCES
    vector: str = "native"  # or avx2, avx512: see `model.native.target`
    namespace: str = "headroom"  # the macro HEADROOM_NAMESPACE: operators are torch.ops.NAMESPACE.*
    compiler: str | None = None  # a command as `CXX` spells it; None: the system's
    seconds: float = COMPILE_SECONDS
    extra_flags: tuple[str, ...] = field(default=())

    def target(self) -> Target:
        """Raises ValueError for a `vector` that is none."""
        return target_of(self.vector)


def _silent(text: str) -> None:
    pass


def load_native(
    cache: Path,
    recipe: Recipe | None = None,
    *,
    say: Callable[[str], None] = _silent,
    prebuilt: Path = PREBUILT,
) -> NativeLibrary:
    """The operators of `recipe`: from the package, from `cache`/native, or compiled into that.

    `say` is told before something that takes long. Of several processes one compiles and the others wait.
    Raises NativeUnavailable: no compiler, sources that do not compile, a folder that is not safe, ...
    """
    recipe = recipe or Recipe()
    if recipe.vector == "native":
        found = _prebuilt(recipe, prebuilt)
        if found is not None:
            return found
    target = recipe.target()
    path = cache / "native" / file_name(recipe.namespace, key_of(recipe, target))
    here = loaded(path.name, target.about)
    if here is not None:
        return here
    check_folder(path.parent)
    if check_file(path):
        with contextlib.suppress(NativeUnavailable):  # broken: made again
            return load(path, recipe.namespace, target.about)
    compiler = find_compiler(recipe.compiler)
    make_folder(path.parent)
    build(path, recipe, target, compiler, say)
    return load(path, recipe.namespace, target.about)


def key_of(recipe: Recipe, target: Target) -> str:
    """32 hexadecimal digits over everything that the library depends on but the compiler."""
    digest = hashlib.sha256()
    try:
        for path in sorted(path for path in recipe.sources.iterdir() if path.suffix in (".h", ".cpp")):
            data = path.read_bytes()
            digest.update(f"{path.name} {len(data)}\n".encode() + data)
    except OSError as error:
        raise NativeUnavailable(f"the C++ sources cannot be read: {error.strerror}") from error
    for part in (torch.__version__, platform.machine(), _libc(), *_flags(recipe, target)):
        digest.update(f"{part}\n".encode())
    if target.name == "native":
        digest.update(" ".join(sorted(cpu_flags())).encode())
    return digest.hexdigest()[:32]


def build(
    path: Path, recipe: Recipe, target: Target, compiler: Sequence[str], say: Callable[[str], None]
) -> None:
    """Compile the library to `path`, whole or not at all. Raises NativeUnavailable."""
    source = recipe.sources / "ops.cpp"
    if not source.is_file():
        raise NativeUnavailable(f"{source.name} is not in the package")

    def write(fresh: Path) -> None:
        compile_library(compiler, source, fresh, _flags(recipe, target), recipe.seconds)
        if not fresh.is_file():
            raise NativeUnavailable(f"{compiler[0]} ended well but compiled nothing")
        seal(fresh)
        fresh.chmod(stat.S_IMODE(fresh.stat().st_mode) & ~OTHERS_WRITE)  # else the next start refuses it
        if path.name != file_name(recipe.namespace, key_of(recipe, target)):
            raise NativeUnavailable("the C++ sources were changed while they were compiled; start again")

    before = _stamp(path)
    try:
        with locked(path.parent / ".lock", lambda: say("waiting for another process that compiles")):
            if _stamp(path) != before:
                return  # by another process, meanwhile
            say("compiling the CPU kernels, once (about half a minute)")
            publish_file(path, write)
            _forget(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent} cannot be written: {error.strerror}") from error


def prebuild(recipe: Recipe, folder: Path = PREBUILT, say: Callable[[str], None] = _silent) -> Sequence[Path]:
    """Compile for each kind of x86-64 CPU, into the package, for all its users; the files.

    `load_native` takes the best one that its CPU can run. Raises NativeUnavailable.
    """
    if platform.machine() not in X86:
        raise NativeUnavailable(f"only for kinds of x86-64 CPUs ahead of time, this is {platform.machine()}")
    compiler = find_compiler(recipe.compiler)
    made = []
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be made: {error.strerror}") from error
    for target in PORTABLE:
        path = folder / file_name(recipe.namespace, key_of(recipe, target))
        build(path, recipe, target, compiler, say)
        made.append(path)
    return made


def _prebuilt(recipe: Recipe, folder: Path) -> NativeLibrary | None:
    """The best library in the package that this CPU can run. Who can write there could change this file too,
    so there is nothing to check."""
    if not folder.is_dir():
        return None
    cpu = cpu_flags()
    for target in PORTABLE:
        path = folder / file_name(recipe.namespace, key_of(recipe, target))
        if target.runs_on(cpu) and path.is_file():
            about = f"{target.about}, with the package"
            try:
                return loaded(path.name, about) or load(path, recipe.namespace, about)
            except NativeUnavailable as error:
                logger.warning("%s", error)
    return None


def _flags(recipe: Recipe, target: Target) -> tuple[str, ...]:
    macro = f"-DHEADROOM_NAMESPACE={recipe.namespace}"
    return (*FLAGS, *target.flags, macro, *recipe.extra_flags)


def _libc() -> str:
    """Version of the C library that a library is linked with: a cache may be shared by machines."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _forget(newest: Path) -> None:
    """Remove all but the newest libraries beside `newest`; a process that has one loaded keeps it."""
    of_same = [p for p in newest.parent.glob("*.so") if namespace_of(p) == namespace_of(newest)]
    for path in sorted(of_same, key=lambda p: p.stat().st_mtime_ns, reverse=True)[_KEPT:]:
        path.unlink(missing_ok=True)
