"""Reading a checkpoint's small JSON files; anything wrong with them is a one-line `ModelError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.errors import ModelError


def read_text(path: Path) -> str | None:
    """The file's UTF-8 text, None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, an empty one if there is no such file."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: not valid JSON ({error}); the file may be cut short, fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, found {type(value).__name__}")
    return value
