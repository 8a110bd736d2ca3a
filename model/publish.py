"""Folders and files that exist whole or not at all, however many processes make them or are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from model.errors import ModelError


def publish_folder(
    final: Path,
    build: Callable[[Path], None],
    is_complete: Callable[[Path], bool],
    waiting: Callable[[], None],
) -> Path:
    """Return `final`, made by `build(empty folder)` unless it is there and `is_complete` already.

    The folder is built beside `final` (same file system) and renamed, so a reader never sees half of one.
    A lock file lets one process build while the others wait (`waiting` is called once, before that); the
    kernel drops the lock of a killed process, whose leftovers the next one removes. Raises ModelError when
    the disk refuses.
    """
    if is_complete(final):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with locked(final.parent / f".{final.name}.lock", waiting):
            if not is_complete(final):
                _build(final, build)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the model to {final}: {error}") from error
    return final


def publish_new_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Make `final` by `build(empty folder)`, in place of nothing but an empty folder.

    The rename refuses a folder that somebody filled meanwhile, so nothing is ever lost. Of a process that
    is killed outright, a folder `NAME.partial-...` stays beside it. Raises ModelError when the disk refuses.
    """
    final = final.resolve()  # `.` and a link to a folder are no names to rename to
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _fresh_folder(f"{final.name}.partial-", final.parent, build) as fresh:
            fresh.rename(final)
        _flush(final.parent)
    except (OSError, SafetensorError) as error:  # the second is a full disk in the words of `save_file`
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ModelError(f"{final} was filled by somebody else meanwhile; it was left alone") from error
        raise ModelError(f"cannot write the model to {final}: {error}") from error


def _build(final: Path, build: Callable[[Path], None]) -> None:
    """Build and rename; the caller holds the lock, so every temporary folder found is a dead process's."""
    prefix = f".{final.name}.tmp-"
    for leftover in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with _fresh_folder(prefix, final.parent, build) as fresh:
        if final.exists():  # incomplete or made by an older version: a rename onto a full folder would fail
            final.rename(fresh.with_name("old"))
        fresh.rename(final)
    _flush(final.parent)


@contextmanager
def _fresh_folder(prefix: str, parent: Path, build: Callable[[Path], None]) -> Iterator[Path]:
    """A folder that `build` has filled, on the disk, inside a temporary one that is removed at the end."""
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        fresh = work / "new"
        fresh.mkdir()
        build(fresh)
        for path in fresh.iterdir():
            _flush(path)
        _flush(fresh)
        yield fresh
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish_file(final: Path, write: Callable[[Path], None]) -> None:
    """Make or replace `final` by `write(path beside it)`, brought to the disk and renamed.

    The caller holds a `locked` that all makers of `final` share. Raises OSError, and whatever `write` raises.
    """
    fresh = final.with_name(f".{final.name}.tmp")  # one name: a dead process's leftover is overwritten
    try:
        write(fresh)
        _flush(fresh)
        fresh.replace(final)
    finally:
        fresh.unlink(missing_ok=True)
    _flush(final.parent)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path`; `waiting` is called before the wait for another's, if there is one.

    The file stays: removed, two processes could each lock one. Raises OSError.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk: a power cut must not leave a renamed, empty one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
