"""Rows of documents with borders, and mixtures of texts."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_d9d.data.token_files import BorderToken, TokenFile, TokenFileWriter
from lightning_d9d.data.token_rows import Mixture, Span, TokenRows, spread
from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.linear_cross_entropy import IGNORED

LENGTHS = [3, 0, 1, 9, 4, 0, 2, 5]


def text(folder: Path, name: str = "text", lengths: Sequence[int] = LENGTHS, first: int = 1) -> TokenFile:
    """Documents of ids that count from `first` on over all of them."""
    ids = iter(range(first, first + sum(lengths)))
    writer = TokenFileWriter(folder / name)
    writer.add([[next(ids) for _ in range(length)] for length in lengths])
    writer.finish()
    return TokenFile(folder / name)


def rows_of(*files: TokenFile, length: int = 5, borders: bool = True, vocab_size: int | None = None) -> TokenRows:
    return TokenRows("text", [Span(file, 0, len(file)) for file in files], length, borders, vocab_size)


def test_rows_by_hand(tmp_path: Path) -> None:
    rows = rows_of(text(tmp_path))
    assert len(rows) == 4
    assert rows.num_left_out == 4
    got = [{name: values.tolist() for name, values in rows[index].items()} for index in range(4)]
    x = IGNORED
    assert got == [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [2, 3, x, x, 6], "document_ids": [0, 0, 0, 1, 2]},
        {"input_ids": [6, 7, 8, 9, 10], "labels": [7, 8, 9, 10, 11], "document_ids": [0] * 5},
        {"input_ids": [11, 12, 13, 14, 15], "labels": [12, 13, x, 15, 16], "document_ids": [0, 0, 0, 1, 1]},
        {"input_ids": [16, 17, 18, 19, 20], "labels": [17, x, 19, x, 21], "document_ids": [0, 0, 1, 1, 2]},
    ]
    assert all(values.dtype == torch.int64 for values in rows[0].values())


def test_every_token_that_has_a_predecessor_in_its_document_is_predicted_once(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 20, 100).tolist()
    file = text(tmp_path, lengths=lengths)
    rows = rows_of(file, length=7)
    labels = torch.cat([rows[index]["labels"] for index in range(len(rows))])
    starts = np.cumsum(lengths) - lengths
    expected = set(range(1, len(rows) * 7 + 2)) - {start + 1 for start in starts.tolist()}
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(each for each in expected if each <= len(file))


def test_a_file_that_ends_with_a_row(tmp_path: Path) -> None:
    """The last token has no successor, also where another file follows."""
    first, second = text(tmp_path, "a", [5]), text(tmp_path, "b", [4, 6], first=100)
    rows = rows_of(first, second, borders=False)
    assert [rows[index]["labels"].tolist() for index in range(3)] == [
        [2, 3, 4, 5, IGNORED],
        [101, 102, 103, 104, 105],
        [106, 107, 108, 109, IGNORED],
    ]
    assert "document_ids" not in rows[0]
    with pytest.raises(IndexError, match="row 3 of 3 rows"):
        rows[3]


def test_borders_by_a_token(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(np.array([1, 2, 0, 3, 0, 4], dtype=np.uint16).tobytes())
    rows = rows_of(TokenFile(path, BorderToken(0, is_first=False)), length=6)
    assert rows[0]["document_ids"].tolist() == [0, 0, 0, 1, 1, 2]
    assert rows[0]["labels"].tolist() == [2, 0, IGNORED, 0, IGNORED, IGNORED]
    with pytest.raises(ConfigError, match=r"train.bin does not mark where documents begin.*last_token.*borders=False"):
        rows_of(TokenFile(path))


def test_ids_outside_of_the_vocabulary(tmp_path: Path) -> None:
    rows = rows_of(text(tmp_path), vocab_size=8)
    assert rows[0]["input_ids"].max() == 5
    with pytest.raises(ConfigError, match=r"text.bin has the id 8 at token 7, but vocab_size=8.*from 0 to 7"):
        rows[1]


def test_rows_in_other_processes(tmp_path: Path) -> None:
    rows = rows_of(text(tmp_path))
    again = pickle.loads(pickle.dumps(rows))
    assert again[2]["labels"].equal(rows[2]["labels"])


def test_spread() -> None:
    for size in (1, 2, 3, 10, 97, 1000):
        places = [spread(place, size) for place in range(3 * size)]
        assert sorted(places[:size]) == list(range(size))
        assert places[size : 2 * size] == places[:size]
    tenth = sorted(spread(place, 1000) for place in range(100))
    assert max(after - before for before, after in pairwise(tenth)) < 50  # 10 at best


class Named(list[int]):
    """Rows that are numbers."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(range(size))
        self.name = name


def test_mixture_of_weights() -> None:
    mixture = Mixture([Named("a", 600), Named("b", 30), Named("c", 370)], [0.2, 0.1, 0.7])  # type: ignore[list-item]
    assert len(mixture) == 1000
    assert mixture.shares == [200, 100, 700]
    for epoch in range(3):
        found = [mixture.find(epoch * 1000 + place) for place in range(1000)]
        assert Counter(number for number, _ in found) == {0: 200, 1: 100, 2: 700}
    three = [mixture.find(index) for index in range(3000)]
    times = [Counter(row for number, row in three if number == each) for each in range(3)]
    assert set(times[0].values()) == {1}  # all rows of a once in three epochs
    assert set(times[1].values()) == {10}
    assert set(times[2].values()) == {5, 6}  # 2100 of 370: no row comes again before all others did
    assert [mixture[index] for index in (0, 999)] == [mixture.find(index)[1] for index in (0, 999)]


def test_mixture_without_weights_has_every_row_once() -> None:
    mixture = Mixture([Named("a", 7), Named("empty", 0), Named("b", 5)])  # type: ignore[list-item]
    assert sorted(map(mixture.find, range(12))) == [*((0, row) for row in range(7)), *((1, row) for row in range(5))]


def test_rare_texts_are_there() -> None:
    assert Mixture([Named("a", 100), Named("b", 5)], [1, 1e-6]).shares == [105, 1]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.0, 0.0], "the weights of a, b sum to 0"),
        ([1.0, -1.0], "weights {'a': 1.0, 'b': -1.0} must be finite numbers, at least 0"),
        ([1.0, float("nan")], "must be finite"),
        ([1.0, 1.0], "b does not have a whole row"),
    ],
)
def test_bad_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture([Named("a", 7), Named("b", 0)], weights)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a does not have a whole row"):
        Mixture([Named("a", 0)])  # type: ignore[list-item]
