"""Models of the Hugging Face hub: the files a decoder needs, and nothing that could run.

Files land in huggingface_hub's own cache, shared with every other tool that uses it, which also serves them
when the hub cannot be reached. Its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, ClassVar

from model.errors import ModelError
from model.progress import Progress

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Folders of a repository hold other formats of the same weights; consolidated files are a second copy.
IGNORED = ("*/*", "consolidated*.safetensors")

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]*[A-Za-z0-9_]", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `organisation/model`."""
    return _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def fetch_from_hub(repo_id: str, *, progress: Progress, endpoint: str | None, hub_cache: Path | None) -> Path:
    """The snapshot folder of `repo_id`'s main branch, downloaded unless it is there already.

    `endpoint` and `hub_cache` None mean huggingface_hub's defaults. Raises ModelError, one line, for a
    repository that is unknown, gated, without safetensors, or out of reach and not in the cache.
    """
    # Imported here: it takes 0.4 s, which only hub ids should cost.
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                repo_id,
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(IGNORED),
                cache_dir=hub_cache,
                endpoint=endpoint,
                tqdm_class=_bars(progress, f"downloading {repo_id}"),
            )
        )
    # The client's errors, its HTTP library's and the disk's share no base class, and mean the same here.
    except Exception as error:
        raise ModelError(f"{repo_id} could not be fetched: {_reason(repo_id, error)}") from error
    if not any(folder.glob("*.safetensors")):
        # Without a network the client takes a snapshot for whole of which only a config was ever asked for.
        alone = [path.name for path in folder.iterdir()] == ["config.json"]
        doubt = ", or the hub cannot be reached and only config.json is here" if alone else ""
        raise ModelError(
            f"{repo_id} holds no *.safetensors{doubt}; other weight files (pickle, GGUF) are not loaded. "
            "Choose a repository with safetensors or convert it"
        )
    return folder


def fetch_config_from_hub(repo_id: str, *, endpoint: str | None, hub_cache: Path | None) -> Path:
    """`repo_id`'s config.json and nothing else, in the snapshot folder where `fetch_from_hub` would put it.

    Raises ModelError, one line, as `fetch_from_hub` does, and where the repository has no config.json.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, "config.json", cache_dir=hub_cache, endpoint=endpoint))
    except Exception as error:  # of no common class, as above
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ModelError(f"{repo_id} holds no config.json; a model has one beside its weights") from error
        raise ModelError(f"{repo_id} could not be fetched: {_reason(repo_id, error)}") from error


def _reason(repo_id: str, error: Exception) -> str:
    """What went wrong and what to do, in one line."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"it is gated; accept its terms at https://huggingface.co/{repo_id} and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder here and no such repository on the hub; if it is private, set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no main branch"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        access = "; set HF_TOKEN to a token that may read it" if status in (401, 403) else ""
        return f"the hub answered with HTTP status {status}{access}"
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            return _reason(repo_id, cause)
        return (
            "the hub cannot be reached, or HF_HUB_OFFLINE is set, and the cache does not hold all of it; "
            "check the network, or name a folder instead"
        )
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _bars(progress: Progress, label: str) -> type[Any]:
    """A class with the parts of tqdm's interface that huggingface_hub uses, drawing through `progress`.

    The hub makes three bars: bytes from the network, bytes on the disk, files. The one of bytes on the disk
    knows its total, which grows as files begin, so it is the one shown.
    """
    lock = threading.RLock()

    class Bar:
        format_dict: ClassVar[dict[str, Any]] = {}

        def __init__(self, *_: Any, **options: Any) -> None:
            self.n: float = options.get("initial") or 0
            self.total: float | None = options.get("total")
            self._shown = str(options.get("desc", "")).startswith("Reconstructing")
            self._told: float | None = None

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                self.refresh()

        def refresh(self, *_: Any, **__: Any) -> None:
            with lock:
                if self._shown and self.total:
                    if self.total != self._told:
                        self._told = self.total
                        progress.start(label, int(self.total))
                    progress.update(int(self.n))

        def nothing(self, *_: Any, **__: Any) -> None:
            pass

        close = set_description = set_description_str = set_postfix_str = nothing

        @classmethod
        def get_lock(cls) -> threading.RLock:
            return lock

        @classmethod
        def set_lock(cls, _: Any) -> None:
            pass

    return Bar
