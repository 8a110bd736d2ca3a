"""The arena's memory on a CPU: a mapping between two guard pages, and what the kernel says of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE


def in_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages, in bytes."""
    return -(-nbytes // PAGE) * PAGE


def guarded_memory(nbytes: int) -> mmap.mmap:
    """`nbytes` zeroed bytes at offset `PAGE`, with a page that nobody may touch before and after them.

    The guards set the mapping apart, so that the kernel lists it alone with its own size, and they stop a
    kernel that writes past an end. A page takes memory only once it is touched. The mapping is private: a
    child process forked later never writes into the parent's cache. Raises OSError, OverflowError or
    ValueError where the system cannot give that much.
    """
    size = in_pages(nbytes)
    memory = mmap.mmap(-1, size + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (start, start + PAGE + size):
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


def mapped_bytes(start: int, maps: Path = Path("/proc/self/maps")) -> int | None:
    """Bytes of the writable mapping that begins at address `start`, 0 if none does; None where the system
    keeps no such list (proc(5))."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    end = start
    for line in lines:  # in order of address; the kernel may list one mapping in several pieces
        bounds, permissions = line.split(maxsplit=2)[:2]
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low == end and permissions.startswith("rw"):
            end = high
    return end - start


def resident_bytes(start: int, nbytes: int) -> int | None:
    """Bytes of the pages of `[start, start + nbytes)` that are in memory now; None where the system cannot
    be asked (mincore(2)). `start` is a page's address. 0.4 to 0.9 ms for 2 GiB."""
    present = np.zeros(in_pages(nbytes) // PAGE, dtype=np.uint8)
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return None
    if mincore(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), ctypes.c_void_p(present.ctypes.data)):
        return None
    return int(np.count_nonzero(present & 1)) * PAGE
