"""The pool of the kernels: whoever takes which chunk, the numbers are those of one thread, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.attention.native import NativeAttention
from model.heads import NativeHeads
from model.linear_native import NativeLinearBackend
from model.native.library import NativeLibrary
from tests.model.test_native_layers import with_layers
from tests.support.decoding import new_rig, run_step, some_ids
from tests.support.native import native

DTYPES = (torch.bfloat16, torch.float32)
COUNTS = (3, 5)


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library() -> NativeLibrary:
    found = native()
    if not isinstance(found, NativeLibrary):
        pytest.skip(found)
    return found


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_threads(count: int, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    torch.set_num_threads(count)
    return work()


def assert_same_bits(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        bits = torch.int16 if one.dtype == torch.bfloat16 else torch.int32  # of what is NaN too
        assert one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(library: NativeLibrary, dtype: torch.dtype) -> None:
    """Also while the number of threads changes, up and down."""
    backend = NativeLinearBackend(library, reason="test")
    linears = [backend.pack(drawn(dtype, out, 64), drawn(dtype, out)) for out in (960, 33)]
    gated = backend.pack_gated(drawn(dtype, 2 * 200, 64), None)
    inputs = [drawn(dtype, tokens, 64, seed=tokens) for tokens in (1, 7, 64, 200)]

    def products() -> list[Tensor]:
        return [operator(x) for x in inputs for operator in (*linears, gated, linears[0].fp32)]

    alone = with_threads(1, products)
    for count in (*COUNTS, 1, 2, 5, 1, 4):
        assert_same_bits(with_threads(count, products), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(tiny: Callable[..., Path], library: NativeLibrary, dtype: torch.dtype) -> None:
    """Chunks that begin at an odd place: two tokens whose bfloat16 V share a word may be two threads' work.
    What they left in the cache is compared too."""
    folder = tiny(hidden=128, layers=2, head_dim=32, kv_heads=1, dtype=dtype)
    decoder, heads = with_layers(folder, library, dtype), NativeHeads(1)

    def answers() -> list[Tensor]:
        rig = new_rig(decoder, block=16)
        opened = [rig.open(heads.kv_heads) for _ in range(2)]
        found: list[Tensor] = []
        for number, counts in enumerate([(17, 5), (401, 31), (1, 1), (63, 1), (1, 32)]):
            ids = [some_ids(count, seed=10 * number + at) for at, count in enumerate(counts)]
            work = [(sequence, each, heads) for sequence, each in zip(opened, ids, strict=True)]
            found += run_step(decoder, rig, work, NativeAttention(library))
        return [
            *found,
            *(layer.k.clone() for layer in rig.layers),
            *(layer.v.clone() for layer in rig.layers),
        ]

    alone = with_threads(1, answers)
    for count in COUNTS:
        for _ in range(40):
            assert_same_bits(with_threads(count, answers), alone)


def test_two_callers_at_once(library: NativeLibrary) -> None:
    """They take turns with the pool, and each gets its own numbers."""
    backend = NativeLinearBackend(library, reason="test")
    linears = [backend.pack(drawn(torch.bfloat16, 960, 256, seed=seed), None) for seed in (1, 2)]
    x = drawn(torch.bfloat16, 64, 256)
    expected = [with_threads(1, lambda linear=linear: [linear(x)]) for linear in linears]  # type: ignore[misc]
    assert not torch.equal(expected[0][0], expected[1][0])
    right = [0, 0]
    begin = threading.Barrier(2, timeout=60)

    def call(caller: int) -> None:
        torch.set_num_threads(COUNTS[caller])
        begin.wait()
        for _ in range(300):
            right[caller] += torch.equal(linears[caller](x), expected[caller][0])

    callers = [threading.Thread(target=call, args=(caller,), daemon=True) for caller in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert right == [300, 300]
