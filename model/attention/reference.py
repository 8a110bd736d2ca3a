"""Attention in plain PyTorch: any device, any dtype, arithmetic in fp32. Every other backend must equal it.

Two shapes of work, told apart only by how many tokens a sequence brings:
- one token: rows of many sequences become one batched product, padded to the longest of a chunk;
- several tokens: one sequence at a time, causal over its own keys.
Both gather a row's blocks into a temporary copy of bounded size. K and V are never repeated: the
query heads of a group read the one copy of their row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.base import AttentionMeta, AttentionStep, LayerKV
from model.attention.gather import DecodeChunk, PrefillPart, StepPlan, plan_step


class ReferenceAttention:
    """The `AttentionBackend` of last resort and the yardstick of the others."""

    def __init__(self, device: torch.device, reason: str = "plain PyTorch, runs on any device") -> None:
        self.name = "reference"
        self.reason = reason
        self._device = device

    def begin(self, meta: AttentionMeta) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        return _ReferenceStep(self, meta, self._device)

    def write(self, k: Tensor, v: Tensor, layer: LayerKV, slots: Tensor) -> None:
        """k, v `[N, D]` into slots `[N]` int64 (block id * B + offset), in the arena's dtype."""
        head_dim = layer.k.shape[-1]
        layer.k.view(-1, head_dim).index_copy_(0, slots, k.to(layer.k.dtype))
        layer.v.view(-1, head_dim).index_copy_(0, slots, v.to(layer.v.dtype))


class _ReferenceStep:
    """One step: where its tokens go, and a gather plan for each window that a layer asks for."""

    def __init__(self, backend: ReferenceAttention, meta: AttentionMeta, device: torch.device) -> None:
        self._backend = backend
        self._meta = meta
        self._device = device
        block = meta.block_size
        row = meta.row_slot.index_select(0, meta.kv_row)
        block_ids = meta.row_tables[row, meta.kv_pos // block].long()
        self._slots = block_ids * block + meta.kv_pos % block
        self._plans: dict[int | None, StepPlan] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: LayerKV, window: int | None) -> Tensor:
        """See `AttentionStep.forward`."""
        self._backend.write(k, v, layer, self._slots)
        plan = self._plans.get(window)
        if plan is None:
            plan = plan_step(self._meta, window, q.shape[-1], self._device)
            self._plans[window] = plan
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for chunk in plan.decodes:
            _decode(q, layer, chunk, out)
        for part in plan.prefills:
            _prefill(q, layer, part, out)
        return out


def _gather(cache: Tensor, blocks: Tensor, rows: int) -> Tensor:
    """cache `[N, B, D]`, blocks `[rows * n]` -> a copy `[rows, n * B, D]` in fp32."""
    picked = cache.view(cache.shape[0], -1).index_select(0, blocks)
    return picked.view(rows, -1, cache.shape[2]).float()


def _decode(q: Tensor, layer: LayerKV, chunk: DecodeChunk, out: Tensor) -> None:
    """One query token per row: q `[T, Hq, D]` -> the chunk's part of out `[T, Hq, D]`."""
    head_dim = q.shape[2]
    by_row = q.reshape(q.shape[0] * chunk.kv_heads, -1, head_dim)  # [T * Hkv, G, D]
    queries = by_row.index_select(0, chunk.rows).float() * head_dim**-0.5
    count = chunk.rows.shape[0]
    scores = torch.bmm(queries, _gather(layer.k, chunk.blocks, count).transpose(1, 2))
    weights = scores.masked_fill_(chunk.hidden, float("-inf")).softmax(dim=-1)
    values = _gather(layer.v, chunk.blocks, count)
    # A weight of 0 does not silence a NaN, and past its end a row reads what others left behind.
    values.view(-1, head_dim).index_fill_(0, chunk.stale, 0.0)
    attended = torch.bmm(weights, values).to(out.dtype)
    out.view(by_row.shape).index_copy_(0, chunk.rows, attended)


def _prefill(q: Tensor, layer: LayerKV, part: PrefillPart, out: Tensor) -> None:
    """Tokens `[start, stop)` of one sequence and some of its KV heads, causal."""
    head_dim = q.shape[2]
    count = part.head_stop - part.head_start
    keys = _gather(layer.k, part.blocks, count)[:, : part.length]
    values = _gather(layer.v, part.blocks, count)[:, : part.length]
    group = q.shape[1] // part.kv_heads
    heads = slice(part.head_start * group, part.head_stop * group)
    queries = q[part.start : part.stop, heads].float()
    queries = queries.view(part.stop - part.start, count, group, head_dim).permute(1, 2, 0, 3)
    attended = F.scaled_dot_product_attention(
        queries,  # [heads, G, q, D]
        keys.unsqueeze(1).expand(-1, group, -1, -1),
        values.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=part.visible,
        is_causal=part.visible is None,
    )
    out[part.start : part.stop, heads] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
