"""Products over packed panels in C++ against exact ones: every height of a tile, ragged shapes, biases, both
builds; and a result that does not depend on who else is in the step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.linear_native import NativeLinear, NativeLinearBackend, PanelEmbedding, rows_of_panels
from model.native.library import LANES, NativeLibrary
from tests.support.native import avx2, native
from tests.support.tensors import plain

BUILDS = {"native": native, "avx2": avx2}
SHAPES = [(960, 576), (33, 50), (576, 1536), (16, 2), (1, 64)]
# Relative error of one rounding to the dtype; sums of K products of size 1 add up to 1e-5 * sqrt(K).
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-23}


@pytest.fixture(params=list(BUILDS))
def backend(request: pytest.FixtureRequest) -> NativeLinearBackend:
    library = BUILDS[request.param]()
    if not isinstance(library, NativeLibrary):
        pytest.skip(library)
    return NativeLinearBackend(library, reason="test")


def to_panels(weight: Tensor) -> Tensor:
    """The layout as it is written down: weight `[N, K]` -> `[ceil(N / 16), K / P, 16, P]`."""
    pair = 4 // weight.itemsize
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % LANES)).contiguous()
    lanes = padded.view(torch.int32).view(-1, LANES, weight.shape[1] // pair)  # [N / 16, 16, K / P]
    return lanes.transpose(1, 2).contiguous().view(weight.dtype).view(*lanes.shape[::2], LANES, pair)


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(product: Tensor, exact: Tensor, dtype: torch.dtype, inputs: int) -> None:
    allowed = exact.abs() * ROUNDING[dtype] + 1e-5 * inputs**0.5
    assert bool(((product.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_products(
    backend: NativeLinearBackend, out: int, into: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = drawn(dtype, out, into)
    bias = drawn(dtype, out, seed=1) if biased else None
    linear = backend.pack(weight, bias)
    assert isinstance(linear, NativeLinear)
    assert linear.nbytes == weight.nbytes + (bias.nbytes if bias is not None else 0)
    for tokens in (0, 1, 2, 5, 6, 7, 12, 13, 31, 64):
        x = drawn(dtype, tokens, into, seed=2)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert linear(x).dtype == dtype and linear.fp32(x).dtype == torch.float32
        assert_near(linear(x), exact, dtype, into)
        assert_near(linear.fp32(x), exact, torch.float32, into)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "into"), [(1536, 576), (24, 48), (17, 2), (16, 64)])
def test_gated_products(
    backend: NativeLinearBackend, inner: int, into: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = drawn(dtype, 2 * inner, into)
    bias = drawn(dtype, 2 * inner, seed=1) if biased else None
    gated = backend.pack_gated(weight, bias)
    for tokens in (0, 1, 6, 7, 40):
        x = 0.3 * drawn(dtype, tokens, into, seed=2)
        both = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        gate, up = both.chunk(2, dim=-1)
        exact = F.silu(gate) * up
        allowed = exact.abs() * ROUNDING[dtype] + 1e-6 * (1 + into**0.5) * (1 + up.abs() + gate.abs())
        assert gated(x).shape == (tokens, inner) and gated(x).dtype == dtype
        assert bool(((gated(x).double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_panels_hold_each_number_once(
    backend: NativeLinearBackend, out: int, into: int, dtype: torch.dtype
) -> None:
    """C++ packs as Python does, whose layout is written down; what is packed can be read again."""
    weight = drawn(dtype, out, into)
    panels = to_panels(weight)
    assert torch.equal(backend.library.ops.to_panels(weight), panels)
    for n, k in ((0, 0), (out - 1, into - 1), (out // 2, into // 3)):
        pair = panels.shape[-1]
        assert panels[n // 16, k // pair, n % 16, k % pair] == weight[n, k]
    assert torch.equal(rows_of_panels(panels, torch.arange(out)), weight)
    assert float(panels.float().abs().sum()) == pytest.approx(float(weight.float().abs().sum()), rel=1e-5)


def test_a_tied_table_is_held_once(backend: NativeLinearBackend) -> None:
    weight = drawn(torch.bfloat16, 100, 64)
    embedding, head = backend.pack_tied(weight)
    assert isinstance(embedding, PanelEmbedding) and isinstance(head, NativeLinear)
    assert (embedding.size, embedding.nbytes, head.nbytes) == (100, weight.nbytes, weight.nbytes)
    ids = torch.tensor([[99, 0], [17, 17]])
    assert torch.equal(embedding.rows(ids), weight[ids])
    weight.zero_()  # its own copy by now
    assert bool(embedding.rows(ids).any())


def test_what_settles_is_a_copy_that_lives_as_long_as_it_is_held(backend: NativeLinearBackend) -> None:
    """Small and large ones in one chunk and across several; letting others go hurts none."""
    settle = backend.library.ops.settle
    given = [
        drawn(torch.bfloat16, size, seed=size) for size in (1, 31, 5_000_000, 64, 20_000_000, 3, 9_000_000)
    ]
    kept = [settle(tensor) for tensor in given]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
    del kept[2], given[2]
    kept += [settle(tensor) for tensor in given]
    assert all(torch.equal(one, other) for one, other in zip(kept, 2 * given, strict=True))
    kept[0].zero_()
    assert torch.equal(kept[1], given[1]) and torch.equal(kept[6], given[0])
    assert settle(drawn(torch.float32, 0, 4)).shape == (0, 4)


def test_a_row_is_the_same_alone_and_in_any_crowd(backend: NativeLinearBackend) -> None:
    """To the last bit: the sums of a token do not depend on the tile that it falls in."""
    for dtype in ROUNDING:
        linear = backend.pack(drawn(dtype, 320, 576), None)
        x = drawn(dtype, 64, 576, seed=1)
        together = linear(x)
        for tokens in (1, 2, 6, 11, 63):
            assert torch.equal(linear(x[:tokens]), together[:tokens])
            assert torch.equal(linear(x[-tokens:]), together[-tokens:])


def test_other_shapes_of_input(backend: NativeLinearBackend) -> None:
    """Leading axes stay; an input that is not contiguous is read right."""
    weight = drawn(torch.float32, 48, 32)
    linear, x = backend.pack(weight, None), drawn(torch.float32, 3, 5, 64, seed=1)[..., ::2]
    torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_an_odd_number_of_bfloat16_inputs_goes_to_pytorch(backend: NativeLinearBackend) -> None:
    weight = drawn(torch.bfloat16, 8, 7)
    assert plain(backend.pack(weight, None)).weight is weight


def test_what_does_not_fit_is_an_error(backend: NativeLinearBackend) -> None:
    linear = backend.pack(drawn(torch.bfloat16, 16, 32), None)
    for x in (drawn(torch.bfloat16, 2, 30), drawn(torch.float32, 2, 32)):
        with pytest.raises(RuntimeError, match="headroom: x must"):
            linear(x)
