"""What the command line accepts, what it says of itself, and how it refuses: one line, at once."""

from __future__ import annotations

import argparse
import os
import re
import resource
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import server
from model.calibration import HEAD_MAPS
from server import cli
from server.commands import flags, shared_flags
from server.commands.arguments import Parser
from server.config import ServeOptions
from server.engine.device import DTYPES
from server.engine.options import EngineOptions
from server.tools.compare.options import CompareOptions
from tests.support.command import ROOT, InProcess, check_one_line, headroom

COMMANDS = ("serve", "generate", "chat", "fetch", "plan", "compare", "convert")
ALL = (*COMMANDS, "kernels")


def test_help() -> None:
    for words in ((), ("--help",), ("-h",), ("help",)):
        done = headroom(*words)
        assert done.returncode == 0
        for command in COMMANDS:
            assert re.search(rf"\n  {command} \[?MODEL", done.stdout)
        assert "\n  kernels " in done.stdout
    assert headroom("--version").stdout == f"headroom {server.__version__}\n"


@pytest.mark.parametrize("command", ALL)
def test_help_of_a_command(command: str) -> None:
    """And it imports nothing heavy."""
    code = (
        "import sys; from server.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic', 'rich', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: headroom {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_help_is_quick() -> None:
    best = min(worked(headroom, "--help") for _ in range(3))
    assert best < 0.3, f"--help took {best:.2f} s of CPU"


def worked(call: object, *words: str) -> float:
    """Seconds of CPU, not of the clock: a busy machine makes nothing slow here."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    begin = spent()
    call(*words)  # type: ignore[operator]
    return spent() - begin


def test_every_flag_says_its_default_and_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Parser("serve", "", "")
    flags.add_model_flags(parser)
    flags.add_serve_flags(parser)
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert len(options) <= 32
    for action in options:
        says = (action.help or "").replace("%(default)s", str(action.default))
        assert "default" in says or isinstance(action, argparse._StoreTrueAction), action.option_strings
        assert (
            action.metavar
            or action.choices
            or isinstance(action, argparse._StoreTrueAction)
            or action.dest == "host"
        )


def served(monkeypatch: pytest.MonkeyPatch, *words: str, **env: str) -> ServeOptions:
    """The options that `serve` would start with."""
    caught: list[ServeOptions] = []
    monkeypatch.setattr("server.commands.serve.serve", lambda options: caught.append(options) or 0)
    for name in ("HEADROOM_API_KEY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", *words]) == 0
    return caught[0]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    options = served(monkeypatch, XDG_CACHE_HOME="/some/where")
    assert options == ServeOptions(model=options.model)
    assert options.model.model == "smollm2-135m"
    assert options.model.cache_dir == Path("/some/where/headroom")
    assert options.model.engine == EngineOptions()


def test_every_flag_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "--device cpu --dtype float32 --kv-memory 1.5GiB --block-size 8 --max-model-len 100 --max-num-seqs 3"
    )
    words += (
        " a/folder --max-batch-tokens 64 --no-prefix-cache --threads 2 --served-model-name m --host 0.0.0.0"
    )
    words += (
        " --port 0 --api-key k1 --api-key k2 --allowed-hosts a,b, --cors-origins https://x --max-queued 5"
    )
    words += " --grace 1.5 --log-level debug --attention mqa,native --head-map mean --generation-config none"
    words += " --kernels torch --speculate ngram --weights int4"
    env = {"HEADROOM_API_KEY": "k3", "HF_ENDPOINT": "http://hub", "CXX": "clang++ -O1"}
    options = served(monkeypatch, *words.split(), **env)
    model, engine = options.model, options.model.engine
    assert (model.model, engine.device, engine.dtype, engine.kv_memory) == (
        "a/folder",
        "cpu",
        "float32",
        3 * 2**29,
    )
    assert (engine.block_size, engine.max_model_len, engine.max_num_seqs, engine.max_batch_tokens) == (
        8,
        100,
        3,
        64,
    )
    assert model.generation_config == "none"
    assert (engine.kernels, model.compiler) == ("torch", "clang++ -O1")
    assert (engine.speculate, engine.weights) == ("ngram", "int4")
    assert (engine.prefix_cache, model.threads, model.served_name, model.hub_endpoint) == (
        False,
        2,
        "m",
        "http://hub",
    )
    assert (engine.attention, engine.head_map, engine.debug) == (("mqa", "native"), "mean", False)
    assert (options.host, options.port, options.api_keys) == ("0.0.0.0", 0, ("k1", "k2", "k3"))
    assert (options.allowed_hosts, options.cors_origins) == (("a", "b"), ("https://x",))
    assert (options.max_queued, options.grace, options.log_level) == (5, 1.5, "debug")
    assert "k1" not in repr(options)


def test_kernels_and_weights_arrive_in_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[CompareOptions] = []
    monkeypatch.setattr("server.commands.compare.compare", lambda options, *_: caught.append(options) or 0)
    monkeypatch.setenv("CXX", "clang++ -O1")
    assert cli.main(["compare", "--kernels", "torch", "--weights", "int8"]) == 0
    monkeypatch.delenv("CXX")
    assert cli.main(["compare"]) == 0
    assert [(o.kernels, o.weights, o.compiler) for o in caught] == [
        ("torch", "int8", "clang++ -O1"),
        ("auto", "none", None),
    ]


def test_pytorchs_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    served(monkeypatch)
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    served(monkeypatch, OMP_WAIT_POLICY="ACTIVE")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_debug_recounts_and_tells_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    options = served(monkeypatch, "--debug", "--log-level", "error")
    assert options.model.engine.debug
    assert options.log_level == "debug"


def test_the_words_that_help_offers_are_those_there_are() -> None:
    """Spelled out again where `--help` must not wait for torch."""
    assert shared_flags.HEAD_MAPS == HEAD_MAPS
    assert tuple(DTYPES) == shared_flags.DTYPES


def test_one_or_two_words_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[tuple[str, str]] = []
    nothing = SimpleNamespace(warnings=())
    monkeypatch.setattr(
        "server.commands.loading.load_model",
        lambda options: SimpleNamespace(name=options.model, facts=nothing),
    )
    monkeypatch.setattr(
        "server.commands.generate.generate",
        lambda loaded, prompt, choice: caught.append((loaded.name, prompt)) or 0,
    )
    for words in (["hi"], ["m", "hi"], ["m", "--seed", "3", "hi"], ["--top-k", "3", "m", "hi"]):
        assert cli.main(["generate", *words]) == 0
    assert caught == [("smollm2-135m", "hi"), ("m", "hi"), ("m", "hi"), ("m", "hi")]


BAD_WORDS = [
    (["serv"], "no command 'serv'"),
    (["serve", "a", "b"], "unrecognized arguments: b"),
    (["serve", "--prot", "1"], "--prot"),
    (["serve", "--port", "70000"], "'70000' is not a whole number from 0 to 65535"),
    (["serve", "--port", "8e3"], "not a whole number"),
    (["generate", "hi", "--threads", "999999999"], "'999999999' is not a whole number from 1 to 1024"),
    (["compare", "--threads", "1025"], "'1025' is not a whole number from 1 to 1024"),
    (["serve", "--kv-memory", "lots"], "'lots' is not a size; write it like 2GiB"),
    (["serve", "--kv-fraction", "1.5"], "not a number above 0 and at most 1"),
    (["serve", "--kv-fraction", "0"], "not a number above 0"),
    (["serve", "--kv-fraction", "nan"], "not a number"),
    (["serve", "--kv-fraction", "0.5", "--kv-memory", "1GiB"], "not allowed with"),
    (["serve", "--block-size", "0"], "at least 1"),
    (["serve", "--device", "tpu"], "'tpu'"),
    (["serve", "--attention", " ,"], "name at least one mode"),
    (["chat", "--head-map", "best"], "'best'"),
    (["serve", "--grace", "-1"], "--grace"),
    (["serve", "--max-queued", "0"], "at least 1"),
    (["serve", "--api-key", " "], "--api-key"),
    (["serve", "--served-model-name", "a\nb"], "printable"),
    (["generate"], "PROMPT"),
    (["generate", "m", "p", "x"], "unrecognized"),
    (["chat", "--temperature", "hot"], "'hot'"),
    (["fetch", "a", "b"], "unrecognized"),
    (["convert"], "required: MODEL, OUT, --attention"),
    (["convert", "m", "--attention", "mqa"], "required: OUT"),
]


@pytest.mark.parametrize(("words", "part"), BAD_WORDS)
def test_bad_words_are_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(words)
    except SystemExit as leaving:
        code = int(str(leaving.code))
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert part in said.err


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that another server has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_a_taken_port_is_found_before_the_model(taken: str) -> None:
    done = headroom("serve", "some-org/never-asked", "--port", taken)
    check_one_line(done, f"port {taken} of 127.0.0.1 is taken", "--port")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["nosuchmodel"], "no model 'nosuchmodel'"),
        (["/"], "config.json"),
        (
            ["MODEL", "--attention", "foo"],
            "attention mode 'foo' is not known; with its KV heads, the checkpoint's modes are mqa (1)",
        ),
        (["--attention", "foo"], "modes are mqa (1), native (3), mha (9)"),
        (["MODEL", "--max-batch-tokens", "3"], "--max-batch-tokens 3 is less than --max-num-seqs"),
        (["some-org/never-asked", "--max-batch-tokens", "3"], "--max-batch-tokens 3 is less than"),
        (["MODEL"], "is taken"),
    ],
)
def test_what_is_wrong_in_the_words_is_said_before_the_port(
    words: list[str], part: str, taken: str, here: InProcess, tiny: Callable[..., Path]
) -> None:
    words = [str(tiny()) if word == "MODEL" else word for word in words]
    check_one_line(here("serve", *words, "--port", taken), part)


def test_addresses_that_are_not_ours() -> None:
    check_one_line(
        headroom("serve", "--host", "203.0.113.7", "--port", "0"), "--host 203.0.113.7 is not an address"
    )
    check_one_line(
        headroom("serve", "--host", "no.such.host.invalid"), "--host no.such.host.invalid is not known"
    )


@pytest.mark.parametrize("command", ["serve", "fetch", "chat", "generate"])
def test_no_such_model(command: str, tmp_path: Path) -> None:
    words = ["a prompt"] if command == "generate" else []
    serve = ["--port", "0"] if command == "serve" else []
    check_one_line(headroom(command, str(tmp_path / "missing"), *words, *serve), "no model", "missing")
    (tmp_path / "empty").mkdir()
    check_one_line(headroom(command, str(tmp_path / "empty"), *words, *serve), "config.json")


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == server.__version__


@pytest.mark.parametrize("words", [["plan", "MODEL"], ["plan", "MODEL", "--json"]], ids=" ".join)
def test_a_full_disk_is_one_line(words: list[str], tiny: Callable[..., Path]) -> None:
    """Output that cannot be written is told like any other fault, once."""
    words = [str(tiny()) if word == "MODEL" else word for word in words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "server.cli", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "headroom plan: No space left on device\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_end_changes_nothing(tiny: Callable[..., Path], number: str) -> None:
    """While Python takes itself down, here in a function that it calls at its exit."""
    code = (
        "import atexit, os, signal, sys\n"
        f"atexit.register(os.kill, os.getpid(), signal.{number})\n"
        "from server.cli import main\n"
        f"sys.exit(main(['plan', {str(tiny())!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
