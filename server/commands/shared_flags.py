"""Flags that several commands have, and the words that they take. No torch here: `--help` must be quick."""

from __future__ import annotations

from server.commands.arguments import Group, count
from server.engine.options import KERNELS, WEIGHTS, EngineOptions

HEAD_MAPS = ("aligned", "aligned-fixed", "mean")
DTYPES = ("bfloat16", "float16", "float32")

_ENGINE = EngineOptions()


def add_machine_flags(group: Group) -> None:
    """Where to run, in which dtype, on how many threads."""
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=_ENGINE.device,
        help="where to run (default: cuda if there is one)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default=_ENGINE.dtype,
        help="of weights and cache (default: the checkpoint's own where this machine is fast in it)",
    )
    group.add_argument(
        "--threads",
        type=count(1, 1024),  # OpenMP ends the process where it has no room for so many
        metavar="N",
        help="CPU threads for arithmetic (default: one for each core)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=_ENGINE.kernels,
        help="what computes on a CPU: operators in C++, compiled once for this machine, or PyTorch's own "
        "(default: auto, the first where there is a compiler)",
    )
    group.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=_ENGINE.weights,
        help="quantise the checkpoint's weights as they are loaded, to about 9 or 6 bits each: less memory, "
        "and faster where they are read for few tokens, at some cost in quality (default: none)",
    )


def add_block_size(group: Group) -> None:
    """Tokens in a block."""
    group.add_argument(
        "--block-size",
        type=count(1),
        default=_ENGINE.block_size,
        metavar="N",
        help="tokens in a block (default: %(default)s)",
    )
