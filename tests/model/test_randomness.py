"""The hash behind every draw: fixed for ever, even, and independent in each of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.randomness import exponential, row_keys
from tests.support.sampling import noise


def test_keys_are_fixed_for_ever() -> None:
    """These values are part of the product: the same seed gives the same answer in every version."""
    seeds = np.array([0, 0, 0, 7, 7, 2**64 - 1], dtype=np.uint64)
    choices = np.array([0, 0, 1, 0, 3, 0], dtype=np.uint64)
    positions = np.array([0, 1, 0, 0, 5, 100], dtype=np.uint64)
    golden = 0x9E3779B97F4A7C15
    expected = []
    for seed, choice, position in zip(seeds.tolist(), choices.tolist(), positions.tolist(), strict=True):
        state = 0
        for number in (seed + golden, (choice + 1) * golden, (position + 1) * golden):
            state = (state + number) % 2**64
            state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
            state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
            state ^= state >> 31
        expected.append(state)
    assert row_keys(seeds, choices, positions).view(np.uint64).tolist() == expected
    assert (expected[0] >> 11) / 2**53 == 0.13870941014555427


def even(u: np.ndarray[Any, Any]) -> None:
    assert u.min() >= 0 and u.max() < 1
    bins = np.histogram(u, bins=50, range=(0, 1))[0]
    assert np.abs(bins - len(u) / 50).max() < 5.5 * np.sqrt(len(u) / 50)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_keys_are_even_and_their_inputs_are_independent() -> None:
    count = 40_000
    zeros, counter = np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64)
    axes = [row_keys(counter, zeros, zeros), row_keys(zeros, counter, zeros), row_keys(zeros, zeros, counter)]
    for keys in axes:
        even(keys.view(np.uint64) / 2.0**64)
    assert len(np.unique(np.concatenate(axes))) == 3 * count - 2  # they share (0, 0, 0) only


def test_noise_is_exponential_along_keys_and_counters() -> None:
    """1 - e^-x of exponential noise is even; no two of a key's counters go together, nor two keys."""
    keys = torch.from_numpy(row_keys(*[np.arange(300, dtype=np.uint64)] * 3))[:, None]
    counters = torch.cat([torch.arange(200), 2**32 + torch.arange(200)]).to(torch.int64)
    found = exponential(keys, counters)
    assert found.dtype == torch.float64 and bool((found > 0).all())
    u = -np.expm1(-found.numpy())
    even(u.ravel())
    even(u.T.ravel())
    assert np.abs(np.corrcoef(u, rowvar=False) - np.eye(400)).max() < 5.5 / np.sqrt(300)


def undone(state: int) -> int:
    """The number that splitmix64's finaliser makes `state` of."""
    for shift, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x = state
        for _ in range(64 // shift):
            x = state ^ x >> shift
        state = x * pow(multiplier, -1, 2**64) % 2**64
    return state


@pytest.mark.parametrize("hashed", [0, 2**64 - 1, 2**64 - 2**11])
def test_the_ends_of_the_noise_are_finite_and_above_0(hashed: int) -> None:
    """Infinite noise would let a token win that is not in the race."""
    key = (undone(hashed) - 0x9E3779B97F4A7C15) % 2**64
    keys = torch.from_numpy(np.array([[key]], dtype=np.uint64).view(np.int64))
    found = exponential(keys, torch.zeros(1, dtype=torch.int64))
    assert found.item() == pytest.approx(53 * np.log(2) if hashed else 2.0**-54, abs=0)


def test_noise_is_the_definition_to_the_last_bit() -> None:
    keys, counters = [0, 1, -1, 2**63 - 1, -(2**63), 123456789], [0, 1, 191, 2**32, 2**32 + 49_151]
    found = exponential(
        torch.tensor(keys, dtype=torch.int64)[:, None], torch.tensor(counters, dtype=torch.int64)
    )
    expected = [[noise(key, counter) for counter in counters] for key in keys]
    assert np.allclose(found.numpy(), expected, rtol=1e-15, atol=0)
