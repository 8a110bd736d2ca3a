"""Fixtures that every room shares: tiny checkpoints, the default model, no network, few threads."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import checkpoints
from tests.support.command import InProcess
from tests.support.native import native

# Tiny models only get slower with more threads, and threads that wait for each other on a busy machine
# make everything slower: even the default model loses more than it wins.
torch.set_num_threads(1)

# What a shell runs in the background, it runs with Ctrl-C ignored, and so would be every program that a test
# starts and interrupts: unlike what is ignored, what is handled here is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Nothing in this process may leave the machine; a program a test starts is not held back."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = address[0]
            if host != "localhost" and not ip_address(host).is_loopback:
                raise OSError(f"the tests use no network, but something connects to {address}")
        connect(self, address)

    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", local_only)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A command that runs in this process leaves handlers which end it without a word."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


# Rooms whose tests start no engine.
_WITHOUT_ENGINES = ("tests/cache/", "tests/model/", "tests/project/", "tests/text/")


@pytest.fixture(autouse=True, scope="session")
def native_operators(request: pytest.FixtureRequest) -> None:
    """Compiled at most once, before any test; a program that a test starts finds them in the user's cache."""
    if any(not item.nodeid.startswith(_WITHOUT_ENGINES) for item in request.session.items):
        native()


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """`here("serve", "folder")` runs a command in this process: what it printed, and its exit code."""
    return InProcess(capsys, monkeypatch)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(family=..., kv_heads=..., ...)`: a folder, built once for each set of arguments. Read only."""
    built: dict[str, Path] = {}

    def build(**arguments: Any) -> Path:
        key = repr(sorted(arguments.items()))
        if key not in built:
            built[key] = checkpoints.make_checkpoint(tmp_path_factory.mktemp("tiny"), **arguments)
        return built[key]

    return build


@pytest.fixture(scope="session")
def tiny_served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GQA Llama with a byte-level BPE tokenizer and a chat template: all a server needs. Read only."""
    folder = tmp_path_factory.mktemp("tiny-served")
    checkpoints.make_checkpoint(folder, vocab=checkpoints.BPE_VOCAB, std=0.3)
    return checkpoints.add_byte_bpe(folder)


@pytest.fixture(scope="session")
def sp_served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SP: a tiny Llama with a sentencepiece tokenizer and no chat template. Read only."""
    folder = tmp_path_factory.mktemp("sp-served")
    checkpoints.make_checkpoint(folder, vocab=checkpoints.SP_VOCAB, std=0.3)
    return checkpoints.add_sentencepiece(folder)


@pytest.fixture(scope="session")
def smol() -> Path:
    """The folder of the default model, fetched once into the user's cache; skipped where it cannot be had."""
    from model.errors import ModelError
    from model.fetch import DEFAULT_MODEL, default_cache_dir, resolve_model

    try:
        return resolve_model(DEFAULT_MODEL, cache_dir=default_cache_dir(os.environ))
    except ModelError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(f"the default model is not here: {error}")


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Path:
    """RAND with the default model's tokenizer. Read only."""
    return checkpoints.add_tokenizer(checkpoints.make_rand(tmp_path_factory.mktemp("rand")), smol)
