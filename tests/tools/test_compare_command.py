"""`headroom compare` as a user meets it: a whole run, signals, failures, and shapes without weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.progress import Silent
from server.engine.errors import ConfigError
from server.tools.compare.options import CompareOptions
from server.tools.compare.prepare import Prepared, prepare
from tests.support.command import ROOT, InProcess, headroom
from tests.support.shapes import LLAMA_3_8B

TEXT = ROOT / "tests" / "data" / "prose.txt"


def test_a_whole_run(nine: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.md", "out.png")]
    words = ("--device", "cpu", "--head-map", "mean", "--context", "64", "--users", "2", "--text", str(TEXT))
    outputs = ("--json", str(files[0]), "--markdown", str(files[1]), "--plot", str(files[2]))
    done = headroom("compare", str(nine), *words, *outputs, timeout=120)
    assert done.returncode == 0, done.stderr
    read = json.loads(files[0].read_text())
    assert read["complete"] is True
    modes = {mode["mode"]: mode for mode in read["modes"]}
    # 2 users, 63 tokens each at the end: 4 blocks of 2 * 2 layers * 16 * 16 * 4 bytes for each KV head.
    for name, heads in (("mqa", 1), ("native", 3), ("mha", 9)):
        assert modes[name]["fixed_work"]["peak_live_bytes"] == 2 * 4 * heads * 4096
        assert modes[name]["fixed_pool"]["users"] == 2 * 9 // heads
        assert modes[name]["fixed_pool"]["next_user"] == "preempted"
    assert modes["mha"]["quality"]["kl"] == pytest.approx(0, abs=1e-5)
    assert modes["mqa"]["quality"]["kl"] > 0.1
    assert "# " in files[1].read_text() and files[2].read_bytes().startswith(b"\x89PNG")
    assert "peak live bytes" in done.stdout and "lossy, mean" in done.stdout
    parts = [line for line in done.stderr.splitlines() if line[0].isdigit() and "loading" not in line]
    assert [line.split()[0] for line in parts] == [f"{n}/7" for n in range(1, 8)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_done(nine: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Once a mode is done, Ctrl-C: SIGINT to the whole process group, as a terminal sends it; or SIGTERM."""
    path = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "compare", str(nine), "--device", "cpu", "--no-quality",
         "--head-map", "mean", "--json", str(path), "--markdown", str(tmp_path / "out.md")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    timer = threading.Timer(90, process.kill)
    timer.start()
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("2/6"):
            break
    if number is signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, rest = process.communicate()
    timer.cancel()
    assert process.returncode == code, said + rest
    assert "Traceback" not in said + rest
    assert number is signal.SIGTERM or rest.splitlines()[-1] == "headroom: interrupted"
    read = json.loads(path.read_text())
    assert read["complete"] is False
    native, mha, mqa = read["modes"]
    assert native["fixed_work"]["peak_live_bytes"] == 4 * 32 * 3 * 4096
    assert mqa["fixed_work"] is None and mha["fixed_pool"] is None
    assert f"{native['fixed_work']['peak_live_bytes']:,}" in out and "nothing was measured" in out
    assert "nothing was measured" in (tmp_path / "out.md").read_text()


