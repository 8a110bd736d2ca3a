"""The Dockerfile, as far as it can be checked without an image engine.

The first tests read it. The slow one runs the build stage's own commands in a clean virtual
environment, then its entrypoint and its health check; what needs an image (the base, the user, the
volume) is not claimed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.dockerfile import Stage, read_dockerfile
from tests.support.server import free_port

ROOT = Path(__file__).resolve().parents[2]
STAGES = read_dockerfile(ROOT / "Dockerfile")
BUILD, FINAL = STAGES[0], STAGES[-1]


def test_it_has_two_slim_stages() -> None:
    assert len(STAGES) == 2
    assert all("-slim" in stage.base and ":" in stage.base for stage in STAGES)
    assert FINAL.name != BUILD.name == "build"


def test_the_final_stage_runs_as_an_ordinary_user() -> None:
    users = FINAL.of("USER")
    assert users
    assert users[-1].rest not in {"root", "0"}
    order = [instruction.keyword for instruction in FINAL.instructions]
    assert "RUN" not in order[order.index("USER") :]


def test_entrypoint_and_health_check_need_no_shell_and_no_curl() -> None:
    (entrypoint,) = FINAL.of("ENTRYPOINT")
    words = entrypoint.exec_form()
    assert words[:2] == ["headroom", "serve"]
    assert words[words.index("--host") + 1] == "0.0.0.0"
    (health,) = FINAL.of("HEALTHCHECK")
    port = words[words.index("--port") + 1]
    command = health.exec_form()
    assert command[0] == "python"
    assert f"127.0.0.1:{port}/health" in command[-1]
    (exposed,) = FINAL.of("EXPOSE")
    assert exposed.rest == port


def test_the_cpu_build_is_the_default_and_cuda_an_argument() -> None:
    assert "TORCH=cpu" in [argument.rest for argument in BUILD.of("ARG")]
    (install,) = [run.rest for run in BUILD.of("RUN") if "constraints-cpu.txt" in run.rest]
    assert '"$TORCH" = cuda' in install


def test_no_model_is_baked_in() -> None:
    for stage in STAGES:
        assert not any(
            word in run.rest for run in stage.of("RUN") for word in ("fetch", "huggingface", "gguf")
        )
        assert not stage.of("ADD")
    cache = [
        word for env in FINAL.of("ENV") for word in env.rest.split() if word.startswith("XDG_CACHE_HOME=")
    ]
    assert [volume.rest for volume in FINAL.of("VOLUME")] == [cache[0].partition("=")[2]]


def test_the_kernels_are_compiled_by_the_stage_that_has_a_compiler() -> None:
    commands = [run.rest for run in BUILD.of("RUN")]
    (compiles,) = (number for number, words in enumerate(commands) if "kernels --portable" in words)
    assert "g++" in commands[0]
    assert commands[compiles - 1].endswith("pip install -c constraints.txt .")
    assert not any("g++" in run.rest for run in FINAL.of("RUN"))


def test_everything_it_copies_is_there_and_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copy in BUILD.of("COPY"):
        for source in copy.sources():
            assert (ROOT / source).exists()
            assert source in allowed
    (taken,) = FINAL.of("COPY")
    assert taken.rest.startswith(f"--from={BUILD.name} ")


def test_the_dependencies_come_before_the_code() -> None:
    """A change of code alone leaves PyTorch's layer as it was."""
    copies = [copy.sources() for copy in BUILD.of("COPY")]
    assert copies[0] == ["constraints.txt", "constraints-cpu.txt"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_install_and_entrypoint_work_in_a_clean_environment(tmp_path: Path, tiny_served: Path) -> None:
    venv = tmp_path / "venv"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # The base image has a `python`; Debian has only `python3`, so that of the tests stands in.
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}
    _build(BUILD, tmp_path / "src", venv, environment)

    installed = subprocess.run([venv / "bin/pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "nvidia-" not in installed
    top = set(os.listdir(_site_packages(venv)))
    assert {"server", "model", "cache"} <= top
    assert not {"tests", "loadtest", "docs"} & top
    prebuilt = list((_site_packages(venv) / "model/native/prebuilt").glob("*.so"))
    assert len(prebuilt) == (2 if platform.machine() == "x86_64" else 0)

    port = str(free_port())
    environment |= {"PATH": f"{venv / 'bin'}:{environment['PATH']}"}
    entrypoint = [word if word != "8000" else port for word in FINAL.of("ENTRYPOINT")[0].exec_form()]
    health = [word.replace(":8000", f":{port}") for word in FINAL.of("HEALTHCHECK")[0].exec_form()]
    arguments = ["--kv-memory", "8MiB"]
    with subprocess.Popen(
        [*entrypoint, str(tiny_served), *arguments], cwd=tmp_path, env=environment
    ) as server:
        try:
            assert _healthy_within(60, health, environment)
            server.terminate()
            assert server.wait(30) == 0
        finally:
            server.kill()
    assert subprocess.run(health, env=environment, capture_output=True, check=False).returncode != 0


def _build(stage: Stage, source: Path, venv: Path, environment: dict[str, str]) -> None:
    """Run the stage's own instructions with the image's paths replaced."""
    source.mkdir()
    arguments = dict(argument.rest.split("=", 1) for argument in stage.of("ARG"))
    for instruction in stage.instructions:
        if instruction.keyword == "COPY":
            for name in instruction.sources():
                origin = ROOT / name
                if origin.is_dir():
                    shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(origin, source / name)
        elif instruction.keyword == "RUN":
            command = re.sub(r"/opt/headroom\b", str(venv), instruction.rest)
            subprocess.run(["sh", "-ec", command], cwd=source, env=environment | arguments, check=True)


def _site_packages(venv: Path) -> Path:
    (found,) = venv.glob("lib/python3*/site-packages")
    return found


def _healthy_within(seconds: float, health: list[str], environment: dict[str, str]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if subprocess.run(health, env=environment, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.5)
    return False
