"""A calibration comes back from its file bit for bit, or is made again; its digest knows every value."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import calibration as store
from model.calibration import Calibration, LayerFit, load_or_fit
from model.errors import ModelError
from tests.support.calibrations import random_layers

ROOT = Path(__file__).parents[2]
FIELDS = [field.name for field in dataclasses.fields(LayerFit)]


def make(seed: int = 0, o_bias: bool = True) -> Calibration:
    """2 layers of 4 native KV heads to 2, 8 query heads, D 16, hidden 24."""
    return Calibration.of("aligned", 2, random_layers(2, seed=seed, o_bias=o_bias))


def forbidden() -> Calibration:
    raise AssertionError("fitted again")


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def bits(tensor: Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(found: Calibration, expected: Calibration) -> None:
    assert (found.kind, found.kv_heads, found.digest) == (expected.kind, expected.kv_heads, expected.digest)
    assert len(found.layers) == len(expected.layers)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        for name in FIELDS:
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if a is not None:
                assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert bits(a) == bits(b), name


@pytest.mark.parametrize("o_bias", [False, True])
def test_a_round_trip_keeps_every_bit(tmp_path: Path, o_bias: bool) -> None:
    made = make(o_bias=o_bias)
    made.layers[1].v_in[0, 0, :3] = torch.tensor([-0.0, 1e-42, float("nan")])
    made = Calibration.of(made.kind, made.kv_heads, made.layers)
    folder = tmp_path / "deep" / "inside"
    assert load_or_fit(folder, "key", lambda: made) is made
    assert_same(load_or_fit(folder, "key", forbidden), made)


def test_a_conjugate_view_is_kept_as_its_values(tmp_path: Path) -> None:
    """`conj()` of a complex tensor is a flag on the same bytes."""
    plain = make()
    lazy = [
        dataclasses.replace(layer, key=layer.key.conj(), query=layer.query.conj()) for layer in plain.layers
    ]
    real = [
        dataclasses.replace(layer, key=layer.key.conj_physical(), query=layer.query.conj_physical())
        for layer in plain.layers
    ]
    load_or_fit(tmp_path, "key", lambda: Calibration.of("aligned", 2, lazy))
    assert_same(load_or_fit(tmp_path, "key", forbidden), Calibration.of("aligned", 2, real))


def test_each_key_has_a_file_of_its_own(tmp_path: Path) -> None:
    for index, key in enumerate(("a", "b", "a/../b", "x" * 5000)):
        made = make(index)
        load_or_fit(tmp_path, key, lambda made=made: made)  # type: ignore[misc]
    for index, key in enumerate(("a", "b", "a/../b", "x" * 5000)):
        assert_same(load_or_fit(tmp_path, key, forbidden), make(index))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_the_digest_changes_with_every_value() -> None:
    seen = {make().digest}
    assert make().digest in seen  # the same values, the same digest
    for layer in range(2):
        for name in FIELDS:
            changed = make()
            tensor = getattr(changed.layers[layer], name)
            flat = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
            for place in (0, -1):
                flat[place] += 1
                seen.add(Calibration.of("aligned", 2, changed.layers).digest)
    # And with what is not a value: kind, heads, the order of layers, a bias that is missing.
    made = make()
    seen.add(Calibration.of("aligned-fixed", 2, made.layers).digest)
    seen.add(Calibration.of("aligned", 1, made.layers).digest)
    seen.add(Calibration.of("aligned", 2, made.layers[::-1]).digest)
    seen.add(Calibration.of("aligned", 2, made.layers[:1]).digest)
    seen.add(make(o_bias=False).digest)
    assert len(seen) == 1 + 2 * len(FIELDS) * 2 + 5


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def noise(file: Path) -> None:
    file.write_bytes(os.urandom(1000))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1  # one bit of one value
    file.write_bytes(content)


def about(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata() or {})


def rewrite(file: Path, drop: str = "", **changes: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if name != drop}
    kept = about(file) | changes
    file.unlink()
    save_file(tensors, file, metadata={name: value for name, value in kept.items() if value})


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": empty,
    "noise": noise,
    "one bit": flip,
    "older version": lambda file: rewrite(file, version="0"),
    "another key": lambda file: rewrite(file, key="another"),
    "foreign": lambda file: rewrite(file, format="something else"),
    "no metadata": lambda file: save_file({"a": torch.zeros(1)}, file),
    "no digest": lambda file: rewrite(file, digest=""),
    "another digest": lambda file: rewrite(file, digest="0" * 64),
    "no number": lambda file: rewrite(file, layers="two"),
    "fewer layers": lambda file: rewrite(file, layers="1"),
    "another mode": lambda file: rewrite(file, kv_heads="1"),
    "a tensor missing": lambda file: rewrite(file, drop="1.key"),
    "a bias missing": lambda file: rewrite(file, drop="1.o_bias"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_used_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first, second = make(1), make(2)
    load_or_fit(tmp_path, "key", lambda: first)
    DAMAGE[damage](only_file(tmp_path))
    assert load_or_fit(tmp_path, "key", lambda: second) is second
    assert [record.message.count("cannot be used") for record in caplog.records] == [1]
    assert_same(load_or_fit(tmp_path, "key", forbidden), second)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    first, second = make(1), make(2)
    load_or_fit(tmp_path, "key", lambda: first)
    file = only_file(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert load_or_fit(tmp_path, "key", lambda: second) is second
    assert_same(load_or_fit(tmp_path, "key", forbidden), second)


def test_a_fit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Calibration:
        raise ModelError("no")

    with pytest.raises(ModelError, match=r"^no$"):
        load_or_fit(tmp_path, "key", fails)
    assert list(tmp_path.glob("*.safetensors")) == []
    made = make()
    assert load_or_fit(tmp_path, "key", lambda: made) is made  # the lock is free again


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    made = make()
    assert load_or_fit(tmp_path / "file" / "inside", "key", lambda: made) is made
    assert "cannot be kept" in caplog.text
    assert "Not a directory" in caplog.text


def test_a_folder_that_cannot_even_be_looked_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here for its name; one that the user may not enter fails in the same call."""
    made = make()
    assert load_or_fit(tmp_path / ("x" * 300), "key", lambda: made) is made
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    """The tests may run as root, whom no permission stops, so the refusal is made here."""

    def refused(*arguments: object, **options: object) -> None:
        raise OSError(trouble, os.strerror(trouble))

    made = make()
    monkeypatch.setattr(store, "save_file" if trouble == errno.ENOSPC else "locked", refused)
    assert load_or_fit(tmp_path, "key", lambda: made) is made
    assert os.strerror(trouble) in caplog.text
    monkeypatch.undo()
    again = make()
    assert load_or_fit(tmp_path, "key", lambda: again) is again  # nothing half was left


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make()
    load_or_fit(tmp_path, "kept", lambda: made)
    tmp_path.chmod(0o500)
    try:
        assert load_or_fit(tmp_path, "new", lambda: made) is made
        assert "cannot be kept" in caplog.text
        assert_same(load_or_fit(tmp_path, "kept", forbidden), made)  # and what is there can be read
    finally:
        tmp_path.chmod(0o700)


