"""The reference backend against a loop over single keys: any tables, any mix of rows, nothing stale leaks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import model.attention.gather
from model.attention.base import AttentionMeta
from model.attention.choose import choose_attention_backend
from model.attention.reference import ReferenceAttention
from tests.support.attention import CPU, CachedSequence, CacheRig, LayerCache

HEADS, HEAD_DIM = 12, 8
WINDOWS = (None, 1, 5, 16)


class Case:
    """Sequences over one cache, and every K and V ever written, kept outside it."""

    def __init__(
        self, kv_heads: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32, block: int = 4
    ) -> None:
        rows = sum(kv_heads)
        self.rig = CacheRig(1, HEADS, HEAD_DIM, block, blocks=2048, max_rows=rows, dtype=dtype, seed=seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.sequences = [self.rig.open(heads) for heads in kv_heads]
        self.written = [[torch.empty(0, heads, HEAD_DIM)] * 2 for heads in kv_heads]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def step(
        self, tokens: Sequence[int], window: int | None, backend: ReferenceAttention
    ) -> tuple[Tensor, Tensor]:
        """Each sequence brings that many tokens; returns the backend's answer and the loop's."""
        work: list[tuple[CachedSequence, int]] = [
            (sequence, count) for sequence, count in zip(self.sequences, tokens, strict=True) if count
        ]
        meta = self.rig.meta(work)
        q = self.random(len(meta.positions), HEADS, HEAD_DIM)
        keys, values, expected, start = [], [], [], 0
        for index, count in enumerate(tokens):
            if not count:
                continue
            for at, new in enumerate((keys, values)):
                fresh = self.random(count, self.sequences[index].kv_heads, HEAD_DIM)
                new.append(fresh.reshape(-1, HEAD_DIM))
                self.written[index][at] = torch.cat([self.written[index][at], fresh.float()])
            expected.append(naive(q[start : start + count].float(), *self.written[index], window))
            start += count
        step = backend.begin(meta)
        ours = step.forward(q, torch.cat(keys), torch.cat(values), self.rig.layers[0], window)
        assert ours.shape == q.shape and ours.dtype == q.dtype
        return ours, torch.cat(expected)


def naive(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q `[n, Hq, D]` are the last n of the row's tokens; k, v `[length, Hkv, D]`."""
    count, heads, head_dim = q.shape
    length, kv_heads, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(count):
        position = length - count + token
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = k[first : position + 1, kv_head].double() @ q[token, head].double() / head_dim**0.5
            out[token, head] = scores.softmax(0) @ v[first : position + 1, kv_head].double()
    return out


