"""Step 7 in C++, from logits on a CPU: the draws that `model/sampler.py` defines, and the scores of
`model/logprobs.py`, a call each.

A row is one thread's, which reads the logits again and again while they are in its cache
(`model/native/csrc/draw.h`). It goes the way that PyTorch's operators go (`model/draw.py`), a row at a time.

A row's draw depends on its logits, parameters and key alone, not on the batch nor on threads: it always goes
the same way, and units add up exactly in any order. Only the exponential is not PyTorch's, and may differ in
the last bits, as those of two CPUs may. So the two samplers draw the same, but for a race or a filter that
so little decides: one draw in about a million.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.logprobs import Scorer, ScoreTensors, score
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


@dataclass(frozen=True, slots=True)
class NativeScorer:
    """Scores on the same threads (`model/native/csrc/score.h`)."""

    library: NativeLibrary

    def __call__(self, logits: Tensor, ids: Tensor, best: int) -> ScoreTensors:
        """See `Scorer`."""
        return ScoreTensors(*self.library.ops.score(logits, ids, min(best, logits.shape[1])))


def choose_scorer(native: NativeLibrary | str) -> Scorer:
    """By the operators in C++, where there are any: they are for CPUs alone."""
    return NativeScorer(native) if isinstance(native, NativeLibrary) else score


def choose_sampler(native: NativeLibrary | str) -> Sampler:
    """As `choose_scorer`."""
    return NativeSampler(native) if isinstance(native, NativeLibrary) else sample
