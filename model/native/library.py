"""What a built library of operators is to its users, and what they are told where there is none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SEAL = hashlib.sha256().digest_size
LANES = 16  # numbers that the kernels take side by side: outputs of a panel, tokens of a block
DTYPES = (torch.bfloat16, torch.float32)  # that they compute in


class NativeUnavailable(Exception):
    """Why there are no native operators: one line, for the start table."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """Operators in C++, loaded: `ops.name(...)` calls one."""

    path: Path
    namespace: str  # they are torch.ops.NAMESPACE.*
    about: str  # what they were compiled for, in a few words for the start table

    @property
    def ops(self) -> Any:
        """The operators by name, as PyTorch's dispatcher knows them."""
        return getattr(torch.ops, self.namespace)

    @property
    def classes(self) -> Any:
        """The classes in C++ by name."""
        return getattr(torch.classes, self.namespace)


def load(path: Path, namespace: str, about: str) -> NativeLibrary:
    """Load a library that registers `namespace`. Raises NativeUnavailable."""
    if not is_sealed(path):  # the loader would end the process where a page is missing
        raise NativeUnavailable(f"{path.name} is damaged")
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise NativeUnavailable(f"{path.name} cannot be loaded: {_first_line(error)}") from error
    return NativeLibrary(path, namespace, about)


def seal(path: Path) -> None:
    """Put the digest of a library behind it, where the system's loader does not look."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def is_sealed(path: Path) -> bool:
    """Whether a library is what was sealed, to the last byte; about a millisecond."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_SEAL]).digest() == data[-_SEAL:]


def loaded(name: str, about: str) -> NativeLibrary | None:
    """The library of file name `name`, from whatever folder, if this process has loaded it.

    Registering a namespace twice would end the process, so one that another library has is refused. Raises
    NativeUnavailable.
    """
    namespace = namespace_of(Path(name))
    for path in map(Path, torch.ops.loaded_libraries):
        if path.name == name:
            return NativeLibrary(path, namespace, about)
        if namespace_of(path) == namespace:
            raise NativeUnavailable(f"other operators are loaded as {namespace} in this process already")
    return None


def file_name(namespace: str, key: str) -> str:
    """The name of the library's file; `namespace_of` reads it."""
    return f"{namespace}-{key}.so"


def namespace_of(path: Path) -> str:
    """The namespace that a file of `file_name` registers."""
    return path.name.rpartition("-")[0]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
