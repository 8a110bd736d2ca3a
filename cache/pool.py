"""The arena: all K and V of all sequences in one allocation, and the views attention reads.

Paged as in PagedAttention (arXiv 2309.06180), except that a block holds one KV head (`cache/layout.py`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cache.arrays import Int32
from cache.errors import CacheError
from cache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of the arena: k and v are `[N, B, D]`, `N` = total + 1 (the scratch block is the last)."""

    k: Tensor
    v: Tensor


class KVPool:
    """An arena `[2 (K, V), L, total + 1, B, D]` on `device`.

    `total` blocks are handed out; block id `total` is scratch, where padding writes may land. On the
    CPU the arena is an anonymous mapping, so that a page takes memory only once a token reaches it.
    Raises `CacheError` when `total` is below 1 or the device cannot give that much memory.
    """

    def __init__(self, layout: KVLayout, total: int, device: torch.device) -> None:
        if total < 1:
            raise CacheError(f"a KV pool needs at least 1 block, got {total}")
        self.layout = layout
        self.total = total
        self.scratch_block = total
        self.device = device
        self.arena = _allocate(layout, total, device)
        self.layers = tuple(
            LayerView(self.arena[0, layer], self.arena[1, layer]) for layer in range(layout.num_layers)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arena's storage, the scratch block included."""
        return self.arena.untyped_storage().nbytes()

    def device_bytes(self) -> int | None:
        """Bytes that the system itself says the arena takes; None where it cannot be asked.

        CPU: the part of the process's memory map that covers the arena. CUDA: the caching allocator's
        block that holds it (rounded up by the allocator).
        """
        start = self.arena.data_ptr()
        if self.device.type == "cpu":
            return _mapped_bytes(start, start + self.nbytes)
        if self.device.type == "cuda":
            return _cuda_bytes(start)
        return None

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copies blocks `src[i]` to `dst[i]` in every layer, K and V.

        All sources are read before any destination is written, so a block may be both.
        """
        if len(src) == 0:
            return
        from_ids = torch.from_numpy(src).to(device=self.device, dtype=torch.int64)
        to_ids = torch.from_numpy(dst).to(device=self.device, dtype=torch.int64)
        self.arena.index_copy_(2, to_ids, self.arena.index_select(2, from_ids))


def _allocate(layout: KVLayout, total: int, device: torch.device) -> Tensor:
    shape = (2, layout.num_layers, total + 1, layout.block_size, layout.head_dim)
    nbytes = layout.arena_bytes(total)
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=layout.dtype, device=device)
        # Private, so that a child process forked later never writes into the parent's cache.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # torch: OutOfMemoryError
        raise CacheError(
            f"the KV pool needs {nbytes} bytes on {device} and could not get them ({error}); "
            "ask for a smaller pool"
        ) from error
    return torch.frombuffer(memory, dtype=layout.dtype).view(shape)


def _mapped_bytes(start: int, stop: int) -> int | None:
    """Bytes of `[start, stop)` that the kernel lists as readable and writable in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    covered = 0
    for line in lines:
        bounds, permissions = line.split(maxsplit=2)[:2]
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if permissions.startswith("rw") and low < stop and high > start:
            # The kernel joins neighbouring anonymous mappings, so only the overlap is ours.
            covered += min(high, stop) - max(low, start)
    return covered


def _cuda_bytes(start: int) -> int | None:
    """Size of the CUDA caching allocator's block that begins at address `start`."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        address = int(segment["address"])
        if not address <= start < address + int(segment["total_size"]):
            continue
        for block in segment["blocks"]:
            if address == start and block["state"] == "active_allocated":
                return int(block["size"])
            address += int(block["size"])
    return None
