"""`convert` at the command line: what it writes, what it says, what it refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.calibration import Calibration
from model.config import ModelConfig
from model.fetch import default_cache_dir
from model.heads import MeanHeads, NativeHeads, RepeatHeads
from model.modes import Mode
from model.progress import Silent
from server.engine.errors import ConfigError
from server.engine.variants import fitted
from server.text.calibration import calibration_source
from server.text.samples import held_out
from server.text.tokenizer import Tokenizer
from server.tools.convert import ConvertOptions, convert
from server.tools.fitting import fitter
from tests.support import checkpoints
from tests.support.calibrations import heads_of, random_calibration
from tests.support.command import InProcess, check_one_line
from tests.support.decoding import load_decoder, run_alone, some_ids
from tests.support.driving import fp32_engine, generate
from tests.support.equality import assert_same_logits
from tests.support.reference import load_reference

Tiny = Callable[..., Path]
IDS = some_ids(40)


def no_fit(mode: Mode, head_map: str) -> Calibration:
    raise AssertionError("nothing is fitted here")


def test_mean(here: InProcess, tiny: Tiny, tmp_path: Path) -> None:
    """2 layers, 4 KV heads of 8 numbers in fp32: 2 * 2 * 4 * 8 * 4 = 512 bytes a token, then a quarter."""
    source, out = tiny(family="qwen2", heads=8, kv_heads=4), tmp_path / "out"
    done = here("convert", str(source), "--attention", "mqa", "--head-map", "mean", str(out))
    assert done.returncode == 0
    size = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values()) / 1024
    assert f"wrote {out}: {size:.0f} KiB of weights in 1 file; KV heads 4 → 1; " in done.stdout
    assert "cache 512 → 128 bytes a token (float32); lossy, the answers change (head map mean)" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == f"writing {out}\n"  # no terminal, no bar
    ours = run_alone(load_decoder(source), IDS, MeanHeads(1))
    assert_same_logits(ours, load_reference(out).logits(IDS))


def test_more_heads(here: InProcess, tiny: Tiny, tmp_path: Path) -> None:
    source, out = tiny(heads=8, kv_heads=2, dtype=torch.bfloat16), tmp_path / "out"
    done = here("convert", str(source), str(out), "--attention", "gqa4")
    assert (
        "KV heads 2 → 4; cache 128 → 256 bytes a token (bfloat16); the answers stay the same" in done.stdout
    )
    assert ModelConfig.from_folder(out).num_kv_heads == 4
    ours = run_alone(load_decoder(source, torch.bfloat16), IDS, RepeatHeads(4))
    assert torch.equal(ours, run_alone(load_decoder(out, torch.bfloat16), IDS, RepeatHeads(4)))


def test_a_dtype(here: InProcess, tiny: Tiny, tmp_path: Path) -> None:
    """In bfloat16 the 512 bytes of fp32 are 256."""
    source, out = tiny(heads=8, kv_heads=4), tmp_path / "out"
    words = ["--attention", "mqa", "--head-map", "mean", "--dtype", "bfloat16"]
    assert "cache 256 → 64 bytes a token (bfloat16)" in here("convert", str(source), str(out), *words).stdout
    assert ModelConfig.from_folder(out).torch_dtype is torch.bfloat16
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_the_new_folder_serves_as_the_variant_does(tiny_served: Path, tmp_path: Path) -> None:
    """`serve OUT` against `serve MODEL --attention mqa`: the same ids, from engines; words come along."""
    out = tmp_path / "out"
    convert(tiny_served, out, ConvertOptions("mqa", "mean"), no_fit, Silent())
    variant, _ = fp32_engine(tiny_served, attention=("mqa",), head_map="mean")
    native, facts = fp32_engine(out)
    assert facts.kv_heads == 1
    prompt = some_ids(30, vocab=checkpoints.BPE_VOCAB)
    ids = generate(variant, prompt, 40, variant="mqa")
    assert generate(native, prompt, 40) == ids
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (tiny_served / name).read_bytes()


@pytest.mark.parametrize("head_map", [None, "aligned-fixed"])
def test_aligned_fixed_is_the_default(tiny: Tiny, tmp_path: Path, head_map: str | None) -> None:
    source, out = tiny(heads=8, kv_heads=4, family="qwen2", shards=True), tmp_path / "out"
    decoder = load_decoder(source)
    made = random_calibration(decoder.config, 2, free=False)
    asked: list[tuple[str, str]] = []

    def fit(mode: Mode, kind: str) -> Calibration:
        asked.append((mode.name, kind))
        return made

    done = convert(source, out, ConvertOptions("gqa2", head_map), fit, Silent())
    assert asked == [("gqa2", "aligned-fixed")]
    assert (done.head_map, done.mode.lossy, done.files) == ("aligned-fixed", True, 1)
    expected = load_reference(out).logits(IDS)
    assert_same_logits(run_alone(decoder, IDS, heads_of(made, decoder)), expected)
    assert_same_logits(run_alone(load_decoder(out), IDS, RepeatHeads(2)), expected)


def test_a_fit_is_made_kept_and_shared_with_serve(
    here: InProcess, tiny_served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default for fewer heads, with nothing made up: the fit that `convert` made is the one that the
    variant is served with, and both say what transformers says of the new folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    done = here("convert", str(tiny_served), "--attention", "mqa", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["Fitting mqa to this model (once)", f"writing {out}"]
    assert "lossy, the answers change (head map aligned-fixed)" in done.stdout
    again = here("convert", str(tiny_served), "--attention", "mqa", str(tmp_path / "again"))
    assert again.stderr.splitlines() == [f"writing {tmp_path / 'again'}"]
    written = (out / "model.safetensors").read_bytes()
    assert written == (tmp_path / "again" / "model.safetensors").read_bytes()

    source = calibration_source(tiny_served, tmp_path / "cache" / "headroom", Silent())
    decoder = load_decoder(tiny_served)
    kept = fitted(Mode("mqa", 1, True), "aligned-fixed", decoder, source)
    expected = load_reference(out).logits(IDS)
    assert_same_logits(run_alone(decoder, IDS, heads_of(kept, decoder)), expected)
    assert_same_logits(run_alone(load_decoder(out), IDS, NativeHeads(1)), expected)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)  # a fit, the first time
def test_the_default_model_as_mqa(smol: Path, tmp_path: Path) -> None:
    """A real fit on real text: three ways the same, and far nearer to the original than the mean of heads."""
    fit = fitter(smol, default_cache_dir(os.environ), Silent())
    ids = held_out("prose", Tokenizer.from_folder(smol))[0]
    original = load_reference(smol).logits(ids)
    divergence = {}
    for head_map in ("aligned-fixed", "mean"):
        out = tmp_path / head_map
        convert(smol, out, ConvertOptions("mqa", head_map, "float32"), fit, Silent())
        logits = load_reference(out).logits(ids)
        assert_same_logits(run_alone(load_decoder(out), ids, NativeHeads(1)), logits)
        if head_map == "aligned-fixed":
            decoder = load_decoder(smol)
            variant = heads_of(fit(Mode("mqa", 1, True), head_map), decoder)
            assert_same_logits(run_alone(decoder, ids, variant), logits)
        log_p, log_q = original.log_softmax(-1), logits.log_softmax(-1)
        divergence[head_map] = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        shutil.rmtree(out)
    print(divergence)
    assert divergence["aligned-fixed"] < 1.5 < 5 < divergence["mean"]


REFUSED: dict[str, tuple[dict[str, Any], list[str], tuple[str, ...]]] = {
    "own": ({}, ["--attention", "native"], ("has 4 KV heads already", "nothing to convert")),
    "own by number": ({}, ["--attention", "gqa4"], ("has 4 KV heads already",)),
    "mha of mha": ({"kv_heads": None}, ["--attention", "mha"], ("has 8 KV heads already",)),
    "no such": ({}, ["--attention", "mla"], ("'mla' is not known", "mqa (1)")),
    "two": ({}, ["--attention", "mqa,mha"], ("'mqa,mha' is not known",)),
    "not equal": ({}, ["--attention", "gqa3"], ("gqa3", "cannot share 8 query heads equally")),
    "free": (
        {},
        ["--attention", "mqa", "--head-map", "aligned"],
        ("--head-map aligned", "frequencies of their own in each layer", "config.json cannot express"),
    ),
    "norm": (
        {"family": "qwen3"},
        ["--attention", "mqa"],
        ("--head-map aligned-fixed", "q_norm, k_norm", "not linear", "take mean"),
    ),
    "map of more": (
        {},
        ["--attention", "mha", "--head-map", "mean"],
        ("--head-map mean is for fewer KV heads", "leave --head-map out"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(here: InProcess, tiny: Tiny, tmp_path: Path, case: str) -> None:
    shape, words, parts = REFUSED[case]
    source = tiny(**{"heads": 8, "kv_heads": 4} | shape)
    check_one_line(here("convert", str(source), *words, str(tmp_path / "out")), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["a", "b"], "--attention"),
        (["a", "--attention", "mqa"], "OUT"),
        (["--attention", "mqa"], "MODEL, OUT"),
        (["a", "b", "c", "--attention", "mqa"], "unrecognized arguments: c"),
        (["a", "b", "--attention", "mqa", "--head-map", "median"], "'median'"),
        (["a", "b", "--attention", "mqa", "--dtype", "int8"], "'int8'"),
        (["a", "b", "--attention", " "], "--attention"),
    ],
)
def test_wrong_words(here: InProcess, words: list[str], part: str) -> None:
    check_one_line(here("convert", *words), part, code=2)


def test_places(here: InProcess, tiny: Tiny, tmp_path: Path) -> None:
    """OUT is looked at first, so that a taken one costs no download."""
    source, full = str(tiny(heads=8, kv_heads=4)), tmp_path / "full"
    shutil.copytree(source, full)
    words = ["--attention", "mqa", "--head-map", "mean"]
    check_one_line(here("convert", "org/never-asked", *words, str(full)), "full is not empty", "new folder")
    check_one_line(here("convert", source, *words, source), "is not empty")
    check_one_line(here("convert", source, *words, str(full / "config.json")), "config.json is a file")
    check_one_line(here("convert", str(tmp_path / "missing"), *words, str(tmp_path / "out")), "no model")
    below = here("convert", source, *words, str(full / "config.json" / "out"))
    assert below.returncode == 1 and "Traceback" not in below.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_what_is_not_there_to_convert(here: InProcess, tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(heads=8, kv_heads=4), tmp_path / "source")
    (source / "model.safetensors").unlink()
    words = ["convert", str(source), "--attention", "mha", str(tmp_path / "out")]
    check_one_line(here(*words), "holds no weights")
    checkpoints.edit_config(source, {"num_attention_heads": 7})
    check_one_line(here(*words), "must divide num_attention_heads (7)")
    (source / "config.json").write_text("{")
    check_one_line(here(*words), "is not valid JSON")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_refusals_come_before_a_fit(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not linear"):
        convert(
            tiny(family="qwen3", heads=8, kv_heads=4),
            tmp_path / "out",
            ConvertOptions("mqa"),
            no_fit,
            Silent(),
        )
