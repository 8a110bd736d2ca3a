"""The flags of `headroom convert`. No torch here: `--help` must be quick."""

from __future__ import annotations

from server.commands.arguments import Parser, name
from server.commands.shared_flags import DTYPES, HEAD_MAPS


def add_convert_flags(parser: Parser) -> None:
    """Which heads, made how, in which dtype."""
    heads = parser.add_argument_group("heads")
    heads.add_argument(
        "--attention",
        type=name,
        required=True,
        metavar="MODE",
        help="mha, mqa or gqaK: the attention mode to convert to (default: none, it must be given)",
    )
    heads.add_argument(
        "--head-map",
        choices=HEAD_MAPS,
        help="how fewer KV heads are made: aligned-fixed is fitted to a text and far better than mean; "
        "aligned can be served but not written (default: aligned-fixed; more KV heads repeat)",
    )
    weights = parser.add_argument_group("weights")
    weights.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights that are written (default: each tensor's own)",
    )
