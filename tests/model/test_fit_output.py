"""Shared values and the refitted output projection: least squares as worked out otherwise, and both pay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import calibrate as fitting
from model.calibrate import calibrate
from model.decoder import Decoder
from model.fit_output import Ridge, ValueStatistics
from model.modes import Heads, parse_mode
from tests.support.calibrations import heads_of
from tests.support.decoding import load_decoder, native_heads, run_alone, some_ids

Tiny = Callable[..., Path]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strength", [0.01, 0.1, 2.0])
def test_ridge_is_least_squares_with_the_start_as_more_rows(strength: float) -> None:
    """|XW - Y|² + p |W - S|² is the plain problem with rows sqrt(p) and sqrt(p) S below X and Y."""
    start, parts = normal(5, 8, seed=1), [(normal(n, 8, seed=n), normal(n, 5, seed=n + 1)) for n in (30, 7)]
    ridge = Ridge(start)
    for features, target in parts:
        ridge.add(features, target)
    x, y = (torch.cat(both).double() for both in zip(*parts, strict=True))
    root = (strength * x.square().sum() / 8).sqrt()
    below = root * torch.eye(8, dtype=torch.float64)
    expected = torch.linalg.lstsq(torch.cat((x, below)), torch.cat((y, root * start.double().T))).solution
    torch.testing.assert_close(ridge.weight(strength).double(), expected.T, rtol=1e-5, atol=1e-5)


def test_ridge_keeps_the_start_where_the_tokens_say_nothing() -> None:
    start, features = normal(5, 8, seed=1), normal(100, 8)
    features[:, 6:] = 0
    wanted = normal(5, 8, seed=2)
    ridge = Ridge(start)
    ridge.add(features, features @ wanted.T)
    weight = ridge.weight(1e-7)
    torch.testing.assert_close(weight[:, :6], wanted[:, :6], rtol=1e-4, atol=1e-4)
    assert torch.equal(weight[:, 6:], start[:, 6:])
    silent = Ridge(start)
    silent.add(torch.zeros(10, 8), normal(10, 5))
    assert torch.equal(silent.weight(0.1), start)


def outputs(v: Tensor, o: Tensor) -> Tensor:
    """What W_O `[out, Hkv, G, D]` makes of values `[T, Hkv, D]` by reader: `[T, out, Hkv, G]`."""
    return torch.einsum("okgd,tkd->tokg", o, v)


def shared(v: Tensor, v_in: Tensor, back: Tensor, readers: int) -> Tensor:
    """The same of the reduced heads, through `v_in` `[K, D, h * D]` and the absorbed W_O."""
    groups, head_dim, _ = v_in.shape
    share = v.shape[1] // groups
    made = torch.einsum("kij,tkj->tki", v_in, v.reshape(len(v), groups, -1))
    return outputs(made.repeat_interleave(share, dim=1), back.view(len(back), -1, readers, head_dim))


def test_values_in_a_subspace_lose_nothing() -> None:
    """Two groups of 2 heads of 8, whose 16 columns have rank 8, read twice each."""
    v = torch.cat([normal(200, 8, seed=g) @ normal(8, 16, seed=g + 5) for g in (0, 1)], dim=1).view(200, 4, 8)
    o = normal(24, 4, 2, 8, seed=9)
    statistics = ValueStatistics(2)
    for part in (v[:50], v[50:]):
        statistics.add(part)
    v_in, back = statistics.subspace(o)
    torch.testing.assert_close(shared(v, v_in, back, 2), outputs(v, o), rtol=1e-3, atol=1e-3)


def test_the_subspace_is_the_best_of_its_size() -> None:
    """What is lost of the outputs, each reader's apart, is the tail of their singular values."""
    v, o = normal(300, 3, 8) * torch.tensor([3.0, 1.0, 0.2]).view(1, 3, 1), normal(24, 3, 2, 8, seed=9)
    statistics = ValueStatistics(1)
    statistics.add(v)
    v_in, back = statistics.subspace(o)
    lost = (shared(v, v_in, back, 2) - outputs(v, o)).square().sum()
    best = torch.linalg.svdvals(outputs(v, o).flatten(1).double())[8:].square().sum()
    torch.testing.assert_close(lost.double(), best, rtol=1e-3, atol=1e-3)


def divergence(decoder: Decoder, ids: Tensor) -> float:
    """Mean KL to native of a fit to `ids`, on `ids`: 4 KV heads to 2."""
    own = heads_of(calibrate(decoder, parse_mode("gqa2", Heads(8, 4)), ids, kind="aligned"), decoder)
    total = 0.0
    for window in ids.tolist():
        native = run_alone(decoder, window, native_heads(decoder)).log_softmax(-1)
        total += float(
            (native.exp() * (native - run_alone(decoder, window, own).log_softmax(-1))).sum(-1).mean()
        )
    return total / len(ids)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_refit_and_its_target_bring_the_stream_nearer(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Without the refit a layer keeps what was lost; without the target it makes good only its own loss, and
    a target of the wrong sign drives the streams apart."""
    decoder = load_decoder(tiny(family=family, heads=8, kv_heads=4, layers=4))
    ids = torch.tensor(some_ids(12 * 64, seed=1)).view(12, 64)
    ours, target = divergence(decoder, ids), fitting._target
    with monkeypatch.context() as patch:
        patch.setattr(Ridge, "weight", lambda ridge, strength: ridge._start)
        assert ours < 0.9 * divergence(decoder, ids)
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_target", torch.zeros_like)
        alone = divergence(decoder, ids)
    assert ours < 0.97 * alone
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "_target", lambda gap: -target(gap))
        assert divergence(decoder, ids) > alone
