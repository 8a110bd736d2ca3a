"""Where a sequence's last few ids stood before in its own text: a small hash table for each length.

A table is 4 to 16 places of an int32 for each id, and a lookup costs the same however long the text is.
Of two n-grams in one place the later one stays: a match is only a guess, and the ids are compared before it
is believed.
"""

from __future__ import annotations

import numpy as np

from cache.arrays import Int32, Int64

LENGTHS = (3, 2)
"""Ids of an n-gram, the most telling first."""

_FACTORS = (1_000_003, 1_640_531_527, 374_761_393)  # odd, below 2^31: sums of products stay below 2^63
_FEWEST = 256  # places of the smallest table
_FEWEST_EACH = (
    4  # places for each id, twice as many when a table is made; with fewer, too many n-grams lose theirs
)
_LOOP = 32  # up to so many new ids are noted one by one, more of them as arrays


class NGrams:
    """The n-grams of one growing text, each with the place of the id that followed it last."""

    __slots__ = ("_noted", "_tables")

    def __init__(self) -> None:
        self._noted = 0  # ids that have been noted as the follower of what is before them
        self._tables: list[Int32] = []  # one for each of LENGTHS; 0 where there is nothing

    def follow(self, tokens: Int32, count: int) -> list[int]:
        """`count` ids that may come after `tokens` `[L]`; none if its end never stood there before.

        They are those that followed last time, and where these end with the text, it is taken to repeat. See
        `Source.follow`.
        """
        self._note(tokens)
        last = tokens[-max(LENGTHS) :].tolist()
        for length, table in zip(LENGTHS, self._tables, strict=True):
            if len(tokens) <= length:
                continue
            gram = last[-length:]
            at = int(table[_place(gram, len(table))])
            if at and tokens[at - length : at].tolist() == gram:
                known: list[int] = tokens[at : at + count].tolist()
                while len(known) < count:
                    known += known[: count - len(known)]
                return known
        return []

    def _note(self, tokens: Int32) -> None:
        """Every id of the text follows something; the last one is noted too, as its n-grams end before it."""
        size = len(tokens)
        if not self._tables or size > len(self._tables[0]) // _FEWEST_EACH:
            places = _FEWEST
            while places < 2 * _FEWEST_EACH * size:
                places *= 2
            self._tables = [np.zeros(places, dtype=np.int32) for _ in LENGTHS]
            self._noted = 0
        if size - self._noted > _LOOP:
            self._note_many(tokens)
        else:
            self._note_few(tokens)
        self._noted = size

    def _note_few(self, tokens: Int32) -> None:
        first = max(0, self._noted - max(LENGTHS))
        near = tokens[first:].tolist()
        for length, table in zip(LENGTHS, self._tables, strict=True):
            places = len(table)
            for at in range(max(self._noted, length), len(tokens)):
                table[_place(near[at - first - length : at - first], places)] = at

    def _note_many(self, tokens: Int32) -> None:
        for length, table in zip(LENGTHS, self._tables, strict=True):
            first = max(self._noted, length)
            at = np.arange(first, len(tokens), dtype=np.int64)
            sums = np.zeros(len(at), dtype=np.int64)
            for back, factor in zip(range(length, 0, -1), _FACTORS, strict=False):
                sums += tokens[first - back : len(tokens) - back].astype(np.int64) * factor
            table[_places(sums, len(table))] = at  # where one place is named twice, the later one stays


def _place(gram: list[int], places: int) -> int:
    """The same as `_places`, for one n-gram."""
    total = 0
    for token, factor in zip(gram, _FACTORS, strict=False):
        total += token * factor
    return (total ^ (total >> 31)) & (places - 1)


def _places(sums: Int64, places: int) -> Int64:
    """`places` is a power of two."""
    mixed: Int64 = (sums ^ (sums >> 31)) & (places - 1)
    return mixed
