"""Aligned heads: equal to complex arithmetic token by token, in fp32 whatever the dtype, and counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.aligned import AlignedHeads, aligned_heads
from model.calibration import Calibration, LayerFit
from model.heads import KeyNorm
from model.linear import Linear, PlainBackend
from model.rope import Rope, RopeConfig, Rotation, inverse_frequencies
from tests.support.calibrations import as_columns, as_pairs, heads_of, random_calibration, random_layers
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.equality import assert_same_logits

Tiny = Callable[..., Path]
CPU = torch.device("cpu")
PLAIN = PlainBackend(reason="test")
ROPES = {
    "default": RopeConfig(),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position=64, attention_factor=1.3),
}
SHAPES = [(9, 3, 1), (8, 4, 1), (8, 4, 2), (4, 4, 2), (6, 6, 1), (8, 2, 1)]  # Hq, Hkv, K


def heads(
    fits: tuple[LayerFit, ...], dtype: torch.dtype = torch.float32, kind: str = "aligned"
) -> AlignedHeads:
    calibration = Calibration.of(kind, fits[0].frequency.shape[0], fits)
    return aligned_heads(calibration, device=CPU, dtype=dtype, linear=PLAIN)


def no_norm(k: Tensor) -> Tensor:
    return k


def rms_norm(k: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(k, k.shape[-1:])


def native_heads(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int = 16,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the decoder has them: slices of one fused product."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    return fused[:, :q_heads], fused[:, q_heads : q_heads + kv_heads], fused[:, q_heads + kv_heads :]


def naive(
    fit: LayerFit, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rope: RopeConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, one token, head and slot group at a time, in fp64: q, k, v of the reduced heads."""
    q_heads, native, kv_heads, head_dim = q.shape[1], k.shape[1], fit.frequency.shape[0], q.shape[2]
    share = native // kv_heads
    frequencies = inverse_frequencies(rope, head_dim, CPU).double()
    queries, keys = torch.zeros(q.shape).double(), torch.zeros(len(k), kv_heads, head_dim).double()
    values = torch.zeros_like(keys)
    for token, position in enumerate(positions.tolist()):
        for group in range(kv_heads):
            pair = fit.frequency[group]
            turn = rope.attention_factor * torch.exp(1j * position * frequencies[pair])
            members = range(group * share, (group + 1) * share)
            shared = sum(fit.key[head] * as_pairs(k[token, head])[pair] for head in members)
            keys[token, group] = as_columns(shared * turn)
            values[token, group] = fit.v_in[group].double() @ torch.cat(
                [v[token, h].double() for h in members]
            )
            for head in range(q_heads // kv_heads * group, q_heads // kv_heads * (group + 1)):
                read = head // (q_heads // native)
                queries[token, head] = as_columns(fit.query[read] * as_pairs(q[token, head])[pair] * turn)
    return queries, keys, values


@pytest.mark.parametrize("k_norm", [no_norm, rms_norm])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_complex_numbers_token_by_token(
    shape: tuple[int, int, int], free: bool, rope: str, k_norm: KeyNorm
) -> None:
    q_heads, native, kv_heads = shape
    fits = random_layers(2, q_heads=q_heads, native=native, kv_heads=kv_heads, free=free)
    own = heads(fits)
    assert own.kv_heads == kv_heads
    q, k, v = native_heads(5, q_heads, native)
    positions = torch.tensor([0, 1, 7, 500, 11])
    rotation = Rope(ROPES[rope], 16, 512, CPU).at(positions)
    for layer in (0, 1):
        ours = own.qkv(layer, q, k, v, k_norm, rotation)
        expected = naive(fits[layer], q, k_norm(k), v, positions, ROPES[rope])
        for name, a, b in zip("qkv", ours, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-4, msg=f"{name} of layer {layer}")


@pytest.mark.parametrize("free", [True, False])
def test_scores_depend_on_differences_of_positions_only(free: bool) -> None:
    own = heads(random_layers(1, q_heads=9, native=3, kv_heads=1, free=free))
    q, k, v = native_heads(6, 9, 3)
    rope = Rope(RopeConfig(theta=100.0), 16, 512, CPU)
    at = torch.tensor([0, 5, 3, 17, 2, 40])

    def scores(shift: int) -> Tensor:
        turned_q, turned_k, _ = own.qkv(0, q, k, v, no_norm, rope.at(at + shift))
        return torch.einsum("qhd,kd->hqk", turned_q, turned_k[:, 0])

    for shift in (1, 13, 400):
        torch.testing.assert_close(scores(shift), scores(0), rtol=1e-4, atol=1e-3)
    moved = own.qkv(0, q, k, v, no_norm, rope.at(at + 1))[1]
    assert not torch.allclose(moved, own.qkv(0, q, k, v, no_norm, rope.at(at))[1], atol=0.1)


def test_heads_that_are_multiples_of_one_are_read_exactly() -> None:
    """k_h = a_h · c for every head: with c as the shared key, conj(a_h) on q gives the native scores."""
    q, k, v = native_heads(6, 9, 3)
    generator = torch.Generator().manual_seed(0)
    a = torch.complex(*torch.randn(2, 3, 8, generator=generator))
    k = as_columns(as_pairs(k[:, :1]) * a).float()
    (fit,) = random_layers(1, q_heads=9, native=3, kv_heads=1, free=False)
    key = torch.zeros_like(a)
    key[1] = 1 / a[1]
    own = heads((dataclasses.replace(fit, key=key, query=a.conj()),))
    rotation = Rope(RopeConfig(), 16, 512, CPU).at(torch.tensor([0, 5, 3, 170, 2, 40]))
    ours_q, ours_k, _ = own.qkv(0, q, k, v, no_norm, rotation)
    native = torch.einsum(
        "qhd,khd->hqk", rotation.apply(q), rotation.apply(k).repeat_interleave(3, dim=1)
    )  # query head i reads native head i // 3
    torch.testing.assert_close(
        torch.einsum("qhd,kd->hqk", ours_q, ours_k[:, 0]), native, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("o_bias", [False, True])
@pytest.mark.parametrize(("native", "kv_heads"), [(4, 1), (4, 2)])
def test_values_and_output_are_dense_algebra(native: int, kv_heads: int, o_bias: bool) -> None:
    fits = random_layers(2, native=native, kv_heads=kv_heads, o_bias=o_bias)
    own = heads(fits)
    assert own.owns_output
    q, k, v = native_heads(7, 8, native)
    rotation = Rope(RopeConfig(), 16, 512, CPU).at(torch.arange(7))
    block = torch.block_diag(*fits[1].v_in)  # [K * D, Hkv * D]
    values = own.qkv(1, q, k, v, no_norm, rotation)[2]
    torch.testing.assert_close(values.flatten(1), v.flatten(1) @ block.T, rtol=1e-5, atol=1e-5)
    attended = torch.randn(7, 8 * 16, generator=torch.Generator().manual_seed(1))
    bias = fits[1].o_bias
    expected = attended @ fits[1].o.T + (0 if bias is None else bias)
    torch.testing.assert_close(own.out(1, attended, refused), expected, rtol=1e-5, atol=1e-5)


class _Refused:
    """The native projection of a map that has its own."""

    nbytes = out_features = 0

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("the native o_proj ran")

    fp32 = __call__


refused: Linear = _Refused()


@pytest.mark.parametrize("free", [True, False])
def test_bf16_is_computed_in_fp32_and_rounded_once(free: bool) -> None:
    fits = random_layers(1, q_heads=9, native=3, kv_heads=1, free=free)
    q, k, v = native_heads(20, 9, 3, dtype=torch.bfloat16)
    rotation = Rope(RopeConfig(), 16, 512, CPU).at(torch.arange(20) * 20)
    ours = heads(fits, torch.bfloat16).qkv(0, q, k, v, no_norm, rotation)
    exact = heads(fits).qkv(0, q.float(), k.float(), v.float(), no_norm, rotation)
    for a, b in zip(ours[:2], exact[:2], strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())
    # v_in is a weight, so it is rounded too: 2 roundings of the same size.
    assert ours[2].dtype == torch.bfloat16
    once = (exact[2].bfloat16() - exact[2]).square().mean().sqrt()
    assert (ours[2] - exact[2]).square().mean().sqrt() < 2 * once


@dataclasses.dataclass(frozen=True)
class NaiveHeads:
    """The definition as a head map: positions are read back from the rotation's slowest pair."""

    fits: tuple[LayerFit, ...]
    rope: RopeConfig
    kv_heads: int
    owns_output: bool = True
    repeats: bool = False
    nbytes: int = 0
    identity: str = "naive"

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_norm: KeyNorm, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        slowest = float(inverse_frequencies(self.rope, q.shape[2], CPU)[-1])
        last = q.shape[2] - 1
        positions = (torch.atan2(rotation.sin[:, last], rotation.cos[:, last]) / slowest).round()
        made = naive(self.fits[layer], q, k_norm(k), v, positions.long(), self.rope)
        return made[0].float(), made[1].float(), made[2].float()

    def out(self, layer: int, attended: Tensor, o_proj: Linear) -> Tensor:
        return attended @ self.fits[layer].o.T


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_free_slots_in_a_whole_model(tiny: Tiny, family: str) -> None:
    decoder = load_decoder(tiny(family=family, heads=8, kv_heads=4))
    calibration = random_calibration(decoder.config, 2)
    expected = run_alone(decoder, some_ids(40), NaiveHeads(calibration.layers, decoder.config.rope, 2))
    own = heads_of(calibration, decoder)
    for chunk in (None, 1, 9):
        assert_same_logits(run_alone(decoder, some_ids(40), own, chunk), expected, f"chunks of {chunk}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("o_bias", [False, True])
def test_bytes_are_those_of_every_tensor_held(dtype: torch.dtype, o_bias: bool) -> None:
    """SmolLM2's shapes, 3 KV heads to 1."""
    shape = {"q_heads": 9, "native": 3, "kv_heads": 1, "head_dim": 64, "hidden": 576}
    free = heads(random_layers(2, **shape, o_bias=o_bias), dtype)
    fixed = heads(random_layers(2, **shape, o_bias=o_bias, free=False), dtype)
    weights = (576 * 576 + 64 * 192 + (576 if o_bias else 0)) * dtype.itemsize
    factors = 2 * 2 * 3 * 64 * 4
    gathers = (9 + 3 + 1) * 64 * 8
    assert fixed.nbytes == 2 * (weights + factors)
    assert free.nbytes == 2 * (weights + factors + gathers)
    for own in (free, fixed):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(own)}
        assert sum(storages.values()) == own.nbytes


def tensors_in(held: object) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    if isinstance(held, tuple):
        return [tensor for part in held for tensor in tensors_in(part)]
    if dataclasses.is_dataclass(held):
        return tensors_in(tuple(getattr(held, field.name) for field in dataclasses.fields(held)))
    return []


def test_identity_tells_kinds_and_calibrations_apart() -> None:
    fits = random_layers(2, free=False)
    same = random_layers(2, free=False)
    other = random_layers(2, free=False, seed=1)
    names = [heads(fits).identity, heads(fits, kind="aligned-fixed").identity, heads(other).identity]
    assert len(set(names)) == 3
    assert heads(same).identity == names[0]
    assert [name.partition(":")[0] for name in names] == ["aligned", "aligned-fixed", "aligned"]
    assert names[0] == f"aligned:{Calibration.of('aligned', 2, fits).digest}"


def test_a_gathered_rotation_turns_each_column_as_the_one_it_names() -> None:
    """By hand: theta 4 and D 4 give frequencies 1 and 1/2; head 0 turns by 1/2 twice, head 1 as it was."""
    rotation = Rope(RopeConfig(theta=4.0), 4, 8, CPU).at(torch.tensor([3]))
    turned = rotation.gather(torch.tensor([1, 1, 3, 3, 0, 1, 2, 3])).apply(torch.ones(1, 2, 4))[0]
    fast, slow = 3.0, 1.5
    first = [math.cos(slow) - math.sin(slow)] * 2 + [math.cos(slow) + math.sin(slow)] * 2
    second = [math.cos(fast) - math.sin(fast), first[0], math.cos(fast) + math.sin(fast), first[2]]
    torch.testing.assert_close(turned, torch.tensor([first, second]), rtol=1e-6, atol=1e-6)
