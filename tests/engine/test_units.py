"""Sizes in and out."""

from __future__ import annotations

import pytest

from server.engine.errors import QueueFull
from server.engine.units import exact_size, format_bytes, parse_size, plural


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("123", 123),
        ("1B", 1),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("2Gi", 2 * 2**30),
        ("512MB", 512 * 10**6),
        ("512m", 512 * 10**6),
        ("1.5 KiB", 1536),
        (" 1T ", 10**12),
        ("0.5k", 500),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "2 GB x", "2GiBB", "1.2.3", "٣", "1PB", "0x10", "nan", "1_000"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 2GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1048577TiB", "9" * 400, f"{'9' * 400}TB"])
def test_more_than_any_machine_has(text: str) -> None:
    with pytest.raises(ValueError, match="more than any machine has; give at most 1048576TiB"):
        parse_size(text)
    assert parse_size("1048576TiB") == 2**60


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (23040, "22.5 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (2 * 2**30, "2.00 GiB"),
        (269_000_000, "257 MiB"),
        (999 * 2**20, "999 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1000, "1000"), (1025, "1025"), (368_640, "360KiB"), (3 * 2**20, "3MiB"), (2**41, "2TiB")],
)
def test_an_exact_size_is_read_back_as_it_was(count: int, text: str) -> None:
    assert exact_size(count) == text
    assert parse_size(text) == count


def test_one_and_many() -> None:
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [plural(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]
    assert str(QueueFull(1, 1, 2)).startswith("1 request is waiting already and the limit is 1 (")
    assert str(QueueFull(2, 2, 2)).startswith("2 requests are waiting already")
