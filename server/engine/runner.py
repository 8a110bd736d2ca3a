"""Step 6 of a request's trip: where the model and the cache meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache.copies import BlockCopies
from cache.pool import KVPool
from model.adjust import adjust
from model.attention.base import AttentionBackend
from model.decoder import Decoder
from model.logprobs import Scorer, Scores, ScoreTensors, score_hidden
from model.native.cores import Cores
from model.sampler import Sampler
from server.engine.batch import ForwardBatch, PromptWish, Shape, made_up_batch
from server.engine.draws import Draws


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step gave, on the host."""

    ids: npt.NDArray[np.int64]  # [N], in the order of `ForwardBatch.drawn`; -1 where logits were broken
    scores: Scores | None = None  # of those ids, for the rows of `Draws.scored`
    prompt: Scores | None = None  # of the tokens of `ForwardBatch.prompt`


class ModelRunner:
    """Runs batches on one decoder over one pool; whose they are it does not know."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        sampler: Sampler,
        scorer: Scorer,
        cores: Cores,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._backend = backend
        self._sampler = sampler
        self._scorer = scorer
        self._cores = cores

    def copy(self, copies: BlockCopies) -> None:
        """Copies of shared tails, before anything of the step is written."""
        self._pool.copy_blocks(copies.src, copies.dst)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Drawn:
        """One step: tokens are drawn where the batch says so.

        Writes K and V of the step's tokens, to the same places if called again. Waits for the device, so that
        a fault of the step is raised here.
        """
        with self._cores.lent():
            hidden = self._hidden(batch)
            prompt, count = batch.prompt, len(batch.wanted)
            told = None if prompt is None else self._score(hidden[count:], prompt)
            if batch.draws is None:
                batch.positions[:1].cpu()
                return Drawn(np.zeros(0, dtype=np.int64), prompt=told)
            ids, scores = self._draw(self._decoder.logits(hidden[:count]), batch.draws)
            return Drawn(ids.cpu().numpy(), None if scores is None else scores.to_host(), told)

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        """The last states that are drawn from, then those that prompts are scored by."""
        prompt = batch.prompt
        return self._decoder.hidden(
            batch.ids,
            batch.positions,
            batch.segments,
            self._backend.begin(batch.meta),
            self._pool.layers,
            batch.wanted if prompt is None else torch.cat([batch.wanted, prompt.positions]),
        )

    def _score(self, hidden: Tensor, prompt: PromptWish) -> Scores:
        """hidden `[M, hidden]` -> the scores of the prompt's tokens; waits for the device."""
        vocab = self._decoder.config.vocab_size
        head = self._decoder.logits
        return score_hidden(hidden, prompt.ids, prompt.best, head, vocab, self._scorer).to_host()

    def _draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, ScoreTensors | None]:
        """logits `[N, V]` -> the drawn ids `[N]`, and the scores that are asked for, of the raw logits."""
        raw = None if draws.scored is None else logits.index_select(0, draws.scored.rows)
        if draws.adjustments is not None:
            adjust(logits, draws.adjustments)
        ids = self._sampler(logits, draws.sampling)
        if draws.scored is None or raw is None:
            return ids, None
        # The scores of a broken row are NaN, and nobody reads them.
        drawn = ids.index_select(0, draws.scored.rows).clamp(min=0)
        return ids, self._scorer(raw, drawn, draws.scored.best)

    def try_out(self, shape: Shape) -> None:
        """One token of nobody's through the model, into the scratch block; raises what the model raises."""
        variant = next(iter(shape.variants.values()))
        rows = torch.full(
            (variant.kv_heads, 1), self._pool.scratch_block, dtype=torch.int32, device=shape.device
        )
        self.run(made_up_batch(variant.name, 0, 1, 1, rows, shape))
