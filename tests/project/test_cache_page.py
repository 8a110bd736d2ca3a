"""The measured part of the pages: what the script writes, and that the pages hold it."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loadtest import cache_page
from loadtest.cache_page import BEGIN, BLOCKS, PICTURE, PICTURE_BYTES, RESULT
from loadtest.page import END, insert
from server.tools.compare.files import as_json
from tests.support.comparisons import comparison_of

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def png(width: int, height: int) -> bytes:
    """Noise, which nothing makes smaller; all of it of 8 colours."""
    dots = np.random.default_rng(0).integers(0, 2, (height, width, 3), dtype=np.uint8) * 255
    file = io.BytesIO()
    Image.fromarray(dots).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def found(tiny: Callable[..., Path]) -> dict[str, Any]:
    """Made-up results of a 9/3-head model, through JSON and back."""
    folder = tiny(heads=9, kv_heads=3, hidden=72)
    result: dict[str, Any] = json.loads(json.dumps(as_json(comparison_of(folder))))
    result["machine"] |= {
        "cpu": "A CPU",
        "threads": 2,
        "cores": 4,
        "memory_bytes": 8 << 30,
        "torch": "2.13",
        "gpu": None,
    }
    result |= {"commit": "abc123", "date": "2030-01-02T03:04:05+00:00"}
    return result


def test_the_cache_page_says_what_was_measured(found: dict[str, Any]) -> None:
    """The pool: 4 users * 9 heads * 4 blocks of 2 (K, V) * 2 layers * 16 tokens * 8 * 4 bytes = 2 KiB."""
    block = cache_page.cache_page(found)
    version = found["headroom"]
    assert " ".join(block.split()).startswith(
        f"tiny in float32 on A CPU (2 of 4 cores, 8.00 GiB of memory); PyTorch 2.13, Headroom {version} at "
        "`abc123`, 2030-01-02. "
    )
    native, mha, mqa = (mode["bytes_per_token"] for mode in found["modes"])
    assert (native, mha, mqa) == (3 * 2 * 2 * 8 * 4, 9 * 2 * 2 * 8 * 4, 2 * 2 * 8 * 4)
    assert f"| `native` | 3 | {native:,} | 196,608 | 200,704 | 10.5, 20.2 | 1.5, 2.5 | 200 |" in block
    assert f"| `mha` | 9 | {mha:,} | 589,824 | 593,920 |" in block
    assert f"| `mqa`, lossy (mean) | 1 | {mqa:,} | 65,536 | 69,632 |" in block
    assert "| `native` | 12 | 4,115 | 14.00 | 0.000 | 100.0 % |" in block
    assert "| `mqa`, lossy (mean) | 36 | 12,345 | 31.50 | 1.250 | 50.0 % |" in block
    words = " ".join(block.split())
    assert (
        "The same pool of 288 KiB, filled by users of 64 tokens each; and quality on a|b.txt (CC0), " in words
    )
    assert "1,000 positions" in words
    assert "](cache-modes.png)" in block


def test_the_readme_has_the_short_form(found: dict[str, Any]) -> None:
    block = cache_page.readme(found)
    assert "| mode | KV heads | bytes a token | 4 users hold | users in 288 KiB |" in block
    assert "| `mha` | 9 | 1,152 | 576 KiB | 4 | 1,372 | 0.000 |" in block
    assert "| `mqa`, lossy (mean) | 1 | 128 | 64.0 KiB | 36 | 12,345 | 1.250 |" in block
    assert f"]({PICTURE})" in block


def test_every_row_has_every_column(found: dict[str, Any]) -> None:
    for block in BLOCKS.values():
        for table in block(found).split("\n\n"):
            if table.startswith("|"):
                assert len({line.count("|") for line in table.splitlines()}) == 1


def test_nothing_outside_the_markers_changes() -> None:
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n"
    once = insert(page, "new", BEGIN)
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nThe end.\n"
    assert insert(once, "new", BEGIN) == once


@pytest.mark.parametrize("page", ["no markers", f"{BEGIN} one", f"{END} {BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_markers(page: str) -> None:
    with pytest.raises(ValueError, match="once each and in this order"):
        insert(page, "new", BEGIN)


def same_dots(one: bytes, other: bytes) -> bool:
    first, second = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in (one, other))
    return bool((first == second).all())


def stand_in(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: int, picture: bytes) -> list[str]:
    """`headroom compare` that writes these at once; returns its words."""
    words: list[str] = []

    def run(command: list[Any], **_: Any) -> subprocess.CompletedProcess[bytes]:
        words.extend(str(word) for word in command)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(found))
        Path(command[command.index("--plot") + 1]).write_bytes(picture)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    return words


def test_a_run_fills_the_pages(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "loadtest").mkdir()
    for name in BLOCKS:
        (tmp_path / name).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    picture = png(300, 200)
    words = stand_in(monkeypatch, found, 0, picture)
    cache_page.compare("some-model", ["--threads", "2"], tmp_path)
    cache_page.render(tmp_path)
    assert words[1:7] == ["-m", "server.cli", "compare", "some-model", "--threads", "2"]
    kept = (tmp_path / PICTURE).read_bytes()
    assert len(kept) < len(picture) and same_dots(kept, picture)
    for name, block in BLOCKS.items():
        assert (tmp_path / name).read_text() == f"before\n{BEGIN}\n\n{block(found)}\n\n{END}\nafter\n"


@pytest.mark.parametrize(("code", "picture"), [(1, (9, 9)), (0, (1000, 1000))])
def test_a_run_that_failed_changes_nothing(
    found: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    picture: tuple[int, int],
) -> None:
    stand_in(monkeypatch, found, code, png(*picture))
    with pytest.raises(SystemExit):
        cache_page.compare("some-model", [], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BLOCKS)
def test_the_pages_hold_what_was_measured(name: str) -> None:
    """Whoever edits a number by hand, or measures and forgets a page, finds out here."""
    committed = json.loads((ROOT / RESULT).read_text())
    page = (ROOT / name).read_text()
    assert insert(page, BLOCKS[name](committed), BEGIN) == page


def test_what_was_measured_is_the_default_model() -> None:
    """The arithmetic of the cache: 7,680 bytes a token of each KV head, and the same work as 3 : 9 : 1."""
    committed = json.loads((ROOT / RESULT).read_text())
    assert committed["complete"] and committed["setup"]["model"] == "smollm2-135m"
    modes = {mode["mode"]: mode for mode in committed["modes"]}
    assert {name: mode["bytes_per_token"] for name, mode in modes.items()} == {
        "native": 23_040,
        "mha": 69_120,
        "mqa": 7_680,
    }
    peaks = {name: mode["fixed_work"]["peak_live_bytes"] for name, mode in modes.items()}
    assert peaks["native"] == 3 * peaks["mqa"] and peaks["mha"] == 9 * peaks["mqa"]
    assert modes["native"]["quality"]["kl"] == 0.0 < modes["mqa"]["quality"]["kl"]


def test_the_picture_is_small() -> None:
    picture = (ROOT / PICTURE).read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) < PICTURE_BYTES
