"""Perplexity as transformers has it; KL and top-1 agreement as all logits at once give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.reference import ReferenceAttention
from model.decoder import Decoder
from model.errors import ModelError
from model.heads import MeanHeads, NativeHeads, RepeatHeads, Variant
from server.engine.errors import ConfigError
from server.engine.options import EngineOptions
from server.engine.scoring import Scoring, load_scoring
from server.text.samples import held_out
from server.text.tokenizer import Tokenizer
from server.tools.quality import LEAST_TOKENS, QualityText, cut, measure_quality, own_text, shipped_text
from tests.support.attention import CPU
from tests.support.checkpoints import make_rand
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.reference import load_reference, token_losses

NATIVE, MHA, MQA = (
    Variant("native", NativeHeads(2)), Variant("mha", RepeatHeads(4)), Variant("mqa", MeanHeads(1)),
)  # fmt: skip
PROSE = Path(__file__).parents[1] / "data" / "prose.txt"


def scoring_of(folder: Path, *variants: Variant, dtype: torch.dtype = torch.float32) -> Scoring:
    return Scoring(load_decoder(folder, dtype), ReferenceAttention(CPU), variants)


def text_of(*lengths: int, name: str = "made up", seed: int = 0, vocab: int = 128) -> QualityText:
    windows = tuple(tuple(some_ids(n, seed=seed + i, vocab=vocab)) for i, n in enumerate(lengths))
    return QualityText(name, "none needed", windows)


def predictions(logits: Sequence[Tensor]) -> Tensor:
    """`[positions, V]` fp64 log probabilities of all windows together, without each one's last."""
    return torch.cat([part[:-1] for part in logits]).to(torch.float64).log_softmax(dim=-1)


@pytest.mark.parametrize("chunk", [None, 1, 13, 40])
def test_perplexity_is_the_references(tiny: Callable[..., Path], chunk: int | None) -> None:
    folder, text = tiny(), text_of(60, 60, 37, 2)
    (row,) = measure_quality(scoring_of(folder, NATIVE), [text], chunk=chunk)
    reference = load_reference(folder)
    losses = torch.cat([token_losses(reference.logits(ids), ids[1:]) for ids in text.windows])
    assert row.positions == len(losses) == 59 + 59 + 36 + 1
    assert row.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-4)
    assert (row.kl, row.top1) == (0.0, 1.0)


@pytest.mark.parametrize("chunk", [None, 7])
def test_divergence_and_agreement(tiny: Callable[..., Path], chunk: int | None) -> None:
    """Of a lossy mode, from all its logits at once and transformers' for the native ones."""
    folder, text = tiny(std=0.1), text_of(80, 50)
    native, mqa = measure_quality(scoring_of(folder, NATIVE, MQA), [text], chunk=chunk)
    decoder = load_decoder(folder)
    p = predictions([load_reference(folder).logits(ids) for ids in text.windows])
    q = predictions([run_alone(decoder, ids, MQA.head_map) for ids in text.windows])
    targets = torch.tensor([token for ids in text.windows for token in ids[1:]])
    kl, reverse = (float(F.kl_div(b, a, reduction="batchmean", log_target=True)) for a, b in ((p, q), (q, p)))
    assert mqa.kl == pytest.approx(kl, rel=1e-4)
    assert abs(reverse - kl) > 1e-2 * kl > 1e-4, "this mode loses something, and the direction shows"
    agree = p.argmax(dim=-1) == q.argmax(dim=-1)
    assert mqa.top1 == pytest.approx(float(agree.double().mean()), abs=1e-12)
    assert 0.05 < mqa.top1 < 0.95
    assert mqa.perplexity == pytest.approx(math.exp(float(F.nll_loss(q, targets))), rel=1e-4)
    assert mqa.perplexity != pytest.approx(native.perplexity, rel=1e-3)
    assert (mqa.mode, mqa.kv_heads, native.mode, native.kv_heads) == ("mqa", 1, "native", 2)


