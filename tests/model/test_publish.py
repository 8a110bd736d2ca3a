"""A folder or file appears whole or not at all, whatever process is killed and however many build it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model.errors import ModelError
from model.publish import publish_file, publish_folder, publish_new_folder

ROOT = Path(__file__).parents[2]

_BUILDER = """
import os, sys, time
from pathlib import Path
from model.publish import publish_file, publish_folder

final, seconds = Path(sys.argv[1]), float(sys.argv[2])

def build(folder):
    (folder / "half").write_text(str(os.getpid()))
    print("building", flush=True)
    time.sleep(seconds)
    (folder / "whole").write_text(str(os.getpid()))

publish_folder(final, build, lambda f: (f / "whole").exists(), lambda: print("waiting", flush=True))
print("done", flush=True)
"""


def start_builder(final: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILDER, str(final), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_appears_is_what_was_built(tmp_path: Path) -> None:
    """Renamed as a whole, never copied file by file under a reader's eyes; also where an old one stood."""
    final, built = tmp_path / "model", []

    def build(folder: Path) -> None:
        (folder / "file").write_text("")
        built.append(folder.stat().st_ino)

    for _ in range(2):
        assert publish_folder(final, build, lambda _: False, lambda: None) == final
        assert final.stat().st_ino == built[-1]
    assert built[0] != built[1]


def test_two_processes_at_once_build_one_folder(tmp_path: Path) -> None:
    final = tmp_path / "model"
    first = start_builder(final, 1.5)
    assert next_line(first) == "building"
    second = start_builder(final, 0)
    assert next_line(second) == "waiting"
    assert not final.exists()
    assert first.communicate()[0].split() == ["done"]
    assert second.communicate()[0].split() == ["done"]
    assert (final / "whole").read_text() == str(first.pid) == (final / "half").read_text()


def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path) -> None:
    final = tmp_path / "model"
    victim = start_builder(final, 60)
    assert next_line(victim) == "building"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert not final.exists()
    assert len(list(tmp_path.glob(".model.tmp-*"))) == 1
    begin = time.monotonic()
    successor = start_builder(final, 0)
    assert successor.communicate()[0].split() == ["building", "done"]
    assert time.monotonic() - begin < 30
    assert (final / "whole").read_text() == str(successor.pid)
    assert list(tmp_path.glob(".model.tmp-*")) == []


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "model"
    final.mkdir()
    (final / "old").write_text("")

    def build(folder: Path) -> None:
        (folder / "new").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError, match=r"^no$"):
        publish_folder(final, build, lambda _: False, lambda: None)
    assert [path.name for path in final.iterdir()] == ["old"]
    assert list(tmp_path.glob(".model.tmp-*")) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the model to"):
        publish_folder(tmp_path / "file" / "model", lambda _: None, lambda _: False, lambda: None)


def test_a_disk_that_refuses_weights_is_told(tmp_path: Path) -> None:
    """safetensors has an error of its own for what the system says; here there is no such folder."""

    def build(folder: Path) -> None:
        save_file({"a": torch.zeros(1)}, folder / "missing" / "model.safetensors")

    for publish in (publish_new_folder, lambda *made: publish_folder(*made, lambda _: False, lambda: None)):
        with pytest.raises(ModelError, match=r"^cannot write the model to .*model: .*No such file"):
            publish(tmp_path / "model", build)
    assert not (tmp_path / "model").exists()


def test_a_file_appears_as_a_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    final, seen = tmp_path / "file", []

    def write(fresh: Path) -> None:
        fresh.write_text("new")
        seen.append((fresh.stat().st_ino, final.read_text() if final.exists() else None))

    for before in (None, "old"):
        if before:
            final.write_text(before)
        publish_file(final, write)
        assert final.read_text() == "new"
        assert seen[-1] == (final.stat().st_ino, before)
    assert list(tmp_path.iterdir()) == [final]


def test_a_file_whose_writing_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "file"
    final.write_text("old")

    def write(fresh: Path) -> None:
        fresh.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish_file(final, write)
    assert final.read_text() == "old"
    assert list(tmp_path.iterdir()) == [final]
