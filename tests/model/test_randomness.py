"""The hash behind every draw: fixed for ever, even, and independent in each of its inputs."""

from __future__ import annotations

import numpy as np

from model.randomness import uniform


def test_uniform_is_fixed_for_ever() -> None:
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
        expected.append((state >> 11) / 2**53)
    assert uniform(seeds, choices, positions).tolist() == expected
    assert expected[0] == 0.13870941014555427


def test_uniform_is_even_and_its_inputs_are_independent() -> None:
    count = 40_000
    zeros, counter = np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64)
    axes = [uniform(counter, zeros, zeros), uniform(zeros, counter, zeros), uniform(zeros, zeros, counter)]
    for u in axes:
        assert u.min() >= 0 and u.max() < 1
        bins = np.histogram(u, bins=50, range=(0, 1))[0]
        assert np.abs(bins - count / 50).max() < 5.5 * np.sqrt(count / 50)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert len(np.unique(np.concatenate(axes))) == 3 * count - 2  # they share (0, 0, 0) only
