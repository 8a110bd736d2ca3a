"""Twenty prompts that have little in common, and the long text they and the perplexity test come from."""

from __future__ import annotations

from pathlib import Path

PROSE = (Path(__file__).resolve().parents[1] / "data" / "prose.txt").read_text(encoding="utf-8")

ONE_TOKEN = "Hello"

TEXTS: dict[str, str] = {
    "one token": ONE_TOKEN,
    "a plain sentence": "The capital of France is",
    "python": 'def fibonacci(n: int) -> list[int]:\n    """The first n numbers."""\n    numbers = [',
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "sql": "SELECT customers.name, COUNT(orders.id) FROM customers LEFT JOIN orders ON",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", ',
    "french": "Il était une fois, dans un petit village au bord de la mer,",
    "german": "Die wichtigsten Sehenswürdigkeiten von Wien sind der Stephansdom,",
    "spanish": "¿Cuál es la mejor manera de aprender a cocinar?",
    "chinese": "你好，今天天气很好，我们一起去",
    "japanese": "むかしむかし、あるところに、おじいさんと",
    "russian": "Однажды весною, в час небывало жаркого заката,",
    "arabic": "كان يا ما كان في قديم الزمان",
    "emoji": "My week in emoji: 🦙🦙 🏃‍♀️ 🍕 🇫🇷 👍🏽",
    "arithmetic": "17 + 25 = 42\n31 + 48 = 79\n56 + 27 =",
    "white space": "a  b   c\t\td\n\n\n   e\r\n",
    "repetition": "tick tock tick tock tick tock tick tock tick tock tick",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "chat with a history": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a prime number above ten."},
        {"role": "assistant", "content": "Eleven."},
        {"role": "user", "content": "And the next one?"},
    ],
}

LONG_TOKENS = 1500
PERPLEXITY_TOKENS = 2000
