"""A decoder on a test checkpoint, and forwards through it without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.attention.reference import ReferenceAttention
from model.config import ModelConfig
from model.decoder import Decoder
from model.heads import HeadMap, NativeHeads, Segment
from model.linear import LinearBackend
from model.linear_choice import choose_linear_backend
from model.loader import load_weights
from tests.support.attention import CPU, CachedSequence, CacheRig


def load_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    linear: LinearBackend | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """Our decoder on a checkpoint folder."""
    config = ModelConfig.from_folder(folder)
    linear = linear or choose_linear_backend(device, dtype)
    weights = load_weights(folder, config, device=device, dtype=dtype, linear=linear)
    return Decoder(config, weights, device)


def some_ids(count: int, seed: int = 0, vocab: int = 128) -> list[int]:
    """Random token ids, the same for the same seed."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def native_heads(decoder: Decoder) -> NativeHeads:
    return NativeHeads(decoder.config.num_kv_heads)


def new_rig(decoder: Decoder, blocks: int = 512, block: int = 4, seed: int = 0) -> CacheRig:
    """An empty cache of the decoder's shape, in the dtype of its weights."""
    config = decoder.config
    return CacheRig(
        config.num_layers,
        config.num_heads,
        config.head_dim,
        block=block,
        blocks=blocks,
        dtype=decoder.weights.embed.dtype,
        seed=seed,
    )


def run_step(
    decoder: Decoder,
    rig: CacheRig,
    work: Sequence[tuple[CachedSequence, Sequence[int], HeadMap]],
    backend: AttentionBackend | None = None,
) -> list[Tensor]:
    """One forward; for each sequence the logits `[tokens, V]` after each of the ids it brings.

    Neighbours with the same head map become one segment.
    """
    backend = backend or ReferenceAttention(rig.device)
    meta = rig.meta([(sequence, len(ids)) for sequence, ids, _ in work])
    segments: list[Segment] = []
    start = 0
    for _, ids, head_map in work:
        stop = start + len(ids)
        if segments and segments[-1].head_map is head_map:
            segments[-1] = Segment(head_map, segments[-1].start, stop)
        else:
            segments.append(Segment(head_map, start, stop))
        start = stop
    flat = torch.tensor([token for _, ids, _ in work for token in ids], device=rig.device)
    wanted = torch.arange(len(flat), device=rig.device)
    logits = decoder.forward(flat, meta.positions, segments, backend.begin(meta), rig.layers, wanted)
    return list(logits.split([len(ids) for _, ids, _ in work]))


def run_alone(
    decoder: Decoder,
    ids: Sequence[int],
    head_map: HeadMap,
    chunk: int | None = None,
    rig: CacheRig | None = None,
) -> Tensor:
    """`[T, V]` fp32: the logits after each of `ids`, in chunks of that many tokens (None: all at once)."""
    if rig is None:
        rig = new_rig(decoder, blocks=head_map.kv_heads * (-(-len(ids) // 4) + 1))
    sequence = rig.open(head_map.kv_heads)
    step = chunk or len(ids)
    parts = [
        run_step(decoder, rig, [(sequence, ids[i : i + step], head_map)])[0] for i in range(0, len(ids), step)
    ]
    return torch.cat(parts)
