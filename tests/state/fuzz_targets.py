"""Files of a Hugging Face directory, changed at random where their structure is: header, index, manifest and config."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.state import read_tensors, save_tensors
from tests.checkpoint.fuzz_targets import Target

WEIGHTS, INDEX, MANIFEST = (f"model.safetensors{end}" for end in ("", ".index.json", ".manifest.json"))
MAX_FILE_BYTES = 2_000_000
_FRAGMENTS = [
    *("0", "-1", "1", "2", "24", "1000000000", "9223372036854775807", "9223372036854775808", "18446744073709551615"),
    *("1" + "0" * 400, "9" * 5000, "0.5", "1e-320", "1e308", "1e400", "NaN", "-Infinity", "true", "null", "", "}", ":"),
    *(json.dumps(text) for text in ("", "a", "F32", "BF16", "F4", "crc32", "../x", "/dev/zero", "pipe", "link", "\0")),
    *(json.dumps(text) for text in ("\x1b[2J", "\u202e", "model-00001-of-00003.safetensors", "x" * 1_000_000)),
    *('"\\ud800"', "[]", "[0]", "[0, 24]", "[24, 0]", "[[]]", "{}", '{"a": 1, "a": 2}', '{"dtype": "F32"}'),
    *("[" * 1000 + "]" * 1000, "[" * 100_000, "[" + "1, " * 400_000 + "1]", "[" + "{}, " * 300_000 + "{}]"),
    *("[0, " + "4611686018427387904, " * 50_000 + "1]", "[" + "9" * 4000 + ", 1" * 100_000 + "]"),
    '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}',
    '{"dtype": "I8", "shape": [0, 4611686018427387904, 4611686018427387904], "data_offsets": [0, 0]}',
]
_EDITS = ("replace", "delete", "copy", "twice", "many", "many and one twice", "many of one name", "rename")


class _Table(list[Any]):
    """An object of JSON as pairs, of which several may have one name."""


class _Text(str):
    """JSON as it is written."""


def _parsed(content: bytes) -> _Table:
    return json.loads(content, object_pairs_hook=lambda pairs: _Table([list(pair) for pair in pairs]))


def _written(value: Any) -> str:
    if isinstance(value, _Text):
        return value
    if isinstance(value, _Table):
        return "{" + ", ".join(f"{_written(name)}: {_written(each)}" for name, each in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


class _Slot(NamedTuple):
    """A place in which a value is: in a list, or in a pair of a table."""

    holder: list[Any]
    place: int
    table: _Table | None

    @property
    def value(self) -> Any:
        return self.holder[self.place]


def _slots(value: Any) -> list[_Slot]:
    """All places in which a value is, the outermost first."""
    if not isinstance(value, list):
        return []
    table = value if isinstance(value, _Table) else None
    own = [_Slot(pair, 1, table) for pair in table or ()] or [_Slot(value, i, None) for i in range(len(value))]
    return own + [slot for each in own for slot in _slots(each.value)]


def tables(valid: bytes) -> st.SearchStrategy[bytes]:
    """A JSON file of which values, names and entries are others, twice, very many, or gone; or bytes are."""
    place = st.integers(0, 10_000)
    number = st.integers(0, len(_FRAGMENTS) - 1)  # fragments themselves would be printed with the strategy
    edit = st.tuples(st.sampled_from(_EDITS), place, place, number)
    edited = st.lists(edit, min_size=1, max_size=4).map(functools.partial(_edited, valid))
    flips = st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)), min_size=1, max_size=4).map(
        lambda edits: functools.reduce(lambda c, e: c[: e[0]] + bytes([e[1]]) + c[e[0] + 1 :], edits, valid)
    )
    cuts = st.builds(lambda begin, end: valid[:begin] + valid[end:], place, place)
    return st.one_of(edited, edited, edited, flips, cuts).filter(lambda content: len(content) <= MAX_FILE_BYTES)


def _edited(valid: bytes, edits: list[tuple[str, int, int, int]]) -> bytes:
    content = _parsed(valid)
    for kind, first, second, number in edits:
        if slots := _slots(content):
            _edit(slots[first % len(slots)], kind, _FRAGMENTS[number], slots[second % len(slots)].value)
    return _written(content).encode("utf-8", "surrogatepass")


def _edit(slot: _Slot, kind: str, fragment: str, other: Any) -> None:
    holder, place, table = slot
    if kind in ("replace", "copy"):
        holder[place] = _Text(fragment if kind == "replace" else _written(other))
    elif table is None:
        holder[place] = _Text(fragment) if kind == "delete" else [_Text(_written(slot.value))] * _number_of(slot.value)
    elif kind == "delete":
        table.remove(holder)
    elif kind == "rename":
        holder[0] = _Text(fragment)
    elif kind == "twice":
        table.append(list(holder))
    else:
        again, (name, _) = _Text(_written(slot.value)), holder
        for number in range(_number_of([name, slot.value])):
            table.append([name if kind == "many of one name" else f"{name}{number}", again])
        if kind == "many and one twice":
            table.append(list(table[-1]))


def _number_of(value: Any) -> int:
    """How many of them a file has room for."""
    return min(100_000, MAX_FILE_BYTES // 2 // (len(_written(value)) + 8))


def files(valid: bytes) -> st.SearchStrategy[bytes]:
    """A safetensors file with another header, of the length that it says or of another, and other data."""
    start = 8 + int.from_bytes(valid[:8], "little")
    lengths = st.none() | st.sampled_from([0, 1, 8, 2**31, 2**63, 2**64 - 1]) | st.integers(0, 2 * len(valid))
    data = st.just(valid[start:]) | st.binary(max_size=40) | st.just(bytes(1_000_000))
    return st.builds(_file, tables(valid[8:start]), lengths, data)


def _file(header: bytes, length: int | None, data: bytes) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _save(path: Path) -> None:
    """Save in three files, beside a pipe and a link."""
    tensors = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3), "c": torch.ones(5, 2, dtype=torch.bfloat16)}
    save_tensors(tensors, path, max_shard_bytes=10)
    os.mkfifo(path / "pipe")
    (path / "link").symlink_to("/dev/zero")


def _target(name: str, mutated: Callable[[bytes], st.SearchStrategy[bytes]]) -> Target:
    def valid(path: Path) -> bytes:
        _save(path)
        return (path / name).read_bytes()

    def read(path: Path, content: bytes) -> object:
        (path / name).write_bytes(content)
        return [tensor.shape for _, tensor in read_tensors(path, check_finite=True)]

    return Target(mutated, valid, read)


def _valid_config(path: Path) -> bytes:
    path.mkdir()
    values = {**Qwen3MoeConfig.preset("tiny").to_dict(), "vocab_splits": {"text": 200, "image": 56}}
    return json.dumps(values).encode()


def _read_config(path: Path, content: bytes) -> object:
    (path / "config.json").write_bytes(content)
    config = Qwen3MoeConfig.from_json(path)
    return config.num_parameters, config.flops_per_token(16), json.dumps(config.to_dict(), allow_nan=False)


TARGETS = {
    "header": _target("model-00001-of-00003.safetensors", files),
    "index": _target(INDEX, tables),
    "manifest": _target(MANIFEST, tables),
    "config": Target(tables, _valid_config, _read_config),
}
