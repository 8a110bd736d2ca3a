"""What a library is compiled for: the vector instructions, and the flags that allow them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

X86 = ("x86_64", "AMD64")  # as `platform.machine` says it
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Target:
    """`needs` are the CPU's own names (as /proc/cpuinfo spells them) of what the code may use."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    about: str

    def runs_on(self, cpu: frozenset[str]) -> bool:
        """Whether a CPU with these flags can run it."""
        return self.needs <= cpu


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}

AVX2 = Target("avx2", ("-march=x86-64-v3",), _AVX2, "compiled for AVX2")
AVX512 = Target(
    "avx512",
    ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    _AVX512,
    "compiled for AVX-512 with bfloat16",
)
PORTABLE = (AVX512, AVX2)  # the best first


def target_of(name: str) -> Target:
    """The target `native` (this CPU), `avx2` or `avx512`. Raises ValueError for other names."""
    if name == "native":
        return native()
    found = next((target for target in PORTABLE if target.name == name), None)
    if found is None:
        raise ValueError(f"vector {name!r}: must be native, avx2 or avx512")
    return found


def native() -> Target:
    """This CPU, with all that it has."""
    flag = "-march=native" if platform.machine() in X86 else "-mcpu=native"
    return Target("native", (flag,), cpu_flags(), "compiled for this CPU")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The instruction sets of this CPU; empty where the system lists none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
