"""What this machine can do at most: memory read in GB/s, bf16 products in GFLOP/s.

    python -m loadtest.ceiling [--seconds 4]

Reading: several ways of going once through a buffer that no cache holds, with all cores, each many times;
the fastest counts. Products: dot products of bf16 pairs on registers alone (`peak/ops.cpp`), which no
program that fetches its numbers can reach, and oneDNN's matrix product for shapes that it likes; the fastest
of many. Where the C++ does not compile, PyTorch's are the only ones, and a better program may come out above
100 %.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.command import parser_of
from model.fetch import default_cache_dir
from model.native.build import Recipe, load_native
from model.native.library import NativeUnavailable

_BUFFER = 768 << 20  # bytes: far more than any cache
_STEPS = 1 << 18  # of a thread: some milliseconds
_SHAPES = ((1024, 1024, 4096), (2048, 2048, 2048), (512, 576, 3072), (2048, 576, 49152))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The best that was seen, and with what; GB and GFLOP are 10⁹."""

    read_gb_s: float
    read_by: str
    matrix_gflop_s: float
    matrix_by: str
    threads: int


def ceiling(seconds: float = 4.0) -> Ceiling:
    """Measure for about `seconds`, half for either."""
    peak = _peak()
    reads, products = _reads(peak), _products(peak)
    read = {name: _BUFFER / 1e9 / _fastest(do, seconds / 2 / len(reads)) for name, do in reads.items()}
    matrix = {
        name: flops / 1e9 / _fastest(do, seconds / 2 / len(products))
        for name, (do, flops) in products.items()
    }
    best_read, best_matrix = max(read, key=read.__getitem__), max(matrix, key=matrix.__getitem__)
    return Ceiling(read[best_read], best_read, matrix[best_matrix], best_matrix, torch.get_num_threads())


def _peak() -> Any | None:
    """The operators of `peak/ops.cpp`, compiled into the user's cache; None where that cannot be."""
    recipe = Recipe(sources=Path(__file__).parent / "peak", namespace="headroom_peak")
    try:
        return load_native(default_cache_dir(os.environ), recipe).ops
    except NativeUnavailable as error:
        print(f"the ceiling is PyTorch's alone: {error}", file=sys.stderr)
        return None


def _reads(peak: Any | None) -> dict[str, Callable[[], object]]:
    """Ways to read the buffer once."""
    columns = 4096
    buffer = torch.ones((_BUFFER // 4 // columns, columns), device="cpu", dtype=torch.float32)
    vector = torch.ones((columns,), device="cpu", dtype=torch.float32)
    whole = buffer.view(-1)
    mine = {} if peak is None else {"every line in C++": lambda: peak.read(buffer)}
    return mine | {
        "sum of float32": whole.sum,
        "largest of float32": whole.amax,
        "float32 matrix by vector": lambda: buffer @ vector,
        "dot product of two halves": lambda: torch.dot(whole[: len(whole) // 2], whole[len(whole) // 2 :]),
    }


def _products(peak: Any | None) -> dict[str, tuple[Callable[[], object], int]]:
    """bf16 products by name, with the operations of each."""
    made: dict[str, tuple[Callable[[], object], int]] = {}
    if peak is not None:
        made["bf16 dot products in registers"] = (lambda: peak.dots(_STEPS), peak.dots(_STEPS))
    for rows, inner, columns in _SHAPES:
        left = torch.randn((rows, inner), device="cpu", dtype=torch.bfloat16)
        right = torch.randn((columns, inner), device="cpu", dtype=torch.bfloat16)
        name = f"bf16 [{rows}, {inner}] by [{inner}, {columns}]"
        made[name] = (_product(left, right), 2 * rows * inner * columns)
    return made


def _product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.nn.functional.linear(left, right)


def _fastest(do: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of the calls that fit into `seconds`, at least three."""
    begin, best, calls = time.perf_counter(), float("inf"), 0
    with torch.inference_mode():
        do()
        while calls < 3 or time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            do()
            best = min(best, time.perf_counter() - start)
            calls += 1
    return best


def main() -> None:
    """Measure and print."""
    parser = parser_of("ceiling", __doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="default: %(default)s")
    print(json.dumps(asdict(ceiling(parser.parse_args().seconds)), indent=1))


if __name__ == "__main__":
    main()
