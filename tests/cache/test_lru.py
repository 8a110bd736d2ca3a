"""The eviction log equals an ordered dictionary, through any number of compactions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cache.errors import CacheError
from cache.lru import LruQueue


@pytest.mark.parametrize("capacity", [1, 5, 40, 300])
def test_it_equals_an_ordered_dictionary(capacity: int) -> None:
    dice = random.Random(capacity)
    weight = np.array([dice.randint(1, 9) for _ in range(capacity)], dtype=np.int32)
    queue, expected = LruQueue(capacity), {}
    for _ in range(3000):
        call = dice.choice(["push", "push", "remove", "pop"])
        if call == "push":
            out = [block for block in range(capacity) if block not in expected]
            some = dice.sample(out, dice.randint(0, len(out)))
            queue.push(np.array(some, dtype=np.int32))
            expected.update(dict.fromkeys(some))
        elif call == "remove":
            some = dice.sample(list(expected), dice.randint(0, len(expected)))
            queue.remove(np.array(some, dtype=np.int32))
            for block in some:
                del expected[block]
        else:
            need = dice.randint(0, max(1, sum(int(weight[block]) for block in expected) // 3))
            if need > sum(int(weight[block]) for block in expected):
                continue
            oldest = []
            while sum(int(weight[block]) for block in oldest) < need:
                oldest.append(next(iter(expected)))
                del expected[oldest[-1]]
            assert queue.pop(need, weight).tolist() == oldest
        assert queue.queued().tolist() == list(expected)


def test_more_than_there_is_is_an_error() -> None:
    queue = LruQueue(3)
    queue.push(np.array([1], dtype=np.int32))
    with pytest.raises(CacheError, match="short"):
        queue.pop(2, np.ones(3, dtype=np.int32))
