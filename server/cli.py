"""`headroom`: the one console script. Only this file reads argv and the environment.

It imports next to nothing: until its handlers are there, a Ctrl-C would be told with a traceback.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Sequence

from server.commands import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 (it failed), 2 (used wrongly), 130 or 143 (interrupted)."""
    interrupts.end_at_once()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            atexit.register(interrupts.ignore_them)  # the last one in is called first, before torch's
            interrupts.end_at_once(silently=True)  # an echo of the signal, or threads that do not end
    except KeyboardInterrupt:
        print("\nheadroom: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left
        _drop_unwritten()
        return 1
    except Exception as error:
        message = _for_user(error)
        if message is None:
            raise
        print(f"{' '.join(('headroom', *words[:1]))}: {message}", file=sys.stderr)
        _drop_unwritten()
        return 1


def _run(words: Sequence[str]) -> int:
    # Read when PyTorch is imported: its OpenMP threads would look for work for a millisecond after each
    # operator, on cores that the kernels in C++ and the network need (half of a decode step at batch 16).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what this terminal cannot show
    from server.commands.words import read

    job = read(words, os.environ)
    interrupts.raise_them()
    code = job()
    sys.stdout.flush()  # here, where a full disk is still told in one line
    return code


def _drop_unwritten() -> None:
    """What nobody takes is not tried again when Python ends, which would say so with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_memory(error: Exception) -> bool:
    """Whether there was not enough; torch has a class of its own for a GPU's, and none for the CPU's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _for_user(error: Exception) -> str | None:
    """The one line for a fault that the user can mend; None for a bug of ours."""
    from model.errors import ModelError
    from server.engine.errors import ConfigError
    from server.text.errors import GenerationError, RequestError

    if isinstance(error, (ModelError, ConfigError, RequestError, GenerationError)):
        return " ".join(str(error).split())
    if _is_memory(error):
        return "not enough memory for this model and its pool; lower --kv-memory, or take a smaller model"
    if isinstance(error, OSError) and error.strerror is not None:  # a disk, a pipe, a limit of the system
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return None


if __name__ == "__main__":
    sys.exit(main())
