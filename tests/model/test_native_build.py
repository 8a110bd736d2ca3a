"""The library of C++ operators is compiled once, found again, and never taken from somebody else.

The sources here are a line long and know nothing of PyTorch, so that a real compiler takes no time.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.native import build, compiler, trust
from model.native.build import Recipe, key_of, load_native, prebuild
from model.native.library import NativeLibrary, NativeUnavailable
from model.native.target import AVX2, AVX512, PORTABLE, X86, cpu_flags, target_of

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
needs_x86 = pytest.mark.skipif(platform.machine() not in X86, reason="for kinds of x86-64")

# A compiler that notes each call, and copies what a real one has made.
FAKE = """#!/bin/sh
echo "$@" >> {calls}
while [ "$1" != -o ]; do shift; done
{work}
cp {made} "$2"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library without operators."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "one.c").write_text("int answer(void) { return 42; }\n")
    library = folder / "one.so"
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "one.c"], check=True)
    return library


class Rig:
    """A cache, sources and a compiler of its own, and how often that was called."""

    def __init__(self, folder: Path, made: Path, name: str) -> None:
        self.cache, self.calls, self.name = folder / "cache", folder / "calls", name
        self.sources = folder / "csrc"
        self.sources.mkdir()
        (self.sources / "ops.cpp").write_text("// nothing\n")
        self.compiler, self.made = folder / "fake-c++", made
        self.work("")

    def work(self, script: str) -> None:
        """What the compiler does before it has a library."""
        self.compiler.write_text(FAKE.format(calls=self.calls, made=self.made, work=script))
        self.compiler.chmod(0o755)

    def recipe(self, **fields: object) -> Recipe:
        values = {"sources": self.sources, "namespace": self.name, "compiler": str(self.compiler)}
        return Recipe(**(values | fields))  # type: ignore[arg-type]

    def load(self, **fields: object) -> NativeLibrary:
        return load_native(self.cache, self.recipe(**fields), prebuilt=self.cache / "none")

    def refused(self, **fields: object) -> str:
        """The one line of the refusal."""
        with pytest.raises(NativeUnavailable) as caught:
            self.load(**fields)
        said = str(caught.value)
        assert said and "\n" not in said
        return said

    @property
    def compiled(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def rig(tmp_path: Path, made: Path, request: pytest.FixtureRequest) -> Rig:
    """Of a namespace of its own: a process takes one library for each."""
    return Rig(tmp_path, made, f"t{abs(hash(request.node.nodeid)):x}")


def forget(library: NativeLibrary) -> None:
    """As if this process had not loaded it."""
    torch.ops.loaded_libraries.discard(str(library.path))


def test_compiled_once_and_found_again(rig: Rig) -> None:
    told: list[str] = []
    library = load_native(rig.cache, rig.recipe(), say=told.append, prebuilt=rig.cache / "none")
    assert ctypes.CDLL(str(library.path)).answer() == 42
    assert (rig.compiled, len(told)) == (1, 1)
    assert "once" in told[0]
    for _ in range(2):  # loaded already, then in the cache
        assert load_native(rig.cache, rig.recipe(), say=told.append, prebuilt=rig.cache / "none") == library
        forget(library)
    assert (rig.compiled, len(told)) == (1, 1)


def test_a_library_in_the_cache_needs_no_compiler_and_no_write(rig: Rig) -> None:
    library = rig.load()
    forget(library)
    rig.compiler.unlink()
    folder = library.path.parent
    folder.chmod(0o500)
    try:
        assert rig.load(compiler="/nowhere/c++") == library
    finally:
        folder.chmod(0o700)


def test_the_import_that_only_compiling_needs_is_not_paid_for(rig: Rig) -> None:
    """In a process of its own: torch.utils.cpp_extension brings setuptools with it."""
    rig.load()
    script = f"""
import sys
from pathlib import Path
from model.native.build import Recipe, load_native
load_native(Path({str(rig.cache)!r}), Recipe(Path({str(rig.sources)!r}), namespace={rig.name!r}))
print([name for name in ("torch.utils.cpp_extension", "setuptools") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert rig.compiled == 1


def test_only_this_user_reads_and_writes_the_folder(rig: Rig) -> None:
    old = os.umask(0)
    try:
        library = rig.load()
    finally:
        os.umask(old)
    assert stat.S_IMODE(library.path.parent.stat().st_mode) == 0o700


def test_a_umask_that_lets_the_group_write_makes_no_library_of_others(rig: Rig) -> None:
    """As a linker makes it: 0775, which the next start would refuse."""
    rig.work('cp {made} "$2"; chmod 775 "$2"; exit 0'.replace("{made}", str(rig.made)))
    old = os.umask(0o002)
    try:
        library = rig.load()
        forget(library)
        assert rig.load() == library
    finally:
        os.umask(old)
    assert stat.S_IMODE(library.path.stat().st_mode) == 0o755
    assert rig.compiled == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_write_is_refused(rig: Rig, mode: int) -> None:
    library = rig.load()
    forget(library)
    library.path.parent.chmod(mode)
    assert f"mode {mode:o}" in rig.refused()
    assert rig.compiled == 1


def test_a_file_that_others_write_is_refused(rig: Rig) -> None:
    library = rig.load()
    forget(library)
    library.path.chmod(0o666)
    assert "written by others" in rig.refused()


@pytest.mark.parametrize(("mode", "fine"), [(0o777, False), (0o1777, True), (0o775, True), (0o755, True)])
def test_the_folder_above(rig: Rig, mode: int, fine: bool) -> None:
    """Open to all, anybody may put another folder in place of ours; of a sticky one nobody can."""
    rig.cache.mkdir()
    rig.cache.chmod(mode)
    if fine:
        rig.load()
    else:
        assert "mode 777" in rig.refused()
        assert rig.compiled == 0


def test_a_folder_of_another_user_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    library = rig.load()
    forget(library)
    monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in rig.refused()


def test_a_link_is_no_folder_and_no_file(rig: Rig, tmp_path: Path) -> None:
    library = rig.load()
    forget(library)
    moved = library.path.rename(tmp_path / "moved.so")
    library.path.symlink_to(moved)
    assert "is a link or no file" in rig.refused()
    folder = library.path.parent.rename(tmp_path / "elsewhere")
    (rig.cache / "native").symlink_to(folder)
    assert "is a link or no folder" in rig.refused()


def test_no_compiler(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.refused(compiler="no-such-c++ -O1") == "no C++ compiler 'no-such-c++' found"
    monkeypatch.setenv("PATH", "/nowhere")
    assert rig.refused(compiler=None) == "no C++ compiler found, neither g++ nor clang++"
    assert not (rig.cache / "native").exists()


def test_a_compiler_command_with_a_quote_that_does_not_end(rig: Rig) -> None:
    assert rig.refused(compiler="c++ '-O1") == """CXX="c++ '-O1": No closing quotation"""


def test_a_compiler_that_fails_says_its_first_error(rig: Rig) -> None:
    rig.work("echo 'note: c10::Error' >&2; echo 'ops.cpp:1:1: error: what is this\nerror: more' >&2; exit 1")
    assert rig.refused() == "compiling failed: ops.cpp:1:1: error: what is this"
    assert [path.name for path in (rig.cache / "native").iterdir()] == [".lock"]
    rig.work("")  # mended: the next start makes it
    rig.load()


def test_a_compiler_that_dies_in_silence(rig: Rig) -> None:
    rig.work("kill -9 $$")
    assert "compiling failed: " in rig.refused()


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(rig: Rig, tmp_path: Path) -> None:
    rig.work(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    begin = time.monotonic()
    assert rig.refused(seconds=2.0) == "compiling took more than 2 s"
    assert time.monotonic() - begin < 10
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 5  # a signal takes its time
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_compiler_that_ended_as_time_ran_out_hides_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    end: Callable[[int, int], None] = os.killpg

    def late(group: int, sign: int) -> None:
        end(group, sign)
        raise ProcessLookupError

    rig.work("sleep 60")
    monkeypatch.setattr(compiler.os, "killpg", late)
    assert rig.refused(seconds=0.2) == "compiling took more than 0 s"


def test_no_place_to_keep_it(rig: Rig) -> None:
    rig.cache.write_text("a file")
    assert "cannot be" in rig.refused()


def test_sources_that_are_not_there(rig: Rig, tmp_path: Path) -> None:
    assert "sources cannot be read" in rig.refused(sources=tmp_path / "nowhere")
    (rig.sources / "ops.cpp").rename(rig.sources / "other.h")
    assert "ops.cpp is not in the package" in rig.refused()


def test_sources_that_change_while_they_are_compiled(rig: Rig) -> None:
    """The library would be kept under a name that is not its own."""
    rig.work(f"echo '// more' >> {rig.sources}/ops.cpp")
    assert "changed while" in rig.refused()
    assert not list((rig.cache / "native").glob("*.so*"))


def test_without_pytorchs_build_tools(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    assert "build tools cannot be imported" in rig.refused()


def test_a_broken_library_is_made_again(rig: Rig) -> None:
    recipe = rig.recipe()
    path = rig.cache / "native" / f"{rig.name}-{key_of(recipe, recipe.target())}.so"
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"not a library")
    path.chmod(0o700)
    assert ctypes.CDLL(str(rig.load().path)).answer() == 42
    assert rig.compiled == 1


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999], ids=str)
def test_a_damaged_library_is_made_again_before_the_system_sees_it(rig: Rig, part: float) -> None:
    """Cut short, or with a byte changed: the system's loader would end the process on some of them."""
    first = rig.load()
    whole = first.path.read_bytes()
    at = int(part * len(whole))
    for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
        forget(first)
        first.path.unlink()  # the first one stays mapped
        first.path.write_bytes(damaged)
        first.path.chmod(0o700)
        calls = rig.compiled
        assert rig.load().path.read_bytes() == whole
        assert rig.compiled == calls + 1


def test_a_compiler_that_makes_nothing(rig: Rig) -> None:
    rig.work("exit 0")
    assert "compiled nothing" in rig.refused()


def test_a_library_that_never_loads_is_said(rig: Rig, made: Path) -> None:
    rig.work('echo nonsense > "$2"; exit 0')
    assert "cannot be loaded" in rig.refused()


def test_whatever_it_depends_on_names_it_anew(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**fields: object) -> str:
        recipe = rig.recipe(**fields)
        return key_of(recipe, recipe.target())

    first = key()
    keys = {first, key(vector="avx2"), key(vector="avx512"), key(namespace="n"), key(extra_flags=("-DX",))}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99")
        keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
        keys.add(key())
    (rig.sources / "ops.cpp").write_text("// nothing.\n")
    keys.add(key())
    (rig.sources / "more.h").write_text("")
    keys.add(key())
    assert len(keys) == 9
    (rig.sources / "more.h").unlink()
    (rig.sources / "ops.cpp").write_text("// nothing\n")
    (rig.sources / "ops.cpp~").write_text("an editor's")
    assert key() == first
    assert key(compiler="clang++", seconds=1.0) == first


def test_a_second_library_of_a_namespace_is_refused(rig: Rig) -> None:
    """PyTorch would end the process."""
    rig.load()
    (rig.sources / "ops.cpp").write_text("// changed\n")
    assert f"loaded as {rig.name}" in rig.refused()


def test_another_cache_finds_what_is_loaded(rig: Rig, tmp_path: Path) -> None:
    library = rig.load()
    assert load_native(tmp_path / "other", rig.recipe(), prebuilt=tmp_path / "none") == library
    assert rig.compiled == 1


def test_old_libraries_are_removed(rig: Rig) -> None:
    others = [rig.load(extra_flags=(f"-D{n}",), namespace=rig.name + str(n)) for n in range(2)]
    for number in range(12):
        (rig.sources / "ops.cpp").write_text(f"// {number}\n")
        forget(rig.load())
    kept = sorted(path.name for path in (rig.cache / "native").glob(f"{rig.name}-*.so"))
    assert len(kept) == 8
    assert all(other.path.exists() for other in others)
    rig.load()
    assert rig.compiled == 14


def test_two_processes_compile_once(rig: Rig) -> None:
    rig.work("sleep 1")
    script = f"""
from pathlib import Path
from model.native.build import Recipe, load_native
recipe = Recipe(Path({str(rig.sources)!r}), namespace={rig.name!r}, compiler={str(rig.compiler)!r})
load_native(Path({str(rig.cache)!r}), recipe, say=print)
"""
    both = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert rig.compiled == 1
    assert sum("compiling" in text and "waiting" not in text for text in said) == 1


@needs_x86
def test_prebuilt_for_this_cpu_comes_first(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that the CPU can run; what is for others, or of other sources, is passed over."""
    shelf = tmp_path / "prebuilt"
    monkeypatch.setattr(build, "cpu_flags", lambda: AVX2.needs)
    files = prebuild(rig.recipe(), shelf)
    assert len(files) == rig.compiled == len(PORTABLE) == 2
    library = load_native(rig.cache, rig.recipe(compiler="/nowhere"), prebuilt=shelf)
    assert (library.path, library.about) == (files[1], "compiled for AVX2, with the package")
    forget(library)
    monkeypatch.setattr(build, "cpu_flags", lambda: AVX512.needs)
    library = load_native(rig.cache, rig.recipe(compiler="/nowhere"), prebuilt=shelf)
    assert library.path == files[0]
    forget(library)
    monkeypatch.setattr(build, "cpu_flags", lambda: AVX2.needs - {"fma"})
    assert load_native(rig.cache, rig.recipe(), prebuilt=shelf).path.parent == rig.cache / "native"
    assert rig.compiled == 3


def test_targets() -> None:
    assert "-march=x86-64-v3" in target_of("avx2").flags
    assert AVX2.needs < AVX512.needs
    assert target_of("native").runs_on(cpu_flags())
    with pytest.raises(ValueError, match="sse9"):
        target_of("sse9")


@pytest.mark.parametrize(("text", "flags"), [("flags\t: a b\nflags\t: c\n", "a b"), ("Features : x", "x")])
def test_flags_of_a_cpu(tmp_path: Path, text: str, flags: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}")
    assert cpu_flags(tmp_path / "cpuinfo") == set(flags.split())
    assert cpu_flags(tmp_path / "nowhere") == frozenset()


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [pytest.param("avx512", marks=needs_x86), pytest.param("avx2", marks=needs_x86), "native"],
)
def test_a_real_compiler_takes_every_flag(tmp_path: Path, name: str) -> None:
    """For this CPU and each kind of x86-64; a constant that only the flags define says that they arrived."""
    (tmp_path / "ops.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int wide() {\n'
        "#if defined(__AVX512BF16__)\n  return 512;\n#elif defined(__AVX2__)\n  return 256;\n"
        "#else\n  return 0;\n#endif\n}\n"
    )
    target, library = target_of(name), tmp_path / f"{name}.so"
    compiler.compile_library(compiler.find_compiler(None), tmp_path / "ops.cpp", library, target.flags, 60.0)
    wide = {"avx512": 512, "avx2": 256}.get(name)
    if target.runs_on(cpu_flags()) and wide is not None:
        assert ctypes.CDLL(str(library)).wide() == wide


def test_an_interrupt_ends_the_compiler(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    end: Callable[[int, int], None] = os.killpg

    def interrupted(self: object, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    rig.work("sleep 60")
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    monkeypatch.setattr(compiler.os, "killpg", lambda group, sign: (ended.append(group), end(group, sign)))
    with pytest.raises(KeyboardInterrupt):
        rig.load()
    assert len(ended) == 1
