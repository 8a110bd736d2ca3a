"""Linear backends: the packed one computes what the plain one does, and the choice says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import model.linear
from model.linear import Linear, PackedBackend, PlainBackend
from model.linear_choice import choose_linear_backend
from tests.support.decoding import load_decoder, native_heads, run_alone, some_ids
from tests.support.equality import assert_bf16_logits
from tests.support.reference import load_reference
from tests.support.tensors import plain, table

CPU = torch.device("cpu")
PACKED = choose_linear_backend(CPU, torch.bfloat16)
needs_packed = pytest.mark.skipif(
    PACKED.name == "torch", reason=f"packed linears do not run on this machine ({PACKED.reason})"
)
PLAIN = PlainBackend(reason="the yardstick")


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@needs_packed
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 16, 17, 64, 200])
@pytest.mark.parametrize(("out", "into"), [(960, 576), (48, 64), (33, 50), (1, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_is_as_exact_as_plain(out: int, into: int, rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(out * rows)
    weight = torch.randn(out, into, generator=generator).bfloat16()
    bias = torch.randn(out, generator=generator).bfloat16() if biased else None
    x = torch.randn(rows, into, generator=generator).bfloat16()
    packed, plain = PACKED.pack(weight, bias), PLAIN.pack(weight, bias)
    expected = exact(x, weight, bias)
    # One rounding of an fp32 sum: half a unit in the last of bfloat16's 8 bits, and a little for the sum.
    allowed = expected.abs() * 2**-8 + 1e-4 * into**0.5
    for linear in (packed, plain):
        product = linear(x)
        assert product.shape == (rows, out) and product.dtype == torch.bfloat16
        assert bool(((product.double() - expected).abs() <= allowed).all())
        assert linear.out_features == out
        assert linear.nbytes == 2 * (out * into + (out if biased else 0))


@needs_packed
def test_a_shared_weight_is_not_copied() -> None:
    given = torch.randn(64, 32).bfloat16()
    embed, head = PACKED.pack_tied(given)
    assert table(embed) is given and plain(head).weight is given


@needs_packed
def test_a_whole_model_on_packed_weights(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    for settings in ({"family": "qwen2"}, {"family": "llama", "tie_word_embeddings": True}):
        folder = tiny(hidden=128, layers=4, dtype=torch.bfloat16, std=0.1, **settings)
        packed = load_decoder(folder, torch.bfloat16, PACKED)
        plain = load_decoder(folder, torch.bfloat16, PLAIN)
        ids = some_ids(200)
        expected = load_reference(folder).logits(ids)
        for linear in (packed, plain):
            ours = run_alone(linear, ids, native_heads(linear), 64)
            assert_bf16_logits(ours, load_reference(folder, torch.bfloat16).logits(ids), expected)
        assert packed.weights.nbytes == plain.weights.nbytes


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cpu", torch.float32, "torch's own matrix products: no native operators were given"),
        ("cpu", torch.float16, "torch's own matrix products: no kernels for float16"),
        ("cuda", torch.bfloat16, "torch's own bfloat16 matrix products on cuda"),
    ],
)
def test_the_choice_says_why(device: str, dtype: torch.dtype, reason: str) -> None:
    chosen = choose_linear_backend(torch.device(device), dtype)
    assert (chosen.name, chosen.reason) == ("torch", reason)


def test_a_machine_that_cannot_pack_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PackedBackend, *args: object, **kwargs: object) -> Linear:
        raise RuntimeError("no such operator\nand a long story")

    monkeypatch.setattr(model.linear.PackedBackend, "pack", missing)
    chosen = choose_linear_backend(CPU, torch.bfloat16)
    assert chosen.name == "torch"
    assert chosen.reason.startswith("no packed weights: ") and "story" not in chosen.reason


@needs_packed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_fp32_products_lose_nothing_to_the_weights_dtype(dtype: torch.dtype, rows: int, biased: bool) -> None:
    x, weight = torch.randn(rows, 576).to(dtype), torch.randn(400, 576).to(dtype)
    bias = torch.randn(400).to(dtype) if biased else None
    for backend in (PLAIN, PACKED) if dtype == torch.bfloat16 else (PLAIN,):
        product = backend.pack(weight.clone(), bias).fp32(x)
        assert product.dtype == torch.float32
        # Twice the 8 bits of bfloat16 on sums that reach 100; one rounding of the sum would leave 0.25.
        assert float((product.double() - exact(x, weight, bias)).abs().max()) < 2e-3
