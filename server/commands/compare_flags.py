"""The flags of `headroom compare`. No torch here: `--help` must be quick."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.commands.arguments import Group, Parser, count, modes
from server.commands.shared_flags import HEAD_MAPS, add_block_size, add_machine_flags
from server.tools.compare.options import DEFAULT_MODES, CompareOptions, Outputs

_DEFAULT = CompareOptions()


def add_compare_flags(parser: Parser) -> None:
    """What to compare, on what, and where to write it."""
    _add_work(parser.add_argument_group("what to compare"))
    machine = parser.add_argument_group("how to run it")
    add_machine_flags(machine)
    add_block_size(machine)
    _add_random(parser.add_argument_group("without a checkpoint"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write exact numbers, as docs/tools.md has them (default: none)"
    )
    output.add_argument("--markdown", metavar="FILE", help="write tables in Markdown (default: none)")
    output.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw a picture, for which matplotlib is needed (default: none)",
    )


def _add_work(work: Group) -> None:
    work.add_argument(
        "--attention",
        type=modes,
        default=(),
        metavar="MODES",
        help="native, mha, mqa or gqaK, with commas between (default: "
        f"{','.join(DEFAULT_MODES)}, each number of KV heads once)",
    )
    work.add_argument(
        "--head-map",
        choices=HEAD_MAPS,
        help="what makes fewer KV heads than the checkpoint's (default: aligned; mean with random weights)",
    )
    work.add_argument(
        "--context",
        type=count(1),
        default=_DEFAULT.context,
        metavar="N",
        help="tokens of a user's prompt and answer together (default: %(default)s)",
    )
    work.add_argument(
        "--users",
        type=count(1),
        default=_DEFAULT.users,
        metavar="N",
        help="users who share the work, and who fill the pool in the widest mode (default: %(default)s)",
    )
    work.add_argument(
        "--text",
        metavar="FILE",
        help="measure quality on the start of this UTF-8 text (default: a text that comes with Headroom)",
    )
    work.add_argument("--no-quality", action="store_true", help="memory and speed only")


def _add_random(random: Group) -> None:
    random.add_argument(
        "--random-weights",
        action="store_true",
        help="measure memory and speed of a shape: needs --config, no weights and no tokenizer",
    )
    random.add_argument(
        "--config", metavar="FOLDER", help="folder whose config.json is the shape (default: none)"
    )
    random.add_argument(
        "--layers", type=count(1), metavar="N", help="run the first N layers only (default: all of them)"
    )


def compare_options(args: argparse.Namespace, parser: Parser, compiler: str | None) -> CompareOptions:
    """The options of `args`; flags that do not go together end the program through `parser`. `compiler` is
    what `CXX` says."""
    if args.random_weights != (args.config is not None):
        parser.error("--random-weights and --config go together: give both or neither")
    if args.layers is not None and not args.random_weights:
        parser.error("--layers cuts random weights; give --random-weights too")
    if args.random_weights and args.model is not None:
        parser.error(f"--random-weights needs no model; leave {args.model!r} out")
    if args.text is not None and (args.random_weights or args.no_quality):
        parser.error("--text is for quality, which is not measured here; leave it out")
    return CompareOptions(
        attention=args.attention,
        head_map=args.head_map,
        context=args.context,
        users=args.users,
        device=args.device,
        dtype=args.dtype,
        block_size=args.block_size,
        threads=args.threads,
        kernels=args.kernels,
        weights=args.weights,
        compiler=compiler,
        random_weights=args.random_weights,
        layers=args.layers,
        text=None if args.text is None else Path(args.text).expanduser(),
        quality=not args.no_quality,
    )


def outputs(args: argparse.Namespace) -> Outputs:
    """The files to write."""
    named = (args.json, args.markdown, args.plot)
    return Outputs(*(None if name is None else Path(name).expanduser() for name in named))
