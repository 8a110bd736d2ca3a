"""Where the sampler's `u` comes from: a counter-based hash, so that no row owns a generator.

A draw is a function of (seed, choice, output position) alone: a seed's answer does not depend on the row's
slot, its batch mates, a preemption or the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """`u` in [0, 1), fp64 `[S]`, for each (seed, choice, output position): the same on every machine.

    A counter-based hash: each number is added, times the golden-ratio increment, and mixed by splitmix64's
    finaliser (Steele, Lea, Flood 2014); the upper 53 bits make the fraction.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + _GOLDEN)
        state = _mix(state + (choices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        state = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
