"""The texts that the package ships: one to fit head maps to, two held out to score attention modes on.

Sources and licences are in `samples/README.md`. The three have no work and no module in common.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal, get_args

from model.errors import ModelError
from server.text.tokenizer import Tokenizer

WINDOW = 512  # tokens; long enough that most of a window's tokens have a long past
CALIBRATION_TOKENS = 18_432  # at most: 36 windows

HeldOut = Literal["prose", "code"]


def sample_text(name: str) -> str:
    """One of the shipped texts: calibration, prose or code."""
    return resources.files("server.text").joinpath("samples", f"{name}.txt").read_text(encoding="utf-8")


def calibration_windows(tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """The text that head maps are fitted to, in windows of one length: 512 tokens, or `longest` if that is
    less. Raises ModelError where the tokenizer makes too little of it."""
    return _windows(tokenizer, "calibration", longest, CALIBRATION_TOKENS)


def held_out(name: HeldOut, tokenizer: Tokenizer, longest: int = WINDOW) -> list[list[int]]:
    """A text that nothing is fitted to, in windows as `calibration_windows` makes them. Raises ModelError."""
    if name not in get_args(HeldOut):
        raise ModelError(f"text {name!r} is not shipped; held-out texts are {', '.join(get_args(HeldOut))}")
    return _windows(tokenizer, name, longest, None)


def _windows(tokenizer: Tokenizer, name: str, longest: int, most: int | None) -> list[list[int]]:
    """Consecutive windows, each with the mark that the checkpoint begins a text with; a rest is left out."""
    length = min(WINDOW, longest)
    ids = tokenizer.encode_rendered(sample_text(name))
    start = tokenizer.encode("")[:1]
    step = length - len(start)
    count = len(ids) // step if step > 0 else 0
    if most is not None:
        count = min(count, most // max(length, 1))
    if count < 1:
        raise ModelError(
            f"the shipped {name} text has {len(ids)} tokens of this checkpoint's tokenizer, less than one "
            f"window of {length}"
        )
    return [start + ids[at * step : (at + 1) * step] for at in range(count)]
