"""Prompts drawn from a seed: the same seed gives every server the same work."""

from __future__ import annotations

import random
from dataclasses import dataclass

SYSTEM = "You are a helpful assistant. Answer briefly and in plain words."

SUBJECTS = (
    "a lighthouse", "the tides", "a bicycle", "bread", "a violin", "the moon", "a compiler", "rain",
    "a market", "the heart", "a bridge", "coffee", "a beehive", "the printing press", "an orchard", "glass",
)  # fmt: skip

TASKS = (
    "Explain how {} works to a child.",
    "Write four lines of verse about {}.",
    "What would the world be like without {}?",
    "List five facts about {}.",
    "Tell a short story in which {} saves the day.",
)

FILLER = (
    "The road followed the river for most of the morning and left it at the mill.",
    "Nobody in the village could say who had built the wall, or why it stopped where it did.",
    "She kept the accounts in two books, one for the shop and one for herself.",
    "By noon the wind had turned and the boats came home early.",
    "The letter had been opened, read and closed again with great care.",
    "There were eleven chairs and twelve guests, which nobody mentioned.",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question, the longest answer wanted (tokens) and the seed of its sampling."""

    text: str
    max_tokens: int
    seed: int


class Prompts:
    """An endless, reproducible supply of questions for one simulated user."""

    def __init__(self, seed: int, user: int) -> None:
        self._random = random.Random(f"{seed}-{user}")

    def chat(self) -> Ask:
        """A short question of one sentence."""
        draw = self._random
        text = draw.choice(TASKS).format(draw.choice(SUBJECTS))
        return Ask(text, max_tokens=draw.randint(24, 96), seed=draw.getrandbits(32))

    def completion(self) -> Ask:
        """A text to go on with, of about 50 to 700 tokens."""
        draw = self._random
        text = " ".join(draw.choices(FILLER, k=draw.randint(3, 40)))
        return Ask(text, max_tokens=draw.randint(16, 64), seed=draw.getrandbits(32))

    def turns(self) -> int:
        """How many questions the next conversation has."""
        return self._random.randint(1, 3)