def test_sums_are_made_in_double_precision(tiny: Callable[..., Path]) -> None:
    """From the very same logits, nothing is lost but the last digits."""
    scoring, text = scoring_of(tiny(std=0.1), MQA), text_of(90)
    (row,) = measure_quality(scoring, [text])
    p, q = (
        predictions(list(scoring.scorer(variant, 90).logits(text.windows[0]))) for variant in (NATIVE, MQA)
    )
    assert row.kl == pytest.approx(float((p.exp() * (p - q)).sum(dim=-1).mean()), rel=1e-10)


def test_an_exact_mode_diverges_by_rounding_alone(tiny: Callable[..., Path]) -> None:
    native, mha = measure_quality(scoring_of(tiny(), NATIVE, MHA), [text_of(100)])
    assert 0 <= mha.kl < 1e-6
    assert mha.top1 == 1.0
    assert mha.perplexity == pytest.approx(native.perplexity, rel=1e-6)


def test_rows_come_text_by_text_in_the_order_asked(tiny: Callable[..., Path]) -> None:
    texts = [text_of(30, name="one"), replace(text_of(40, 41, name="two", seed=9), licence="CC0-1.0")]
    told: list[float] = []
    scoring = scoring_of(tiny(), MQA, NATIVE, MHA)
    rows = measure_quality(scoring, texts, chunk=16, progress=told.append)
    assert [(row.text, row.mode) for row in rows] == [
        (text, mode) for text in ("one", "two") for mode in ("mqa", "native", "mha")
    ]
    assert [row.positions for row in rows] == [29] * 3 + [39 + 40] * 3
    assert {row.licence for row in rows[3:]} == {"CC0-1.0"}
    assert told == sorted(told) and told[-1] == 1.0 and len(told) == 2 + 3 + 3
    assert rows[:3] == measure_quality(scoring, texts[:1], chunk=16), "the same again, and alone"


