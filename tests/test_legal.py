"""The numbers that errors name."""

import pytest

from lightning_d9d.legal import divisors, nearest


@pytest.mark.parametrize("number", [1, 2, 7, 36, 96, 97, 100])
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_nothing_divides_no_rows() -> None:
    assert divisors(0) == []


@pytest.mark.parametrize(
    ("value", "legal", "expected"),
    [
        (5, [1, 2, 3, 4, 6, 12], [4, 6]),
        (5, [12, 6, 1], [1, 6]),
        (5, [5], []),
        (0, range(2, 9, 2), [2]),
        (50, [4, 8], [8]),
        (3, [], []),
    ],
)
def test_nearest(value: int, legal: list[int], expected: list[int]) -> None:
    assert nearest(value, iter(legal)) == expected
