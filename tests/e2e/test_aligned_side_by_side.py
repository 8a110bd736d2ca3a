"""Reduced modes beside native and repeated ones in one forward, each as it is alone.

`fixed` has its reference in transformers: the checkpoint that its factors write out. `free` has none (slots
turn with frequencies of their own), so it is compared with the decoder's own forward over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.decoder import Decoder
from model.heads import HeadMap, NativeHeads, RepeatHeads, Variant
from tests.support.calibrations import heads_of, random_calibration, write_reduced
from tests.support.decoding import load_decoder, run_alone
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.equality import assert_same_ids
from tests.support.reference import load_reference
from tests.support.tap import Tap, listen

HEAD_DIM, LAYERS = 8, 2


@dataclass(frozen=True)
class Modes:
    """Variants of one checkpoint, and what each says of a text when nothing else runs."""

    folder: Path
    variants: tuple[Variant, ...]
    references: dict[str, Callable[[list[int]], Tensor]]  # ids `[T]` -> logits `[T, V]`


@pytest.fixture(scope="module")
def modes(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Modes:
    folder = tiny(family="qwen2", rope="llama3", heads=8, kv_heads=4)
    decoder = load_decoder(folder)
    fixed = random_calibration(decoder.config, 2, free=False)
    reduced = write_reduced(tmp_path_factory.mktemp("reduced") / "fixed", folder, fixed)
    maps: dict[str, HeadMap] = {
        "native": NativeHeads(4),
        "mha": RepeatHeads(8),
        "fixed": heads_of(fixed, decoder),
        "free": heads_of(random_calibration(decoder.config, 1, seed=1), decoder),
    }
    return Modes(
        folder,
        tuple(Variant(name, head_map) for name, head_map in maps.items()),
        {
            "native": load_reference(folder).logits,
            "mha": load_reference(folder).logits,
            "fixed": load_reference(reduced).logits,
            "free": lambda ids: run_alone(decoder, ids, maps["free"]),
        },
    )


@pytest.fixture
def tap() -> Iterator[Tap]:
    with listen() as tap:
        yield tap


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


ASKED = [
    (mode, random_ids(20 + 13 * i, seed=i)) for i, mode in enumerate(["native", "mha", "fixed", "free"] * 2)
]


def check_all(tap: Tap, modes: Modes, asked: list[tuple[str, list[int]]], answers: list[list[Any]]) -> int:
    """Every answer, and every logit on the way to it, against its mode alone; how many runs the tap heard."""
    runs = list(tap.runs)
    heard = 0
    for (mode, prompt), (answer,) in zip(asked, answers, strict=True):
        text = prompt + answer.ids
        expected = modes.references[mode](text)
        assert_same_ids(answer.ids, expected[len(prompt) - 1 : -1].argmax(-1).tolist(), where=mode)
        heard += len(Tap(runs).check(text, expected, mode))
    return heard


@pytest.mark.parametrize("chunk", [512, 40])
def test_four_modes_in_one_forward(
    modes: Modes, tap: Tap, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    together = []
    hidden = Decoder.hidden

    def counted(self: Decoder, ids: Tensor, positions: Tensor, segments: Any, *rest: Any) -> Tensor:
        together.append({segment.head_map.identity + str(segment.head_map.kv_heads) for segment in segments})
        return hidden(self, ids, positions, segments, *rest)

    monkeypatch.setattr(Decoder, "hidden", counted)
    engine, _ = fp32_engine(modes.folder, variants=modes.variants, max_batch_tokens=chunk, max_num_seqs=8)
    answers = run(engine, [greedy_request(ids, 30, variant=mode) for mode, ids in ASKED])
    steps = len(together)
    assert max(map(len, together)) == 4, "no forward held all four modes"
    assert steps <= -(-sum(len(ids) for _, ids in ASKED) // chunk) + 45, "the modes did not share their steps"
    assert check_all(tap, modes, ASKED, answers) == len(ASKED)


def test_preempted_and_resumed_beside_each_other(modes: Modes, tap: Tap) -> None:
    pool = 110 * (2 * LAYERS * 16 * HEAD_DIM * 4)
    engine, _ = fp32_engine(modes.folder, variants=modes.variants, kv_memory=pool, max_model_len=200)
    answers = run(engine, [greedy_request(ids, 60, variant=mode) for mode, ids in ASKED])
    assert check_all(tap, modes, ASKED, answers) >= len(ASKED)
    assert engine.stats().preemptions > 0
    assert engine.report(check=True).states.live.blocks == 0


def test_a_prefix_hit_of_a_reduced_mode(modes: Modes, tap: Tap) -> None:
    """The second time, 4 full blocks of the prompt come from the mode's own cache, and nothing changes."""
    engine, _ = fp32_engine(modes.folder, variants=modes.variants)
    prompt = random_ids(70, seed=20)
    for mode in ("fixed", "free"):
        for cached in (0, 64):
            request = greedy_request(prompt, 10, variant=mode, root=mode.encode().ljust(32))
            ((answer,),) = run(engine, [request])
            assert answer.kv is not None
            assert answer.kv.cached_tokens == cached
            check_all(tap, modes, [(mode, prompt)], [[answer]])