def test_native_runs_once_for_all_modes(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []
    forward = Decoder.forward

    def seen(self: Decoder, ids: Tensor, positions: Tensor, segments: Any, *rest: Any) -> Tensor:
        heads.append(segments[0].head_map.kv_heads)
        return forward(self, ids, positions, segments, *rest)

    monkeypatch.setattr(Decoder, "forward", seen)
    measure_quality(scoring_of(tiny(), MHA, NATIVE, MQA), [text_of(40)], chunk=20)
    assert heads == [2, 4, 1] * 2
    heads.clear()
    rows = measure_quality(scoring_of(tiny(), MQA), [text_of(40)], chunk=20)
    assert heads == [2, 1] * 2
    assert [row.mode for row in rows] == ["mqa"], "native is measured against, asked for or not"


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def test_nothing_of_the_size_of_a_window_is_held(tmp_path: Path) -> None:
    """200 tokens have 39 MB of logits; in chunks of 40, nothing exceeds 8 MiB, fp64 included."""
    scoring = scoring_of(make_rand(tmp_path, vocab=49152), NATIVE, MQA)
    scoring.decoder.weights.lm_head(torch.zeros(1, 64))  # whatever is made once
    with Largest() as largest:
        measure_quality(scoring, [text_of(200, vocab=49152)], chunk=40)
    assert 40 * 49152 * 4 <= largest.nbytes <= 8 << 20


def test_logits_that_are_no_numbers(tiny: Callable[..., Path]) -> None:
    scoring = scoring_of(tiny(), NATIVE, MQA)
    scoring.decoder.weights.norm[0] = math.inf
    with pytest.raises(ModelError, match="attention mode native: its logits on the text made up are not fin"):
        measure_quality(scoring, [text_of(30)])


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((), "the text odd has a window of fewer than 2 tokens"),
        (((1, 2, 3), (1,)), "the text odd has a window of fewer than 2 tokens"),
        (((1, 2, 128),), "the text odd has token 128, and the model knows 128 tokens"),
    ],
)
def test_windows_that_cannot_be_scored(
    tiny: Callable[..., Path], windows: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_quality(scoring_of(tiny(), NATIVE), [QualityText("odd", "none", windows)])


def test_the_shipped_text(tiny_served: Path) -> None:
    """As much prose as code, whatever a window is."""
    tokenizer = Tokenizer.from_folder(tiny_served)
    prose, code = (held_out(name, tokenizer, 512) for name in ("prose", "code"))
    text = shipped_text(tokenizer, 512)
    assert text.windows == (*map(tuple, prose[:4]), *map(tuple, code[:4]))
    short = shipped_text(tokenizer, 100)
    assert {len(window) for window in short.windows} == {100} and len(short.windows) == 2 * 20


def test_a_users_text(tiny_served: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_served)
    path = tmp_path / "mine.txt"
    path.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 40)
    text = own_text(path, tokenizer, 50)
    ids = tokenizer.encode_rendered(path.read_text())
    assert text.name == "mine.txt"
    assert {len(window) for window in text.windows} == {50}
    assert [token for window in text.windows for token in window] == ids[: len(ids) // 50 * 50]


def test_each_window_begins_as_a_text_does(sp_served: Path, tmp_path: Path) -> None:
    """A tokenizer that puts BOS before a text: its model has never seen one that lacks it."""
    tokenizer = Tokenizer.from_folder(sp_served)
    path = tmp_path / "mine.txt"
    path.write_text("the lock and the water " * 60)
    bos = tokenizer.encode("the")[0]
    assert bos != tokenizer.encode_rendered("the")[0]
    text = own_text(path, tokenizer, 64)
    assert len(text.windows) > 1
    assert all(window[0] == bos and bos not in window[1:] for window in text.windows)
    joined = [token for window in text.windows for token in window[1:]]
    assert joined == tokenizer.encode_rendered(path.read_text())[: len(joined)]


def test_windows_are_whole_unless_there_is_only_one() -> None:
    assert cut(range(10), [], 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cut(range(3), [9], 8) == ((9, 0, 1, 2),)
    assert cut(range(6), [9], 4) == ((9, 0, 1, 2), (9, 3, 4, 5))
    assert sum(map(len, cut(range(10_000), [], 512))) == 4096, "a book is not read to its end"


@pytest.mark.parametrize("words", ["", "Too short."])
def test_a_text_too_short(tiny_served: Path, tmp_path: Path, words: str) -> None:
    tokenizer = Tokenizer.from_folder(tiny_served)
    path = tmp_path / "mine.txt"
    path.write_text(words)
    count = len(tokenizer.encode_rendered(words))
    with pytest.raises(ConfigError) as error:
        own_text(path, tokenizer, 512)
    assert str(error.value) == f"{path}: the text has {count} tokens; scoring needs at least {LEAST_TOKENS}"


def test_a_text_that_is_no_text(tiny_served: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"plain, and then \xff")
    with pytest.raises(ConfigError, match=r"mine\.txt: is not UTF-8 text \(byte 16\)"):
        own_text(path, Tokenizer.from_folder(tiny_served), 512)
    with pytest.raises(FileNotFoundError):
        own_text(tmp_path / "none.txt", Tokenizer.from_folder(tiny_served), 512)


def test_a_long_file_is_read_in_part(tiny_served: Path, tmp_path: Path) -> None:
    """Cut in the middle of a character, which is no fault of the file."""
    path = tmp_path / "mine.txt"
    path.write_bytes(b"x" + "é".encode() * 400_000)
    text = own_text(path, Tokenizer.from_folder(tiny_served), 512)
    assert len(text.windows) == 8


@pytest.mark.model
def test_the_default_model(smol: Path) -> None:
    """1,000 tokens of prose in two windows against transformers; the exact mode on a few."""
    scoring = load_scoring(EngineOptions("cpu", "float32"), smol, 512)
    ids = Tokenizer.from_folder(smol).encode(PROSE.read_text())[:1000]
    text = QualityText("prose", "Apache-2.0", (tuple(ids[:500]), tuple(ids[500:])))
    (native,) = measure_quality(scoring, [text])
    reference = load_reference(smol)
    expected = math.sqrt(math.prod(reference.perplexity(window) for window in text.windows))
    assert native.positions == 998
    assert native.perplexity == pytest.approx(expected, rel=1e-4)
    wide = replace(scoring, variants=(Variant("mha", RepeatHeads(9)),))
    (mha,) = measure_quality(wide, [replace(text, windows=(tuple(ids[:100]),))])
    assert 0 <= mha.kl < 1e-6
    assert mha.top1 == 1.0
