"""The flags of every command, in groups, and what they say of themselves in `--help`."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from server.config import ModelOptions, SamplingChoice, ServeOptions, parse_size

DEFAULT_MODEL = "smollm2-135m"
MODEL_HELP = f"a folder, a hub id (organisation/model) or the alias {DEFAULT_MODEL} (the default)"


class _Help(argparse.HelpFormatter):
    """As wide as the terminal, up to a readable limit."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(100, shutil.get_terminal_size().columns - 2))


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes flags before, between and after the other words."""

    def __init__(self, command: str, usage: str, text: str) -> None:
        super().__init__(
            prog=f"headroom {command}",
            usage=f"headroom {command} {usage}",
            description=text,
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_model_flags(parser: Parser) -> None:
    """Everything that decides what is loaded and how large its cache is."""
    weights = parser.add_argument_group("model")
    weights.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to run (default: cuda if there is one)",
    )
    weights.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="of weights and cache (default: the checkpoint's own where this machine is fast in it)",
    )
    weights.add_argument(
        "--threads",
        type=_count(1),
        metavar="N",
        help="CPU threads for arithmetic (default: one for each core)",
    )
    cache = parser.add_argument_group("KV cache")
    size = cache.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-memory",
        type=_size,
        metavar="SIZE",
        help="size of the pool, as 2GiB or 512MB (default on a CPU: 2GiB, or a quarter of free memory)",
    )
    size.add_argument(
        "--kv-fraction",
        type=_number(0, 1, above=True),
        metavar="F",
        help="share of the GPU memory that weights and work leave free (default on CUDA: 0.9)",
    )
    cache.add_argument(
        "--block-size",
        type=_count(1),
        default=16,
        metavar="N",
        help="tokens in a block (default: %(default)s)",
    )
    cache.add_argument(
        "--max-model-len",
        type=_count(1),
        metavar="N",
        help="tokens of prompt and output together (default: the model's own, or what the pool holds)",
    )
    cache.add_argument(
        "--no-prefix-cache", action="store_true", help="forget a sequence's cache as soon as it has ended"
    )
    batch = parser.add_argument_group("batching")
    batch.add_argument(
        "--max-num-seqs",
        type=_count(1),
        default=64,
        metavar="N",
        help="sequences in a step (default: %(default)s)",
    )
    batch.add_argument(
        "--max-batch-tokens",
        type=_count(1),
        default=512,
        metavar="N",
        help="tokens in a step (default: %(default)s)",
    )


def add_serve_flags(parser: Parser) -> None:
    """Everything about the server around the model."""
    name = parser.add_argument_group("names")
    name.add_argument(
        "--served-model-name",
        type=_name,
        metavar="NAME",
        help="what clients call the model (default: its own name)",
    )
    door = parser.add_argument_group("network")
    door.add_argument(
        "--host", type=_name, default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    door.add_argument(
        "--port",
        type=_count(0, 65535),
        default=8000,
        metavar="N",
        help="port, 0 for a free one (default: %(default)s)",
    )
    door.add_argument(
        "--api-key",
        action="append",
        type=_key,
        default=[],
        metavar="KEY",
        help="a key that clients must send; give several, or set HEADROOM_API_KEY (default: no key)",
    )
    door.add_argument(
        "--allowed-hosts",
        type=_names,
        default=(),
        metavar="NAMES",
        help="more names a Host header may hold, a,b or * for any (default: --host and localhost)",
    )
    door.add_argument(
        "--cors-origins",
        type=_names,
        default=(),
        metavar="URLS",
        help="origins whose pages may call from a browser, a,b or * for any (default: none)",
    )
    work = parser.add_argument_group("life")
    work.add_argument(
        "--max-queued",
        type=_count(0),
        default=256,
        metavar="N",
        help="requests that may wait; more get 429 (default: %(default)s)",
    )
    work.add_argument(
        "--grace",
        type=_number(0, 86400),
        default=30.0,
        metavar="SECONDS",
        help="how long running answers may go on after SIGTERM (default: 30)",
    )
    work.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="default: %(default)s",
    )


def add_sampling_flags(parser: Parser, *, temperature: float, max_tokens: int | None) -> None:
    """How the terminal commands draw tokens."""
    group = parser.add_argument_group("sampling")
    limit = "no limit but the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens",
        type=_count(1),
        default=max_tokens,
        metavar="N",
        help=f"longest answer (default: {limit})",
    )
    group.add_argument(
        "--temperature",
        type=_number(0, 2),
        default=temperature,
        metavar="T",
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    group.add_argument(
        "--top-p", type=_number(0, 1), default=1.0, metavar="P", help="keep this mass of tokens (default: 1)"
    )
    group.add_argument(
        "--top-k", type=_count(0), default=0, metavar="K", help="keep the K likeliest, 0 all (default: 0)"
    )
    group.add_argument(
        "--seed", type=_count(0), metavar="N", help="repeat an answer (default: a new one each time)"
    )


def model_options(args: argparse.Namespace, env: Mapping[str, str], cache_dir: Path) -> ModelOptions:
    """The model flags of `args`; hub settings come from `env`."""
    return ModelOptions(
        model=args.model or DEFAULT_MODEL,
        cache_dir=cache_dir,
        served_name=getattr(args, "served_model_name", None),
        device=args.device,
        dtype=args.dtype,
        kv_memory=args.kv_memory,
        kv_fraction=args.kv_fraction,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_batch_tokens=args.max_batch_tokens,
        prefix_cache=not args.no_prefix_cache,
        threads=args.threads,
        hub_endpoint=env.get("HF_ENDPOINT") or None,
    )


def serve_options(args: argparse.Namespace, env: Mapping[str, str], cache_dir: Path) -> ServeOptions:
    """The flags of `serve`; a key in HEADROOM_API_KEY counts like one given by flag."""
    keys = [*args.api_key, *filter(None, [env.get("HEADROOM_API_KEY", "").strip()])]
    return ServeOptions(
        model=model_options(args, env, cache_dir),
        host=args.host,
        port=args.port,
        api_keys=tuple(dict.fromkeys(keys)),
        allowed_hosts=args.allowed_hosts,
        cors_origins=args.cors_origins,
        max_queued=args.max_queued,
        grace=args.grace,
        log_level=args.log_level,
    )


def sampling(args: argparse.Namespace) -> SamplingChoice:
    """The sampling flags of `args`."""
    return SamplingChoice(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def parse(text: str) -> int:
        if not (
            text.isascii() and text.isdecimal() and len(text) < 19 and low <= int(text) <= (high or 10**18)
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return parse


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            wanted = f"above {low} and at most {high}" if above else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return value

    return parse


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > 200:
        raise argparse.ArgumentTypeError("a name has 1 to 200 printable characters")
    return text.strip()


def _key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a key cannot be empty")
    return text.strip()
