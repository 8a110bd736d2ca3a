"""Attention modes side by side: one pool, one forward pass, the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.aligned import AlignedHeads
from model.calibration import Calibration
from model.decoder import Decoder
from model.errors import ModelError
from model.heads import MeanHeads, NativeHeads, RepeatHeads, Variant
from model.modes import Mode
from model.progress import Silent
from server.engine import loading, variants
from server.engine.errors import ConfigError
from server.engine.variants import CalibrationSource
from tests.engine.conftest import Oracle
from tests.support.calibrations import random_calibration
from tests.support.checkpoints import make_rand
from tests.support.driving import fp32_engine, greedy_request, run
from tests.support.engines import checked, manager_of, on_batches, pool_of, prompt_of

BOTH = (Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)))


def test_modes_share_every_step(small: Path, oracle: Oracle) -> None:
    engine = checked(fp32_engine(small, variants=BOTH, max_batch_tokens=512)[0])
    batches: list[Any] = []
    on_batches(engine, batches.append)
    prompts = [prompt_of(10 + 11 * i, 90 + i) for i in range(8)]
    requests = [greedy_request(p, 15, variant=("native", "mha")[i % 2]) for i, p in enumerate(prompts)]
    answers = run(engine, requests)
    for (answer,), prompt in zip(answers, prompts, strict=True):
        assert answer.ids == oracle.greedy(prompt, 15)
    assert len(batches) == engine.stats().steps == 15, "one forward a step, for both modes together"
    for batch in batches:
        assert [(s.head_map.kv_heads, s.start) for s in batch.segments] == [
            (4, 0),
            (2, batch.segments[0].stop),
        ], "the tokens of a mode stand together"
        assert len(batch.meta.row_slot) == 4 * 2 + 4 * 4


def test_blocks_follow_the_heads(small: Path) -> None:
    engine = checked(fp32_engine(small, variants=BOTH, prefix_cache=False)[0])
    peaks = {}
    for variant in ("native", "mha"):
        ((answer,),) = run(engine, [greedy_request(prompt_of(40, 91), 10, variant=variant)])
        assert answer.kv is not None
        peaks[variant] = (answer.kv.blocks, answer.kv.tokens)
    assert peaks == {"native": (2 * 4, 49), "mha": (4 * 4, 49)}


def test_modes_never_share_a_cached_block(small: Path, oracle: Oracle) -> None:
    """Even under one root, which the words never give to two modes."""
    engine = checked(fp32_engine(small, variants=BOTH)[0])
    prompt = prompt_of(40, 92)
    for variant, cached in (("native", 0), ("mha", 0), ("native", 32), ("mha", 0)):
        ((answer,),) = run(engine, [greedy_request(prompt, 3, variant=variant)])
        assert answer.ids == oracle.greedy(prompt, 3)
        assert answer.kv is not None and answer.kv.cached_tokens == cached


@pytest.mark.parametrize("blocks", [16, 20])
def test_modes_push_each_other_out(small: Path, oracle: Oracle, blocks: int) -> None:
    engine = checked(pool_of(small, blocks, variants=BOTH)[0])
    prompts = [prompt_of(20, 93 + i) for i in range(6)]
    requests = [greedy_request(p, 44, variant=("mha", "native")[i % 2]) for i, p in enumerate(prompts)]
    answers = run(engine, requests)
    assert [answer.ids for (answer,) in answers] == [oracle.greedy(prompt, 44) for prompt in prompts]
    assert engine.stats().preemptions > 0
    assert manager_of(engine).live_blocks == 0


def test_two_engines_in_one_process(small: Path, oracle: Oracle) -> None:
    """Step by step in turn, of different dtypes and modes; neither notices the other."""
    one = checked(fp32_engine(small)[0])
    two = checked(fp32_engine(small, dtype="bfloat16", variants=BOTH)[0])
    prompt = prompt_of(30, 94)
    one.add(greedy_request(prompt, 12))
    two.add(greedy_request(prompt, 12, variant="mha"))
    ids = []
    while one.has_work or two.has_work:
        ids += [event.token for event in one.step()]
        two.step()
    assert ids == oracle.greedy(prompt, 12)
    assert torch.get_default_dtype() is torch.float32


def test_modes_by_name_get_their_maps(small: Path) -> None:
    """4 query and 2 KV heads: each mode's map, canonical name and arithmetic; the first is the default."""
    engine, facts = fp32_engine(small, attention=("gqa1", "mha", "gqa2"), head_map="mean")
    variants = engine._shape.variants
    assert [type(variant.head_map) for variant in variants.values()] == [MeanHeads, RepeatHeads, NativeHeads]
    told = [(v.name, v.kv_heads, v.group, v.bytes_per_token, v.lossy, v.head_map) for v in facts.variants]
    assert told == [
        ("mqa", 1, 4, 256, True, "mean"),
        ("mha", 4, 1, 1024, False, "repeat"),
        ("native", 2, 2, 512, False, "native"),
    ]
    assert [v.identity for v in facts.variants] == ["mean", "", ""]
    assert facts.warnings == (
        "mqa is lossy: 1 KV head for the checkpoint's 2 (head map mean); "
        "`headroom compare` measures the cost",
    )
    assert facts.weight_bytes == facts.checkpoint_bytes == fp32_engine(small)[1].weight_bytes


