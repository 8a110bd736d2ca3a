"""The flags of every command, in groups, and what they say of themselves in `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from server.commands.arguments import Group, Parser, count, key, modes, name, names, number, size
from server.commands.shared_flags import HEAD_MAPS, add_block_size, add_machine_flags
from server.config import ModelOptions, SamplingChoice, ServeOptions
from server.engine.options import SPECULATION, EngineOptions

DEFAULT_MODEL = "smollm2-135m"
_ENGINE = EngineOptions()  # the defaults
MODEL_HELP = f"a folder, a hub id (organisation/model) or the alias {DEFAULT_MODEL} (the default)"


def add_model_flags(parser: Parser) -> None:
    """Everything that decides what is loaded and how large its cache is."""
    model = parser.add_argument_group("model")
    add_machine_flags(model)
    model.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling that a request leaves out: the checkpoint's own, or OpenAI's defaults (default: auto)",
    )
    _add_attention(parser.add_argument_group("attention"))
    _add_cache(parser.add_argument_group("KV cache"))
    _add_batching(parser.add_argument_group("batching"))


def add_serve_flags(parser: Parser) -> None:
    """Everything about the server around the model."""
    naming = parser.add_argument_group("names")
    naming.add_argument(
        "--served-model-name",
        type=name,
        metavar="NAME",
        help="what clients call the model (default: its own name)",
    )
    _add_door(parser.add_argument_group("network"))
    _add_life(parser.add_argument_group("life"))


def _add_attention(attention: Group) -> None:
    attention.add_argument(
        "--attention",
        type=modes,
        default=_ENGINE.attention,
        metavar="MODES",
        help="modes to serve side by side, a,b of native, mha, mqa, gqaK (K KV heads); the first answers "
        "where no mode is named (default: native)",
    )
    attention.add_argument(
        "--head-map",
        choices=HEAD_MAPS,
        default=_ENGINE.head_map,
        help="how modes with fewer KV heads than the checkpoint make them: fitted to the checkpoint once, "
        "fitted in a form that `convert` can write, or averaged (default: %(default)s)",
    )


def _add_cache(cache: Group) -> None:
    pool = cache.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="size of the pool, as 2GiB or 512MB (default on a CPU: 2GiB, at most a quarter of what is free)",
    )
    pool.add_argument(
        "--kv-fraction",
        type=number(0, 1, above=True),
        metavar="F",
        help="share of the memory that weights and work leave free (default on CUDA: 0.9)",
    )
    add_block_size(cache)
    cache.add_argument(
        "--max-model-len",
        type=count(1),
        metavar="N",
        help="tokens of prompt and output together (default: the model's own, or what the pool holds)",
    )
    cache.add_argument(
        "--no-prefix-cache", action="store_true", help="forget a sequence's cache as soon as it has ended"
    )


def _add_batching(batch: Group) -> None:
    batch.add_argument(
        "--max-num-seqs",
        type=count(1),
        default=_ENGINE.max_num_seqs,
        metavar="N",
        help="sequences in a step (default: %(default)s)",
    )
    batch.add_argument(
        "--max-batch-tokens",
        type=count(1),
        metavar="N",
        help="tokens in a step, at least --max-num-seqs (default: 256 on a CPU, 2048 on a GPU)",
    )
    batch.add_argument(
        "--speculate",
        choices=SPECULATION,
        default=_ENGINE.speculate,
        help="draft what may come next from a sequence's own text, where it pays; answers stay the same "
        "(default: %(default)s)",
    )


def _add_door(door: Group) -> None:
    door.add_argument(
        "--host", type=name, default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    door.add_argument(
        "--port",
        type=count(0, 65535),
        default=8000,
        metavar="N",
        help="port, 0 for a free one (default: %(default)s)",
    )
    door.add_argument(
        "--api-key",
        action="append",
        type=key,
        default=[],
        metavar="KEY",
        help="a key that clients must send; repeat it for several, or set HEADROOM_API_KEY (default: no key)",
    )
    door.add_argument(
        "--allowed-hosts",
        type=names,
        default=(),
        metavar="NAMES",
        help="more names a Host header may hold, a,b or * for any (default: --host and localhost)",
    )
    door.add_argument(
        "--cors-origins",
        type=names,
        default=(),
        metavar="URLS",
        help="origins whose pages may call from a browser, a,b or * for any (default: none)",
    )


def _add_life(work: Group) -> None:
    work.add_argument(
        "--max-queued",
        type=count(1),
        default=256,
        metavar="N",
        help="requests that may wait; more get 429 (default: %(default)s)",
    )
    work.add_argument(
        "--request-timeout",
        type=number(0, 10**7),
        default=6 * 3600.0,
        metavar="SECONDS",
        help="how long a request may take, waiting included, until it gets 504; 0 for ever (default: 21600, "
        "six hours)",
    )
    work.add_argument(
        "--grace",
        type=number(0, 86400),
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
    work.add_argument(
        "--debug",
        action="store_true",
        help="recount the whole cache after every step, and log at debug level: slow",
    )


def add_sampling_flags(parser: Parser, *, temperature: float | None, max_tokens: int | None) -> None:
    """How the terminal commands draw tokens."""
    group = parser.add_argument_group("sampling")
    limit = "no limit but the context" if max_tokens is None else str(max_tokens)
    own = "the checkpoint's own, else "
    heat = f"{own}1" if temperature is None else f"{temperature:g}"
    group.add_argument(
        "--max-tokens",
        type=count(1),
        default=max_tokens,
        metavar="N",
        help=f"longest answer (default: {limit})",
    )
    group.add_argument(
        "--temperature",
        type=number(0, 2),
        default=temperature,
        metavar="T",
        help=f"0 always takes the likeliest token (default: {heat})",
    )
    group.add_argument(
        "--top-p", type=number(0, 1), metavar="P", help=f"keep this mass of tokens (default: {own}1)"
    )
    group.add_argument(
        "--top-k", type=count(0), metavar="K", help=f"keep the K likeliest, 0 all (default: {own}0)"
    )
    group.add_argument(
        "--seed", type=count(0), metavar="N", help="repeat an answer (default: a new one each time)"
    )


def model_options(args: argparse.Namespace, env: Mapping[str, str], cache_dir: Path) -> ModelOptions:
    """The model flags of `args`; hub settings come from `env`."""
    return ModelOptions(
        model=args.model or DEFAULT_MODEL,
        cache_dir=cache_dir,
        served_name=getattr(args, "served_model_name", None),
        threads=args.threads,
        hub_endpoint=env.get("HF_ENDPOINT") or None,
        generation_config=args.generation_config,
        compiler=env.get("CXX") or None,
        engine=EngineOptions(
            device=args.device,
            dtype=args.dtype,
            kv_memory=args.kv_memory,
            kv_fraction=args.kv_fraction,
            block_size=args.block_size,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_batch_tokens=args.max_batch_tokens,
            prefix_cache=not args.no_prefix_cache,
            attention=args.attention,
            head_map=args.head_map,
            speculate=args.speculate,
            kernels=args.kernels,
            weights=args.weights,
            debug=getattr(args, "debug", False),
        ),
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
        request_timeout=args.request_timeout,
        grace=args.grace,
        log_level="debug" if args.debug else args.log_level,
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
