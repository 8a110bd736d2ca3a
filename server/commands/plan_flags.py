"""The flags of `headroom plan`. No torch here: `--help` must be quick."""

from __future__ import annotations

from server.commands.arguments import Parser, count, modes, size
from server.commands.shared_flags import DTYPES, add_block_size
from server.engine.options import EngineOptions

_ENGINE = EngineOptions()


def add_plan_flags(parser: Parser) -> None:
    """What to plan for, and how to print it."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--context",
        type=count(1),
        metavar="N",
        help="tokens of prompt and answer together (default: as many as the model was made for)",
    )
    load.add_argument(
        "--users",
        type=count(1),
        metavar="N",
        help="users at the same time, each with the whole context (default: 1, 8 and "
        f"{_ENGINE.max_num_seqs}, which serve runs at once; the first is what has to fit)",
    )
    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="size of the pool, as 2GiB or 512MB: says how many users fit, and what to change if they do "
        "not (default: not asked)",
    )
    cache.add_argument(
        "--attention",
        type=modes,
        default=(),
        metavar="MODES",
        help="native, mha, mqa or gqaK, with commas between (default: every mode that the model can run in)",
    )
    cache.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and cache (default: all of them, the checkpoint's own first)",
    )
    add_block_size(cache)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print JSON with exact bytes, as docs/tools.md describes it"
    )