def test_repeated_heads_say_what_the_checkpoint_says(small: Path, oracle: Oracle) -> None:
    engine = checked(fp32_engine(small, attention=("mha", "native", "mqa"), head_map="mean")[0])
    prompts = [prompt_of(20 + i, 95 + i) for i in range(6)]
    names = ("mha", "native", "mqa") * 2
    answers = run(engine, [greedy_request(p, 12, variant=v) for p, v in zip(prompts, names, strict=True)])
    for (answer,), prompt, name in zip(answers, prompts, names, strict=True):
        assert (answer.ids == oracle.greedy(prompt, 12)) is (name != "mqa")


def reachable(root: object) -> dict[int, int]:
    """Bytes of each tensor storage that hangs on `root`, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (tuple, list)):
            todo += thing
        elif isinstance(thing, dict):
            todo += thing.values()
        elif type(thing).__module__.startswith("model."):
            slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            names = slots or vars(thing)
            todo += [getattr(thing, name) for name in names]
    return found


def test_every_weight_is_held_once(small: Path) -> None:
    """Counted in storages, which PyTorch's kernels show: three modes hold what one holds, and what their maps
    own."""
    held = {}
    for attention in (("native",), ("native", "mha", "mqa")):
        engine, facts = fp32_engine(small, attention=attention, head_map="mean", kernels="torch")
        storages = reachable(engine._runner._decoder.weights) | reachable(engine._shape.variants)
        held[len(attention)] = sum(storages.values())
        assert held[len(attention)] == facts.weight_bytes
    assert held[3] == held[1] > 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "attention", "words"),
    [
        (9, 3, ("gqa4",), "attention mode gqa4: 4 KV heads cannot share 9 query heads equally; with its KV "
                          "heads, the checkpoint's modes are mqa (1), native (3), mha (9)"),
        (6, 3, ("native", "gqa2"), "attention mode gqa2: 2 is neither a multiple nor a divisor of the "
                                   "checkpoint's 3 KV heads"),
        (9, 3, ("mha", "gqa9"), "attention modes mha and gqa9 are the same here (9 KV heads); name it once"),
        (9, 3, ("gqa3", "native"), "gqa3 and native are the same here"),
        (9, 3, ("mla",), "attention mode 'mla' is not known"),
    ],
)  # fmt: skip
def test_modes_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    attention: tuple[str, ...],
    words: str,
) -> None:
    """Refused in one line, before the weights are read."""
    monkeypatch.setattr(loading, "load_weights", None)
    folder = make_rand(tmp_path, vocab=32, heads=heads, kv_heads=kv_heads, head_dim=8, hidden=8 * heads)
    with pytest.raises(ModelError) as refused:
        fp32_engine(folder, attention=attention)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention": ()}, "--attention names no mode"),
        ({"head_map": "best"}, "--head-map best: must be one of aligned, aligned-fixed, mean"),
        ({"attention": ("mqa",)}, "mqa with --head-map aligned is fitted to a text, and there is none here"),
    ],
)
def test_options_that_cannot_be(
    small: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(loading, "load_weights", None)
    with pytest.raises(ConfigError, match=words):
        fp32_engine(small, **options)  # type: ignore[arg-type]


class Fits:
    """Stands in for the fit: counts, looks, and answers with random numbers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self.ids: list[list[int]] = []
        patch.setattr(variants, "calibrate", self)

    def __call__(
        self, decoder: Decoder, mode: Mode, ids: torch.Tensor, *, kind: str, progress: Any
    ) -> Calibration:
        self.seen.append((mode.name, kind))
        self.ids = ids.tolist()
        assert decoder.rope._cos.shape[0] >= ids.shape[1], "tables for all of the text"
        progress(0.25)
        progress(1.0)
        return random_calibration(decoder.config, mode.kv_heads, free=kind == "aligned")


class Told(Silent):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def start(self, label: str, total: int | None) -> None:
        self.said.append((label, total))

    def update(self, done: int) -> None:
        self.said.append(done)


def source(folder: Path, windows: list[list[int]], progress: Silent | None = None) -> CalibrationSource:
    return CalibrationSource(lambda: windows, folder, progress or Silent())


TEXT = [[3 + i % 500 for i in range(start, start + 200)] for start in (0, 200)]


