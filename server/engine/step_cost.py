"""What a step takes by the number of its tokens, learnt while the engine runs."""

from __future__ import annotations

from bisect import bisect_left

_FLAT = 8  # before anything is known: so many tokens take as long as one, and more of them in proportion
_MEMORY = 0.15  # how much one step more moves what is known
_DOWN = 0.5  # the same where it took less than it should: steps are slow by chance, but hardly fast
_HICCUP = 2.0  # a step that took so many times as long as it should is no news about the model
_SHORTEST = 1e-6  # s; nothing takes no time, and ratios are made of what is learnt here
_SIZES = 18  # 1, 2, 4, ... 131,072 tokens


class StepCost:
    """Seconds of a step of so many tokens: a value for each power of two, straight lines between.

    A memory-bound step takes as long with a few rows more, a compute-bound one does not; where the one
    becomes the other depends on model and machine, so it is not a constant here. What has not been seen is
    guessed: between two sizes that have been, by a straight line, else by a prior of the usual shape.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}  # by the logarithm of the size
        self._line = [_prior(1 << size) for size in range(_SIZES)]

    def note(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took so long: the values to either side share the surprise."""
        low, share = _place(tokens)
        weights = {low: 1.0 - share, low + 1: share} if share > 0.0 else {low: 1.0}
        expected = self.seconds(tokens)
        if self._seen.keys().isdisjoint(weights):  # there is nothing to weigh it against
            self._seen |= {size: max(self._line[size] * seconds / expected, _SHORTEST) for size in weights}
        else:
            surprise = min(seconds, _HICCUP * expected) - expected
            surprise *= _MEMORY if surprise > 0.0 else _DOWN
            total = sum(weight**2 for weight in weights.values())
            for size, weight in weights.items():
                moved = self._seen.get(size, self._line[size]) + surprise * weight / total
                self._seen[size] = max(moved, _SHORTEST)
        self._draw_line()

    @staticmethod
    def is_usually_flat(tokens: int) -> bool:
        """Whether a row more costs nothing where nothing is known."""
        return tokens < _FLAT

    def seconds(self, tokens: int) -> float:
        """What a step of `tokens` takes; before the first is noted, in units of the shortest."""
        low, share = _place(tokens)
        return self._line[low] + (self._line[low + 1] - self._line[low]) * share

    def _draw_line(self) -> None:
        """More tokens never take less, and twice as many take at most twice as long: else it was noise."""
        seen = sorted(self._seen)
        before = _SHORTEST
        for size in range(_SIZES):
            value = self._seen[size] if size in self._seen else self._guess(size, seen)
            if size > 0 and value > 2.0 * before:
                value = 2.0 * before
                if size in self._seen:
                    self._seen[size] = value
            self._line[size] = before = max(value, before)

    def _guess(self, size: int, seen: list[int]) -> float:
        at = bisect_left(seen, size)
        if 0 < at < len(seen):
            low, high = seen[at - 1], seen[at]
            share = ((1 << size) - (1 << low)) / ((1 << high) - (1 << low))
            return self._seen[low] + (self._seen[high] - self._seen[low]) * share
        nearest = seen[max(at - 1, 0)]
        return self._seen[nearest] * _prior(1 << size) / _prior(1 << nearest)


def _place(tokens: int) -> tuple[int, float]:
    """The power of two below, by its logarithm, and how far it is from there to the next."""
    low = min(tokens.bit_length() - 1, _SIZES - 2)
    return low, (tokens - (1 << low)) / (1 << low)


def _prior(tokens: int) -> float:
    return max(1.0, tokens / _FLAT)
