"""docs/benchmarks.md: what the scripts write from made-up results; the page holds what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench, bench_page
from loadtest.bench_page import BEGIN, OWN, PAGE, PEERS, block, own_block, render
from loadtest.bench_peers_page import GOALS, OURS, best_peer, medians, peers_block
from loadtest.bench_tables import Bar
from loadtest.page import END, insert

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "cpu": "A CPU", "cores": 2, "flags": ["avx2"], "memory_bytes": 8 << 30, "system": "Linux 6",
    "python": "3.11", "torch": "2.13", "headroom": "0.1",
}  # fmt: skip
STAMP = {"commit": "abc", "date": "2030-01-02T03:04:05+00:00", "load": 0.25, "seed": 1}


def figures(work: str = "decode1", **more: Any) -> dict[str, Any]:
    return {
        "workload": work, "requests": 4, "concurrency": 1, "prompt": 128, "output": 128, "wall_s": 10.0,
        "out_tok_s": 51.2, "total_tok_s": 102.4, "ttft_p50": 100.0, "ttft_p99": 120.0, "itl_p50": 20.0,
        "itl_p99": 30.0,
    } | more  # fmt: skip


def tally(**more: Any) -> dict[str, Any]:
    return {
        "answers": 4, "equal": 3, "near_ties": 1, "undecided": 0, "wrong": 0, "compared": 60,
        "near_tie": 0.5, "examples": [],
    } | more  # fmt: skip


@pytest.fixture
def own() -> dict[str, Any]:
    """A made-up run of every part."""
    memory = {"own": 3_000_000_000, "weights": 269_000_000, "pool": 2_147_000_000, "rest": 584_000_000}
    parts: dict[str, Any] = {
        "ceiling": {"read_gb_s": 30.0, "read_by": "sum", "matrix_gflop_s": 400.0, "matrix_by": "bf16",
                    "threads": 2},
        "engine": {"rows": {"decode1": figures(steps=512, bytes=150_000_000_000, flops=200_000_000_000)},
                   "backends": {"dtype": "bfloat16", "attention": "fast", "linear": "packed"}},
        "http": {"rows": {"decode1": figures()}, "ready_median_s": 2.5, "idle": memory, "busy": memory},
        "mixed": {"ratio": 0.9},
        "context": {"sequences": 8, "contexts": [512, 2048], "step_ms": [20.0, 30.0], "more_ms": 10.0,
                    "more_bytes": 283_115_520, "more_flops": 849_346_560},
        "queue": {"queued": 10000, "ratio": 1.03},
        "quantised": {"rows": {kind: {"weight_bytes": 1 << 27, "perplexity": 14.25, "text": "prose",
                                      "positions": 4000, "rows": {"decode1": figures()}}
                               for kind in ("none", "int4")}},
        "speculation": {"rows": {"repetitive1": {
            "off": figures(), "ngram": figures(out_tok_s=102.4, draft_tokens=200, accepted_tokens=150)},
            "decode1": {"off": figures(), "ngram": figures(out_tok_s=49.6)}}},
        "check": {"tallies": {"engine": {"decode1": tally()}}},
    }  # fmt: skip
    return {"model": "m", "machine": MACHINE, "parts": {k: STAMP | v for k, v in parts.items()}}


def peer(over: str, rate: float, ready: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "over": over,
        "load": 0.25,
        "commit": "abc",
        "version": "1",
        "ready_s": ready,
        "rows": {"decode1": figures(out_tok_s=rate, **more)},
    }


@pytest.fixture
def others() -> dict[str, Any]:
    """Three made-up rounds; one peer ran in the first alone."""
    rounds = []
    for number in range(3):
        peers = {
            OURS["http"]: peer("http", 90.0 + number, 2.0),
            OURS["engine"]: peer("engine", 95.0),
            "vLLM": peer("http", 38.0, 90.0),
            "OpenVINO": peer("engine", 50.0 + number),
        }
        peers |= {
            OURS["quantised"]: peer("quantised", 200.0),
            "llama.cpp, Q4_0": peer("quantised", 210.0),
        }
        for name in ("ttft_p50", "ttft_p99"):
            del peers["llama.cpp, Q4_0"]["rows"]["decode1"][name]
        if number == 0:
            peers["llama.cpp"] = peer("http", 84.0, 1.0)
        rounds.append({"seed": number, "peers": peers, "check": {"vLLM": {"decode1": tally(wrong=1)}}})
    return {
        "model": "m", "machine": MACHINE, "date": STAMP["date"], "rounds": rounds,
        "notes": ["llama.cpp ran once."],
    }  # fmt: skip


def test_our_side_in_words(own: dict[str, Any]) -> None:
    text = own_block(own)
    words = " ".join(text.split())
    assert "m on A CPU, 2 cores (avx2), 8.00 GiB of memory" in words
    assert "reads 30.0 GB/s (sum) and multiplies 400 GFLOP/s" in words
    row = "| `decode1` | 4 × 128 → 128, 1 | 51.2 | 100, 120 | 20.0, 30.0 |"
    assert f"{row} 15.0 (50%) | 20 (5%) |" in text and f"{row}\n" in text
    assert "| command to ready, model on disk | 2.50 s | ≤ 3 s | held |" in text
    assert "| memory beside weights and pool | 557 MiB | ≤ 500 MB | **missed** |" in text
    assert "| 90.0% | ≥ 85 % | held |" in text
    assert "| median step with 10,000 waiting, of one with none | 1.030 × | ≤ 1.02 × | **missed** |" in text
    assert "| `int4` | 128 MiB | 14.25 | 51.2 |" in text
    assert "| 51.2 | 102 | 2.000 × |  |  | 150 of 200 (75%) |" in text
    assert "| 51.2 | 49.6 | 0.969 × | ≥ 0.97 × | **missed** | 0 of 0 |" in text
    assert "| engine | `decode1` | 4 | 3 | 1 | 0 | 0 | 15.0 | 0.50 |" in text
    assert "queue 2030-01-02 03:04 at `abc`, load 0.2" in words


def test_what_more_context_may_cost(own: dict[str, Any]) -> None:
    """283 MB at 30 GB/s are 9.44 ms, 0.849 GFLOP at 400 GFLOP/s are 2.12 ms."""
    assert "| +10.0 ms | ≤ 11.6 ms | held |" in own_block(own)
    own["parts"]["context"]["more_ms"] = 11.7
    assert "| +11.7 ms | ≤ 11.6 ms | **missed** |" in own_block(own)


def test_a_part_that_did_not_run_is_left_out(own: dict[str, Any]) -> None:
    for name in list(own["parts"]):
        del own["parts"][name]
        assert own_block(own)


def test_ratios_to_the_best_of_the_others(others: dict[str, Any]) -> None:
    text = peers_block(others)
    assert "| `decode1` | output tok/s | 91.0 | 84.0 (llama.cpp) | 1.083 × | ≥ 1.05 × | held |" in text
    assert "| `decode1` | output tok/s | 95.0 | 51.0 (OpenVINO) | 1.863 × | ≥ 1.05 × | held |" in text
    assert "| 200 | 210 (llama.cpp, Q4_0) | 0.952 × | ≥ 0.8 × | held |" in text
    assert "| llama.cpp, Q4_0 | 210 | -, - |" in text
    assert "| vLLM | 1 | 90.0 s | 0.2 to 0.2 | 3 |" in text and "| llama.cpp | 1 | 1.0 s | 0.2 | 1 |" in text
    assert "| vLLM | `decode1` | 12 | 9 | 3 | 0 | 3 | 15.0 | 0.50 |" in text
    assert "llama.cpp ran once." in text
    others["rounds"][0]["peers"]["llama.cpp"]["rows"]["decode1"]["out_tok_s"] = 87.0
    assert "| 87.0 (llama.cpp) | 1.046 × | ≥ 1.05 × | **missed** |" in peers_block(others)


def test_what_was_not_measured_is_said(others: dict[str, Any]) -> None:
    first = others["rounds"][0]
    first["failed"] = {"llama.cpp": "failed", "SGLang": "is not installed"}
    del first["peers"]["llama.cpp"]
    first["peers"]["vLLM"]["commit"] = "def"
    others["perplexity"] = {
        kind: {"perplexity": value, "text": "prose", "positions": 4088}
        for kind, value in (("none", 14.25), ("int4", 15.5))
    }
    text = " ".join(peers_block(others).split())
    assert "Not measured: llama.cpp failed (round 1); SGLang is not installed (round 1)." in text
    assert "| `prefix` | output tok/s | - | - | - | ≥ 1.5 × | not measured |" in text
    assert "at commits `abc`, `def`; 3 rounds" in text
    assert "4,088 positions: 15.50 with `--weights int4`, 14.25 as the model is." in text
    for each in others["rounds"]:
        for name in ("vLLM", "OpenVINO", "llama.cpp, Q4_0"):
            del each["peers"][name]
    text = peers_block(others)
    assert "| `decode1` | output tok/s | 91.0 | - | - | ≥ 1.05 × | not measured |" in text


def test_of_times_the_shortest_is_best(others: dict[str, Any]) -> None:
    goal = next(goal for goal in GOALS if goal.figure == "ttft_p50")
    rows = others["rounds"][0]["peers"]
    for name, wait in (("vLLM", 2200.0), ("llama.cpp", 4000.0), (OURS["http"], 1500.0)):
        rows[name]["rows"]["prefill"] = figures("prefill", ttft_p50=wait)
    assert best_peer(others, goal, "http") == ("vLLM", 2200.0)
    assert best_peer(others, goal, "engine") is None
    assert "| `prefill` | TTFT p50, ms | 1,500 | 2,200 (vLLM) | 0.682 × | ≤ 0.9 × | held |" in peers_block(
        others
    )


def test_medians_are_over_the_rounds(others: dict[str, Any]) -> None:
    found = medians(others, OURS["http"], "decode1")
    assert found is not None and found["out_tok_s"] == 91.0
    assert medians(others, "vLLM", "long8") is None


def test_a_bar_is_held_at_its_edge() -> None:
    assert Bar(least=1.05).held(1.05) and not Bar(least=1.05).held(1.0499)
    assert Bar(most=250).held(250) and not Bar(most=250).held(250.1)


def test_every_row_has_every_column(own: dict[str, Any], others: dict[str, Any]) -> None:
    for part in block(own, others).split("\n\n"):
        if part.startswith("|"):
            assert len({line.count("|") for line in part.splitlines()}) == 1


@pytest.mark.parametrize("there", [(), (OWN,), (PEERS,), (OWN, PEERS)])
def test_the_files_fill_the_page(
    own: dict[str, Any], others: dict[str, Any], tmp_path: Path, there: tuple[str, ...]
) -> None:
    found = {OWN: own, PEERS: others}
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(found[name]))
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    render(tmp_path)
    wanted = block(*(found[name] if name in there else None for name in (OWN, PEERS)))
    assert (tmp_path / PAGE).read_text() == f"before\n{BEGIN}\n\n{wanted}\n\n{END}\nafter\n"


def test_the_page_holds_what_was_measured() -> None:
    """Whoever edits a number by hand, or measures and forgets the page, finds out here."""
    own, peers = (json.loads((ROOT / name).read_text()) for name in (OWN, PEERS))
    page = (ROOT / PAGE).read_text()
    assert insert(page, block(own, peers), BEGIN) == page


def test_results_grow_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "found.json"
    bench.keep(path, "m", {"a": {"x": 1}})
    bench.keep(path, "m", {"b": {"x": 2}})
    bench.keep(path, "m", {"a": {"x": 3}})
    assert json.loads(path.read_text())["parts"] == {"a": {"x": 3}, "b": {"x": 2}}
    bench.keep(path, "another", {"b": {"x": 4}})
    assert json.loads(path.read_text())["parts"] == {"b": {"x": 4}}
    about = bench.about()
    monkeypatch.setattr(bench, "about", lambda: about.__class__(**{**_fields(about), "cores": 99}))
    bench.keep(path, "another", {"c": {"x": 5}})
    assert json.loads(path.read_text())["parts"] == {"c": {"x": 5}}


def _fields(about: Any) -> dict[str, Any]:
    return {name: getattr(about, name) for name in about.__slots__}


def test_the_scripts_agree_on_the_files() -> None:
    assert bench.RESULT == bench_page.OWN
