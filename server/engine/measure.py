"""What a step takes on a GPU beside weights and cache: found by running the largest one, not by estimate."""

from __future__ import annotations

import torch

from cache.layout import KVLayout
from cache.pool import KVPool
from model.attention.base import AttentionBackend
from model.decoder import Decoder
from model.heads import Variant
from model.logprobs import score
from model.native.cores import Cores
from model.sampler import sample
from server.engine.batch import Shape, made_up_batch
from server.engine.runner import ModelRunner

_BEST = 20  # of the likeliest tokens, told of every token of the step: more than requests ask for


def room_on_gpu(
    decoder: Decoder,
    attention: AttentionBackend,
    layout: KVLayout,
    shape: Shape,
    tokens: int,
    drawn: int,
    context: int,
) -> int:
    """Bytes that the GPU has left for a pool once the weights are there and the largest step has its own.

    The step: one sequence's last chunk of `tokens` tokens at the end of `context`, with `drawn` tokens drawn,
    in whichever mode takes most: the widest has the most keys, a fitted head map work of its own.
    """
    torch.cuda.empty_cache()
    peak = max(
        _peak(decoder, attention, layout, shape, variant, tokens, drawn, context)
        for variant in shape.variants.values()
    )
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(shape.device)
    return max(free - peak, 0)


def _peak(
    decoder: Decoder,
    attention: AttentionBackend,
    layout: KVLayout,
    shape: Shape,
    variant: Variant,
    tokens: int,
    drawn: int,
    context: int,
) -> int:
    """Bytes that the step takes in one mode. Its cache is one block that every entry of its table names, so
    it needs no pool."""
    device = shape.device
    pool = KVPool(layout, 1, device)
    blocks = layout.logical_blocks(context)
    rows = torch.zeros((variant.kv_heads, blocks), dtype=torch.int32, device=device)
    count = min(tokens, context)
    batch = made_up_batch(variant.name, context - count, count, min(drawn, count), rows, shape, _BEST)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ModelRunner(decoder, pool, attention, sample, score, Cores("this is a GPU")).run(batch)
    return torch.cuda.max_memory_allocated(device) - before