def test_a_reduced_mode_is_fitted_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the next start; anything that the fit depends on makes another."""
    fits, told = Fits(monkeypatch), Told()
    modes = {"attention": ("native", "mha", "mqa"), "kv_memory": 8 * 4096}  # 16 blocks of mqa: 128 tokens
    engine, facts = fp32_engine(small, calibration=source(tmp_path, TEXT, told), **modes)
    assert fits.seen == [("mqa", "aligned")]
    assert fits.ids == TEXT
    assert told.said == [("Fitting mqa to this model (once)", 100), 25, 100]
    mqa = facts.variants[2]
    head_map = engine._shape.variants["mqa"].head_map
    assert isinstance(head_map, AlignedHeads)
    assert (mqa.head_map, mqa.identity, mqa.weight_bytes) == ("aligned", head_map.identity, head_map.nbytes)
    assert len(mqa.identity) > 40, "a digest"

    again = fp32_engine(small, calibration=source(tmp_path, TEXT, told), **modes)[1]
    assert again.variants[2].identity == mqa.identity
    assert (len(fits.seen), len(told.said)) == (1, 3)
    others: list[tuple[list[list[int]], dict[str, object]]] = [
        (TEXT[:1], {}),
        (TEXT, {"head_map": "aligned-fixed"}),
        (TEXT, {"dtype": "bfloat16"}),
    ]
    for number, (text, options) in enumerate(others):
        fp32_engine(small, calibration=source(tmp_path, text), **modes | options)
        assert len(fits.seen) == 2 + number
    assert [kind for _, kind in fits.seen] == ["aligned", "aligned", "aligned-fixed", "aligned"]
    monkeypatch.setattr(variants, "METHOD", "another")
    fp32_engine(small, calibration=source(tmp_path, TEXT), **modes)
    assert len(fits.seen) == 5
    fp32_engine(small, calibration=source(tmp_path / "elsewhere", TEXT), **modes)
    assert len(fits.seen) == 6


def test_each_reduced_mode_has_its_own_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Fits(monkeypatch)
    folder = make_rand(tmp_path / "wide", vocab=512, heads=8, kv_heads=4)
    for _ in range(2):
        facts = fp32_engine(folder, calibration=source(tmp_path, TEXT), attention=("gqa2", "mqa", "native"))[
            1
        ]
        assert fits.seen == [("gqa2", "aligned"), ("mqa", "aligned")]
    assert len({variant.identity for variant in facts.variants}) == 3


def test_what_a_fitted_map_owns_is_counted(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fits(monkeypatch)
    one = fp32_engine(small)[1].weight_bytes
    modes = ("native", "mha", "mqa")
    engine, facts = fp32_engine(
        small, calibration=source(tmp_path, TEXT), attention=modes, kernels="torch"
    )  # whose storages can be seen
    owned = reachable(engine._shape.variants)
    assert [v.weight_bytes for v in facts.variants] == [0, 0, sum(owned.values())]
    assert facts.weight_bytes == one + sum(owned.values())
    assert facts.checkpoint_bytes == one
    assert not owned.keys() & reachable(engine._runner._decoder.weights).keys()
    # Two layers of W_O [64, 64] and v_in [16, 2 * 16] in fp32 are most of it.
    assert 2 * 4 * (64 * 64 + 16 * 32) <= sum(owned.values()) < 3 * 4 * (64 * 64 + 16 * 32)


@pytest.mark.model
def test_what_an_aligned_mqa_of_the_default_model_owns(
    smol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 layers of W_O [576, 576] and v_in [64, 192] in bf16, 7.7 % of the checkpoint's 134.5 million
    weights; factors and columns are another 0.1 %."""
    Fits(monkeypatch)
    facts = fp32_engine(
        smol, calibration=source(tmp_path, TEXT), attention=("mqa",), dtype="bfloat16", kv_memory=1 << 20
    )[1]
    (mqa,) = facts.variants
    products = 30 * 2 * (576 * 576 + 64 * 192)
    assert products / facts.checkpoint_bytes == pytest.approx(0.077, abs=0.0005)
    assert 0 < mqa.weight_bytes - products < 0.002 * facts.checkpoint_bytes


def test_text_that_the_checkpoint_cannot_read(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ids that this checkpoint has no embedding for"):
        fp32_engine(small, calibration=source(tmp_path, [[5, 512]]), attention=("mqa",))


def test_a_fit_that_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Calibration:
        raise ModelError("it cannot apply here")

    monkeypatch.setattr(variants, "calibrate", refuse)
    with pytest.raises(ModelError, match="it cannot apply here"):
        fp32_engine(small, calibration=source(tmp_path, TEXT), attention=("mqa",))
    assert list(tmp_path.glob("*.safetensors")) == []
