"""What an attention mode costs in quality: its predictions on a text beside those of the native heads.

Perplexity says how well a mode predicts the text; KL(native || mode) how far its predictions are from the
native ones at every position; top-1 how often both would write the same token.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model.errors import ModelError
from server.engine.errors import ConfigError
from server.engine.scoring import Scorer, Scoring
from server.engine.units import plural
from server.text.samples import held_out
from server.text.tokenizer import Tokenizer

WINDOW = 512  # tokens that are scored together
SHIPPED_TOKENS = 2048  # of each shipped text, from its start
OWN_TEXT_TOKENS = 4096  # of a user's text, from its start
LEAST_TOKENS = 128  # fewer say nothing
_BYTES_A_TOKEN = 64  # of a text's file at most: nobody's tokens are as long as that on average
_SLICE_BYTES = 8 << 20  # of log probabilities in fp64 at once


@dataclass(frozen=True, slots=True)
class QualityText:
    """A text to score, cut into windows of token ids, each of at least two and scored on its own."""

    name: str
    licence: str
    windows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One mode on one text. A position is a token of a window that has a next token in it."""

    mode: str
    kv_heads: int
    text: str
    licence: str
    positions: int
    perplexity: float  # exp of the mean negative log likelihood of the next token
    kl: float  # mean KL(native || mode), nats per position
    top1: float  # share of positions where both find the same token the most likely


def measure_quality(
    scoring: Scoring,
    texts: Sequence[QualityText],
    *,
    chunk: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[QualityRow, ...]:
    """A row for each text and, within it, each variant of `scoring`, in their order.

    Native logits are computed once for all modes, and no more than a chunk of any mode's is held at a time
    (`chunk` tokens, see `Scorer`). `progress` is told the share that is done, in (0, 1]. Raises ConfigError
    for a text that the model cannot read, ModelError for logits that are not finite.
    """
    total = sum(len(window) for text in texts for window in text.windows)
    done = 0
    rows: list[QualityRow] = []
    for text in texts:
        _check(text, scoring)
        native, *others = _modes(scoring, max(map(len, text.windows)), chunk)
        for window in text.windows:
            for tokens in _score(native, others, window):
                done += tokens
                if progress is not None:
                    progress(done / total)
        found = {mode.scorer.variant.name: mode for mode in (native, *others)}
        rows += [found[variant.name].row(text) for variant in scoring.variants]
    return tuple(rows)


def shipped_text(tokenizer: Tokenizer, longest: int) -> QualityText:
    """The held-out prose and code that come with Headroom, about as much of each, in windows of `longest`
    tokens or 512. Raises ModelError where the tokenizer makes too little of them."""
    windows = [
        window
        for texts in (held_out("prose", tokenizer, longest), held_out("code", tokenizer, longest))
        for window in texts[: max(1, SHIPPED_TOKENS // len(texts[0]))]
    ]
    return QualityText("held-out prose and code", "public domain; Apache-2.0", tuple(map(tuple, windows)))


def own_text(path: Path, tokenizer: Tokenizer, longest: int) -> QualityText:
    """The start of a user's text in windows of `longest` tokens, each begun as the tokenizer begins a text.

    Raises OSError, and ConfigError for a file that is not UTF-8 or too short.
    """
    limit = OWN_TEXT_TOKENS * _BYTES_A_TOKEN
    with path.open("rb") as file:
        data = file.read(limit)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < limit)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    ids = tokenizer.encode_rendered(text)
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"{path}: the text has {plural(len(ids), 'token')}; scoring needs at least {LEAST_TOKENS}"
        )
    return QualityText(path.name, "the user's own text", cut(ids, _start(text, ids, tokenizer), longest))


def cut(ids: Sequence[int], start: Sequence[int], longest: int) -> tuple[tuple[int, ...], ...]:
    """Windows of `longest` ids, each beginning with `start`; a rest is left out, unless there is no more."""
    body = longest - len(start)
    count = min(len(ids), OWN_TEXT_TOKENS) // body or 1
    return tuple((*start, *ids[i * body : (i + 1) * body]) for i in range(count))


def _start(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text: BOS, for some."""
    marked = tokenizer.encode(text)
    extra = len(marked) - len(ids)
    return next((marked[:n] for n in range(extra + 1) if marked[n : n + len(ids)] == list(ids)), [])


def _check(text: QualityText, scoring: Scoring) -> None:
    rows = scoring.decoder.config.vocab_size
    if not text.windows or min(map(len, text.windows)) < 2:
        raise ConfigError(f"the text {text.name} has a window of fewer than 2 tokens: nothing to predict")
    largest = max(max(window) for window in text.windows)
    if largest >= rows:
        raise ConfigError(f"the text {text.name} has token {largest}, and the model knows {rows} tokens")


@dataclass(slots=True)
class _Sums:
    """Sums over positions in fp64, kept on the device: reading one would wait for it."""

    positions: int = 0
    loss: Tensor | float = 0.0
    kl: Tensor | float = 0.0
    same: Tensor | int = 0


@dataclass(frozen=True, slots=True)
class _Mode:
    scorer: Scorer
    sums: _Sums = field(default_factory=_Sums)

    def row(self, text: QualityText) -> QualityRow:
        """The means. Raises ModelError where they are no numbers."""
        sums, variant = self.sums, self.scorer.variant
        loss, kl = float(sums.loss) / sums.positions, float(sums.kl) / sums.positions
        if not (math.isfinite(loss) and math.isfinite(kl)):
            raise ModelError(
                f"attention mode {variant.name}: its logits on the text {text.name} are not finite; "
                "try --dtype float32"
            )
        return QualityRow(
            mode=variant.name,
            kv_heads=variant.kv_heads,
            text=text.name,
            licence=text.licence,
            positions=sums.positions,
            perplexity=math.exp(loss),
            kl=kl,
            top1=int(sums.same) / sums.positions,
        )


def _modes(scoring: Scoring, window: int, chunk: int | None) -> list[_Mode]:
    """Native first, asked for or not, then the others that were asked for."""
    others = [variant for variant in scoring.variants if variant.name != scoring.native.name]
    return [_Mode(scoring.scorer(variant, window, chunk=chunk)) for variant in (scoring.native, *others)]


def _score(native: _Mode, others: Sequence[_Mode], window: Sequence[int]) -> Iterator[int]:
    """Adds one window to all sums; yields the tokens of each chunk that is done."""
    targets = torch.tensor(window[1:], dtype=torch.int64)
    running = [(mode.sums, mode.scorer.logits(window)) for mode in others]
    start = 0
    for logits in native.scorer.logits(window):
        known = targets[start : start + len(logits)].to(logits.device)
        _add(native.sums, logits, logits, known)
        for sums, chunks in running:
            _add(sums, logits, next(chunks), known)
        start += len(logits)
        yield len(logits)


def _add(sums: _Sums, native: Tensor, mode: Tensor, targets: Tensor) -> None:
    """One chunk's logits, native's and a mode's, `[n, V]`; targets `[n]`, or `[n - 1]` at a window's end."""
    step = max(1, _SLICE_BYTES // (native.shape[1] * torch.float64.itemsize))
    for start in range(0, len(targets), step):
        target = targets[start : start + step]
        ours, theirs = (logits[start : start + len(target)] for logits in (mode, native))
        q, p = (logits.to(torch.float64).log_softmax(dim=-1) for logits in (ours, theirs))
        sums.loss -= q.gather(1, target.unsqueeze(1)).sum()
        sums.kl += (p.exp() * (p - q)).sum()
        sums.same += (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum()
    sums.positions += len(targets)
