"""The default model with one KV head, fitted to the shipped text and scored on the two that are held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.aligned import AlignedHeads, aligned_heads
from model.calibrate import calibrate
from model.decoder import Decoder
from model.heads import HeadMap
from model.linear_choice import choose_linear_backend
from model.modes import Mode
from server.text.samples import HeldOut, calibration_windows, held_out
from server.text.tokenizer import Tokenizer
from tests.support.decoding import load_decoder, native_heads, run_alone

CPU = torch.device("cpu")
pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Score:
    kl: float  # to native, nats per position
    times_native: float  # perplexity over native's
    agreement: float  # share of positions with native's best token


def score(decoder: Decoder, head_map: HeadMap, windows: Sequence[Sequence[int]]) -> Score:
    kl = loss = agree = 0.0
    for window in windows:
        native = run_alone(decoder, window, native_heads(decoder)).log_softmax(-1)
        reduced = run_alone(decoder, window, head_map).log_softmax(-1)
        kl += float((native.exp() * (native - reduced)).sum())
        agree += float((native.argmax(-1) == reduced.argmax(-1)).sum())
        ahead = torch.tensor(window[1:]).unsqueeze(1)
        loss += float(picked(native, ahead) - picked(reduced, ahead))
    tokens = sum(len(window) for window in windows)
    return Score(kl / tokens, math.exp(loss / (tokens - len(windows))), agree / tokens)


def picked(logs: Tensor, ahead: Tensor) -> Tensor:
    return logs[:-1].gather(1, ahead).sum()


@pytest.fixture(scope="module")
def decoder(smol: Path) -> Decoder:
    return load_decoder(smol, torch.bfloat16)


@pytest.fixture(scope="module")
def one_head(decoder: Decoder, smol: Path) -> AlignedHeads:
    ids = torch.tensor(calibration_windows(Tokenizer.from_folder(smol), 8192))
    fit = calibrate(decoder, Mode("mqa", 1, lossy=True), ids, kind="aligned")
    linear = choose_linear_backend(CPU, torch.bfloat16)
    return aligned_heads(fit, device=CPU, dtype=torch.bfloat16, linear=linear)


@pytest.mark.parametrize("name", ["prose", "code"])
def test_one_head_for_three_stays_near_native(
    decoder: Decoder, one_head: AlignedHeads, smol: Path, name: HeldOut
) -> None:
    found = score(decoder, one_head, held_out(name, Tokenizer.from_folder(smol)))
    print(f"{name}: {found}")
    assert found.kl <= 1.2
    assert found.times_native <= 3.0


def test_it_owns_its_output_and_value_weights_and_small_tables(
    decoder: Decoder, one_head: AlignedHeads
) -> None:
    weights = (576 * 576 + 64 * 192) * torch.bfloat16.itemsize
    factors = 4 * 3 * 64 * torch.float32.itemsize  # two tables for the keys of 3 heads, two for queries
    columns = (9 * 64 + 3 * 64 + 64) * torch.int64.itemsize  # of queries, keys, and the rotation
    assert one_head.nbytes == 30 * (weights + factors + columns)
    assert one_head.nbytes < 0.08 * decoder.weights.nbytes
