"""Rows of batches: their number, their place, and how they are split."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.pipeline.trees import children, described, take_apart, with_children

Path = tuple[Any, ...]
"""Keys and positions that lead to a part of a batch."""

Form = Literal["rows", "columns", "whole"]
"""The form of a list: one entry for each row; parts that each have all rows; or a value that all rows share."""


@dataclass
class _Reading:
    """One interpretation of the rows in a batch."""

    num_rows: int
    forms: dict[Path, Form] = field(default_factory=dict)
    """Forms of its lists and tuples, except those inside of a row."""
    unclear: list[Path] = field(default_factory=list)
    """Paths of lists that could also have another form."""


class BatchRows:
    """A finder of the rows of batches, which are trees (see `lightning_d9d.pipeline.trees`).

    A tensor has its rows along dim 0. A list or tuple with as many entries as rows has one for each row, such as a
    text. Columns that torch's default_collate puts into a list are split one by one. Everything else is shared by all
    rows. If the form of a list is ambiguous, its form in an earlier batch decides.
    """

    def __init__(self) -> None:
        self._known: dict[Path, Form] = {}
        self._taken_for: dict[Path, Form] = {}
        """Forms assumed for lists that were ambiguous in all batches so far."""

    def count(self, batch: Any, strict: bool = True) -> int:
        """Return the number of rows.

        Args:
            batch: Any tree.
            strict: If False, lists that could be rows or columns are interpreted as columns.

        Raises:
            ConfigError: The batch has no rows, or tensors that disagree, or, if `strict`, lists that could be both. Or
                a list that was interpreted as columns in an earlier batch has one entry for each row.
        """
        return self._read(batch, strict).num_rows

    def split(self, batch: Any, num_parts: int) -> list[Any]:
        """Split the rows into `num_parts` parts, as even as possible, longest first; tensors are views.

        Raises:
            ConfigError: The rows cannot be counted, as in `count`, and there is more than one part.
        """
        return [batch] if num_parts == 1 else _split(batch, (), self._read(batch, strict=True), num_parts)

    def _read(self, batch: Any, strict: bool) -> _Reading:
        readings = []
        for num_rows in _possible_numbers(batch):
            reading = _Reading(num_rows)
            if self._fits(batch, (), reading):
                readings.append(reading)
        if not readings:
            raise ConfigError(
                f"a batch is split into microbatches along dim 0, but it is {described(batch)}. Its tensors must share "
                "one first size, at least 1, and lists with an entry for each row must have it, too. Make such "
                f"batches in the DataLoader's collate_fn, or {_REMEDY}"
            )
        as_before = [each for each in readings if all(self._known.get(p) == f for p, f in each.forms.items())]
        readings = as_before if len(as_before) == 1 else readings
        is_clear = len(readings) == 1 and not readings[0].unclear
        if strict and not is_clear:
            self._refuse(batch, readings)
        reading = min(readings, key=lambda each: list(each.forms.values()).count("rows"))
        if not is_clear:
            self._taken_for |= reading.forms
        elif reading.num_rows > 1:
            if any(self._taken_for.get(path, form) != form for path, form in reading.forms.items()):
                self._refuse(batch, readings)
            self._known = {**reading.forms, **self._known}
        return reading

    def _fits(self, tree: Any, path: Path, reading: _Reading) -> bool | None:
        """Return whether a tree has this many rows; None if nothing in it has rows.

        It records the forms of its lists.
        """
        if isinstance(tree, Tensor):
            return len(tree) == reading.num_rows if tree.ndim else None
        parts = children(tree)
        if parts is None:
            return None
        names, values = parts
        if names is None and not hasattr(tree, "_fields"):
            return self._fits_list(tree, values, path, reading)
        places = range(len(values)) if names is None else names
        return _all(self._fits(value, (*path, place), reading) for place, value in zip(places, values, strict=True))

    def _fits_list(self, tree: Any, values: list[Any], path: Path, reading: _Reading) -> bool | None:
        inside = _Reading(reading.num_rows)
        as_columns = _all([self._fits(value, (*path, place), inside) for place, value in enumerate(values)])
        known = self._known.get(path)
        is_long = len(values) == reading.num_rows and (len(values) > 1 or known == "rows")
        possible: list[Form] = ["rows"] if is_long and _are_alike(values) else []
        if as_columns:
            possible.append("columns")
        elif as_columns is None and (not possible or known == "whole"):
            possible.append("whole")
        if known in possible:
            possible = [known]
        if not possible:
            return False
        form = reading.forms[path] = possible[-1]
        if len(possible) > 1:
            reading.unclear.append(path)
        if form != "rows":
            reading.forms |= inside.forms
            reading.unclear += inside.unclear
        return None if form == "whole" else True

    def _refuse(self, batch: Any, readings: list[_Reading]) -> None:
        paths = [path for each in readings for path in (each.unclear or each.forms)]
        where = "batch" + "".join(f"[{place!r}]" for place in min(paths, key=len))
        numbers = " or ".join(str(number) for number in sorted({each.num_rows for each in readings}))
        raise ConfigError(
            f"the rows of a batch cannot be counted or split: {where} is a list that is ambiguous, here or with an "
            "earlier batch. It could have one entry for each row, or tensors that each have all rows. There are "
            f"{numbers} rows, and the batch is {described(batch)}. Make one tensor of its rows, or a dictionary of its "
            f"columns, in the DataLoader's collate_fn; or {_REMEDY}"
        )


_REMEDY = "override split_batch(batch, n) and set num_microbatches for batches of another form"


def _all(results: Any) -> bool | None:
    found = set(results)
    return False if False in found else True if True in found else None


def _possible_numbers(batch: Any) -> list[int]:
    """Return the sizes of tensors outside of lists if there are some, else those of all tensors and lists."""
    outside: set[int] = set()
    inside: set[int] = set()
    _add_sizes(batch, outside, inside)
    return sorted((outside or inside) - {0})


def _add_sizes(tree: Any, sizes: set[int], of_lists: set[int]) -> None:
    if isinstance(tree, Tensor):
        sizes.update(tree.shape[:1])
        return
    parts = children(tree)
    if parts is None:
        return
    names, values = parts
    if names is None and not hasattr(tree, "_fields"):
        of_lists.add(len(values))
        sizes = of_lists
    for value in values:
        _add_sizes(value, sizes, of_lists)


def _are_alike(values: list[Any]) -> bool:
    """Return whether the values could be entries of different rows, such as tensors of one dtype and number of dims."""
    has_tensors = len(take_apart(values)[0]) > 0
    return not has_tensors or len({_kind(value) for value in values if value is not None}) < 2


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, list | tuple):
        return type(value), frozenset(map(_kind, value))
    return type(value)


def _split(tree: Any, path: Path, reading: _Reading, num_parts: int) -> list[Any]:
    if isinstance(tree, Tensor) and tree.ndim > 0:
        return list(tree.tensor_split(num_parts))
    parts = children(tree)
    form = reading.forms.get(path)
    if parts is None or form == "whole":
        return [tree] * num_parts
    names, values = parts
    if form == "rows":
        size, longer = divmod(len(values), num_parts)
        ends = accumulate([size + 1] * longer + [size] * (num_parts - longer), initial=0)
        return [with_children(tree, values[start:end]) for start, end in pairwise(ends)]
    places = range(len(values)) if names is None else names
    split = [_split(value, (*path, place), reading, num_parts) for place, value in zip(places, values, strict=True)]
    by_part = list(zip(*split, strict=True)) or [()] * num_parts
    return [with_children(tree, part if names is None else dict(zip(names, part, strict=True))) for part in by_part]
