"""Step 7 in one call of C++: the draws that `model/sampler.py` defines, from logits on a CPU.

A row is one thread's, which reads the logits again and again while they are in its cache
(`model/native/csrc/draw.h`). It needs one way where PyTorch's operators need two: the exact weight of the
whole row is cheap there, and bounds how low the last token can be that a filter keeps.

A row's draw depends on its logits, parameters and key alone, not on the batch nor on threads: it always goes
the same way, and units add up exactly in any order. Only the exponential is not PyTorch's, and may differ in
the last bits, as those of two CPUs may. So the two samplers draw the same, but for a race or a filter that
so little decides: one draw in about a million.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.native.library import NativeLibrary
from model.sampler import Sampler, SamplingBatch, sample


@dataclass(frozen=True, slots=True)
class NativeSampler:
    """Draws on the kernels' own threads."""

    library: NativeLibrary

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """See `Sampler`."""
        ids: Tensor = self.library.ops.draw(
            logits, batch.rows, batch.temperature, batch.top_p, batch.min_p, batch.top_k, batch.key
        )
        return ids


def choose_sampler(native: NativeLibrary | str) -> Sampler:
    """By the operators in C++, where there are any: they are for CPUs alone."""
    return NativeSampler(native) if isinstance(native, NativeLibrary) else sample
