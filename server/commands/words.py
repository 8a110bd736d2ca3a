"""What each word after `headroom` does: its flags are read, its modules imported, and a job is what remains.

Nothing heavy is imported before it is known to be needed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from server import __version__
from server.commands import flags
from server.commands.arguments import Parser
from server.commands.compare_flags import add_compare_flags, compare_options, outputs
from server.commands.convert_flags import add_convert_flags
from server.commands.interrupts import importing
from server.commands.plan_flags import add_plan_flags

if TYPE_CHECKING:
    from server.app import Loaded
    from server.config import ModelOptions

Job = Callable[[], int]  # returns the exit code

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
  convert MODEL --attention MODE OUT
                            write a model again with other KV heads
  kernels                   compile the CPU kernels now, not at the first start

MODEL:
  {flags.MODEL_HELP}

`headroom COMMAND --help` explains a command's flags; `headroom --version` tells
the version.
"""


def read(words: Sequence[str], env: Mapping[str, str]) -> Job:
    """The job that `words` ask for, with its modules imported. A wrong word is told, and is SystemExit(2)."""
    commands: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], Job]] = {
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
        return partial(_say, _HELP)
    if name in ("-V", "--version"):
        return partial(_say, f"headroom {__version__}\n")
    if name not in commands:
        print(f"headroom: there is no command {name!r}; there are {', '.join(commands)}", file=sys.stderr)
        raise SystemExit(2)
    return commands[name](words[1:], env)


def _say(text: str) -> int:
    print(text, end="")
    return 0


def _parser(name: str, usage: str, what: str) -> Parser:
    """Of a command whose first word is a model, or none."""
    parser = Parser(name, usage, what)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=flags.MODEL_HELP)
    return parser


def _serve(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser("serve", "[MODEL] [flags]", "Serve a model over an OpenAI-compatible HTTP API.")
    flags.add_model_flags(parser)
    flags.add_serve_flags(parser)
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir
    from server.commands.serve import serve

    return partial(serve, flags.serve_options(args, env, default_cache_dir(env)))


def _generate(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser(
        "generate",
        "[MODEL] PROMPT [flags]",
        "Print how a model continues a prompt. Of two words, the first is the model; one is the prompt.",
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue, - to read it from standard input"
    )
    flags.add_sampling_flags(parser, temperature=0.0, max_tokens=128)
    flags.add_model_flags(parser)
    args = parser.parse_intermixed_args(words)
    options, sampling = _options(args, env), flags.sampling(args)

    def job() -> int:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        loaded = _load(options)
        with importing():
            from server.commands.generate import generate
        return generate(loaded, prompt, sampling)

    return job


def _chat(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser(
        "chat", "[MODEL] [flags]", "Talk to a model in the terminal. /help lists what you can type."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message to begin with (default: the template's own)"
    )
    flags.add_sampling_flags(parser, temperature=None, max_tokens=None)
    flags.add_model_flags(parser)
    args = parser.parse_intermixed_args(words)
    options, sampling = _options(args, env), flags.sampling(args)

    def job() -> int:
        loaded = _load(options)
        with importing():
            from server.commands.chat import chat
        return chat(loaded, args.system, sampling)

    return job


def _fetch(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser("fetch", "[MODEL]", "Download a model unless it is here already, and print its folder.")
    args = parser.parse_intermixed_args(words)
    from model.fetch import default_cache_dir, resolve_model
    from server.commands.progress import progress

    model, cache_dir = args.model or flags.DEFAULT_MODEL, default_cache_dir(env)
    endpoint = env.get("HF_ENDPOINT") or None

    def job() -> int:
        with progress() as shown:
            folder = resolve_model(model, cache_dir=cache_dir, progress=shown, hub_endpoint=endpoint)
        print(folder)
        return 0

    return job


def _plan(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser(
        "plan",
        "[MODEL] [flags]",
        "Tell what a model's KV cache costs and how many users fit, from its config.json alone.",
    )
    add_plan_flags(parser)
    args = parser.parse_intermixed_args(words)
    from server.commands.plan import plan

    return partial(plan, args, args.model or flags.DEFAULT_MODEL, env.get("HF_ENDPOINT") or None)


def _compare(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = _parser(
        "compare",
        "[MODEL] [flags]",
        "Measure a model's attention modes side by side: memory, speed, users that fit, and quality.",
    )
    add_compare_flags(parser)
    args = parser.parse_intermixed_args(words)
    options, files = compare_options(args, parser, env.get("CXX") or None), outputs(args)
    from model.fetch import default_cache_dir
    from server.commands.compare import compare

    config = None if args.config is None else Path(args.config).expanduser()
    model, endpoint = args.model or flags.DEFAULT_MODEL, env.get("HF_ENDPOINT") or None
    return partial(compare, options, files, model, config, default_cache_dir(env), endpoint)


def _convert(words: Sequence[str], env: Mapping[str, str]) -> Job:
    parser = Parser(
        "convert",
        "MODEL --attention MODE OUT [flags]",
        "Write a model as an ordinary Hugging Face folder with other KV heads, which any program can load.",
    )
    parser.add_argument("model", metavar="MODEL", help=flags.MODEL_HELP.removesuffix(" (the default)"))
    parser.add_argument("out", metavar="OUT", help="the folder to write: new, or empty")
    add_convert_flags(parser)
    args = parser.parse_args(words)  # intermixed, of all that is missing it would name the flag alone
    from model.fetch import default_cache_dir
    from server.commands.convert import run_convert

    return partial(run_convert, args, default_cache_dir(env), env.get("HF_ENDPOINT") or None)


def _kernels(words: Sequence[str], env: Mapping[str, str]) -> Job:
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

    return partial(kernels, default_cache_dir(env), env.get("CXX") or None, args.portable)


def _options(args: argparse.Namespace, env: Mapping[str, str]) -> ModelOptions:
    from model.fetch import default_cache_dir

    return flags.model_options(args, env, default_cache_dir(env))


def _load(options: ModelOptions) -> Loaded:
    from server.commands.loading import load_model

    loaded = load_model(options)
    for warning in loaded.facts.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded
