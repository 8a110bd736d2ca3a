"""Step 6 of a request's trip: where the model and the cache meet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cache.copies import BlockCopies
from cache.pool import KVPool
from model.adjust import adjust
from model.attention.base import AttentionBackend
from model.decoder import Decoder
from model.sampler import sample
from server.engine.batch import ForwardBatch, Shape, made_up_batch


class ModelRunner:
    """Runs batches on one decoder over one pool; whose they are it does not know."""

    def __init__(self, decoder: Decoder, pool: KVPool, backend: AttentionBackend) -> None:
        self._decoder = decoder
        self._pool = pool
        self._backend = backend

    def copy(self, copies: BlockCopies) -> None:
        """Copies of shared tails, before anything of the step is written."""
        self._pool.copy_blocks(copies.src, copies.dst)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> npt.NDArray[np.int64]:
        """The drawn ids `[N]` on the host, in the order of `batch.drawn`; -1 where logits were broken.

        Writes K and V of the step's tokens, to the same places if called again. Waits for the device once, so
        that a fault of the step is raised here.
        """
        logits = self._decoder.forward(
            batch.ids,
            batch.positions,
            batch.segments,
            self._backend.begin(batch.meta),
            self._pool.layers,
            batch.wanted,
        )
        if batch.sampling is None:
            batch.positions[:1].cpu()
            return np.zeros(0, dtype=np.int64)
        if batch.adjustments is not None:
            logits = adjust(logits, batch.adjustments)
        ids: npt.NDArray[np.int64] = sample(logits, batch.sampling).cpu().numpy()
        return ids

    def try_out(self, shape: Shape) -> None:
        """One token of nobody's through the model, into the scratch block; raises what the model raises."""
        variant = next(iter(shape.variants.values()))
        rows = torch.full(
            (variant.kv_heads, 1), self._pool.scratch_block, dtype=torch.int32, device=shape.device
        )
        self.run(made_up_batch(variant.name, 0, 1, 1, rows, shape))
