"""A checkpoint folder written again with other KV heads, and everything else as it was."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint import INDEX, SINGLE, Checkpoint, open_checkpoint
from model.config import ModelConfig, read_json_object
from model.convert import Rewrite
from model.errors import ModelError
from model.expected import EMBED, LM_HEAD, NORM, check_tensors, layer_prefix, layer_tensors
from model.progress import Progress
from model.publish import publish_new_folder

SHARD_BYTES = 2 << 30  # of a file: what is held in memory at once

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_PROJECTION = re.compile(r"self_attn\.(\w+_proj)\.(weight|bias)")
# Weights in any form, their indices, code that is never run, and the stamp of this program's own cache.
_LEFT_OUT = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.index.json", "*.py", "config.json",
    "headroom.json", ".*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: bytes of the weights, and in how many files."""

    weight_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors that are written together: a layer's, or one other. `nbytes` as written."""

    layer: int | None
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    """What is written from what; `dtype` None keeps each tensor's own."""

    checkpoint: Checkpoint
    config: ModelConfig  # of the checkpoint that is read
    rewrite: Rewrite
    dtype: torch.dtype | None

    def units(self) -> Iterator[_Unit]:
        """In the order that a decoder reads them."""
        yield from self._alone(EMBED)
        shapes = layer_tensors(replace(self.config, num_kv_heads=self.rewrite.kv_heads))
        for layer in range(self.config.num_layers):
            sizes = {layer_prefix(layer) + name: shape for name, shape in shapes.items()}
            nbytes = sum(self._nbytes(name, shape) for name, shape in sizes.items())
            yield _Unit(layer, tuple(sizes), nbytes)
        yield from self._alone(NORM)
        yield from self._alone(LM_HEAD)

    def _alone(self, name: str) -> Iterator[_Unit]:
        if name in self.checkpoint.entries:  # a tied checkpoint holds one of the two tables, or both
            yield _Unit(None, (name,), self._nbytes(name, self.checkpoint.entries[name].shape))

    def _nbytes(self, name: str, shape: Sequence[int]) -> int:
        dtype = self.dtype or _DTYPES[self.checkpoint.entries[name].dtype]
        return torch.Size(shape).numel() * dtype.itemsize

    def tensors(self, unit: _Unit) -> dict[str, Tensor]:
        """New tensors of a unit: rewritten, converted, or copied."""
        with self.checkpoint.mapped(unit.names) as mapped:
            return {name: self._tensor(unit.layer, name, tensor) for name, tensor in mapped.items()}

    def _tensor(self, layer: int | None, name: str, tensor: Tensor) -> Tensor:
        dtype = self.dtype or tensor.dtype
        match = None if layer is None else _PROJECTION.search(name)
        if layer is not None and match is not None and match[1] in self.rewrite.changes:
            tensor = self.rewrite.projection(layer, match[1], match[2], tensor.float())
        written = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if dtype is torch.float16 and not bool(torch.isfinite(written).all()):
            raise ModelError(f"tensor {name} holds values that float16 cannot (above 65,504); take bfloat16")
        return written


def convert_folder(
    source: Path,
    out: Path,
    config: ModelConfig,
    rewrite: Rewrite,
    *,
    dtype: torch.dtype | None,
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the checkpoint in `source`, whose config is `config`, to `out` with the heads of `rewrite`.

    `dtype` None keeps each tensor's own. `out` is made whole or not at all, and only where nothing or an
    empty folder is. Raises ModelError: a checkpoint that cannot be read, no room, a disk that refuses.
    """
    check_out(out)
    checkpoint = open_checkpoint(source)
    check_tensors(checkpoint, config)
    job = _Job(checkpoint, config, rewrite, dtype)
    shards = _shards(job, shard_bytes)
    total = sum(unit.nbytes for units in shards for unit in units)
    _check_room(out, total)

    def build(folder: Path) -> None:
        _write_config(source, folder, job)
        _copy_others(source, folder)
        progress.start(f"writing {out}", total)
        _write_weights(folder, job, shards, progress)

    publish_new_folder(out, build)
    return Written(total, len(shards))


def check_out(out: Path) -> None:
    """Raises ModelError unless `out` is a free name or an empty folder, where a folder can be made."""
    try:
        if out.is_dir():
            if any(out.iterdir()):
                raise ModelError(f"{out} is not empty, and nothing is overwritten; name a new folder")
        elif out.exists() or out.is_symlink():
            raise ModelError(f"{out} is a file; name a new folder")
        parent = _parent(out)
        if not parent.is_dir():
            raise ModelError(f"{parent} is a file, so {out} cannot be made; name a new folder")
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ModelError(f"{out} cannot be made: {error.strerror}; name another folder") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError(f"{out} cannot be made: {parent} may not be written; name another folder")


def _parent(out: Path) -> Path:
    """What is there already of the way to `out`."""
    return next(path for path in out.resolve().parents if path.exists())


def _shards(job: _Job, limit: int) -> list[list[_Unit]]:
    """The units, in files of at most `limit` bytes (or one unit)."""
    shards: list[list[_Unit]] = []
    room = 0
    for unit in job.units():
        if not shards or unit.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(unit)
        room -= unit.nbytes
    return shards


def _check_room(out: Path, nbytes: int) -> None:
    parent = _parent(out)
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise ModelError(f"{out} needs {nbytes:,} bytes and {parent} has {free:,} left; name another disk")


def _write_config(source: Path, folder: Path, job: _Job) -> None:
    """The source's config.json with what changed; `head_dim` is spelled out, as no default may hold now."""
    values = dict(read_json_object(source / "config.json"))
    values["num_key_value_heads"] = job.rewrite.kv_heads
    values["head_dim"] = job.config.head_dim
    if job.dtype is not None:
        key = "torch_dtype" if values.get("dtype") is None else "dtype"
        values[key] = str(job.dtype).removeprefix("torch.")
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation config, licence: what stays true of the new heads."""
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in _LEFT_OUT):
            shutil.copyfile(path, folder / path.name)


def _write_weights(folder: Path, job: _Job, shards: Sequence[Sequence[_Unit]], progress: Progress) -> None:
    """One file, or several and their index."""
    done = 0
    weight_map: dict[str, str] = {}
    for number, units in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for unit in units:
            tensors |= job.tensors(unit)
            done += unit.nbytes
            progress.update(done)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        # safetensors makes its file private; give it the rights that the user's umask gave the others.
        (folder / name).chmod((folder / "config.json").stat().st_mode)
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
