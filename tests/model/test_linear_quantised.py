"""Products with weights of 4 and 8 bits: both backends give what the made-again weight gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.linear import LinearBackend
from model.linear_quantised import QuantisedBackend
from model.linear_quantised_native import (
    NativeQuantisedBackend,
    PanelledEmbedding,
    choose_quantised_backend,
    to_code_panels,
)
from model.native.library import NativeLibrary
from model.quantise import Bits, quantise
from tests.support.native import avx2, native

CPU = torch.device("cpu")
BITS: tuple[Bits, ...] = (4, 8)
BUILDS = {"native": native, "avx2": avx2}
KINDS = ("torch", *BUILDS)
# [out, in]: whole, ragged in outputs, in inputs, in both, and smaller than one panel and one group.
SHAPES = ((960, 576), (33, 64), (32, 257), (101, 50), (1, 1), (3, 32))


def backend(kind: str, bits: Bits) -> LinearBackend:
    if kind == "torch":
        return QuantisedBackend(bits, reason="test")
    library = BUILDS[kind]()
    if isinstance(library, str):
        pytest.skip(library)
    return NativeQuantisedBackend(bits, "test", library)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def exact(x: Tensor, weight: Tensor, bits: Bits, bias: Tensor | None = None) -> Tensor:
    """In fp64 over the codes' own numbers."""
    product = x.double() @ quantise(weight, bits).dequantise(torch.float64).T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out", "into"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_codes(kind: str, bits: Bits, out: int, into: int, biased: bool) -> None:
    weight, bias = draw(out, into), draw(out) if biased else None
    linear = backend(kind, bits).pack(weight, bias)
    assert linear.out_features == out
    assert linear.nbytes == quantise(weight, bits).nbytes + (2 * out if biased else 0)
    for rows in (0, 1, 2, 3, 12, 13, 31, 70):
        x = draw(rows, into)
        expected = exact(x, weight, bits, bias)
        wide = linear.fp32(x)
        assert wide.dtype == torch.float32 and wide.shape == (rows, out)
        assert float((wide.double() - expected).abs().max() if rows else 0.0) < 3e-5 * into**0.5
        narrow = linear(x)
        assert narrow.dtype == torch.bfloat16 and narrow.shape == (rows, out)
        # The plain path rounds each made weight (2^-9 of it) and the sum, the native one the sum only.
        size = x.double().abs() @ quantise(weight, bits).dequantise(torch.float64).abs().T
        allowed = expected.abs() * 2**-8 + (size * 2**-8 if kind == "torch" else 0) + 1e-4 * into**0.5
        assert bool(((narrow.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_the_same_in_any_batch(kind: str, bits: Bits) -> None:
    """To the bit, in C++: a weight's codes and the order of sums do not depend on who else is there."""
    weight, x = draw(112, 288), draw(150, 288)
    linear = backend(kind, bits).pack(weight, None)
    alone = torch.cat([linear.fp32(row.unsqueeze(0)) for row in x])
    for rows in (2, 7, 12, 13, 40, 64, 65, 150):
        assert torch.equal(linear.fp32(x[:rows]), alone[:rows])


@pytest.mark.parametrize("bits", BITS)
def test_any_number_of_threads(bits: Bits) -> None:
    weight, x = draw(700, 96), draw(5, 96)
    linear = backend("native", bits).pack(weight, None)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear.fp32(x)
        torch.set_num_threads(3)
        assert torch.equal(linear.fp32(x), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inner", "into"), [(96, 64), (37, 64), (16, 45), (5, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_gate_and_up(kind: str, bits: Bits, inner: int, into: int, biased: bool) -> None:
    weight, bias = draw(2 * inner, into), draw(2 * inner) if biased else None
    gated = backend(kind, bits).pack_gated(weight, bias)
    for rows in (1, 5, 14):
        x = draw(rows, into)
        gate, up = exact(x, weight, bits, bias).chunk(2, dim=1)
        expected = F.silu(gate) * up
        found = gated(x)
        assert found.shape == (rows, inner) and found.dtype == torch.bfloat16
        error = float((found.double() - expected).abs().max())
        assert error <= 0.02 * float(expected.abs().max().clamp(min=1))
    assert gated.nbytes == quantise(weight, bits).nbytes + (4 * inner if biased else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tied", [True, False])
def test_both_ends_have_eight_bits(kind: str, bits: Bits, tied: bool) -> None:
    table, head = draw(77, 40), draw(77, 40, seed=1)
    chosen = backend(kind, bits)
    embedding, lm_head = chosen.pack_tied(table) if tied else chosen.pack_untied(table, head)
    ids = torch.tensor([[0, 76, 15], [16, 17, 0]])
    assert torch.equal(embedding.rows(ids), quantise(table, 8).dequantise(torch.bfloat16)[ids])
    assert (embedding.size, embedding.dtype, embedding.device) == (77, torch.bfloat16, CPU)
    x = draw(3, 40)
    expected = exact(x, table if tied else head, 8)
    assert float((lm_head.fp32(x).double() - expected).abs().max()) < 1e-3
    assert embedding.nbytes == lm_head.nbytes == quantise(table, 8).nbytes


@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_rows_are_found_among_the_panels(out: int, into: int) -> None:
    codes = quantise(draw(out, into), 8)
    embedding = PanelledEmbedding(to_code_panels(codes), out, codes.nbytes, torch.float32)
    assert torch.equal(embedding.rows(torch.arange(out)), codes.dequantise(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_other_dtypes_run_through_torch(bits: Bits, dtype: torch.dtype) -> None:
    weight, x = draw(40, 70).to(dtype), draw(3, 70).to(dtype)
    chosen = choose_quantised_backend(bits, CPU, dtype, native())
    assert chosen.name == f"torch-int{bits}" and str(dtype).removeprefix("torch.") in chosen.reason
    product = chosen.pack(weight, None)(x)
    assert product.dtype == dtype
    assert float((product.double() - exact(x, weight, bits)).abs().max()) < (
        1e-4 if dtype.itemsize == 4 else 0.1
    )


def test_the_choice_says_why() -> None:
    chosen = choose_quantised_backend(4, CPU, torch.bfloat16, "no C++ compiler")
    assert chosen.name == "torch-int4" and chosen.reason.endswith(": no C++ compiler")
    chosen = choose_quantised_backend(8, torch.device("cuda"), torch.bfloat16, "unused")
    assert chosen.name == "torch-int8" and "cuda" in chosen.reason
    library = native()
    if isinstance(library, NativeLibrary):
        chosen = choose_quantised_backend(4, CPU, torch.bfloat16, library)
        assert chosen.name == "native-int4" and library.about in chosen.reason


def test_codes_that_do_not_fit_are_refused() -> None:
    """Before any memory is read past its end."""
    library = native()
    if isinstance(library, str):
        pytest.skip(library)
    panels = to_code_panels(quantise(draw(16, 64), 4))
    make = library.classes.Weight
    make(panels.lanes, None, 16, 64, panels.scales)
    for lanes, outputs, inputs, scales in (
        (panels.lanes, 17, 64, panels.scales),
        (panels.lanes, 16, 96, panels.scales),
        (panels.lanes, 16, 63, panels.scales),
        (panels.lanes, 16, 64, panels.scales[:, :1]),
        (panels.lanes[:, :, :2], 16, 64, panels.scales),
        (panels.lanes.float(), 16, 64, panels.scales),
    ):
        with pytest.raises(RuntimeError, match="headroom:"):
            make(lanes, None, outputs, inputs, scales)
