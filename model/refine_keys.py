"""Shared keys, refined by what matters of them: where attention goes.

Second moments (`fit_keys`) see keys as vectors; softmax sees which key wins. A few gradient steps on the
factors bring the reduced heads' attention nearer to the native heads', for the same queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.fit_keys import Slots
from model.rope import Rotation

# On SmolLM2-135M, 3 heads -> 1, they take a third off KL(native attention || reduced), on other texts too.
_STEPS = 40
_RATE = 0.05  # of Adam (arXiv 1412.6980), in units of a typical factor; falls to 0 along a cosine
_DAMPING = 1e-5  # gradients far below this are rounding, and Adam would make full steps of them
_QUERIES = 16  # of each window; all of its keys are used
_EXACT = 1e-5  # nats: nothing to gain


@dataclass(frozen=True, slots=True)
class _Sample:
    """Queries and keys turned by RoPE, as the slots see them; n queries of W windows, all T keys."""

    native: Tensor  # [W, Hkv * G * n, T] attention of the native heads, laid out as [h, G, n] in each of K
    q: tuple[Tensor, Tensor]  # [W, n, K, h, G, S] real and imaginary
    k: tuple[Tensor, Tensor]  # [W, T, K, h, S]
    hidden: Tensor  # [W, 1, 1, n, T] bool: keys that a query does not see
    scale: float


def refine(
    slots: Slots, heads: Sequence[tuple[Tensor, Tensor]], rotation: Rotation, window: int | None
) -> Slots:
    """The slots with other factors; their frequencies stay.

    `heads`: q `[T, Hq, D]` and k `[T, Hkv, D]` fp32 of each text window, after bias and norm, before RoPE;
    `window`: the layer's sliding window. Where the steps lead to nothing better, the slots as they were.
    """
    sample = _sample(slots, heads, rotation, window)
    entropy = -float(torch.xlogy(sample.native, sample.native).sum(dim=-1).mean())
    # Key and query factors of a slot differ by the square of what queries weigh; unit is their middle.
    unit = (slots.key.abs() / slots.query.abs().clamp_min(1e-30)).sqrt().clamp_min(1e-30).unsqueeze(-1)
    key, query = torch.view_as_real(slots.key), torch.view_as_real(slots.query)
    first = float(_cross_entropy(sample, key, query))
    if not first - entropy > _EXACT:
        return slots
    with torch.enable_grad():
        key, query = (key / unit).requires_grad_(True), (query * unit).requires_grad_(True)
        optimizer = torch.optim.Adam([key, query], lr=_RATE, betas=(0.9, 0.95), eps=_DAMPING)
        for step in range(_STEPS):
            optimizer.param_groups[0]["lr"] = _RATE * 0.5 * (1 + math.cos(math.pi * step / _STEPS))
            optimizer.zero_grad()
            _cross_entropy(sample, key * unit, query / unit).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    key, query = (key * unit).detach(), (query / unit).detach()
    if not float(_cross_entropy(sample, key, query)) < first:
        return slots
    return Slots(slots.frequency, torch.view_as_complex(key), torch.view_as_complex(query))


def _sample(
    slots: Slots, heads: Sequence[tuple[Tensor, Tensor]], rotation: Rotation, window: int | None
) -> _Sample:
    groups = slots.frequency.shape[0]
    tokens, native, head_dim = heads[0][1].shape
    count = min(_QUERIES, tokens)
    apart = tokens // count
    every = torch.arange(count, dtype=torch.int64, device=slots.frequency.device) * apart
    keys = torch.stack([rotation.apply(k) for _, k in heads])  # [W, T, Hkv, D]
    queries, hidden = [], []
    for number, (q, _) in enumerate(heads):
        at = every + number * 5 % apart  # other places in each window
        queries.append(rotation.apply(q).index_select(0, at))
        hidden.append(_hidden(at, tokens, window))
    turned = torch.stack(queries).view(len(heads), count, native, -1, head_dim)  # [W, n, Hkv, G, D]
    unseen = torch.stack(hidden).view(len(heads), 1, 1, count, tokens)
    scale = head_dim**-0.5
    scores = torch.einsum("wnhgd,wthd->whgnt", turned, keys) * scale
    attention = scores.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
    pair = slots.frequency.repeat_interleave(native // groups, dim=0)  # [Hkv, S]
    at_q = (len(heads), count, groups, native // groups, -1, head_dim // 2)
    at_k = (len(heads), tokens, groups, native // groups, head_dim // 2)
    (q_real, q_imag), (k_real, k_imag) = _picked(turned, pair.unsqueeze(1)), _picked(keys, pair)
    return _Sample(
        native=attention.view(len(heads), -1, tokens),
        q=(q_real.view(at_q), q_imag.view(at_q)),
        k=(k_real.view(at_k), k_imag.view(at_k)),
        hidden=unseen,
        scale=scale,
    )


def _hidden(at: Tensor, tokens: int, window: int | None) -> Tensor:
    """`[n, T]` bool: which keys the queries at positions `at` do not see."""
    past = at.unsqueeze(1) - torch.arange(tokens, dtype=torch.int64, device=at.device)
    return past < 0 if window is None else (past < 0) | (past >= window)


def _picked(turned: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    """turned `[..., D]`, pair `[..., S]` that broadcasts to it -> the slots' two columns, `[..., S]` each."""
    first, second = turned.chunk(2, dim=-1)
    place = pair.expand_as(first)
    return first.gather(-1, place), second.gather(-1, place)


def _cross_entropy(sample: _Sample, key: Tensor, query: Tensor) -> Tensor:
    """Of the native attention under the reduced one, nats a query. Factors `[Hkv, S, 2]`."""
    (q_real, q_imag), (k_real, k_imag) = sample.q, sample.k
    windows, count, groups, share, _, slots = q_real.shape
    a, b = key.view(groups, share, slots, 2).unbind(dim=-1)
    c, d = query.view(groups, share, 1, slots, 2).unbind(dim=-1)
    shared = torch.cat(
        ((k_real * a - k_imag * b).sum(dim=3), (k_real * b + k_imag * a).sum(dim=3)), dim=-1
    )  # [W, T, K, D]
    asking = torch.cat((q_real * c - q_imag * d, q_real * d + q_imag * c), dim=-1)  # [W, n, K, h, G, D]
    asking = asking.permute(0, 2, 3, 4, 1, 5).reshape(windows, groups, -1, 2 * slots)
    scores = (asking @ shared.permute(0, 2, 3, 1)) * sample.scale  # [W, K, h * G * n, T]
    scores = scores.view(windows, groups, -1, count, scores.shape[-1])
    logs = scores.masked_fill(sample.hidden, -1e30).log_softmax(dim=-1)
    # A hidden key's weight is 0, and 0 times minus infinity would not be.
    won: Tensor = sample.native.view(logs.shape) * logs.clamp_min(-1e4)
    return -won.sum(dim=-1).mean()
