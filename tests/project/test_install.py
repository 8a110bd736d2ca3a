"""The environment is the one the pins describe, and no CUDA package came in where there is no GPU."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s]+)", re.MULTILINE)


def normal(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    return {normal(name): version for name, version in PIN.findall((ROOT / file).read_text())}


def installed() -> dict[str, str]:
    """Name -> version of the environment's own distributions, a local "+cpu" left out.

    Not all of sys.path: a test that compiles imports setuptools, and that adds the copies it carries.
    """
    paths = sysconfig.get_paths()
    found = metadata.distributions(path=sorted({paths["purelib"], paths["platlib"]}))
    return {normal(dist.metadata["Name"]): dist.version.split("+")[0] for dist in found}


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(has_gpu(), reason="this machine has an NVIDIA GPU")
def test_no_cuda_package_without_a_gpu() -> None:
    names = installed().keys()
    assert "torch" in names
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-"))}


def test_both_pin_files_name_one_torch() -> None:
    cpu = {
        version.removesuffix("+cpu") for _, version in PIN.findall((ROOT / "constraints-cpu.txt").read_text())
    }
    assert cpu == {pins("constraints.txt")["torch"]}


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    names = {normal(re.split(r"[<>=!~;\[\s]", requirement, maxsplit=1)[0]) for requirement in wanted}
    assert names <= pins("constraints.txt").keys()


def test_what_is_installed_is_what_is_pinned() -> None:
    """Every pinned distribution that is here has the pinned version, whatever an earlier test imported."""
    importlib.import_module("setuptools")
    pinned, here = pins("constraints.txt"), installed()
    differing = {
        name: (here[name], pinned[name]) for name in here.keys() & pinned.keys() if here[name] != pinned[name]
    }
    assert len(here.keys() & pinned.keys()) > 20
    assert not differing


ROOMS_WITHOUT_WEB = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "starlette", "uvicorn", "pydantic"}:
            raise ModuleNotFoundError(f"{name} is refused by this test")

sys.meta_path.insert(0, Refuse())
count = 0
for room in ("server.engine", "server.text", "model", "cache"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        importlib.import_module(module.name)
        count += 1
print(count)
"""


def test_the_engine_and_the_words_need_no_web_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROOMS_WITHOUT_WEB],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
