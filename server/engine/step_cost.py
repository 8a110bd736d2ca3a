"""What a step takes by the number of its tokens, learnt while the engine runs."""

from __future__ import annotations

_FLAT = 8  # before anything is known: so many tokens take as long as one, and more of them in proportion
_MEMORY = 0.1  # how much one step more moves what is known of its like
_SIZES = 18  # 1, 2, 4, ... 131,072 tokens


class StepCost:
    """Seconds of a step of so many tokens: a running mean at each power of two, straight lines between.

    A memory-bound step takes as long with a few rows more, a compute-bound one does not; where the one
    becomes the other depends on model and machine, so it is not a constant here. Sizes that have not been
    seen are guessed: between two that have been, by a straight line, else by a prior of the usual shape.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._line = [_prior(1 << size) for size in range(_SIZES)]

    def note(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took so long."""
        size = min((tokens - 1).bit_length(), _SIZES - 1)
        there = seconds * _prior(1 << size) / _prior(tokens)
        known = self._seen.get(size)
        # A hiccup of the machine is no news about the model.
        there = there if known is None else known + _MEMORY * (min(there, 3 * known) - known)
        self._seen[size] = there
        self._draw_line()

    def seconds(self, tokens: int) -> float:
        """What a step of `tokens` takes; before the first is noted, in units of the shortest."""
        size = min((tokens - 1).bit_length(), _SIZES - 1)
        if size == 0:
            return self._line[0]
        below, above, half = self._line[size - 1], self._line[size], 1 << (size - 1)
        return below + (above - below) * (tokens - half) / half

    def _draw_line(self) -> None:
        seen = sorted(self._seen)
        for size in range(_SIZES):
            if size not in self._seen:
                self._line[size] = self._guess(size, seen)
            else:
                self._line[size] = self._seen[size]
        for size in range(1, _SIZES):  # more tokens never take less; a step that seemed to, was noise
            self._line[size] = max(self._line[size], self._line[size - 1])

    def _guess(self, size: int, seen: list[int]) -> float:
        smaller = [known for known in seen if known < size]
        larger = [known for known in seen if known > size]
        if smaller and larger:
            low, high = smaller[-1], larger[0]
            share = ((1 << size) - (1 << low)) / ((1 << high) - (1 << low))
            return self._seen[low] + (self._seen[high] - self._seen[low]) * share
        nearest = smaller[-1] if smaller else larger[0]
        return self._seen[nearest] * _prior(1 << size) / _prior(1 << nearest)


def _prior(tokens: int) -> float:
    return max(1.0, tokens / _FLAT)
