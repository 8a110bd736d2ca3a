"""Which files may be loaded as code: this user's own, which no other may write, in folders of that kind.

The file, its folder and the folder above are looked at. Those further up are taken on trust, with whoever may
rename in them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from model.native.library import NativeUnavailable

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_folder(folder: Path) -> None:
    """Refuse a folder, or one that it lies in, where others could put a library; none at all is no fault.

    `folder` must be this user's, and writable by nobody else. The folder above may be written by its group,
    as a umask makes it, but not be another user's, nor open to all. Raises NativeUnavailable.
    """
    status = _look(folder)
    if status is not None:
        if not stat.S_ISDIR(status.st_mode):
            raise NativeUnavailable(f"{folder} is a link or no folder; remove it")
        _check(folder, status, OTHERS_WRITE)
    above = _look(folder.parent, follow=True)
    if above is not None:
        forbidden = 0 if above.st_mode & stat.S_ISVTX else stat.S_IWOTH
        _check(folder.parent, above, forbidden, root=True)


def make_folder(folder: Path) -> None:
    """Make `folder` for this user alone unless it is there, and check it. Raises NativeUnavailable."""
    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be made: {error.strerror}") from error
    check_folder(folder)


def check_file(path: Path) -> bool:
    """Whether `path` is there. Raises NativeUnavailable if somebody else may have written it."""
    status = _look(path)
    if status is None:
        return False
    if not stat.S_ISREG(status.st_mode):
        raise NativeUnavailable(f"{path} is a link or no file; remove it")
    _check(path, status, OTHERS_WRITE)
    return True


def _check(path: Path, status: os.stat_result, forbidden: int, root: bool = False) -> None:
    if status.st_uid != os.geteuid() and not (root and status.st_uid == 0):
        raise NativeUnavailable(f"{path} belongs to another user, whose code is not loaded")
    if status.st_mode & forbidden:
        raise NativeUnavailable(
            f"{path} can be written by others, mode {stat.S_IMODE(status.st_mode):o}: their code is not "
            f"loaded; chmod go-w"
        )


def _look(path: Path, follow: bool = False) -> os.stat_result | None:
    try:
        return path.stat() if follow else path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be read: {error.strerror}") from error
