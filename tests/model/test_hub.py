"""Hub ids against a stub of the hub: which files are asked for, what stays cached, what each refusal says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.fetch import resolve_config, resolve_model
from model.hub import is_hub_id
from tests.support.stub_hub import SHA, StubHub

REPO = "some-org/Tiny_Llama-1.0"

WANTED = {
    "config.json": b"{}",
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"sentencepiece",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"one" * 50_000,
    "model-00002-of-00002.safetensors": b"two" * 50_000,
}
REFUSED = {
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_custom.py": b"import os",
    "tokenization_custom.py": b"import os",
    "README.md": b"# Tiny",
    ".gitattributes": b"",
    "tiny.gguf": b"GGUF",
    "consolidated.safetensors": b"again",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"again",
}


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with StubHub({REPO: WANTED | REFUSED}).running() as running:
        yield running


@pytest.fixture
def fetch(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)  # no folder of that name here

    def fetch(name: str = REPO, **options: object) -> Path:
        return resolve_model(
            name, cache_dir=tmp_path / "ours", hub_endpoint=hub.url, hub_cache=tmp_path / "hub", **options
        )  # type: ignore[arg-type]

    return fetch


def refused(fetch: Callable[..., Path], *parts: str, name: str = REPO) -> None:
    with pytest.raises(ModelError) as caught:
        fetch(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in (name, *parts):
        assert part in message, message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a/b.c_d-e", True),
        ("name", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./b", False),
        ("../b", False),
        ("~/b", False),
        ("a/..", False),
        ("a/b--c", False),
        ("a/b c", False),
        ("a/", False),
        ("ä/b", False),
        ("a/b\n", False),
    ],
)
def test_what_a_hub_id_looks_like(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_only_files_that_cannot_run_are_downloaded(hub: StubHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED
    assert sorted(hub.downloaded) == sorted(WANTED)
    assert {line.split(f"/{SHA}/")[1] for line in hub.asked if "/resolve/" in line} == set(WANTED)


def test_progress_counts_bytes(fetch: Callable[..., Path]) -> None:
    phases: list[tuple[str, int | None]] = []
    done: list[int] = []

    class Shown:
        def start(self, label: str, total: int | None) -> None:
            phases.append((label, total))

        def update(self, amount: int) -> None:
            done.append(amount)

    fetch(progress=Shown())
    size = sum(len(content) for content in WANTED.values())
    assert phases[-1] == (f"downloading {REPO}", size)
    assert done[-1] == size
    assert done == sorted(done)


def test_a_second_time_asks_for_no_file(hub: StubHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    hub.asked.clear()
    assert fetch() == folder
    assert not [line for line in hub.asked if "/resolve/" in line]


def test_without_a_network_the_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StubHub({REPO: WANTED}).running() as hub:
        folder = resolve_model(REPO, cache_dir=tmp_path, hub_endpoint=hub.url, hub_cache=tmp_path / "hub")
    again = resolve_model(REPO, cache_dir=tmp_path, hub_endpoint=hub.url, hub_cache=tmp_path / "hub")
    assert again == folder
    assert {path.name for path in again.iterdir()} == set(WANTED)


def test_without_a_network_or_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StubHub().running() as hub:
        pass

    def fetch(name: str) -> Path:
        return resolve_model(name, cache_dir=tmp_path, hub_endpoint=hub.url, hub_cache=tmp_path / "hub")

    refused(fetch, "cannot be reached", "name a folder instead")


def test_half_a_download_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's retries
    broken = "model-00002-of-00002.safetensors"
    with StubHub({REPO: WANTED}, broken_files={broken}).running() as hub:

        def fetch(name: str) -> Path:
            return resolve_model(name, cache_dir=tmp_path, hub_endpoint=hub.url, hub_cache=tmp_path / "hub")

        refused(fetch, "could not be fetched")
    refused(fetch, "does not hold all of it")  # and the hub is gone now
    with StubHub({REPO: WANTED}).running() as hub:
        assert {path.name: path.read_bytes() for path in fetch(REPO).iterdir()} == WANTED


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "GatedRepo", "gated; accept its terms"),
        (401, "GatedRepo", "gated; accept its terms"),
        (401, "RepoNotFound", "no such repository on the hub"),
        (403, "", "HTTP status 403; set HF_TOKEN"),
        (404, "RevisionNotFound", "no main branch"),
        (404, "", "HTTP status 404"),
        (418, "", "HTTP status 418"),
    ],
)
def test_refusals(hub: StubHub, fetch: Callable[..., Path], status: int, code: str, says: str) -> None:
    hub.refusals[REPO] = (status, code)
    refused(fetch, "could not be fetched", says)


def test_unknown_repository(fetch: Callable[..., Path]) -> None:
    refused(fetch, "no such folder here and no such repository on the hub", name="some-org/nonesuch")


def test_repository_of_pickles(hub: StubHub, fetch: Callable[..., Path]) -> None:
    hub.repositories[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    refused(fetch, "holds no *.safetensors")
    assert hub.downloaded == ["config.json"]


def test_repository_without_a_config(hub: StubHub, fetch: Callable[..., Path]) -> None:
    hub.repositories[REPO] = {"model.safetensors": b"weights"}
    refused(fetch, "holds no config.json")


SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def config_of(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelConfig]:
    monkeypatch.chdir(tmp_path)
    hub.repositories[REPO] = WANTED | REFUSED | {"config.json": json.dumps(SHAPE).encode()}
    return lambda name=REPO: resolve_config(name, hub_endpoint=hub.url, hub_cache=tmp_path / "hub")


def test_a_config_comes_alone(hub: StubHub, config_of: Callable[..., ModelConfig]) -> None:
    assert config_of().num_kv_heads == 2
    assert hub.downloaded == ["config.json"]
    hub.downloaded.clear()
    assert config_of().num_kv_heads == 2
    assert hub.downloaded == []


def test_the_rest_follows_a_config(
    hub: StubHub, config_of: Callable[..., ModelConfig], fetch: Callable[..., Path]
) -> None:
    config_of()
    assert {path.name for path in fetch().iterdir()} == set(WANTED)
    assert sorted(hub.downloaded) == sorted(WANTED)


def test_a_config_alone_is_no_model_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places: dict[str, Any] = {"hub_cache": tmp_path / "hub"}
    with StubHub({REPO: WANTED | {"config.json": json.dumps(SHAPE).encode()}}).running() as hub:
        resolve_config(REPO, hub_endpoint=hub.url, **places)
    assert resolve_config(REPO, hub_endpoint=hub.url, **places).num_kv_heads == 2
    refused(
        lambda name: resolve_model(name, cache_dir=tmp_path, hub_endpoint=hub.url, **places),
        "cannot be reached and only config.json is here",
    )


def test_refused_configs(hub: StubHub, config_of: Callable[..., ModelConfig]) -> None:
    def config(name: str) -> Path:
        config_of(name)
        raise AssertionError

    refused(config, "no such repository on the hub", name="some-org/nonesuch")
    hub.refusals[REPO] = (403, "GatedRepo")
    refused(config, "gated; accept its terms")
    hub.refusals.clear()
    hub.repositories[REPO] = {"model.safetensors": b"weights"}
    refused(config, "holds no config.json")
