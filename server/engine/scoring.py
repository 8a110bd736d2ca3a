"""What a model says about a text that is there already: the logits after every token of it.

A window of ids goes through the engine's own decoder, attention and paged cache in one attention mode, so
what is scored is what is served. It goes in chunks, each of which sees all before it, and no more logits
than a chunk's are ever held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cache.errors import CacheError
from cache.pool import KVPool
from model.attention.base import AttentionBackend
from model.config import ModelConfig
from model.decoder import Decoder
from model.heads import NativeHeads, Variant
from server.engine.batch import ForwardBatch, Shape, lone_batch
from server.engine.device import choose_device, choose_dtype
from server.engine.errors import ConfigError
from server.engine.kernels import NativeSource
from server.engine.layout import cache_layout
from server.engine.loading import load_machinery
from server.engine.options import EngineOptions
from server.engine.variants import CalibrationSource, choose_modes, make_variants

BLOCK_SIZE = 16
_CHUNK_TOKENS = 256
_LOGIT_BYTES = 32 << 20  # of a chunk's logits in fp32; those who read them may need as much again


class Scorer:
    """Scores windows of up to `window` tokens in one attention mode; holds a pool for one of them.

    One window at a time. The same ids give the same logits, whatever was scored before.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        variant: Variant,
        window: int,
        *,
        chunk: int | None = None,
    ) -> None:
        """`window` must be within the decoder's positions; `chunk` tokens go through the decoder at once
        (default: `chunk_tokens`). Raises ConfigError if the device has no room for the pool."""
        config, weights = decoder.config, decoder.weights
        device = weights.embed.device
        layout = cache_layout(config, BLOCK_SIZE, weights.embed.dtype)
        self.variant = variant
        self.window = window
        self.chunk = chunk or chunk_tokens(window, config.vocab_size)
        self._decoder = decoder
        self._attention = attention
        self._shape = Shape(BLOCK_SIZE, config.num_heads, {variant.name: variant}, device, config.vocab_size)
        try:
            self._pool = KVPool(layout, layout.physical_blocks(window, variant.kv_heads), device)
        except CacheError as error:
            raise ConfigError(f"scoring {window} tokens as {variant.name}: {error}") from error
        blocks = torch.arange(self._pool.total, dtype=torch.int32, device=device)
        self._rows = blocks.view(variant.kv_heads, -1)  # one sequence's, and all blocks are its own

    def logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The logits after each of `ids`, in order: `[n, V]` fp32 for each chunk, `n` at most `chunk`.

        Raises ValueError for an empty window and for one that is too long.
        """
        if not 0 < len(ids) <= self.window:
            raise ValueError(f"a window of {len(ids)} tokens; this takes 1 to {self.window}")
        known = np.asarray(ids, dtype=np.int64)
        for start in range(0, len(known), self.chunk):
            part = known[start : start + self.chunk]
            yield self._run(lone_batch(self.variant.name, part, start, len(part), self._rows, self._shape))

    @torch.inference_mode()
    def _run(self, batch: ForwardBatch) -> Tensor:
        step = self._attention.begin(batch.meta)
        return self._decoder.forward(
            batch.ids, batch.positions, batch.segments, step, self._pool.layers, batch.wanted
        )


@dataclass(frozen=True, slots=True)
class Scoring:
    """A loaded checkpoint and its attention modes, ready to score; there is no engine and no pool yet."""

    decoder: Decoder
    attention: AttentionBackend
    variants: tuple[Variant, ...]  # as they were asked for

    @property
    def native(self) -> Variant:
        """The checkpoint's own heads, whether or not they were asked for."""
        return Variant("native", NativeHeads(self.decoder.config.num_kv_heads))

    def scorer(self, variant: Variant, window: int, *, chunk: int | None = None) -> Scorer:
        """See `Scorer`."""
        return Scorer(self.decoder, self.attention, variant, window, chunk=chunk)


def load_scoring(
    options: EngineOptions,
    model_folder: Path,
    longest: int,
    calibration: CalibrationSource | None = None,
    native: NativeSource | None = None,
) -> Scoring:
    """The checkpoint in `model_folder`, in the modes, on the device and in the dtype of `options`.

    Windows to score may have up to `longest` tokens, or what the model allows if that is less.
    Raises ModelError (checkpoint, modes) or ConfigError (options).
    """
    config = ModelConfig.from_folder(model_folder)
    modes = choose_modes(options, config, calibration)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config.torch_dtype, device).dtype
    positions = min(longest, config.max_position_embeddings)
    own = replace(options, block_size=BLOCK_SIZE)
    made = load_machinery(own, model_folder, config, device, dtype, longest=positions, native=native)
    variants = make_variants(modes, options.head_map, made.decoder, made.own_linear, calibration)
    return Scoring(made.decoder, made.attention, variants)


def chunk_tokens(window: int, vocab: int) -> int:
    """Tokens of a chunk: `window` in the fewest equal parts that are small enough, in steps and in logits."""
    most = max(1, min(_CHUNK_TOKENS, _LOGIT_BYTES // (vocab * torch.float32.itemsize)))
    parts = -(-window // most)
    return -(-window // parts)
