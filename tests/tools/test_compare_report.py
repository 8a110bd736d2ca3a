"""What a comparison says: the table, JSON, Markdown and the picture, whole and cut short."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.engine.errors import ConfigError
from server.tools.compare.files import as_markdown, write_json
from server.tools.compare.lines import ending
from server.tools.compare.plot import check_matplotlib, draw, write_plot
from server.tools.compare.results import Comparison
from server.tools.compare.table import print_table
from tests.support.comparisons import comparison_of
from tests.support.shapes import LLAMA_3_8B

EVERY_MODE = ("mqa", "gqa2", "gqa4", "native", "gqa16", "mha")  # of 32 query and 8 KV heads
NAMES = Path(__file__).parents[2] / "docs" / "tools.md"


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny(heads=9, kv_heads=3, hidden=144, vocab=512)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Llama 3 8B's config.json, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


@pytest.fixture
def found(folder: Path) -> Comparison:
    return comparison_of(folder)


def rows(text: str) -> dict[str, list[str]]:
    """Cells of each line of the terminal's table that begins with two spaces."""
    cut = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    return {cells[0]: cells[1:] for cells in cut if cells[0]}


def test_the_table(found: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(found)
    said = capsys.readouterr().out
    table = rows(said)
    assert table["KV heads"] == ["3", "9", "1"]
    assert table["answers"] == ["exact", "exact", "lossy, mean"]
    assert table["bytes a token"] == ["768", "2,304", "256"]  # 2 * 2 layers * heads * 16 * 4 bytes
    assert table["peak live bytes"] == ["196,608", "589,824", "65,536"]
    assert table["device bytes"] == ["200,704", "593,920", "69,632"]
    assert table["first token, p50 ms"] == ["10.5"] * 3 and table["first token, p99 ms"] == ["20.2"] * 3
    assert table["output tokens/s"] == ["200"] * 3
    assert table["users that fit"] == ["12", "4", "36"]
    assert table["tokens/s of them all"] == ["4,115", "1,372", "12,345"]
    assert table["perplexity"] == ["14.00", "14.00", "31.50"]
    assert table["KL to native, nats"] == ["0.000", "0.000", "1.250"]
    assert table["same top-1 token"] == ["100.0 %", "100.0 %", "50.0 %"]
    assert "one more is preempted" in said and "measured on a|b.txt (CC0), 1,000 positions" in said
    assert all(len(line.rstrip()) <= 100 for line in said.splitlines())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_many_modes_go_on_below(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """In a terminal of any width every name and every cell is whole, and every mode is there once."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    found = comparison_of(llama, attention=EVERY_MODE)
    print_table(found)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    heads = [line.split() for line in lines if line.split()[:1] and set(line.split()) <= set(EVERY_MODE)]
    assert [name for head in heads for name in head] == list(EVERY_MODE)
    peaks = [cell for line in lines if line.startswith("  peak live bytes") for cell in line.split()[3:]]
    assert peaks == [f"{heads * 65536:,}" for heads in (1, 2, 4, 8, 16, 32)]


def test_what_is_missing_is_a_dash(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison_of(folder, done=False)
    found.fixed_work["mha"] = comparison_of(folder).fixed_work["mha"]
    print_table(found)
    said = capsys.readouterr().out
    table = rows(said)
    assert table["peak live bytes"] == ["–", "589,824", "–"]
    assert table["users that fit"] == table["perplexity"] == ["–"] * 3
    assert table["bytes a token"] == ["768", "2,304", "256"]
    assert "where there is a –, nothing was measured" in said


@pytest.mark.parametrize(("slowest", "told"), [(20.1, False), (19.9, True)])
def test_a_busy_machine_is_told(folder: Path, slowest: float, told: bool) -> None:
    found = comparison_of(folder)
    for mode, work in found.fixed_work.items():
        rounds = (30.0, slowest, 25.0) if mode == "mha" else (30.0, 30.0, 30.0)
        found.fixed_work[mode] = replace(work, rounds=rounds)
    assert told == any("rounds of mha differ by more than 1.5 times" in line for line in ending(found))


def test_no_quality_no_section(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison_of(folder, quality=False)
    print_table(found)
    said = capsys.readouterr().out
    assert "perplexity" not in said + as_markdown(found)


def test_json(found: Comparison, folder: Path, tmp_path: Path) -> None:
    write_json(found, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(read) == {
        "format", "complete", "headroom", "commit", "date", "seconds", "machine", "setup", "modes", "notes",
    }  # fmt: skip
    assert (read["format"], read["complete"], read["seconds"]) == (1, True, 12.3)
    assert set(read["machine"]) == {
        "cpu", "cores", "threads", "memory_bytes", "gpu", "system", "python", "torch",
    }  # fmt: skip
    assert (read["setup"]["context"], read["setup"]["users"], read["setup"]["block_size"]) == (64, 4, 16)
    assert read["setup"]["prompt_tokens"] + read["setup"]["output_tokens"] == 64
    native, mha, mqa = read["modes"]
    assert [mode["mode"] for mode in read["modes"]] == ["native", "mha", "mqa"]
    assert (mqa["kv_heads"], mqa["group"], mqa["lossy"], mqa["head_map"]) == (1, 9, True, "mean")
    assert mha["fixed_work"] == {
        "peak_live_bytes": 589824,
        "predicted_peak_bytes": 589824,
        "pool_bytes": 589824,
        "device_bytes": 593920,
        "weight_bytes": 1000000,
        "map_bytes": 0,
        "ttft_ms": {"p50": 10.5, "p99": 20.25},
        "itl_ms": {"p50": 1.5, "p99": 2.5},
        "output_tokens": 64,
        "rounds": [100.0, 200.0, 300.0],
        "output_tokens_per_second": 200.0,
    }
    assert native["fixed_pool"] == {
        "pool_bytes": 589824,
        "users": 12,
        "next_user": "preempted",
        "curve": [{"users": 1, "tokens_per_second": 50.0}, {"users": 12, "tokens_per_second": 4115.0}],
    }
    assert (mqa["quality"]["perplexity"], mqa["quality"]["kl"], mqa["quality"]["top1"]) == (31.5, 1.25, 0.5)
    write_json(comparison_of(folder, done=False), tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert read["complete"] is False
    assert all(mode["fixed_work"] is mode["fixed_pool"] is mode["quality"] is None for mode in read["modes"])


def test_every_name_of_the_json_is_documented(found: Comparison, tmp_path: Path) -> None:
    write_json(found, tmp_path / "out.json")

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    page = NAMES.read_text(encoding="utf-8")
    page = page[page.index("## compare") :]
    missing = {
        name for name in names(json.loads((tmp_path / "out.json").read_text())) if f"`{name}`" not in page
    }
    assert not missing


def test_markdown(found: Comparison) -> None:
    lines = as_markdown(found).splitlines()
    assert lines[0] == "# tiny: attention modes compared"
    tables = [line for line in lines if line.startswith("|")]
    assert "| mha | 9 | exact | 2,304 |" in tables
    assert "| mqa | 65,536 | 69,632 | 10.5 | 20.2 | 1.5 | 2.5 | 200 |" in tables
    assert "| mqa | 36 | 12,345 |" in tables
    assert "| mqa | 31.50 | 1.250 | 50.0 % |" in tables
    widths = {}
    for line in lines:  # every row of a table has as many cells as its head
        if not line.startswith("|"):
            widths.clear()
        else:
            assert line.count("|") == widths.setdefault("head", line.count("|"))


@pytest.mark.parametrize("case", ["whole", "nothing done", "no quality"])
def test_the_picture(folder: Path, tmp_path: Path, case: str) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "out.png"
    write_plot(comparison_of(folder, quality=case == "whole", done=case != "nothing done"), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = image.imread(path)[..., :3]
    height, width = pixels.shape[:2]
    assert (width, height) >= (1000, 800)
    colours = {tuple(colour) for colour in np.round(pixels.reshape(-1, 3) * 255).astype(int).tolist()}
    for mode in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73)):  # Okabe and Ito's first three
        assert mode in colours
    for panel in (pixels[: height // 2, : width // 2], pixels[: height // 2, width // 2 :],
                  pixels[height // 2 :, : width // 2], pixels[height // 2 :, width // 2 :]):  # fmt: skip
        assert 0.01 < float((panel.min(axis=-1) < 0.9).mean()) < 0.9, "a panel is empty, or all ink"


@pytest.mark.parametrize("modes", [("mqa",), ("native", "mha", "mqa"), EVERY_MODE], ids=len)
def test_no_label_of_the_picture_hides_another(llama: Path, modes: tuple[str, ...]) -> None:
    """Over and under the bars, and whatever is written stays in the picture."""
    pytest.importorskip("matplotlib")
    figure = draw(comparison_of(llama, attention=modes))
    figure.draw_without_rendering()
    for axes in figure.axes:
        words = [*axes.texts, *axes.get_xticklabels(), axes.title, axes.xaxis.label, axes.yaxis.label]
        boxes = [(text.get_text(), text.get_window_extent()) for text in words if text.get_text()]
        for _, box in boxes:
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        if axes.get_xscale() == "linear":
            for i, (first, box) in enumerate(boxes):
                assert not [second for second, other in boxes[i + 1 :] if box.overlaps(other)], first


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^--plot draws with matplotlib.*pip install 'matplotlib"):
        check_matplotlib()
