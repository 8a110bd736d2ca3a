"""Servers that the cases share: CHAIN by script, started once a module and looked after once a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Oracle
from tests.support import checkpoints
from tests.support.reference import load_reference, load_reference_tokenizer
from tests.support.scripted import Serve, chain_servers, known_of
from tests.support.server import Served, inside
from tests.support.standing import Known, assert_stands


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Iterator[Serve]:
    """`chains(*scripts)`: a running server that follows them, started once for each set of scripts."""
    with chain_servers(lambda: tmp_path_factory.mktemp("chain"), smol) as get:
        yield get


@pytest.fixture
def serve(chains: Serve, smol: Path) -> Iterator[Serve]:
    """The same; and every server that the test has used must stand as before when it ends."""
    used: set[tuple[tuple[int, ...], ...]] = set()

    def get(*scripts: tuple[int, ...]) -> Served:
        used.add(scripts)
        return chains(*scripts)

    yield get
    for scripts in used:
        assert_stands(chains(*scripts), known_of(*scripts, tokenizer=smol))


@pytest.fixture(scope="module")
def rand_running(rand: Path) -> Iterator[Served]:
    """RAND in fp32 with a roomy pool."""
    with inside(rand, kv_memory=32 << 20) as server:
        yield server


@pytest.fixture
def rand_served(rand_running: Served, rand_known: Known) -> Iterator[Served]:
    """The same; it must stand as before when the test ends."""
    yield rand_running
    assert_stands(rand_running, rand_known)


@pytest.fixture(scope="session")
def rand_known(rand: Path) -> Known:
    """What transformers says after seven ids."""
    prompt = [11, *range(700, 706)]
    ids = load_reference(rand).greedy(prompt, 12)
    text = load_reference_tokenizer(rand).decode(ids, skip_special_tokens=True)
    return Known(prompt, str(text), len(ids))


@pytest.fixture(scope="module")
def _started() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:
        servers: dict[str, Served] = {}

        def get(folder: Path, **options: Any) -> Served:
            key = f"{folder} {sorted(options.items())}"
            if key not in servers:
                servers[key] = stack.enter_context(inside(folder, **options))
            return servers[key]

        yield get


@pytest.fixture
def served(_started: Callable[..., Served]) -> Iterator[Callable[..., Served]]:
    """`served(folder, known, **options)`: a server of `folder`, one for all tests of the module.

    `known` is a completion whose right text is known; when the test ends, every server it used must live,
    still say that, and hold no block. `options` go to `tests.support.server.inside`.
    """
    used: list[tuple[Served, Known]] = []

    def get(folder: Path, known: Known, **options: Any) -> Served:
        server = _started(folder, **options)
        used.append((server, known))
        return server

    yield get
    for server, known in used:
        assert_stands(server, known)


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, smol: Path) -> Callable[..., Path]:
    """`chain(*scripts, **options)`: CHAIN with the default model's tokenizer, built once. Read only."""
    built: dict[str, Path] = {}

    def build(*scripts: Sequence[int], **options: Any) -> Path:
        key = f"{scripts} {sorted(options.items())}"
        if key not in built:
            folder = checkpoints.make_chain(tmp_path_factory.mktemp("chain"), *scripts, **options)
            built[key] = checkpoints.add_tokenizer(folder, smol)
        return built[key]

    return build


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND with 512 ids, for engines without words. Read only."""
    return checkpoints.make_rand(tmp_path_factory.mktemp("small"), vocab=512)


@pytest.fixture(scope="session")
def oracle(small: Path) -> Oracle:
    """What transformers says on it."""
    return Oracle(load_reference(small))
