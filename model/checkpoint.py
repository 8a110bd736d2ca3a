"""The tensors of a folder's safetensors files: which there are, and mapped views of some of them.

Format: https://huggingface.co/docs/safetensors. One file `model.safetensors`, or several that
`model.safetensors.index.json` lists; the former wins where both exist, as in transformers. A file that
neither names (a stray shard, `consolidated.safetensors`) is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import read_json_object
from model.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_READABLE = ("BF16", "F16", "F32")
_IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a table that old checkpoints carry and RoPE computes itself
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies and what its file says of it; `dtype` is BF16, F16 or F32."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor of a checkpoint folder by name, headers checked, no data read yet."""

    folder: Path
    entries: Mapping[str, Entry]

    @contextmanager
    def mapped(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Views of the named tensors on memory-mapped files, in the files' dtypes, on the CPU.

        The pages are given back when the block ends and no view is held any more: keep copies, not views.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            views: dict[str, Tensor] = {}
            for name in names:
                file = self.entries[name].file
                if file not in opened:
                    opened[file] = stack.enter_context(_open(file))
                views[name] = opened[file].get_tensor(name)
            yield views
            views.clear()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of `folder`'s safetensors files.

    Raises ModelError, naming file and tensor, for a missing, unreadable or truncated file, an index that does
    not fit its files, a tensor given twice, and a dtype that cannot be loaded.
    """
    if (folder / SINGLE).exists():
        entries = _header(folder / SINGLE)
    elif (folder / INDEX).exists():
        entries = _indexed(folder / INDEX)
    else:
        raise ModelError(_nothing_to_load(folder))
    kept = {name: entry for name, entry in entries.items() if not name.endswith(_IGNORED_SUFFIX)}
    for name, entry in kept.items():
        if entry.dtype not in _READABLE:
            raise ModelError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}; supported are {', '.join(_READABLE)} "
                "(quantised checkpoints are not)"
            )
    return Checkpoint(folder, kept)


def _indexed(index: Path) -> dict[str, Entry]:
    """The tensors that an index lists, each checked to be in its shard, and no shard holding others."""
    listed = _weight_map(index)
    shards = {name: _header(index.parent / name) for name in sorted(set(listed.values()))}
    for tensor, shard in listed.items():
        if tensor not in shards[shard]:
            raise ModelError(f"{index}: lists tensor {tensor} in {shard}, which does not hold it")
    for shard, header in shards.items():
        for tensor in header:
            owner = listed.get(tensor)
            if owner != shard and not tensor.endswith(_IGNORED_SUFFIX):
                where = "lists nowhere" if owner is None else f"lists in {owner}"
                raise ModelError(f"{index.parent / shard}: holds tensor {tensor}, which {index.name} {where}")
    return {tensor: shards[shard][tensor] for tensor, shard in listed.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, each checked to be a file of this very folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: has no object weight_map")
    for tensor, name in weight_map.items():
        if not _is_plain_name(name):
            raise ModelError(
                f"{index}: places tensor {tensor} in {name!r}, which is no *.safetensors of the same folder"
            )
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name}: is missing; {index.name} places tensor {tensor} in it")
    return weight_map


def _is_plain_name(name: object) -> bool:
    """Whether `name` is a safetensors file of the folder itself: no path leads out of a checkpoint."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return Path(name).name == name and "\\" not in name


def _header(file: Path) -> dict[str, Entry]:
    """What one file says it holds; the library checks that the data are all there."""
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: Entry(file, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """safe_open whose failures are ModelErrors; those of the block pass through."""
    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {_why_unreadable(file, error)}") from None
    with handle as opened:
        yield opened


def _why_unreadable(file: Path, error: Exception) -> str:
    if not isinstance(error, SafetensorError):
        return f"cannot be opened ({error})"
    with file.open("rb") as start:
        if start.read(24) == b"version https://git-lfs.":
            return "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
    return f"is not a whole safetensors file ({error}); it may be truncated, fetch it again"


def _nothing_to_load(folder: Path) -> str:
    """Why a folder without either name cannot be loaded, from what else lies in it."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return (
            f"{folder}: holds {found[0]}{f' and {len(found) - 1} more' if found[1:] else ''}, but neither "
            f"{SINGLE} nor {INDEX}, which says what belongs together"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: its weights are only in {pickles[0]}, a pickle, which is never loaded because it can "
            "run code; convert it to safetensors (transformers' save_pretrained writes it)"
        )
    return f"{folder}: holds no weights; expected {SINGLE}, or {INDEX} and its files"