_FITTER = """
import logging, os, sys, time
from pathlib import Path
from model.calibration import Calibration, load_or_fit
from tests.support.calibrations import random_layers

logging.basicConfig(format="%(message)s")

def fit():
    print("fitting", flush=True)
    if len(sys.argv) > 2:
        sys.stdin.readline()
    return Calibration.of("aligned", 2, random_layers(2, seed=os.getpid()))

print(load_or_fit(Path(sys.argv[1]), "key", fit).digest, flush=True)
"""


def start(folder: Path, *held: str) -> subprocess.Popen[str]:
    """A process that fits and prints the digest that it got; a `held` one waits for a line in its fit."""
    return subprocess.Popen(
        [sys.executable, "-c", _FITTER, str(folder), *held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def line(process: subprocess.Popen[str], stream: str = "stdout") -> str:
    return str(getattr(process, stream).readline()).strip()


def test_of_two_processes_one_fits_and_the_other_waits(tmp_path: Path) -> None:
    first = start(tmp_path, "held")
    assert line(first) == "fitting"
    second = start(tmp_path)
    assert "waiting for another process" in line(second, "stderr")
    assert list(tmp_path.glob("*.safetensors")) == []
    out, _ = first.communicate("\n")
    expected = Calibration.of("aligned", 2, random_layers(2, seed=first.pid)).digest
    assert out.strip() == expected
    assert second.communicate()[0].strip() == expected  # it fitted nothing
    assert load_or_fit(tmp_path, "key", forbidden).digest == expected


def test_a_killed_fit_is_taken_over(tmp_path: Path) -> None:
    victim = start(tmp_path, "held")
    assert line(victim) == "fitting"
    victim.kill()
    victim.communicate()
    heir = start(tmp_path)
    out = heir.communicate()[0].split()
    assert out == ["fitting", Calibration.of("aligned", 2, random_layers(2, seed=heir.pid)).digest]
    assert [path.name for path in tmp_path.iterdir() if ".tmp" in path.name] == []


def test_a_leftover_of_a_killed_writer_does_not_count(tmp_path: Path) -> None:
    made = make()
    load_or_fit(tmp_path, "key", lambda: made)
    file = only_file(tmp_path)
    file.rename(tmp_path / f".{file.name}.tmp")  # whole, but never published
    again = make(1)
    assert load_or_fit(tmp_path, "key", lambda: again) is again
    assert_same(load_or_fit(tmp_path, "key", forbidden), again)
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_usable_file_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    made = make()
    load_or_fit(tmp_path, "key", lambda: made)
    load_or_fit(tmp_path, "key", forbidden)
    assert caplog.records == []
