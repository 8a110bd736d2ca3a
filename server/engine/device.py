"""Where the model runs and in which dtype: `auto` is resolved here, once, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.native.target import cpu_flags
from server.engine.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPU_BF16_FLAGS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class DTypeChoice:
    """A dtype, and why that one."""

    dtype: torch.dtype
    reason: str


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`. Raises ConfigError for a GPU that is not there, and for other names."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name}: must be auto, cpu or cuda")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        build = "" if torch.version.cuda else " (this PyTorch is a CPU build)"
        raise ConfigError(f"--device cuda: PyTorch finds no NVIDIA GPU{build}; use --device cpu, or auto")
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    return torch.device(name)


def choose_dtype(name: str, checkpoint: torch.dtype | None, device: torch.device) -> DTypeChoice:
    """`auto` or a dtype's name. `checkpoint` is the dtype that config.json names, None if it names none.

    auto: the checkpoint's own 16-bit dtype where the device computes in it, else float32. A CPU that computes
    in bfloat16 takes it for float16 checkpoints too. Raises ConfigError for other names.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name}: must be auto, {', '.join(DTYPES)}")
        return DTypeChoice(DTYPES[name], "as asked")
    if checkpoint not in (torch.bfloat16, torch.float16):
        what = "names no dtype" if checkpoint is None else f"is {_spell(checkpoint)}"
        return DTypeChoice(torch.float32, f"the checkpoint {what}")
    if device.type == "cuda":
        return _choose_on_gpu(checkpoint)
    flags = [flag for flag in _CPU_BF16_FLAGS if flag in cpu_flags()]
    if flags:
        return DTypeChoice(torch.bfloat16, f"the checkpoint is {_spell(checkpoint)}, this CPU has {flags[0]}")
    return DTypeChoice(
        torch.float32,
        f"the checkpoint is {_spell(checkpoint)}, but this CPU has neither {' nor '.join(_CPU_BF16_FLAGS)}",
    )


def _choose_on_gpu(checkpoint: torch.dtype) -> DTypeChoice:
    if checkpoint is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return DTypeChoice(torch.float16, "the checkpoint is bfloat16, which this GPU does not compute in")
    return DTypeChoice(checkpoint, f"the checkpoint is {_spell(checkpoint)}")


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
