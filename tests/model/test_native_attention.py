"""The C++ kernels against plain fp64 attention: random shapes and steps, block edges, stale memory, both ends
of a large arena, and the build for AVX2 beside the one for this CPU."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.attention.choose import choose_attention_backend
from model.attention.native import NativeAttention
from model.attention.reference import ReferenceAttention
from model.native.library import NativeLibrary
from tests.support.attention import CPU, CacheRig, LayerCache
from tests.support.native import avx2, native

KERNELS = {"native": native, "avx2": avx2}
BF16, FP32 = torch.bfloat16, torch.float32
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025)


@pytest.fixture(params=list(KERNELS))
def kernels(request: pytest.FixtureRequest) -> NativeAttention:
    """The backend, as built for this CPU and as built for one with AVX2 only."""
    return backend_of(request.param)


def backend_of(build: str) -> NativeAttention:
    library = KERNELS[build]()
    if not isinstance(library, NativeLibrary):
        pytest.skip(library)
    return NativeAttention(library)


def exact(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """q `[n, Hq, D]` of a row's last n tokens, k, v `[length, Hkv, D]` -> attention in fp64, and the same of
    |v|: what the rounding of weights is relative to."""
    count, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1).double().transpose(0, 1) for each in (k, v))  # [Hq, length, D]
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) / q.shape[2] ** 0.5
    behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
    hidden = (behind < 0) | (behind >= (window or length))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1), (weights @ v.abs()).transpose(0, 1)


class Case:
    """Sequences over one cache that starts as NaN, and every K and V ever written, kept outside it."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        block: int,
        kv_heads: Sequence[int],
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.rig = CacheRig(1, heads, head_dim, block, 1024, sum(kv_heads), dtype, seed=seed)
        self.shape, self.dtype = (heads, head_dim), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.sequences = [self.rig.open(count) for count in kv_heads]
        self.written = [[self.random(0, count, head_dim) for _ in "kv"] for count in kv_heads]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def room(self, tokens: Sequence[int]) -> bool:
        """Whether the cache has blocks for such a step."""
        lengths = [s.length + count for s, count in zip(self.sequences, tokens, strict=True)]
        blocks = [-(-n // self.rig.block) * s.kv_heads for n, s in zip(lengths, self.sequences, strict=True)]
        return any(tokens) and sum(blocks) <= 1024

    def step(
        self, backend: AttentionBackend, tokens: Sequence[int], window: int | None = None
    ) -> list[Tensor]:
        """Each sequence brings that many tokens; the answers of each, `[tokens, Hq, D]`, all right."""
        busy = [index for index, count in enumerate(tokens) if count]
        meta = self.rig.meta([(self.sequences[index], tokens[index]) for index in busy])
        q = [self.random(tokens[index], *self.shape) for index in busy]
        fresh: list[list[Tensor]] = [[], []]
        for index in busy:
            for at in (0, 1):
                new = self.random(tokens[index], self.sequences[index].kv_heads, self.shape[1])
                fresh[at].append(new.flatten(0, 1))
                self.written[index][at] = torch.cat([self.written[index][at], new])
        k, v = (torch.cat(each) for each in fresh)
        ours = backend.begin(meta).forward(torch.cat(q), k, v, self.rig.layers[0], window)
        assert ours.shape == (sum(tokens), *self.shape) and ours.dtype == self.dtype
        answers = list(ours.split([tokens[index] for index in busy]))
        for index, queries, answer in zip(busy, q, answers, strict=True):
            check(answer, *exact(queries, *self.written[index], window))
        return answers


def check(ours: Tensor, expected: Tensor, absolute: Tensor) -> None:
    """Weights and answer are each rounded once: by half an ulp, relative to the sums of |weight * value|.
    fp32 adds up the errors of sums and of 2^x, some ulps."""
    allowed = 2**-8 * (absolute + expected.abs()) if ours.dtype == BF16 else 1e-5 * absolute
    worst = ((ours.double() - expected).abs() / allowed).max()
    assert float(worst) < 1, f"{float(worst):.2f} of the allowed error"


def some_case(seed: int) -> tuple[Case, np.random.Generator]:
    """Any heads, groups, head_dim, block size and dtype, with up to 4 sequences of any modes."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 4, 6, 9, 12, 32]))
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    kv_heads = [int(rng.choice(divisors)) for _ in range(rng.integers(1, 5))]
    head_dim, block = (
        int(rng.choice([32, 48, 64, 80, 96, 112, 128, 256])),
        int(rng.choice([16, 32, 48, 64, 128])),
    )
    return Case(heads, head_dim, block, kv_heads, (BF16, FP32)[seed % 2], seed), rng


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes_and_steps(kernels: NativeAttention, seed: int) -> None:
    """Prefill, chunks of it and decode in the same steps, lengths around the edges of blocks and chunks."""
    case, rng = some_case(seed)
    block = case.rig.block
    counts = [0, 1, 1, 1, 2, 5, block - 1, block, block + 1, 63, 64, 65, 2 * block]
    for _ in range(4):
        tokens = [int(rng.choice(counts)) for _ in case.sequences]
        if case.room(tokens):
            case.step(kernels, tokens, (None, None, 1, 5, 16, 70)[rng.integers(6)])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    "length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025]
)
def test_lengths_around_every_edge(kernels: NativeAttention, length: int, dtype: torch.dtype) -> None:
    """Of a pair, a panel, a block, a chunk and a segment of keys: a prompt of it, then two single tokens."""
    case = Case(6, 32, 32, [2, 6, 1], dtype, seed=length)
    case.step(kernels, [length, 1, min(length, 40)])
    case.step(kernels, [1, length, 1])
    case.step(kernels, [1, 1, 1])


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("window", [None, 700, 40])
def test_long_rows_are_shared_by_threads(threads: int, window: int | None) -> None:
    """What several threads sum up in pieces is what one sums up, to the last bit."""
    kernels = backend_of("native")
    before = torch.get_num_threads()
    answers = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            case = Case(6, 64, 16, [2, 1], BF16, seed=5)
            case.step(kernels, [1800, 1200], window)
            answers.append(
                [case.step(kernels, tokens, window) for tokens in ([1, 1], [1, 0], [90, 1], [1, 3])]
            )
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*answers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_token_is_answered_alike_in_any_company(dtype: torch.dtype, window: int | None) -> None:
    """A prompt at once, in chunks, token by token, alone or beside others: the same bits."""
    kernels = backend_of("native")
    layer = CacheRig(1, 6, 64, 16, 512, 8, dtype).layers[0]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(150, n, 64, generator=generator).to(dtype) for n in (6, 2, 2))
    answers = []
    for chunks in ([150], [1] * 3 + [47, 100], [64, 80, 1, 1, 1, 1, 1, 1]):
        rig = CacheRig(0, 6, 64, 16, 512, 8, dtype, seed=len(chunks))
        ours, other = rig.open(2), rig.open(3)
        parts, start = [], 0
        for turn, count in enumerate(chunks):
            beside = [(other, turn + 1)] if turn % 2 else []
            meta = rig.meta([*beside, (ours, count)])
            extra = sum(tokens for _, tokens in beside)
            step_q = torch.cat([q[:extra], q[start : start + count]])
            new = [
                torch.cat([each[: 3 * extra, 0], each[start : start + count].flatten(0, 1)])
                for each in (k, v)
            ]
            parts.append(kernels.begin(meta).forward(step_q, *new, layer, window)[extra:])
            start += count
        answers.append(torch.cat(parts))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_others_left_behind_does_not_leak(
    kernels: NativeAttention, dtype: torch.dtype, poison: float
) -> None:
    """Every slot that the rows did not write holds `poison`: tails of blocks at every offset, and block 0."""
    case = Case(6, 48, 16, [3, 1, 6], dtype)
    for layer in case.rig.layers:
        layer.k.fill_(poison)
        layer.v.fill_(poison)
    for tokens in ([21, 6, 2], *[[1, 1, 1]] * 17, [3, 9, 20], [1, 1, 1]):
        for answer in case.step(kernels, tokens, None if sum(tokens) > 3 else 20):
            assert bool(torch.isfinite(answer).all())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_poisoned_sequence_hurts_itself_alone(
    kernels: NativeAttention, dtype: torch.dtype, tokens: int, which: str
) -> None:
    """A NaN among its own keys or values is its answer; those of others are right."""
    case = Case(6, 64, 16, [3, 3, 3], dtype)
    case.step(kernels, [10, 20, 30])
    sequence = case.sequences[1]
    getattr(case.rig.layers[0], which)[int(case.rig.row_tables[sequence.row, 0])] = torch.nan
    case.written[1][0 if which == "k" else 1][:16, 0] = torch.nan
    meta = case.rig.meta([(each, tokens) for each in case.sequences])
    q, k, v = case.random(3 * tokens, 6, 64), case.random(9 * tokens, 64), case.random(9 * tokens, 64)
    ours = kernels.begin(meta).forward(q, k, v, case.rig.layers[0], None).isnan()
    assert bool(ours[tokens : 2 * tokens, :2].all())
    ours[tokens : 2 * tokens, :2] = False
    assert not bool(ours.any())


@pytest.mark.parametrize(("dtype", "allowed"), [(BF16, 2**-6), (FP32, 2e-5)])
def test_equals_the_reference_backend(kernels: NativeAttention, dtype: torch.dtype, allowed: float) -> None:
    """One step in both arenas: the backends differ by rounding alone."""
    cases = [Case(12, 64, 16, [12, 3, 1], dtype, seed=3) for _ in range(2)]
    for tokens in ([40, 25, 60], [1, 1, 1], [4, 1, 9]):
        ours, theirs = (
            torch.cat(case.step(backend, tokens))
            for case, backend in zip(cases, (kernels, ReferenceAttention(CPU)), strict=True)
        )
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("block", [16, 48])
def test_where_the_bytes_of_a_block_lie(kernels: NativeAttention, block: int, dtype: torch.dtype) -> None:
    """K `[D / P, B, P]`, V `[B / P, D, P]`; tokens go to their slots and nothing else is written."""
    pair, width = 4 // dtype.itemsize, 32
    layer = LayerCache(*(torch.full((4, block, width), 7.0, dtype=dtype) for _ in "kv"))
    slots = [2 * block + 5, 0, 3 * block + block - 1, 6, 7]
    k, v = torch.randn(2, len(slots), width).to(dtype)
    kernels.write(k, v, layer, torch.tensor(slots))
    plain_k = layer.k.view(4, width // pair, block, pair).transpose(1, 2).reshape(4 * block, width)
    plain_v = layer.v.view(4, block // pair, width, pair).transpose(2, 3).reshape(4 * block, width)
    for plain, new in ((plain_k, k), (plain_v, v)):
        assert torch.equal(plain[slots], new)
        rest = torch.ones(4 * block, dtype=torch.bool)
        rest[slots] = False
        assert bool((plain[rest] == 7).all())


def test_queries_may_lie_in_a_wider_buffer(kernels: NativeAttention) -> None:
    """As the fused product of q, k and v leaves them: a token's heads together, tokens apart."""
    rig = CacheRig(1, 6, 32, 16, 16, 4)
    fused = torch.randn(5, 6 + 2 + 2, 32)
    meta = rig.meta([(rig.open(2), 5)])
    k, v = (fused[:, at : at + 2].reshape(-1, 32) for at in (6, 8))
    ours = kernels.begin(meta).forward(fused[:, :6], k, v, rig.layers[0], None)
    check(ours, *exact(fused[:, :6], fused[:, 6:8], fused[:, 8:], None))


@pytest.mark.parametrize("window", [None, 3])
def test_both_ends_of_more_than_two_to_the_31_elements(kernels: NativeAttention, window: int | None) -> None:
    """Offsets are 64 bits wide: blocks at either end of a sparse K and V are written and attended to."""
    block, blocks = 16, 2**21 + 3
    memory = mmap.mmap(-1, (blocks + 1) * block * 64 * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=BF16).view(blocks + 1, block, 64)
    layer = LayerCache(whole[:-1], whole[1:])  # V is K one block on, so only every other block is used
    assert layer.k.numel() > 2**31
    case = Case(12, 64, block, [2], BF16)
    case.rig.layers[0] = layer
    case.rig._free = [2, blocks - 3, blocks - 1, 0]
    for tokens in (18, 1, 2):
        case.step(kernels, [tokens], window)
    assert case.rig.row_tables[:2, :2].tolist() == [[0, blocks - 1], [blocks - 3, 2]]


def test_many_sequences(kernels: NativeAttention) -> None:
    """64 of all modes, one of them in prefill."""
    case = Case(4, 32, 16, [1, 2, 4] * 21 + [2], BF16)
    case.step(kernels, [1 + 5 * index % 37 for index in range(64)])
    case.step(kernels, [1] * 63 + [50])
    case.step(kernels, [1] * 64)


@pytest.mark.parametrize(
    ("dtype", "block", "head_dim", "said"),
    [
        (torch.float16, 16, 64, "not float16"),
        (BF16, 8, 64, "multiple of 16 tokens, not 8"),
        (BF16, 16, 72, "multiple of 16, not 72"),
    ],
)
def test_what_the_kernels_do_not_read(dtype: torch.dtype, block: int, head_dim: int, said: str) -> None:
    library = native()
    chosen = choose_attention_backend(CPU, dtype, block_size=block, head_dim=head_dim, native=library)
    assert chosen.name == "reference"
    assert said in chosen.reason or isinstance(library, str)


def test_the_choice_says_why() -> None:
    library = native()
    if not isinstance(library, NativeLibrary):
        pytest.skip(library)
    choose = [CPU, BF16], {"block_size": 16, "head_dim": 64}
    chosen = choose_attention_backend(*choose[0], **choose[1], native=library)
    assert chosen.name == "native" and library.about in chosen.reason
    other = choose_attention_backend(*choose[0], **choose[1], native="no compiler")
    assert other.name == "reference" and "no compiler" in other.reason
    there = choose_attention_backend(torch.device("meta"), BF16, **choose[1], native=library)
    assert there.name == "reference" and "meta" in there.reason
