"""Where the sampler's chance comes from: counter-based hashes, so that no row owns a generator.

A draw is a function of the logits and of (seed, choice, output position) alone: a seed's answer does not
depend on the row's slot, its batch mates, a preemption or the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's multipliers


def row_keys(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """One 64-bit key `[S]` for each (seed, choice, output position): the same on every machine.

    A counter-based hash: each number is added, times the golden-ratio increment, and mixed by splitmix64's
    finaliser (Steele, Lea, Flood 2014).
    """
    return keys_at(row_states(seeds, choices), positions)


def row_states(seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """What of `row_keys` does not depend on the position `[S]`."""
    golden = np.uint64(_GOLDEN)
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + golden)
        return _mix(state + (choices.astype(np.uint64) + np.uint64(1)) * golden)


def keys_at(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The keys `[S]` of rows in these states at these output positions."""
    with np.errstate(over="ignore"):
        mixed = _mix(states + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return mixed.view(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def exponential(key: Tensor, counter: Tensor) -> Tensor:
    """Exponential noise of mean 1, fp64, above 0, finite, for each (key, counter): int64, broadcast together.

    The same hash once more; its upper 53 bits are the fraction `f` of -log(1 - f), each moved up by half a
    step so that none is 0, and the last, which would round up to 1, back to the largest number below it.
    """
    state = key + (counter + 1) * _signed(_GOLDEN)
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    fraction = (_shifted(state ^ _shifted(state, 31), 11).to(torch.float64) + 0.5) / 2**53
    fraction.clamp_(max=1 - 2.0**-53)
    return -torch.log1p(-fraction)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """int64 as if without a sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - 2**64
