"""Weights in 4 and 8 bits: how far off each may be, by arithmetic, and what comes back exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.quantise import GROUP, Bits, Quantised, quantise

FP32 = torch.float32


def some_weight(outputs: int, inputs: int, scale: float = 0.05, seed: int = 0) -> Tensor:
    """Like a checkpoint's: a few outputs and a few numbers are much larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * scale
    weight[::7] *= 20
    weight[torch.rand(outputs, inputs, generator=generator) < 0.01] *= 8
    return weight


def grouped(weight: Tensor) -> list[Tensor]:
    """The groups of all outputs, `[N, up to 32]` each."""
    return list(weight.split(GROUP, dim=1))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 31), (5, 32), (16, 33), (1030, 100), (2, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_off_by_half_a_step_at_most(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = some_weight(outputs, inputs).to(dtype)
    again = quantise(weight, 8).dequantise(FP32)
    assert again.shape == weight.shape
    for had, got in zip(grouped(weight.float()), grouped(again), strict=True):
        # 127 steps reach the largest; rounding the step up to bfloat16 makes it 2^-7 larger at most.
        step = had.abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)
        assert bool(((had - got).abs() <= step / 2 * 1.0001).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 31), (5, 32), (16, 33), (1030, 100), (2, 576)])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_int4_is_near_half_a_step_and_no_worse_than_min_and_max(
    outputs: int, inputs: int, shift: float
) -> None:
    """A group's rms error, least squares, is at most that of 16 even levels from its smallest to its largest
    weight, but for what the 8 bits of scale and middle take: 7.5 steps and the middle, each to 2^-9."""
    weight = some_weight(outputs, inputs) + shift
    again = quantise(weight, 4).dequantise(FP32)
    for had, got in zip(grouped(weight), grouped(again), strict=True):
        low, high = had.amin(1, keepdim=True), had.amax(1, keepdim=True)
        step = (high - low) / 15
        even = ((had - low) / step.clamp(min=1e-30)).round() * step + low
        rounding = 7.5 * step * 2**-8 + ((low + high) / 2).abs() * 2**-8 + step.abs() * 2**-5

        def rms(error: Tensor) -> Tensor:
            return error.square().mean(1, keepdim=True).sqrt()

        assert bool((rms(had - got) <= rms(had - even) + rounding + 1e-30).all())


@pytest.mark.parametrize("middle", [0.0, 2.0, -0.75])
def test_sixteen_levels_come_back_exactly(middle: float) -> None:
    """Scale and middle of few bits, and both ends of the range in use: then nothing is lost."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (40, 3, GROUP), generator=generator)
    codes[..., 4], codes[..., 9] = 0, 15
    scale = torch.randint(1, 200, (40, 3, 1), generator=generator) * 2.0**-12
    weight = ((codes - 7.5) * scale + middle).flatten(1)
    assert torch.equal(quantise(weight, 4).dequantise(FP32), weight)


def test_a_checkpoint_that_was_four_bits_comes_back() -> None:
    """Q4_1 (w = d * q + m, fp16 d and m) rounded to bfloat16, as the default checkpoint's: the codes are the
    same, and each number is as near to the original as bfloat16 was."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (64, 18, GROUP), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    d = (torch.rand(64, 18, 1, generator=generator) * 0.02 + 0.002).half().float()
    m = (-7.5 * d + d * torch.randn(64, 18, 1, generator=generator)).half().float()
    original = (codes * d + m).flatten(1)
    found = quantise(original.bfloat16(), 4)
    bytes_ = found.codes.view(64, 18, 16)
    assert torch.equal(torch.stack((bytes_ & 15, bytes_ >> 4), 3).flatten(2).long(), codes)
    error = (found.dequantise(FP32) - original).square().mean().sqrt()
    rounding = (original.bfloat16().float() - original).square().mean().sqrt()
    assert float(error) < 2 * float(rounding)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_has_no_spread_is_exact(bits: Bits) -> None:
    """Zeros, and groups of one number that bfloat16 holds; the last, ragged group is not drawn to zero."""
    weight = torch.zeros(6, 70)
    weight[1], weight[2], weight[3, 64:] = 0.5, -3.0, 1.0
    again = quantise(weight, bits).dequantise(FP32)
    if bits == 8:
        assert bool(((again - weight).abs() <= weight.abs() * 2**-8).all())
        assert torch.equal(again[0], weight[0])
    else:
        assert torch.equal(again, weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_any_size_of_weights(bits: Bits, size: float) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * size
    error = (quantise(weight, bits).dequantise(FP32) - weight).abs().max()
    assert float(error) < (0.3 if bits == 4 else 0.02) * size


@pytest.mark.parametrize(("bits", "a_weight"), [(4, 5.0), (8, 8.5)])
def test_the_bytes_are_those_that_were_promised(bits: Bits, a_weight: float) -> None:
    found = quantise(some_weight(64, 96), bits)
    assert (found.bits, found.outputs, found.inputs) == (bits, 64, 96)
    assert found.nbytes * 8 == 64 * 96 * a_weight
    ragged = quantise(some_weight(3, 33), bits)  # made up to two groups
    assert ragged.nbytes * 8 == 3 * 64 * a_weight


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_looked_up(bits: Bits) -> None:
    found: Quantised = quantise(some_weight(50, 45), bits)
    whole = found.dequantise(torch.bfloat16)
    ids = torch.tensor([4, 49, 0, 4])
    assert torch.equal(found.dequantise(torch.bfloat16, ids), whole[ids])
    assert torch.equal(found.dequantise(torch.bfloat16, slice(7, 9)), whole[7:9])
