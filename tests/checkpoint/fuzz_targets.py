"""Files of checkpoints, changed at random where their structure is: what a fuzzer may hand to their readers."""

from __future__ import annotations

import functools
import io
import pickletools
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from lightning_d9d.checkpoint import open_directory
from lightning_d9d.strategy.checkpoint_files import mapped, read_checkpoint
from tests.checkpoint import hostile
from tests.checkpoint.hostile import NAME, text

_FRAGMENTS = [
    *(bytes([opcode]) for opcode in b"()]}tRabseuQ02N\x85\x86\x87\x88\x89\x81\x93\x94."),
    *(b"K\0", b"K\1", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"M\xff\xff", b"G\x7f\xf8\0\0\0\0\0\0"),
    *(b"\x8a\x08" + number.to_bytes(8, "little", signed=True) for number in (2**63 - 1, -(2**63), 2**40)),
    *(b"\x8a\xff" + b"\x7f" * 255, b"\x8b\0\1\0\0" + b"\x7f" * 256, b"r\xff\xff\xff\0", b"j\xff\xff\xff\0", b"h\1"),
    *(text(value) for value in ("", "a", "0", "1", "storage", "cpu", "../a", "__0_0.distcp", "__1_0.distcp", "offset")),
    *(f"c{NAME}\n{name}\n".encode() for name in ("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING")),
    *(b"ctorch\n" + name + b"\n" for name in (b"Size", b"float64", b"FloatTensor", b"FloatStorage", b"Tensor")),
    *(
        b"ctorch._utils\n" + name + b"\n"
        for name in (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", b"_rebuild_qtensor")
    ),
    *(b"c__builtin__\nset\n", b"c__builtin__\nbytearray\n", b"ccollections\nOrderedDict\n", b"c_codecs\nencode\n"),
    *(b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch.distributed.device_mesh\nDeviceMesh\n"),
    *(b")" + b"\x85" * 20_000, b"]" * 5_000 + b"a" * 4_999, b"(" * 5_000, b")" + b"2\x86" * 60),
]
_LATIN = text("latin1")
_SHARED = [
    b"(]q\0" + b"](h\0h\0eq\0" * 60 + b"t",
    b"(}q\0" + b"}(K\0h\0K\1h\0uq\0" * 60 + b"t",
    b"(" + text("a" * 5_000) + b"q\0" + (b"](" + b"h\0" * 50 + b"eq\0") * 5 + b"t",
    *(
        b"](" + given + b"q\0" + call * 2_000 + b"e"
        for given, call in (
            (text("a" * 50_000), b"c_codecs\nencode\nh\0" + _LATIN + b"\x86R"),
            (text("a" * 50_000), b"c__builtin__\nbytearray\nh\0" + _LATIN + b"\x86R"),
            (b"](" + b"K\1" * 20_000 + b"e", b"c__builtin__\nset\nh\0\x85R"),
            (b"(" + b"K\1" * 20_000 + b"t", b"ctorch\nSize\nh\0\x85R"),
            (b"}(" + b"".join(b"M%cN" % i + bytes(0) for i in ()) + b"K\1Nu", b"ccollections\nCounter\nh\0\x85R"),
        )
    ),
]
"""Values that name another one very often, which is in the pickle once."""
_MAX_REPEATED = 50_000
_EDITS = ("delete", "copy", "swap", "insert", "replace", "repeat", "flip", "share", "share", "fill")


class Target(NamedTuple):
    """A file and its reader."""

    mutated: Callable[[bytes], st.SearchStrategy[bytes]]
    """Other contents, from a valid one."""
    valid: Callable[[Path], bytes]
    """Makes a checkpoint in a folder; the file's content."""
    read: Callable[[Path, bytes], object]
    """Reads the checkpoint with another content."""


class Parts(NamedTuple):
    """A pickle in pieces."""

    operations: list[bytes]
    values: list[int]
    """Which operations put a number or a text on the stack."""
    members: list[tuple[int, bytes, bool]]
    """Entries of lists and dicts that can be named again: the operation before it, its name, and whether it is of a
    dict."""


def parts_of(valid: bytes) -> Parts:
    """Follows pickle's machine, whose stack has here how to name each value again."""
    found = [*pickletools.genops(valid)]
    ends = [*(place for _, _, place in found[1:]), len(valid)]
    stack: list[bytes | None] = []
    marks: list[int] = []
    num_known = 0
    parts = Parts([valid[place:end] for (_, _, place), end in zip(found, ends, strict=True)], [], [])
    for number, (operation, argument, _) in enumerate(found):
        name, before, after = operation.name, operation.stack_before, operation.stack_after
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            stack[-1] = b"j" + num_known.to_bytes(4, "little")
            num_known += 1
            continue
        num_kept = marks.pop() if pickletools.markobject in before else len(stack) - len(before)
        fills = name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS")
        if pickletools.markobject in before and before[0] is not pickletools.markobject:
            num_kept -= 1
        taken = stack[num_kept:]
        del stack[num_kept:]
        if fills and taken[-1] is not None:
            parts.members.append((number, taken[-1], name.startswith("SET")))
        if not before and name.startswith(("BININT", "BINUNICODE")):
            parts.values.append(number)
        is_get = name in ("BINGET", "LONG_BINGET")
        first = b"j" + argument.to_bytes(4, "little") if is_get else taken[0] if fills or name == "BUILD" else None
        stack += [first] * len(after)
    return parts


def pickles(valid: bytes) -> st.SearchStrategy[bytes]:
    """A pickle of which some operations are gone, doubled, exchanged or others, and values in several places."""
    parts = parts_of(valid)
    place = st.integers(0, len(parts.operations) - 1)
    edit = st.tuples(st.sampled_from(_EDITS), place, place, st.sampled_from(_FRAGMENTS))
    return st.lists(edit, min_size=1, max_size=5).map(lambda edits: _edited(parts, edits))


def _edited(parts: Parts, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    operations = list(parts.operations)
    for kind, first, second, fragment in edits:
        if kind == "delete":
            operations[first] = b""
        elif kind == "copy":
            operations[second] += operations[first]
        elif kind == "swap":
            operations[first], operations[second] = operations[second], operations[first]
        elif kind == "insert":
            operations[first] += fragment
        elif kind == "replace":
            operations[first] = fragment
        elif kind == "repeat":
            operations[first] *= min(1 + 100 * second, max(1, _MAX_REPEATED // max(1, len(operations[first]))))
        elif kind == "share":
            chosen = random.Random(len(operations) * first + second).sample(parts.members, min(3, len(parts.members)))
            for place, name, of_dict in chosen:
                operations[place] += b"".join(_again(name, i, of_dict) for i in range(min(100 * second, 1_000)))
        elif kind == "fill":
            operations[parts.values[first % len(parts.values)]] = _SHARED[second % len(_SHARED)]
        elif operations[first]:
            changed = bytearray(operations[first])
            changed[second % len(changed)] ^= 1 << second % 8
            operations[first] = bytes(changed)
    return b"".join(operations)


def _again(name: bytes, number: int, of_dict: bool) -> bytes:
    return text(str(number)) + name + b"s" if of_dict else name + b"a"


def archives(valid: bytes) -> st.SearchStrategy[bytes]:
    """An archive with another pickle, with other parts, or with other bytes anywhere."""
    with zipfile.ZipFile(io.BytesIO(valid)) as archive:
        pickled = archive.read("archive/data.pkl")
        names = archive.namelist()
    other_pickles = pickles(pickled).map(lambda new: hostile.packed_again(valid, lambda _: new))
    more = st.dictionaries(st.sampled_from([*names, "archive/DATA.PKL", "data.pkl"]), st.binary(max_size=9), max_size=2)
    packings = st.builds(
        lambda compression, more: hostile.packed_again(valid, compression=compression, more=more),
        st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
        more,
    )
    places = st.integers(0, len(valid) - 1) | st.integers(len(valid) - 900, len(valid) - 1)
    flips = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4).map(
        lambda edits: functools.reduce(lambda c, e: c[: e[0]] + bytes([e[1]]) + c[e[0] + 1 :], edits, valid)
    )
    cuts = st.builds(lambda a, b: valid[:a] + valid[b:], places, places)
    return other_pickles | packings | flips | cuts


def _checkpoint(path: Path) -> None:
    """Return a checkpoint with all kinds of values, and a tensor in any number of pieces."""
    values: dict[str, Any] = {"texts": ["a", b"b"], "set": {1, 2}, "number": 1.5, "tensor": torch.ones(2, 2)}
    values |= {"parameter": torch.nn.Parameter(torch.ones(1)), "u": torch.ones(2).to(torch.uint16)}
    hostile.save(path, values, empty=torch.empty(0))


def _valid_metadata(path: Path) -> bytes:
    _checkpoint(path)
    return hostile.metadata_file(path).read_bytes()


def _read_metadata(path: Path, content: bytes) -> object:
    hostile.forge_metadata(path, content)
    return open_directory(path, alone=True).read()


def _valid_values(path: Path) -> bytes:
    _checkpoint(path)
    return (path / "values.pt").read_bytes()


def _read_values(path: Path, content: bytes) -> object:
    (path / "values.pt").write_bytes(content)
    return open_directory(path, alone=True).read()


def _valid_file(path: Path) -> bytes:
    _checkpoint(path)
    return hostile.saved({"state_dict": {"a": torch.ones(3)}, **open_directory(path, alone=True).values})


def _read_file(path: Path, content: bytes) -> object:
    (path / "a.ckpt").write_bytes(content)
    return read_checkpoint(functools.partial(mapped, path / "a.ckpt"), path / "a.ckpt")


TARGETS = {
    "metadata": Target(pickles, _valid_metadata, _read_metadata),
    "values": Target(archives, _valid_values, _read_values),
    "file": Target(archives, _valid_file, _read_file),
}
