"""The parts of `make bench` on a tiny model: they run, and what they count is what was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_parts, bench_variants
from loadtest.bench_check import Oracle
from loadtest.bench_cost import model_cost
from loadtest.bench_engine import drive, make_engine
from loadtest.bench_parts import PARTS
from loadtest.bench_setup import Setup
from loadtest.bench_work import WORKLOADS, Ask
from loadtest.ceiling import ceiling
from loadtest.peers import Missing, Places, llama, openvino, vllm
from loadtest.tiny import VOCAB, make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench"), context=4096)


@pytest.fixture
def setup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Two requests a workload, and few of everything else."""
    monkeypatch.setattr("loadtest.bench_variants.kernels", lambda: lambda: "none, in this test")
    monkeypatch.setattr("loadtest.bench_engine.kernels", lambda: lambda: "none, in this test")
    monkeypatch.setattr(bench_variants, "SPECULATION_TURNS", 1)
    monkeypatch.setattr(bench_parts, "MIXED_TURNS", 2)
    monkeypatch.setattr(bench_parts, "QUEUED", 50)
    monkeypatch.setattr(bench_parts, "QUEUE_STEPS", 4)
    monkeypatch.setattr(bench_parts, "QUEUE_TURNS", 1)
    return Setup(folder, seed=5, requests=2)


def test_the_engine_s_answers_and_steps(setup: Setup, folder: Path) -> None:
    found, texts = PARTS["engine"](setup)
    assert list(found["rows"]) == list(WORKLOADS)
    one = found["rows"]["decode1"]
    assert one["requests"] == 2 and one["steps"] == 2 * 128  # the first of each reads its prompt
    assert found["rows"]["prefill"]["steps"] == 2 * (2048 // 256 + 7)
    assert one["bytes"] > one["steps"] * model_cost(setup.config, 4).weight_bytes
    (truth, _) = Oracle(folder).truths([said["prompt"] for said in texts["decode1"]])
    assert texts["decode1"][0]["ids"][:16] == truth.ids and texts["decode1"][0]["text"] is None
    assert all(token < VOCAB for said in texts["prefix"] for token in said["prompt"])


def test_mixed_lengths_do_the_work_of_uniform_ones(setup: Setup) -> None:
    found, _ = PARTS["mixed"](setup)
    assert found["mixed"]["tokens"] == found["uniform"]["tokens"] > 2 * 17
    assert found["ratio"] == pytest.approx(found["uniform"]["wall_s"] / found["mixed"]["wall_s"])
    assert found["ratios"] == sorted(found["ratios"]) and found["ratio"] == found["ratios"][1]


def test_a_queue_is_there_and_gone(setup: Setup) -> None:
    found, _ = PARTS["queue"](setup)
    assert found["queued"] == 50 and found["steps"] == 4 and found["empty_ms"] > 0 and found["full_ms"] > 0


def test_more_context(setup: Setup) -> None:
    found, _ = PARTS["context"](setup)
    assert found["contexts"] == (512, 2048) and min(found["step_ms"]) > 0
    assert found["more_bytes"] == 8 * 1536 * model_cost(setup.config, 4).token_bytes


def test_speculation_says_what_it_drafted(setup: Setup) -> None:
    found, _ = PARTS["speculation"](setup)
    assert found["rows"].keys() == {"repetitive1", "repetitive16", "decode1", "decode16"}
    for kinds in found["rows"].values():
        assert kinds["off"]["draft_tokens"] == 0
        assert kinds["ngram"]["draft_tokens"] >= kinds["ngram"]["accepted_tokens"]


def test_an_engine_is_driven_as_it_is_asked(setup: Setup, folder: Path) -> None:
    engine, facts = make_engine(folder, dtype="float32")
    given = [Ask((5, 6, 7), count) for count in (3, 1, 2)]
    answers, _ = drive(engine, facts, given, 2)
    assert [answer.tokens for answer in answers] == [3, 1, 2]
    assert all(len(answer.arrivals) == answer.tokens for answer in answers)
    assert not engine.has_work


def test_a_ceiling_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.ceiling._peak", lambda: None)  # what is compiled has minutes for it
    monkeypatch.setattr("loadtest.ceiling._BUFFER", 32 << 20)
    monkeypatch.setattr("loadtest.ceiling._SHAPES", ((64, 256, 256),))
    found = ceiling(seconds=0.1)
    assert 0.5 < found.read_gb_s < 2000 and 1 < found.matrix_gflop_s < 100_000


def test_the_command_writes_json(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "found.json"
    monkeypatch.setitem(bench_parts.PARTS, "ceiling", lambda setup: ({"seed": setup.seed}, {}))
    words = ["x", "ceiling", "--model", str(folder), "--seed", "9", "--json", str(result)]
    monkeypatch.setattr("sys.argv", words)
    assert bench_parts.main() == 0
    assert json.loads(result.read_text()) == {"seed": 9}


def test_peers_that_are_not_there_are_named(tmp_path: Path) -> None:
    places = Places(tmp_path)
    for look in (lambda: vllm(places, tmp_path, 1), lambda: llama(places, 1), lambda: openvino(places)):
        with pytest.raises(Missing, match=f"left out: no .* in {tmp_path}"):
            look()
    with pytest.raises(Missing, match="elsewhere is not there"):
        vllm(Places(tmp_path, vllm=Path("elsewhere")), tmp_path, 1)


def test_a_peer_is_started_as_its_recipe_says(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 42 (abc)' >&2\n")
    program.chmod(0o755)
    (tmp_path / "smol-bf16.gguf").touch()
    peer = llama(Places(tmp_path), 8123)
    assert peer.version == "42"
    assert peer.command[0] == str(program) and peer.command[peer.command.index("--port") + 1] == "8123"
