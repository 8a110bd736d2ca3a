"""The arena: its size by every witness, its views, its copies, and its far end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cache.errors import CacheError
from cache.pool import KVPool
from tests.support.cache_harness import CPU, make_layout


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_shapes_and_sizes() -> None:
    layout = make_layout(16, layers=3, head_dim=8, dtype=torch.bfloat16)
    pool = KVPool(layout, 10, CPU)
    assert pool.arena.shape == (2, 3, 11, 16, 8)
    assert pool.arena.dtype == torch.bfloat16
    assert pool.scratch_block == pool.total == 10
    assert pool.nbytes == layout.arena_bytes(10) == 11 * layout.block_bytes
    assert not pool.arena.any()
    assert len(pool.layers) == 3
    pool.layers[1].k[4] = 1
    pool.layers[2].v[10] = 2
    assert pool.arena[0, 1, 4].eq(1).all() and pool.arena[1, 2, 10].eq(2).all()
    assert int(pool.arena.count_nonzero()) == 2 * 16 * 8


def test_the_system_confirms_the_size() -> None:
    pool = KVPool(make_layout(16, head_dim=64, dtype=torch.float16), 1000, CPU)
    reported = pool.device_bytes()
    assert reported is not None
    assert 0 <= reported - pool.nbytes < 4096  # whole pages


def test_other_devices_get_a_zeroed_tensor() -> None:
    pool = KVPool(make_layout(), 5, torch.device("meta"))
    assert pool.arena.device.type == "meta" and pool.arena.shape == (2, 2, 6, 4, 1)
    assert pool.device_bytes() is None


def test_copies_go_over_all_layers_and_read_before_they_write() -> None:
    pool = KVPool(make_layout(2, layers=3, head_dim=4), 6, CPU)
    pool.arena.copy_(torch.arange(pool.arena.numel(), dtype=torch.int64).view(pool.arena.shape))
    before = pool.arena.clone()
    pool.copy_blocks(ids(0, 1, 4), ids(1, 2, 0))  # block 1 is a destination and a source
    assert pool.arena[:, :, 1].equal(before[:, :, 0])
    assert pool.arena[:, :, 2].equal(before[:, :, 1])
    assert pool.arena[:, :, 0].equal(before[:, :, 4])
    assert pool.arena[:, :, 3:].equal(before[:, :, 3:])
    pool.copy_blocks(ids(), ids())


def test_both_ends_of_more_than_two_to_the_31_elements() -> None:
    layout = make_layout(16, layers=1, head_dim=64, dtype=torch.bfloat16)
    held_before = resident_bytes()
    pool = KVPool(layout, 2**20 + 100, CPU)
    assert pool.arena.numel() > 2**31
    last = pool.total - 1
    pool.layers[0].k[0] = 3
    pool.layers[0].v[0] = 5
    pool.copy_blocks(ids(0), ids(last))
    assert pool.layers[0].k[last].eq(3).all() and pool.layers[0].v[last].eq(5).all()
    pool.layers[0].v[last, 15, 63] = 7
    assert pool.arena[1, 0, last, 15, 63] == 7
    assert pool.arena.flatten()[(pool.total + 1) * 16 * 64 * 2 - 16 * 64 - 1] == 7
    assert int(pool.layers[0].k[last - 1].count_nonzero()) == 0
    assert resident_bytes() - held_before < 64 * 2**20  # only what was touched takes memory


def test_a_pool_that_cannot_be() -> None:
    with pytest.raises(CacheError, match="at least 1 block"):
        KVPool(make_layout(), 0, CPU)
    with pytest.raises(CacheError, match="smaller pool"):
        KVPool(make_layout(), 2**56, CPU)
