"""The ids that one sequence's penalties look at, in a table on the device that grows with the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SPARE = 64  # places that a new table has for what will be generated


class Seen:
    """`size` entries: the prompt's ids, if they count, and those generated; each id once, with how often it
    was generated. `taken` tokens of the answer have been counted."""

    __slots__ = ("_place", "_prompt", "_table", "_times", "size", "taken")

    def __init__(self, prompt: npt.NDArray[np.int64], device: torch.device) -> None:
        """`prompt` are ids, each once and ascending. They are sent now, and never again."""
        host = np.zeros((2, len(prompt) + _SPARE), dtype=np.int64)
        host[0, : len(prompt)] = prompt
        self._prompt = prompt
        self._table: Tensor = torch.from_numpy(host).to(device=device, dtype=torch.int64)
        self._place: dict[int, int] = {}  # of the ids that were generated
        self._times: dict[int, int] = {}
        self.size = len(prompt)
        self.taken = 0

    @property
    def entries(self) -> Tensor:
        """`[2, size]` int64 on the device: ids, and how often each was generated."""
        return self._table[:, : self.size]

    def count(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Takes generated ids in; what `write` must be told of: (place, id, times generated)."""
        for token in tokens:
            if token not in self._place:
                self._place[token] = self._find(token)
            self._times[token] = self._times.get(token, 0) + 1
        return [(self._place[token], token, self._times[token]) for token in dict.fromkeys(tokens)]

    def write(self, places: Sequence[int], entries: Tensor) -> None:
        """Writes entries `[2, n]` int64 (ids, times), already on the device, to their places."""
        room = self._table.shape[1]
        if self.size > room:
            shape, device = (2, max(2 * room, self.size)), self._table.device
            grown: Tensor = torch.zeros(shape, dtype=torch.int64, device=device)
            grown[:, :room] = self._table
            self._table = grown
        for index, place in enumerate(places):
            self._table[:, place] = entries[:, index]

    def _find(self, token: int) -> int:
        """Its place among the prompt's, or a new one at the end."""
        place = int(np.searchsorted(self._prompt, token))
        if place < len(self._prompt) and self._prompt[place] == token:
            return place
        self.size += 1
        return self.size - 1