@pytest.fixture(params=["roomy", "tight"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReferenceAttention:
    """Once as it is, once with gathers of a few hundred tokens, so that every way of cutting is taken."""
    if request.param == "tight":
        monkeypatch.setattr(model.attention.gather, "_CPU_DECODE_BYTES", 6000)
        monkeypatch.setattr(model.attention.gather, "_PREFILL_BYTES", 2000)
        monkeypatch.setattr(model.attention.gather, "_ALIKE_TOKENS", 8)
    return ReferenceAttention(CPU)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", [1, 4, 16])
def test_any_mix_of_rows(backend: ReferenceAttention, block: int, window: int | None) -> None:
    """MHA, GQA and MQA rows, ragged, prefilling, in chunks and decoding in the same steps."""
    case = Case([12, 3, 1, 4, 3, 1, 6, 12], seed=block, block=block)
    steps = (
        [1, 2, 25, 7, 1, 16, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [5, 1, 1, 20, 1, 1, 1, 11],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [3, 0, 12, 1, 0, 1, 2, 1],
        [1, 1, 1, 1, 1, 1, 1, 1],
    )
    for tokens in steps:
        ours, expected = case.step(tokens, window, backend)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_one_step_serves_layers_of_different_windows(backend: ReferenceAttention) -> None:
    case = Case([3, 3])
    case.step([30, 9], None, backend)
    meta = case.rig.meta([(sequence, 1) for sequence in case.sequences])
    step, q = backend.begin(meta), case.random(2, HEADS, HEAD_DIM)
    k, v = case.random(6, HEAD_DIM), case.random(6, HEAD_DIM)
    answers = {w: step.forward(q, k, v, case.rig.layers[0], w) for w in (None, 5, None, 16)}
    for window, ours in answers.items():
        for index in range(2):
            keys, values = case.written[index]
            keys = torch.cat([keys, k[None, 3 * index : 3 * index + 3]])
            values = torch.cat([values, v[None, 3 * index : 3 * index + 3]])
            expected = naive(q[index : index + 1], keys, values, window)
            torch.testing.assert_close(ours[index : index + 1].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [None, 6])
def test_what_others_left_behind_does_not_leak(
    backend: ReferenceAttention, window: int | None, poison: float
) -> None:
    """Every slot that the rows did not write holds `poison`: block tails, freed blocks, and block 0."""
    case = Case([3, 1, 12, 3])
    for layer in case.rig.layers:
        layer.k.fill_(poison)
        layer.v.fill_(poison)
    case.step([33, 6, 2, 1], window, backend)
    case.rig.release(case.sequences[1])
    case.written[1] = [torch.empty(0, 1, HEAD_DIM)] * 2
    for tokens in ([1, 9, 1, 1], [1, 1, 1, 1], [1, 1, 20, 1], [1, 1, 1, 1]):
        ours, expected = case.step(tokens, window, backend)
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_poisoned_sequence_hurts_itself_alone(backend: ReferenceAttention, tokens: int) -> None:
    case = Case([3, 3, 3])
    case.step([10, 20, 30], None, backend)
    table = case.rig.row_tables[case.sequences[1].row]
    case.rig.layers[0].v[int(table[0])] = torch.nan
    ours, expected = case.step([tokens] * 3, None, backend)
    poisoned = slice(tokens, 2 * tokens)
    assert bool(ours[poisoned, : HEADS // 3].isnan().all())
    healthy = torch.ones(3 * tokens, dtype=torch.bool)
    healthy[poisoned] = False
    torch.testing.assert_close(ours[healthy].double(), expected[healthy], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_rounds_only_the_answer(
    backend: ReferenceAttention, dtype: torch.dtype, allowed: float
) -> None:
    """Scores and softmax are fp32: against exact arithmetic on the rounded K and V one rounding is left."""
    case = Case([12, 3, 1], dtype=dtype)
    for tokens in ([40, 25, 60], [1, 1, 1], [4, 1, 9]):
        ours, expected = case.step(tokens, None, backend)
        error = (ours.double() - expected).abs()
        assert bool((error <= expected.abs() * allowed + 1e-5).all())


def test_write_puts_tokens_into_their_slots() -> None:
    case = Case([2])
    layer, backend = case.rig.layers[0], ReferenceAttention(CPU)
    k, v = case.random(3, HEAD_DIM), case.random(3, HEAD_DIM)
    slots = torch.tensor([4 * 2047 + 3, 0, 9])
    backend.write(k, v, layer, slots)
    for slot, new_k, new_v in zip(slots.tolist(), k, v, strict=True):
        assert torch.equal(layer.k[slot // 4, slot % 4], new_k)
        assert torch.equal(layer.v[slot // 4, slot % 4], new_v)
    assert int(layer.k.isnan().sum()) == layer.k.numel() - 3 * HEAD_DIM


def test_nothing_else_is_written() -> None:
    """A step changes the slots of its own tokens and no other byte of the arena."""
    case, backend = Case([3, 1]), ReferenceAttention(CPU)
    case.step([6, 6], None, backend)
    layer = case.rig.layers[0]
    before = layer.k.clone()
    meta: AttentionMeta = case.rig.meta([(case.sequences[0], 2)])
    step = backend.begin(meta)
    step.forward(*(case.random(n, *s) for n, s in ((2, (HEADS, HEAD_DIM)), (6, (HEAD_DIM,)))),
                 case.random(6, HEAD_DIM), layer, None)  # fmt: skip
    changed = (layer.k.view(torch.int32) != before.view(torch.int32)).any(-1)
    expected = torch.zeros_like(changed)
    for row in range(3):
        for position in (6, 7):
            block = case.rig.row_tables[case.sequences[0].row + row, position // 4]
            expected[int(block), position % 4] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_both_ends_of_more_than_two_to_the_31_elements(window: int | None) -> None:
    """Offsets are 64 bits wide: blocks at either end of a sparse K and V are written and attended to."""
    block, blocks = 16, 2**21 + 3
    memory = mmap.mmap(-1, (blocks + 1) * block * 64 * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.bfloat16).view(blocks + 1, block, 64)
    rig = CacheRig(0, HEADS, 64, block, blocks=4, dtype=torch.bfloat16)
    layer = LayerCache(whole[:-1], whole[1:])  # V is K one block on, so only every other block is used
    assert layer.k.numel() > 2**31
    rig._free = [2, blocks - 3, blocks - 1, 0]
    sequence, backend = rig.open(2), ReferenceAttention(CPU)
    k, v = (torch.randn(21, 2, 64).bfloat16() for _ in "kv")
    for start, stop in ((0, 18), (18, 19), (19, 21)):
        meta, q = rig.meta([(sequence, stop - start)]), torch.randn(stop - start, HEADS, 64).bfloat16()
        new = (each[start:stop].reshape(-1, 64) for each in (k, v))
        ours = backend.begin(meta).forward(q, *new, layer, window)
        expected = naive(q.float(), k[:stop].float(), v[:stop].float(), window)
        torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-4)
    assert rig.row_tables[:2, :2].tolist() == [[0, blocks - 1], [blocks - 3, 2]]
    assert torch.equal(layer.k[blocks - 1, :5], k[16:, 0]) and torch.equal(layer.v[blocks - 3], v[:16, 1])


def test_gathers_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gathered copy is larger than the bound, but for one row that alone is longer."""
    monkeypatch.setattr(model.attention.gather, "_CPU_DECODE_BYTES", 4096)
    case, sizes = Case([12, 3, 1]), []
    case.step([50, 20, 30], None, ReferenceAttention(CPU))
    meta = case.rig.meta([(sequence, 1) for sequence in case.sequences])
    plan = model.attention.gather.plan_step(meta, None, HEAD_DIM, CPU)
    for chunk in plan.decodes:
        tokens = chunk.hidden.shape[0] * chunk.hidden.shape[2]
        sizes.append(tokens * HEAD_DIM * 2 * 4)
        assert chunk.blocks.shape[0] * 4 == tokens
        assert sizes[-1] <= 4096 or len(chunk.rows) == 1
    assert sum(len(chunk.rows) for chunk in plan.decodes) == 16
    assert len(plan.decodes) > 6


def test_a_long_row_does_not_pad_short_ones() -> None:
    rig = CacheRig(1, HEADS, HEAD_DIM, blocks=2048, max_rows=20)
    rig.meta([(rig.open(1), 4000 if index == 7 else 10) for index in range(20)])
    sequences = [CachedSequence(index, 1, 4000 if index == 7 else 10) for index in range(20)]
    plan = model.attention.gather.plan_step(rig.meta([(s, 1) for s in sequences]), None, HEAD_DIM, CPU)
    assert sorted(tuple(chunk.hidden.shape) for chunk in plan.decodes) == [(1, 1, 4004), (19, 1, 12)]


def test_the_choice_says_why() -> None:
    chosen = choose_attention_backend(CPU, torch.bfloat16, block_size=16, head_dim=64, native="none here")
    assert chosen.name == "reference" and "PyTorch" in chosen.reason
