"""Refined keys: attention is nearer to the native heads' on queries and keys that no step saw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.fit_keys import KeyStatistics, Slots
from model.refine_keys import refine
from model.rope import Rope, RopeConfig, Rotation

CPU = torch.device("cpu")
TOKENS, READERS, DIM = 48, 2, 16  # READERS: query heads of each native KV head

Heads = list[tuple[Tensor, Tensor]]


def rotation(tokens: int = TOKENS) -> Rotation:
    return Rope(RopeConfig(theta=1e6), DIM, 512, CPU).at(torch.arange(tokens))


def some_heads(windows: int, seed: int, native: int = 4) -> Heads:
    """Queries and keys of several texts. A head's keys are its neighbours', turned its own way, and at the
    slow frequencies they have a large constant part: most of their size, and nothing to softmax."""
    generator = torch.Generator().manual_seed(9)
    turn = torch.polar(torch.ones(native, DIM // 2), 6.28 * torch.rand(native, DIM // 2, generator=generator))
    constant = 6 * torch.randn(native, DIM, generator=generator)
    constant[:, [0, 1, 2, 3, 8, 9, 10, 11]] = 0
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = []
    for _ in range(windows):
        common = torch.complex(normal(TOKENS, 1, DIM // 2), normal(TOKENS, 1, DIM // 2)) * turn
        k = torch.cat((common.real, common.imag), dim=-1) + 0.2 * normal(TOKENS, native, DIM) + constant
        made.append((normal(TOKENS, native * READERS, DIM), k))
    return made


def pca_slots(heads: Heads, kv_heads: int) -> Slots:
    statistics = KeyStatistics(kv_heads)
    for q, k in heads:
        statistics.add(q, k)
    return statistics.slots(free=True)


def attention_kl(slots: Slots, heads: Heads, window: int | None = None) -> float:
    """Mean KL(native attention || reduced), head by head and query by query, in complex fp64."""
    groups, native = slots.frequency.shape[0], slots.key.shape[0]
    total, count = 0.0, 0
    for q, k in heads:
        turned_q, turned_k = (rotation().apply(x).double() for x in (q, k))
        pairs_q = torch.complex(turned_q[..., : DIM // 2], turned_q[..., DIM // 2 :])
        pairs_k = torch.complex(turned_k[..., : DIM // 2], turned_k[..., DIM // 2 :])
        share = native // groups
        for head in range(native * READERS):
            read = head // READERS
            pair = slots.frequency[read // share]
            members = range(read // share * share, (read // share + 1) * share)
            shared = torch.stack([slots.key[h] * pairs_k[:, h][:, pair] for h in members]).sum(dim=0)
            asked = slots.query[read] * pairs_q[:, head][:, pair]
            for t in range(TOKENS):
                seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
                native_scores = (pairs_q[t, head] * pairs_k[seen, read].conj()).real.sum(-1) / DIM**0.5
                scores = (asked[t] * shared[seen].conj()).real.sum(-1) / DIM**0.5
                a, b = native_scores.log_softmax(-1), scores.log_softmax(-1)
                total, count = total + float((a.exp() * (a - b)).sum()), count + 1
    return total / count


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_is_nearer_on_texts_that_were_not_fitted(kv_heads: int, window: int | None) -> None:
    fitted, fresh = some_heads(12, seed=1), some_heads(2, seed=2)
    slots = pca_slots(fitted, kv_heads)
    refined = refine(slots, fitted, rotation(), window)
    assert torch.equal(refined.frequency, slots.frequency)
    assert attention_kl(refined, fresh, window) < 0.9 * attention_kl(slots, fresh, window)


def test_keys_that_one_slot_holds_exactly_stay_as_they_are() -> None:
    copies = [(q, k[:, :1].expand_as(k).contiguous()) for q, k in some_heads(4, seed=1)]
    slots = pca_slots(copies, 1)
    assert attention_kl(slots, copies[:1]) < 1e-9
    assert refine(slots, copies, rotation(), None) is slots


def test_a_window_of_one_leaves_nothing_to_gain() -> None:
    heads = some_heads(4, seed=1)  # each query sees its own key alone, whatever the factors are
    slots = pca_slots(heads, 1)
    assert refine(slots, heads, rotation(), 1) is slots


def test_texts_of_one_token() -> None:
    heads = [(q[:1], k[:1]) for q, k in some_heads(4, seed=1)]
    slots = pca_slots(heads, 1)
    assert refine(slots, heads, rotation(1), None) is slots


def test_the_same_factors_each_time() -> None:
    heads = some_heads(4, seed=1)
    slots = pca_slots(heads, 2)
    first, second = (refine(slots, heads, rotation(), None) for _ in range(2))
    assert torch.equal(first.key, second.key) and torch.equal(first.query, second.query)
    assert not torch.equal(first.key, slots.key)
