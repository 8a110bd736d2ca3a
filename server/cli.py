"""`headroom`: the one console script. Only this file reads argv and the environment.

Nothing heavy is imported before it is known to be needed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from server import __version__
from server.commands import flags
from server.commands.arguments import Parser
from server.commands.compare_flags import add_compare_flags, compare_options, outputs
from server.commands.convert_flags import add_convert_flags
from server.commands.plan_flags import add_plan_flags

if TYPE_CHECKING:
    from server.app import Loaded

_HELP = f"""\
usage: headroom COMMAND [flags]

An LLM inference server that shows where the KV cache went.

commands:
  serve [MODEL]             serve a model over an OpenAI-compatible HTTP API
  generate [MODEL] PROMPT   print how a model continues a prompt
  chat [MODEL]              talk to a model in the terminal
  fetch [MODEL]             download a model and print its folder
  plan [MODEL]              what its KV cache costs, and how many users fit
  compare [MODEL]           measure what its attention modes save, and cost
  convert MODEL OUT         write a model again with other KV heads
  kernels                   compile the CPU kernels now, not at the first start

MODEL:
  {flags.MODEL_HELP}

`headroom COMMAND --help` explains a command's flags; `headroom --version` tells
the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 (it failed), 2 (used wrongly), 130 or 143 (interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
        "serve": _serve,
        "generate": _generate,
        "chat": _chat,
        "fetch": _fetch,
        "plan": _plan,
        "compare": _compare,
        "convert": _convert,
        "kernels": _kernels,
    }
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if name in ("-V", "--version"):
        print(f"headroom {__version__}")
        return 0
    if name not in commands:
        print(f"headroom: there is no command {name!r}; there are {', '.join(commands)}", file=sys.stderr)
        return 2
    # Read when PyTorch is imported: its OpenMP threads would look for work for a millisecond after each
    # operator, on cores that the kernels in C++ and the network need (half of a decode step at batch 16).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what this terminal cannot show
    # Without a handler, the first process of a container would ignore SIGTERM.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = commands[name](words[1:], os.environ)
        sys.stdout.flush()  # here, where a full disk is still told in one line
        return code
    except KeyboardInterrupt:
        print(f"\nheadroom {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left
        _drop_unwritten()
        return 1
    except Exception as error:
        message = _for_user(error)
        if message is None:
            raise
        print(f"headroom {name}: {message}", file=sys.stderr)
        _drop_unwritten()
        return 1
    finally:
        atexit.register(_leave_quietly)  # the last one in is called first, before torch's


def _leave_quietly() -> None:
    """All is done; a Ctrl-C now would only make Python print what it broke off."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _drop_unwritten() -> None:
    """What nobody takes is not tried again when Python ends, which would say so with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_memory(error: Exception) -> bool:
    """Whether there was not enough; torch has a class of its own for a GPU's, and none for the CPU's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _for_user(error: Exception) -> str | None:
    """The one line for a fault that the user can mend; None for a bug of ours."""
    from model.errors import ModelError
    from server.engine.errors import ConfigError
    from server.text.errors import GenerationError, RequestError

    if isinstance(error, (ModelError, ConfigError, RequestError, GenerationError)):
        return " ".join(str(error).split())
    if _is_memory(error):
        return "not enough memory for this model and its pool; lower --kv-memory, or take a smaller model"
    if isinstance(error, OSError) and error.strerror is not None:  # a disk, a pipe, a limit of the system
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return None


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _serve(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser("serve", "[MODEL] [flags]", "Serve a model over an OpenAI-compatible HTTP API.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    flags.add_model_flags(parser)
    flags.add_serve_flags(parser)
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir
    from server.commands.serve import serve

    return serve(flags.serve_options(args, env, default_cache_dir(env)))


def _generate(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "generate",
        "[MODEL] PROMPT [flags]",
        "Print how a model continues a prompt. Of two words, the first is the model; one is the prompt.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue, - to read it from standard input"
    )
    flags.add_sampling_flags(parser, temperature=0.0, max_tokens=128)
    flags.add_model_flags(parser)
    args = parser.parse_intermixed_args(words)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    loaded = _load(args, env)
    from server.commands.generate import generate

    return generate(loaded, prompt, flags.sampling(args))


def _chat(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "chat", "[MODEL] [flags]", "Talk to a model in the terminal. /help lists what you can type."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message to begin with (default: the template's own)"
    )
    flags.add_sampling_flags(parser, temperature=None, max_tokens=None)
    flags.add_model_flags(parser)
    args = parser.parse_intermixed_args(words)
    loaded = _load(args, env)
    from server.commands.chat import chat

    return chat(loaded, args.system, flags.sampling(args))


def _fetch(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser("fetch", "[MODEL]", "Download a model unless it is here already, and print its folder.")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir, resolve_model
    from server.commands.progress import progress

    with progress() as shown:
        folder = resolve_model(
            args.model or flags.DEFAULT_MODEL,
            cache_dir=default_cache_dir(env),
            progress=shown,
            hub_endpoint=env.get("HF_ENDPOINT") or None,
        )
    print(folder)
    return 0


def _plan(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "plan",
        "[MODEL] [flags]",
        "Tell what a model's KV cache costs and how many users fit, from its config.json alone.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    add_plan_flags(parser)
    args = parser.parse_intermixed_args(words)
    from server.commands.plan import plan

    return plan(args, args.model or flags.DEFAULT_MODEL, env.get("HF_ENDPOINT") or None)


def _compare(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "compare",
        "[MODEL] [flags]",
        "Measure a model's attention modes side by side: memory, speed, users that fit, and quality.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    add_compare_flags(parser)
    args = parser.parse_intermixed_args(words)
    options, files = compare_options(args, parser, env.get("CXX") or None), outputs(args)
    from model.fetch import default_cache_dir
    from server.commands.compare import compare

    config = None if args.config is None else Path(args.config).expanduser()
    model, endpoint = args.model or flags.DEFAULT_MODEL, env.get("HF_ENDPOINT") or None
    return compare(options, files, model, config, default_cache_dir(env), endpoint)


def _convert(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "convert",
        "MODEL --attention MODE OUT [flags]",
        "Write a model as an ordinary Hugging Face folder with other KV heads, which any program can load.",
    )
    parser.add_argument("model", metavar="MODEL", help=flags.MODEL_HELP.removesuffix(" (the default)"))
    parser.add_argument("out", metavar="OUT", help="the folder to write: new, or empty")
    add_convert_flags(parser)
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir
    from server.commands.convert import run_convert

    return run_convert(args, default_cache_dir(env), env.get("HF_ENDPOINT") or None)


def _kernels(words: Sequence[str], env: Mapping[str, str]) -> int:
    parser = Parser(
        "kernels",
        "[flags]",
        "Compile the operators in C++ for this CPU unless they are in the cache, and print their file. "
        "Otherwise the first start does it. The environment variable CXX names a compiler other than the "
        "system's.",
    )
    parser.add_argument(
        "--portable",
        action="store_true",
        help="compile them for x86-64 CPUs (AVX2, AVX-512), into the package, where all its users find "
        "them: for images",
    )
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir
    from server.commands.kernels import kernels

    return kernels(default_cache_dir(env), env.get("CXX") or None, args.portable)


def _load(args: argparse.Namespace, env: Mapping[str, str]) -> Loaded:
    from model.fetch import default_cache_dir
    from server.commands.loading import load_model

    loaded = load_model(flags.model_options(args, env, default_cache_dir(env)))
    for warning in loaded.facts.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


if __name__ == "__main__":
    sys.exit(main())
