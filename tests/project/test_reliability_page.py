"""The measured part of docs/reliability.md: what the script writes, and that the page holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import fuzz, soak
from loadtest.page import END, insert
from loadtest.reliability_page import BEGIN, PAGE, block, render

ROOT = Path(__file__).resolve().parents[2]
DATE = "2030-01-02T03:04:05+00:00"
MACHINE = {"cpu": "A CPU", "cores": 2, "torch": "2.13"}


@pytest.fixture
def held() -> dict[str, Any]:
    """A made-up soak."""
    return {
        "passed": True, "machine": MACHINE, "commit": "abc123", "date": DATE,
        "setup": {"clients": 32, "model": "m", "kv_memory": "56MiB", "max_num_seqs": 16},
        "loaded_seconds": 1830.0, "catalogue": 78, "requests": 3000, "answers": 2001, "streamed": 1400,
        "tokens": 54321, "near_ties": 2, "wrong": 0, "refused": {},
        "left": {"while waiting": 400, "in mid-stream": 590, "too late": 9}, "preemptions": 77,
        "scores": 8000, "worst_score": 1.2e-5, "live_blocks": 0,
        "memory": {"judged": True, "slope": 1234.5, "quarters": -99.0},
    }  # fmt: skip


@pytest.fixture
def tried() -> dict[str, Any]:
    """A made-up fuzzing."""
    return {
        "passed": True, "machine": MACHINE, "commit": None, "date": DATE, "seconds": 90.0,
        "requests": 20000, "kinds": {"a": 1, "b": 2}, "faults": 0, "by_design": {"503": 3},
        "by_source": {"bodies": {"2xx": 3000, "4xx": 12000}, "sockets": {"4xx": 700, "none": 300}},
        "after": {"live_blocks": 0, "memory_growth": -(2 << 20)},
    }  # fmt: skip


def test_the_page_says_what_was_found(held: dict[str, Any], tried: dict[str, Any]) -> None:
    text = block(held, tried)
    words = " ".join(text.split())
    assert (
        "On A CPU (2 cores); PyTorch 2.13, commit `abc123`, 2030-01-02. 32 clients for 30 minutes, m" in words
    )
    assert "| answers equal to their solo runs | 1,999 |" in text
    assert "| left by their client while waiting | 400 |" in text
    assert "| sequences preempted and resumed | 77 |" in text
    assert "| memory after warm-up, bytes a request (least squares) | 1,234 |" in text
    assert "20,000 requests of 2 kinds in 1.5 minutes" in words
    assert "| bodies | 3,000 | 12,000 | 0 | 0 |" in text
    assert "| sockets | 0 | 700 | 300 | 0 |" in text
    assert "3 answers were 503, by design." in words
    assert "memory is -2.00 MiB from where it was" in words


def test_memory_that_was_not_judged_is_not_told(held: dict[str, Any], tried: dict[str, Any]) -> None:
    held["memory"]["judged"] = False
    assert "bytes a request" not in block(held, tried)


@pytest.mark.parametrize("name", ["soak", "fuzz"])
def test_a_run_that_failed_is_not_written(held: dict[str, Any], tried: dict[str, Any], name: str) -> None:
    (held if name == "soak" else tried)["passed"] = False
    with pytest.raises(ValueError, match=f"make {name}"):
        block(held, tried)


def test_every_row_has_every_column(held: dict[str, Any], tried: dict[str, Any]) -> None:
    for table in block(held, tried).split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_files_fill_the_page(held: dict[str, Any], tried: dict[str, Any], tmp_path: Path) -> None:
    for name, content in ((soak.RESULT, json.dumps(held)), (fuzz.RESULT, json.dumps(tried))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    render(tmp_path)
    assert (tmp_path / PAGE).read_text() == f"before\n{BEGIN}\n\n{block(held, tried)}\n\n{END}\nafter\n"


def test_the_page_holds_what_was_measured() -> None:
    """Whoever edits a number by hand, or measures and forgets the page, finds out here."""
    held, tried = (json.loads((ROOT / name).read_text()) for name in (soak.RESULT, fuzz.RESULT))
    page = (ROOT / PAGE).read_text()
    assert insert(page, block(held, tried), BEGIN) == page


def test_what_was_measured_is_whole() -> None:
    """The default model, three modes, every request right, and as many bad inputs as are promised."""
    held, tried = (json.loads((ROOT / name).read_text()) for name in (soak.RESULT, fuzz.RESULT))
    assert held["passed"] and held["setup"]["model"] == "smollm2-135m" and held["setup"]["clients"] == 32
    assert held["setup"]["minutes"] >= 30 and held["memory"]["judged"]
    assert held["wrong"] == 0 and not held["refused"] and held["preemptions"] > 0 and held["live_blocks"] == 0
    assert tried["passed"] and tried["requests"] >= 20_000 and tried["faults"] == 0
