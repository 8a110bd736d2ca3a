"""The rounds of `make bench-peers`: who runs what in which order, what is kept, and how a run goes on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench_peers
from loadtest.bench_answers import read
from loadtest.bench_peers import Found, Plan, begin, measure, ours_fell_short
from loadtest.bench_peers_page import OURS
from loadtest.bench_peers_record import Record
from loadtest.bench_rows import BenchError
from loadtest.own_server import free_port, running
from loadtest.peers import Missing, Places


class Servers:
    """Made-up servers a, b and c; `broken` fails. They write down who was asked what, with which seed."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...], int]] = []
        self.broken: set[str] = set()

    def table(self) -> dict[str, Any]:
        return {short: (short.upper(), self._server(short)) for short in "abc"}

    def _server(self, short: str) -> Any:
        def ask(plan: Plan) -> Found:
            self.asked.append((short, plan.works, plan.seed))
            if short in self.broken:
                raise Missing(f"{short} is not installed")
            rows = {name: {"out_tok_s": 1.0} for name in plan.works}
            entry = {"over": "http", "version": "1", "rows": rows}
            return entry, {name: [{"text": short}] for name in plan.works}

        return ask


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Servers:
    made = Servers()
    monkeypatch.setattr(bench_peers, "SERVERS", made.table())
    monkeypatch.setattr(bench_peers, "ROOT", tmp_path)
    (tmp_path / bench_peers.OUT).mkdir(parents=True)

    def checked(folder: Path, files: dict[str, Path], most: int | None) -> dict[str, Any]:
        return {"tallies": {name: read(path) for name, path in files.items()}}

    monkeypatch.setattr(bench_peers, "checked", checked)
    return made


def options(**more: Any) -> argparse.Namespace:
    given = {
        "only": "a,b,c", "once": "b:long", "rounds": 2, "workloads": "short,long", "seed": 10, "check": None,
        "resume": False, "model": "m",
    }  # fmt: skip
    return argparse.Namespace(**(given | more))


def go(tmp_path: Path, **more: Any) -> dict[str, Any]:
    path = tmp_path / "peers.json"
    asked = options(**more)
    keep = begin(path, asked)
    measure(Plan("m", tmp_path, Places(tmp_path), None, ()), keep, asked)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_rounds_begin_with_another_and_share_their_seed(servers: Servers, tmp_path: Path) -> None:
    found = go(tmp_path)
    both = ("short", "long")
    assert servers.asked == [
        ("a", both, 10), ("b", both, 10), ("c", both, 10),
        ("b", ("short",), 11), ("c", both, 11), ("a", both, 11),
    ]  # fmt: skip
    assert [each["seed"] for each in found["rounds"]] == [10, 11]
    assert found["notes"] == ["B ran `long` in the first round only, as it is far behind there."]
    for each in found["rounds"]:
        assert each["peers"].keys() == {"A", "B", "C"} == each["check"].keys()


def test_who_is_missing_is_said_and_left_out(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.broken = {"b"}
    found = go(tmp_path, rounds=1)
    assert found["rounds"][0]["peers"].keys() == {"A", "C"}
    assert found["rounds"][0]["failed"] == {"B": "is not installed"}
    assert "B: b is not installed" in capsys.readouterr().err


def test_only_a_run_of_the_same_model_and_machine_goes_on(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path, rounds=1)
    with pytest.raises(BenchError, match="of the model m, not another"):
        go(tmp_path, resume=True, model="another")
    here = bench_peers.about()
    monkeypatch.setattr(bench_peers, "about", lambda: dataclasses.replace(here, cores=99))
    with pytest.raises(BenchError, match=r"cores .*, here 99"):
        go(tmp_path, resume=True)


def test_answers_of_another_run_are_not_checked(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = go(tmp_path, rounds=1, check=0)
    assert "check" not in found["rounds"][0]
    stale = tmp_path / bench_peers.OUT / "0-b.json"
    stale.write_text(stale.read_text().replace('"seed": 10', '"seed": 11'))
    (tmp_path / bench_peers.OUT / "0-c.json").write_text("{}")
    found = go(tmp_path, rounds=1, resume=True)
    assert found["rounds"][0]["check"].keys() == {"A"}
    assert "B: answers of another run are not checked (0-b.json)" in capsys.readouterr().err


def test_a_wrong_answer_of_ours_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    tally = {"answers": 4, "wrong": 1, "examples": ["answer 2 after 3 ids"]}
    assert not ours_fell_short(
        {"rounds": [{"check": {"vLLM": {"decode1": tally}}, "failed": {"vLLM": "failed"}}]}
    )
    assert ours_fell_short({"rounds": [{"check": {OURS["http"]: {"decode1": tally}}}]})
    assert "Headroom, decode1: 1 of 4 answers are wrong, as answer 2 after" in capsys.readouterr().err
    assert ours_fell_short({"rounds": [{"failed": {OURS["engine"]: "failed"}}]})


def test_a_run_goes_on_where_it_was_broken_off(servers: Servers, tmp_path: Path) -> None:
    servers.broken = {"c"}
    go(tmp_path, rounds=1)
    servers.broken, servers.asked = set(), []
    found = go(tmp_path, rounds=2, seed=None, resume=True)
    assert [(short, seed) for short, _, seed in servers.asked[:1]] == [("c", 10)]
    assert len(servers.asked) == 1 + 3
    assert found["rounds"][0]["peers"].keys() == {"A", "B", "C"} == found["rounds"][0]["check"].keys()
    assert found["rounds"][1]["seed"] not in (10, 11)


def test_without_a_seed_each_round_has_a_fresh_one(tmp_path: Path) -> None:
    keep = Record(tmp_path / "x.json", {"rounds": []})
    seeds = [keep.round(number, None)["seed"] for number in range(3)]
    assert len(set(seeds)) == 3 and keep.round(1, None)["seed"] == seeds[1]


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Type", "text/plain"); self.end_headers()
        self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_and_what_it_started_are_ended() -> None:
    port = free_port()
    with running([sys.executable, "-c", SERVER, str(port)], port) as server:
        child = int(server.get("/health"))
        assert _alive(server.process.pid) and _alive(child)
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:  # a signal takes its time
        time.sleep(0.01)
    assert not _alive(child)


def test_a_server_that_ends_at_once_says_why() -> None:
    with (
        pytest.raises(SystemExit, match="code 3 before it was ready\nno luck"),
        running([sys.executable, "-c", "print('no luck'); exit(3)"], 1),
    ):
        pass


def _alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