def test_a_failure_keeps_what_is_done(
    here: InProcess, nine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second mode's process dies: the first mode is printed and written, then one line. If the first one
    dies there is nothing to show but the line."""
    words = (
        "compare",
        str(nine),
        "--device",
        "cpu",
        "--no-quality",
        "--head-map",
        "mean",
        "--context",
        "64",
    )
    jobs: list[object] = []

    def killed(job: Callable[[Silent], object], progress: Silent) -> object:
        jobs.append(job)
        if len(jobs) == dies:
            raise ConfigError("the process that measures ended early")
        return job(Silent())

    monkeypatch.setattr("server.tools.compare.measure.in_a_process", killed)
    dies = 2
    done = here(*words, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "headroom compare: the process that measures ended early"
    native, mha, _ = json.loads((tmp_path / "out.json").read_text())["modes"]
    assert native["fixed_work"] is not None and mha["fixed_work"] is None
    assert "nothing was measured" in done.stdout
    jobs.clear()
    done = here(*words, "--json", "/dev/full", "--markdown", str(tmp_path / "out.md"))
    full = "headroom compare: --json /dev/full: cannot be written (No space left on device)"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, full)
    assert "nothing was measured" in (tmp_path / "out.md").read_text(), (
        "the other file is written all the same"
    )
    jobs.clear()
    dies = 1
    done = here(*words, "--json", str(tmp_path / "none.json"))
    assert (done.returncode, done.stdout) == (1, "") and not (tmp_path / "none.json").exists()


def test_files_are_written_whoever_reads_the_table(
    here: InProcess, nine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headroom compare ... | head -1`, after minutes of work."""

    def left(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("server.commands.compare.print_table", left)
    monkeypatch.setattr("server.tools.compare.measure.in_a_process", lambda job, _: job(Silent()))
    words = ("--device", "cpu", "--no-quality", "--context", "32", "--users", "1", "--attention", "native")
    done = here("compare", str(nine), *words, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["complete"] is True


def prepared(folder: Path, **options: Any) -> Prepared:
    settings = {"device": "cpu", "random_weights": True} | options
    return prepare(CompareOptions(**settings), "shape", folder, folder)


def test_llama_3_8b_without_weights(shape: Path) -> None:
    """The formula's bytes are those of all layers, however many are run."""
    made = prepared(shape, layers=2, dtype="bfloat16", attention=("mqa", "native", "mha"))
    facts = [(mode.mode, mode.bytes_per_token, mode.head_map) for mode in made.comparison.modes]
    assert facts == [("mqa", 16384, "mean"), ("native", 131072, "native"), ("mha", 524288, "repeat")]
    assert [mode.run_bytes_per_token for mode in made.comparison.modes] == [1024, 8192, 32768]
    # 4 users of 512 tokens as mha: 4 * 32 blocks * 32 heads of 2 * 2 layers * 16 * 128 * 2 bytes.
    assert made.comparison.setup.pool_bytes == 4 * 32 * 32 * 16384
    assert [part.kind for part in made.parts] == ["fixed_work"] * 3 + ["fixed_pool"] * 3
    predicted = {part.mode: part.job.pool.peak for part in made.parts[:3]}  # type: ignore[attr-defined]
    assert predicted == {"mqa": 128, "native": 1024, "mha": 4096}
    users = {part.mode: part.job.growth.users for part in made.parts[3:]}  # type: ignore[attr-defined]
    assert users == {"mqa": 128, "native": 16, "mha": 4}
    notes = " ".join(made.comparison.notes)
    assert (
        "Random weights" in notes
        and "mqa) use the head map mean" in notes
        and "Run with 2 of 32 layers" in notes
    )


@pytest.mark.model
def test_the_default_model(smol: Path) -> None:
    """SmolLM2 in bf16: 7,680 bytes a token and KV head; 4 users of 511 KV tokens are 128 logical blocks."""
    made = prepared(smol, random_weights=False, quality=False, head_map="mean", dtype="bfloat16")
    assert [(mode.mode, mode.bytes_per_token) for mode in made.comparison.modes] == [
        ("native", 23040), ("mha", 69120), ("mqa", 7680),
    ]  # fmt: skip
    peaks = [part.job.pool.peak for part in made.parts[:3]]  # type: ignore[attr-defined]
    assert [peak * made.comparison.setup.block_bytes for peak in peaks] == [47185920, 141557760, 15728640]
    assert [part.job.growth.users for part in made.parts[3:]] == [12, 4, 36]  # type: ignore[attr-defined]


def test_what_is_measured_is_made_as_asked(shape: Path) -> None:
    made = prepared(shape, kernels="torch", weights="int8", compiler="clang++ -O1")
    for part in made.parts:
        target = part.job.target  # type: ignore[attr-defined]
        assert (target.kernels, target.weights, target.compiler) == ("torch", "int8", "clang++ -O1")


def test_random_weights_run(shape: Path, tmp_path: Path) -> None:
    """A shape of a few megabytes, through the whole command: neither weights nor tokenizer are there."""
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_hidden_layers": 5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | small))
    words = ("--random-weights", "--config", str(tmp_path), "--layers", "2", "--attention", "mqa,mha")
    more = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--context",
        "64",
        "--users",
        "1",
        "--json",
        str(tmp_path / "out.json"),
    )
    done = headroom("compare", *words, *more, timeout=120)
    assert done.returncode == 0, done.stderr
    read = json.loads((tmp_path / "out.json").read_text())
    assert [mode["bytes_per_token"] for mode in read["modes"]] == [2 * 5 * heads * 16 * 4 for heads in (1, 4)]
    work = [mode["fixed_work"] for mode in read["modes"]]
    assert [each["peak_live_bytes"] for each in work] == [4 * heads * 2 * 2 * 16 * 16 * 4 for heads in (1, 4)]
    assert [mode["quality"] for mode in read["modes"]] == [None] * 2
    assert "perplexity" not in done.stdout and "use the head map mean" in " ".join(done.stdout.split())


def test_default_modes_drop_the_same_heads_named_twice(tiny: Callable[..., Path]) -> None:
    mha = prepared(tiny(heads=4, kv_heads=4)).comparison
    assert [mode.mode for mode in mha.modes] == ["native", "mqa"]
    mqa = prepared(tiny(heads=4, kv_heads=1)).comparison
    assert [mode.mode for mode in mqa.modes] == ["native", "mha"]
