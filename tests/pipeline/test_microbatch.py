from __future__ import annotations

import pytest

from lightning_d9d import ConfigError
from lightning_d9d.pipeline.microbatch import MicrobatchCount


@pytest.mark.parametrize(
    ("size", "number", "rows", "expected"), [(2, None, 6, 3), (2, None, 5, 3), (None, 4, 8, 4), (None, 4, 3, 3)]
)
def test_number_of_microbatches(size: int | None, number: int | None, rows: int, expected: int) -> None:
    assert MicrobatchCount(size, number).of(rows) == expected


def test_check_names_what_divides() -> None:
    MicrobatchCount(4, None).check(8)
    MicrobatchCount(None, 4).check(8)
    with pytest.raises(ConfigError, match=r"6 rows, which microbatch_size=4 does not divide.*\[1, 2, 3, 6\]"):
        MicrobatchCount(4, None).check(6)
