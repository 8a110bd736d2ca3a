"""The arena: all K and V of all sequences in one allocation, and the views attention reads.

Paged as in PagedAttention (arXiv 2309.06180), except that a block holds one KV head (`cache/layout.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.arrays import Int32
from cache.errors import CacheError
from cache.layout import KVLayout
from cache.mapping import PAGE, guarded_memory, mapped_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of the arena: k and v are `[N, B, D]`, `N` = total + 1 (the scratch block is the last)."""

    k: Tensor
    v: Tensor


class KVPool:
    """An arena `[2 (K, V), L, total + 1, B, D]` on `device`.

    `total` blocks are handed out; block id `total` is scratch, where padding writes may land. On the
    CPU the arena is a mapping of its own (`cache/mapping.py`).
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
        """Bytes that the device itself says the arena takes; None where it cannot be asked.

        CPU: the mapping that the kernel lists at the arena's address, in whole pages. CUDA: what the caching
        allocator was asked for when it made the arena's block, to the byte.
        """
        start = self.arena.data_ptr()
        if self.device.type == "cpu":
            return mapped_bytes(start)
        if self.device.type == "cuda":
            return _requested_on_gpu(start)
        return None

    @property
    def device_page_bytes(self) -> int:
        """The unit that `device_bytes` counts in."""
        return PAGE if self.device.type == "cpu" else 1

    def resident_bytes(self) -> int | None:
        """Bytes of the arena whose pages are in memory, on a CPU; None on others, where all of it is."""
        if self.device.type != "cpu":
            return None
        return resident_bytes(self.arena.data_ptr(), self.nbytes)

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
    nbytes = math.prod(shape) * layout.dtype.itemsize  # not by the layout's formula, which the audit checks
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=layout.dtype, device=device)
        memory = guarded_memory(nbytes)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # torch: OutOfMemoryError
        raise CacheError(
            f"the KV pool needs {nbytes} bytes on {device} and could not get them ({error}); "
            "ask for a smaller pool"
        ) from error
    flat = torch.frombuffer(memory, dtype=layout.dtype, count=math.prod(shape), offset=PAGE)
    return flat.view(shape)


def _requested_on_gpu(start: int) -> int | None:
    """Bytes asked for when the block at address `start` was made, as PyTorch's CUDA caching allocator noted
    them; None if the block is not its own (another allocator is configured)."""
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
    except RuntimeError:  # cudaMallocAsync keeps no such list
        return None
    for segment in segments:
        for block in segment["blocks"]:
            if block["address"] == start and block["state"] == "active_allocated":
                return int(block["requested_size"])
    return None
