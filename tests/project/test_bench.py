"""`make bench`: which parts end the run, which answers are checked, and what a wrong one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench, bench_perplexity
from loadtest.bench_perplexity import perplexity

TALLY = {
    "answers": 4, "equal": 3, "near_ties": 0, "undecided": 0, "wrong": 1, "compared": 60, "near_tie": 0.5,
    "examples": [],
}  # fmt: skip


class Parts:
    """Made-up parts of `make bench`: the engine's answers are those of the run, and one is wrong."""

    def __init__(self) -> None:
        self.checked: list[list[str]] = []

    def child(self, words: list[str], python: str = "") -> dict[str, Any]:
        if words[0] == "loadtest.bench_check":
            names = [each.split("=")[0] for each in words[words.index("--texts") + 1 :] if "=" in each]
            self.checked.append(names)
            return {name: {"decode1": TALLY} for name in names}
        if "--texts" in words:
            Path(words[words.index("--texts") + 1]).write_text('{"decode1": []}')
        return {"x": 1}


def _plan(tmp_path: Path, parts: str, **more: Any) -> bench.Plan:
    given = {"model": "m", "seed": 1, "requests": None, "check": None, "flags": ()}
    return bench.Plan(parts=tuple(parts.split(",")), result=tmp_path / "found.json", **(given | more))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    made = Parts()
    monkeypatch.setattr(bench, "child", made.child)
    monkeypatch.setattr(bench, "folder_of", lambda model: tmp_path)
    (tmp_path / "texts").mkdir()
    return made


def test_a_wrong_answer_fails_the_check(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(_plan(tmp_path, "engine,check"), tmp_path / "texts") == 1
    assert "engine, decode1: 1 of 4 answers are wrong" in capsys.readouterr().err
    assert bench.run(_plan(tmp_path, "engine,check", check=0), tmp_path / "texts") == 0
    assert parts.checked == [["engine"]]


def test_only_answers_of_the_kept_figures_are_checked(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(_plan(tmp_path, "engine"), tmp_path / "texts")
    (tmp_path / "texts" / "http.json").write_text((tmp_path / "texts" / "engine.json").read_text())
    bench.run(_plan(tmp_path, "check"), tmp_path / "texts")
    assert parts.checked == [["engine"]]
    bench.run(_plan(tmp_path, "check", model="another"), tmp_path / "texts")
    assert parts.checked == [["engine"]]
    said = capsys.readouterr().err
    assert "http: answers of another run are not checked (http.json)" in said
    assert "check: no answers to check" in said


def test_a_server_that_does_not_start_ends_its_part_alone(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any) -> Any:
        raise SystemExit(code)

    code: Any = "the server ended with code 1"
    monkeypatch.setattr(bench, "server_part", ends)
    assert bench.run(_plan(tmp_path, "http,engine"), tmp_path / "texts") == 1
    assert json.loads((tmp_path / "found.json").read_text())["parts"].keys() == {"engine"}
    code = 143
    with pytest.raises(SystemExit):
        bench.run(_plan(tmp_path, "http,engine"), tmp_path / "texts")


def test_our_own_parts_wait_as_the_server_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that writes down what it was told in its environment."""
    (tmp_path / "part.py").write_text(
        "import json, os, sys\n"
        "found = {'policy': os.environ.get('OMP_WAIT_POLICY')}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
    )
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert bench.child(["part"]) == {"policy": "PASSIVE"}
    other = tmp_path / "python"  # a peer's own
    other.symlink_to(sys.executable)
    assert bench.child(["part"], str(other)) == {"policy": None}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert bench.child(["part"]) == {"policy": "ACTIVE"}


def test_a_perplexity_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {"perplexity": 14.0, "text": "prose", "positions": 9}
    calls: list[list[str]] = []

    def child(words: list[str]) -> dict[str, Any]:
        calls.append(words)
        return {"rows": {"none": figures, "int4": figures | {"perplexity": 15.0}}}

    monkeypatch.setattr(bench_perplexity, "child", child)
    result = tmp_path / "bench.json"
    assert perplexity("m", measure=False, result=result) is None
    found = perplexity("m", measure=True, result=result)
    assert found is not None and found["int4"]["perplexity"] == 15.0 and len(calls) == 1
    rows = {kind: figures | {"rows": {}} for kind in ("none", "int8", "int4")}
    result.write_text(json.dumps({"model": "m", "parts": {"quantised": {"rows": rows}}}))
    assert perplexity("m", measure=True, result=result) == {"none": figures, "int4": figures}
    assert len(calls) == 1
    perplexity("another", measure=True, result=result)
    assert len(calls) == 2
