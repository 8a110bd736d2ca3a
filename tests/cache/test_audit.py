"""The arena's size by three witnesses: each of them can be the one that is wrong, and is then found out."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cache import mapping
from cache.audit import Audit, audit, summary, verify
from cache.errors import CacheError
from cache.layout import KVLayout, LayerGroup
from cache.mapping import PAGE, in_pages, mapped_bytes, resident_bytes
from cache.pool import KVPool
from tests.support.cache_harness import CPU, make_manager


def smol_layout() -> KVLayout:
    """SmolLM2-135M in bf16: 122,880 bytes a block, 30 pages of 4 KiB."""
    return KVLayout((LayerGroup(tuple(range(30)), 3, 64),), 16, torch.bfloat16)


def odd_layout() -> KVLayout:
    """1,920 bytes a block: an arena of them ends within a page."""
    return KVLayout((LayerGroup((0, 1, 2), 1, 10),), 16, torch.bfloat16)


@pytest.mark.parametrize("layout", [smol_layout(), odd_layout()], ids=["whole pages", "part of a page"])
@pytest.mark.parametrize("total", [1, 7, 500])
def test_the_three_agree(layout: KVLayout, total: int) -> None:
    pool = KVPool(layout, total, CPU)
    found = audit(layout, pool)
    size = (total + 1) * layout.block_bytes
    assert found == Audit(size, size, -(-size // PAGE) * PAGE, device_page_bytes=PAGE, resident_bytes=0)
    assert found.agrees
    verify(found)
    assert summary(found) == f"{size:,} bytes by formula, arena and device"


def test_neighbours_are_told_apart() -> None:
    """Arenas made one after the other lie side by side, and the kernel would list them as one mapping."""
    pools = [KVPool(smol_layout(), total, CPU) for total in (3, 1, 8, 8)]
    for pool in pools:
        assert pool.device_bytes() == pool.nbytes == (pool.total + 1) * 122_880


SIZE = 11 * 122_880
WRONGS: dict[str, dict[str, Any]] = {
    "the formula": {"predicted_bytes": SIZE + 122_880},
    "the formula by a byte": {"predicted_bytes": SIZE - 1},
    "the arena": {"arena_bytes": SIZE - 122_880},
    "the arena by a byte": {"arena_bytes": SIZE + 1},
    "the device": {"device_bytes": SIZE - PAGE},
    "the device by a page": {"device_bytes": SIZE + PAGE},
    "the device, which says nothing is there": {"device_bytes": 0},
    "a device that counts bytes": {"device_page_bytes": 1, "device_bytes": SIZE + 1},
    "the arena, and the device cannot be asked": {"arena_bytes": SIZE + 1, "device_bytes": None},
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_a_witness_that_disagrees(wrong: str) -> None:
    sizes = {"predicted_bytes": SIZE, "arena_bytes": SIZE, "device_bytes": SIZE, "device_page_bytes": PAGE}
    verify(Audit(**sizes))
    found = Audit(**(sizes | WRONGS[wrong]))
    assert not found.agrees
    with pytest.raises(CacheError) as caught:
        verify(found)
    line = str(caught.value)
    assert "\n" not in line
    assert f"formula gives {found.predicted_bytes:,} bytes" in line
    assert f"arena has {found.arena_bytes:,}," in line
    device = "cannot be asked" if found.device_bytes is None else f"reports {found.device_bytes:,}"
    assert f"device {device}" in line


def test_a_device_that_cannot_be_asked_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(smol_layout(), 2, torch.device("meta"))
    found = audit(pool.layout, pool)
    assert found == Audit(3 * 122_880, 3 * 122_880, None) and found.agrees
    verify(found)
    assert summary(found) == "368,640 bytes by formula and arena; this device cannot be asked"
    assert mapped_bytes(0, maps=Path("/nowhere/maps")) is None
    monkeypatch.setattr(mapping.ctypes, "CDLL", lambda *_: object())
    assert resident_bytes(0, PAGE) is None


def test_what_the_gpu_allocator_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields are those of `torch._utils._Block`; its sizes are rounded up, requests are not."""
    pool = KVPool(odd_layout(), 10, CPU)
    start, free, live = pool.arena.data_ptr(), "inactive", "active_allocated"
    blocks = [
        {"address": start - 512, "size": 512, "requested_size": 500, "state": live},
        {"address": start, "size": 2 << 20, "requested_size": 11 * 1920, "state": live},
        {"address": start + (2 << 20), "size": 2 << 20, "requested_size": 9, "state": free},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **_: [{"blocks": []}, {"blocks": blocks}])
    pool.device = torch.device("cuda")
    found = audit(pool.layout, pool)
    assert found == Audit(21_120, 21_120, 21_120) and found.agrees
    blocks[1]["requested_size"] = 21_121
    assert not audit(pool.layout, pool).agrees, "on a GPU the number is exact"
    blocks[1]["state"] = free
    assert pool.device_bytes() is None

    def no_list(**_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", no_list)
    assert audit(pool.layout, pool).device_bytes is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("total", [1, 10, 5000])
def test_on_a_gpu_the_request_is_exact(total: int) -> None:
    pool = KVPool(odd_layout(), total, torch.device("cuda"))
    size = (total + 1) * 1920
    assert audit(pool.layout, pool) == Audit(size, size, size)
    del pool
    torch.cuda.empty_cache()


def test_an_arena_of_another_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, broken in each of the three places."""
    pool = KVPool(smol_layout(), 10, CPU)
    whole = pool.arena
    pool.arena = whole.narrow(0, 0, 1).clone()  # half of it, on the heap: the kernel lists no such mapping
    assert audit(pool.layout, pool).arena_bytes == SIZE // 2
    with pytest.raises(CacheError, match="arena has 675,840"):
        verify(audit(pool.layout, pool))
    pool.arena = whole
    verify(audit(pool.layout, pool))
    pool.total = 9
    with pytest.raises(
        CacheError, match=r"formula gives 1,228,800 bytes, the arena has 1,351,680, the device"
    ):
        verify(audit(pool.layout, pool))
    pool.total = 10
    with monkeypatch.context() as patch:
        patch.setattr(KVLayout, "block_bytes", property(lambda layout: 30 * 16 * 64 * 2))  # K alone
        with pytest.raises(CacheError, match="formula gives 675,840 bytes, the arena has 1,351,680, the dev"):
            verify(audit(pool.layout, KVPool(smol_layout(), 10, CPU)))
    libc, middle = ctypes.CDLL(None), whole.data_ptr() + 100 * PAGE
    assert libc.mprotect(ctypes.c_void_p(middle), ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
    with pytest.raises(CacheError, match=f"device reports {100 * PAGE:,} in pages of {PAGE:,}"):
        verify(audit(pool.layout, pool))


def test_resident_bytes_are_the_pages_that_were_touched() -> None:
    pool = KVPool(smol_layout(), 99, CPU)
    assert pool.resident_bytes() == 0
    pool.layers[3].k[50, 5, 7] = 1  # one element: one page
    assert pool.resident_bytes() == PAGE
    pool.arena[0].fill_(1)
    assert pool.resident_bytes() == pool.nbytes // 2 == 50 * 122_880
    pool.arena.fill_(1)
    assert pool.resident_bytes() == pool.nbytes
    end = KVPool(odd_layout(), 10, CPU)
    end.arena.fill_(1)
    assert end.resident_bytes() == in_pages(end.nbytes)


def test_an_audit_of_two_gibibytes_is_quick() -> None:
    """It is polled. Measured at 2 ms, with every page in memory or none."""
    layout = smol_layout()
    pool = KVPool(layout, layout.total_blocks(2 << 30), CPU)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        verify(audit(layout, pool))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.020


def test_the_report_says_whether_the_three_agree() -> None:
    """A block of this layout is 2 * 2 * 4 * 8 bytes."""
    manager = make_manager(60)
    told = manager.report().to_dict()["audit"]
    assert told == {
        "predicted_bytes": 61 * 128,
        "arena_bytes": 61 * 128,
        "device_bytes": in_pages(61 * 128),
        "device_page_bytes": PAGE,
        "resident_bytes": 0,
        "agrees": True,
    }
    manager.pool.total += 1
    assert manager.report().to_dict()["audit"]["agrees"] is False


@pytest.mark.parametrize(("place", "ends"), [("-1", True), ("0", False), ("21119", False), ("pages", True)])
def test_the_guards_stop_a_stray_write(place: str, ends: bool) -> None:
    """A byte before the arena or after its last page ends the process; the first and the last are its own."""
    program = f"""if True:
        import ctypes
        from cache.mapping import PAGE, guarded_memory, in_pages
        memory, pages = guarded_memory(21120), in_pages(21120)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PAGE
        ctypes.memset(start + ({place}), 1, 1)
    """
    code = subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode
    assert code == (-signal.SIGSEGV if ends else 0)
