"""Runs the C++ compiler: one file of operators to one shared library, within a time limit."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from model.native.library import NativeUnavailable

COMPILE_SECONDS = 600.0
# Hidden symbols: two builds in one process share nothing by accident. No warnings, which nobody would read. A
# link that fails is better told now than at the load.
FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-pipe", "-w"),
    *("-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wl,--no-undefined"),
)
_CANDIDATES = ("c++", "g++", "clang++")


def find_compiler(asked: str | None) -> list[str]:
    """The command in words: `asked` (as `CXX` spells it) or the system's own. Raises NativeUnavailable."""
    try:
        words = shlex.split(asked or "")
    except ValueError as error:  # a quote that does not end
        raise NativeUnavailable(f"CXX={asked!r}: {error}") from error
    for name in words[:1] or _CANDIDATES:
        found = shutil.which(name)
        if found is not None:
            return [found, *words[1:]]
    what = (
        f"no C++ compiler {words[0]!r} found" if words else "no C++ compiler found, neither g++ nor clang++"
    )
    raise NativeUnavailable(what)


def compile_library(
    compiler: Sequence[str], source: Path, library: Path, flags: Sequence[str], seconds: float
) -> None:
    """Compile and link `source` against this PyTorch into `library`. Raises NativeUnavailable."""
    # Imported here, as a start with the library in the cache does without; it wants setuptools.
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise NativeUnavailable(f"PyTorch's build tools cannot be imported: {error}") from error

    includes = [word for path in include_paths() for word in ("-isystem", path)]
    libraries = [f"-L{path}" for path in library_paths()]
    command = [*compiler, *FLAGS, *flags, *includes, str(source), "-o", str(library)]
    _run([*command, *libraries, "-lc10", "-ltorch_cpu", "-ltorch"], seconds)


def _run(command: Sequence[str], seconds: float) -> None:
    """Wait for the command, and end it with all that it started when time is up or somebody interrupts."""
    # LC_ALL: its complaints are looked through. A session of its own: it can be ended with its children.
    words = ["env", "LC_ALL=C", *command]
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NativeUnavailable(f"the compiler cannot be started: {error.strerror}") from error
    with process:
        try:
            said = process.communicate(timeout=seconds)[1]
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # ended by itself meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise NativeUnavailable(f"compiling took more than {seconds:.0f} s") from error
            raise
    if process.returncode:
        raise NativeUnavailable(f"compiling failed: {_complaint(said, process.returncode)}")


def _complaint(said: str, code: int) -> str:
    """The line that says what went wrong: the first error, else the last line, else the exit code."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    line = (errors or lines[-1:] or [f"exit code {code}"])[0]
    return line if len(line) <= 200 else f"{line[:199]}…"
