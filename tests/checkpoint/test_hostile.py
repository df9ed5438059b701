"""Checkpoints made to do harm: each is refused with a `StateError`, soon and without using memory for it."""

from __future__ import annotations

import functools
import io
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh

from lightning_d9d.checkpoint import open_directory
from lightning_d9d.checkpoint.metadata import _fill
from lightning_d9d.checkpoint.torch_files import read_saved
from lightning_d9d.errors import StateError
from lightning_d9d.strategy.checkpoint_files import check_file, mapped, read_checkpoint
from tests.checkpoint import hostile
from tests.checkpoint.hostile import NAME, save, text
from tests.fuzz import outcome

BOMB = 200 * 2**20


def read(path: Path) -> dict[str, torch.Tensor]:
    return open_directory(path, alone=True).read()


def read_file(path: Path) -> Any:
    return read_checkpoint(functools.partial(mapped, path), path)


# Metadata


BUILDS = {
    "class": f"c{NAME}\nTensorProperties\n".encode() + b"N}" + text("__getstate__") + b"Ns\x86b.",
    "dataclass": f"c{NAME}\nChunkStorageMetadata\n".encode() + b"N}" + text("__init__") + b"Ns\x86b.",
    "member": f"c{NAME}\n_MEM_FORMAT_ENCODING\n".encode() + b"K\0\x85RN}" + text("_value_") + b"K\7s\x86b.",
    "size": b"ctorch\nSize\nN}" + text("numel") + b"Ns\x86b.",
    "dtype": b"ctorch\nfloat32\nN}" + text("itemsize") + b"Ns\x86b.",
}


CHANGEABLE = [TensorProperties, ChunkStorageMetadata, *_MEM_FORMAT_ENCODING]


@pytest.mark.parametrize("what", BUILDS)
def test_metadata_change_nothing_of_torch(tmp_path: Path, what: str) -> None:
    path = save(tmp_path / "a")
    before = [dict(vars(each)) for each in CHANGEABLE]
    hostile.forge_metadata(path, b"\x80\2" + BUILDS[what])
    reason = hostile.problem(lambda: read(path))
    assert [dict(vars(each)) for each in CHANGEABLE] == before
    assert re.search("changes something that is not a new object|something else in place of a Metadata", reason)
    assert read(save(tmp_path / "b"))["b"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", [None, "denominator"])
def test_metadata_of_a_python_that_pickles_members_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """Python 3.11.2 does so. A member is read, and an attribute of anything else is refused."""
    path = save(tmp_path / "a")

    def by_name(self: Any, protocol: int) -> tuple[Any, ...]:
        return getattr, ((type(self), self.name) if name is None else (5, name))

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    hostile.change_metadata(path, lambda metadata: None)
    monkeypatch.undo()
    assert b"getattr" in hostile.metadata_file(path).read_bytes()
    if name is None:
        assert read(path)["b"].tolist() == [0, 1, 2, 3, 4]
    else:
        with pytest.raises(StateError, match=r"sets an attribute of something other than .*_MEM_FORMAT_ENCODING"):
            read(path)


def chunks_of(**changes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, boxes in changes.items():
            old = next(index for index in metadata.storage_data if index.fqn == name)
            stored = metadata.storage_data.pop(old)
            metadata.state_dict_metadata[name].chunks[:] = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
            ]
            for number, (offsets, _) in enumerate(boxes):
                place = type(stored)(f"__{number + 1}_0.distcp", 0, stored.length)
                metadata.storage_data[type(old)(name, torch.Size(offsets))] = place

    return change


def resized(size: tuple[int, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["b"].size = torch.Size(size)
        metadata.state_dict_metadata["b"].chunks[0].sizes = torch.Size(size)

    return change


def at_one_place(metadata: Any) -> None:
    for stored in metadata.storage_data.values():
        stored.offset = 0


def of_dtype(dtype: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["b"].properties, "dtype", dtype)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "overlapping chunks": (chunks_of(b=[((0,), (2,)), ((1,), (2,)), ((4,), (1,))]), "is inconsistent at 'b'"),
    "chunk outside": (chunks_of(b=[((1,), (5,))]), "is inconsistent at 'b'"),
    "chunk twice": (chunks_of(a=[((0, 0), (3, 2)), ((0, 0), (3, 2))]), "is inconsistent at 'a'"),
    "chunks of other dims": (chunks_of(a=[((0,), (12,))]), "is inconsistent at 'a'"),
    "negative size": (resized((-5,)), "is inconsistent at 'b'"),
    "negative sizes": (resized((-5, -1)), "is inconsistent at 'b'"),
    "huge size": (resized((2**40,)), "is inconsistent at 'b'"),
    "huge empty size": (resized((0, 2**62)), "is inconsistent at 'b'"),
    "pieces at one place": (at_one_place, "is inconsistent at"),
    "longer dtype": (of_dtype(torch.complex128), "has b in another shape or dtype|is inconsistent at 'b'"),
    "no dtype": (of_dtype(5), "has a int where a name belongs"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_metadata_that_do_not_fit(tmp_path: Path, case: str) -> None:
    path = save(tmp_path / "a")
    change, reason = CHANGES[case]
    hostile.change_metadata(path, change)
    with pytest.raises(StateError, match=reason):
        read(path)


PICKLES = {
    "deep key": b"}" + b")" + b"\x85" * 300_000 + b"Ns.",
    "wide key": b"}" + b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"Ns.",
    "place in the memo": b"Nr\xff\xff\xff\x03.",
    "long number": b"\x8b\0\0\x10\0" + b"\1" * 2**20 + b".",
    "long text number": b"L" + b"9" * 10**6 + b"L\n.",
    "extension": b"\x82\1.",
    "call of a result": b"ctorch\nSize\n)R)R.",
    "without end": b"N",
    "empty stack": b".",
}


@pytest.mark.parametrize("case", PICKLES)
def test_metadata_built_to_take_long(tmp_path: Path, case: str) -> None:
    path = save(tmp_path / "a")
    hostile.forge_metadata(path, b"\x80\2" + PICKLES[case])
    with pytest.raises(StateError, match=r"\.metadata'"):
        open_directory(path, alone=True)


def sharing_chunks(metadata: Any) -> None:
    """Return as many names as chunks, all of one entry. Their number is the square of what the file has room for."""
    empty, num = torch.Size((0,)), 3000
    chunks = [ChunkStorageMetadata(empty, empty)] * num
    entry = TensorStorageMetadata(TensorProperties(), empty, chunks)
    metadata.state_dict_metadata = dict.fromkeys(map(str, range(num)), entry)
    metadata.storage_data = {}


def sharing_an_entry(metadata: Any) -> None:
    """Each name has a place, but all one entry of many dims."""
    empty = torch.Size((0,) * 64)
    entry = TensorStorageMetadata(TensorProperties(), empty, [ChunkStorageMetadata(empty, empty)])
    (place, *_) = metadata.storage_data.values()
    place.length = 0
    names = [*map(str, range(8000))]
    metadata.state_dict_metadata = dict.fromkeys(names, entry)
    metadata.storage_data = {MetadataIndex(name, empty): place for name in names}


def test_metadata_that_share_much_take_no_longer(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    hostile.change_metadata(path, sharing_chunks)
    assert outcome(lambda: read(path)) == "StateError"
    assert "has 0 places for 3000 pieces or more" in hostile.problem(lambda: read(path))
    path = save(tmp_path / "b")
    hostile.change_metadata(path, sharing_an_entry)
    assert outcome(lambda: open_directory(path, alone=True)) == "read"


def test_grids_are_found_among_chunks() -> None:
    def boxes(*rows: tuple[int, int, int, int]) -> list[tuple[torch.Size, torch.Size]]:
        return [(torch.Size(row[:2]), torch.Size(row[2:])) for row in rows]

    size = torch.Size((3, 4))
    assert _fill(size, boxes((0, 0, 2, 4), (2, 0, 1, 4)))
    assert _fill(size, boxes((2, 1, 1, 3), (0, 0, 2, 1), (0, 1, 2, 3), (2, 0, 1, 1)))
    assert _fill(torch.Size(()), [(torch.Size(()), torch.Size(()))])
    assert _fill(torch.Size((0,)), [(torch.Size((0,)), torch.Size((0,)))])
    assert not _fill(size, [])
    assert not _fill(size, boxes((0, 0, 3, 2)))
    assert not _fill(size, boxes((0, 0, 3, 4), (0, 0, 0, 4)))
    assert not _fill(size, boxes((0, 0, 2, 4), (1, 0, 2, 4)))
    assert not _fill(size, boxes((0, 0, 3, 2), (0, 0, 3, 2)))
    assert not _fill(size, boxes((0, 0, 2, 2), (2, 2, 1, 2), (0, 2, 2, 2), (0, 2, 2, 2)))


# Files that are none


PARTS: dict[str, Callable[[Path], Path]] = {
    "values.pt": lambda path: path / "values.pt",
    ".metadata": hostile.metadata_file,
    "__0_0.distcp": hostile.data_file,
    "folder": lambda path: hostile.data_file(path).parent,
}


@pytest.mark.parametrize("name", PARTS)
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a")
    part = PARTS[name](path)
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match=r"is a link|distcp' is missing"):
        open_directory(path, alone=True)


@pytest.mark.parametrize("name", ["values.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.timeout(60)
def test_pipes_are_not_read(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a")
    opened = open_directory(path, alone=True)
    part = PARTS[name](path)
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(StateError, match=r"is not a regular file|distcp' is missing"):
        open_directory(path, alone=True)
    if name == "__0_0.distcp":  # put there later
        with pytest.raises(StateError, match="is not a regular file"):
            opened.read()
        with pytest.raises(StateError, match="is not a regular file"):
            opened._reader.fill({"b": torch.zeros(5, dtype=torch.long)})


@pytest.mark.timeout(60)
def test_a_file_of_lightning_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "epoch.ckpt")
    (tmp_path / "last.ckpt").symlink_to("epoch.ckpt")
    assert read_file(tmp_path / "last.ckpt") == {"state_dict": {}}
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(StateError, match="is not a regular file"):
        read_file(tmp_path / "pipe.ckpt")


# Values and files of Lightning: the same dangers


def with_mesh(archive: bytes) -> bytes:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        content = torch.load(io.BytesIO(archive), weights_only=True)
        return hostile.saved({**content, "values": {"mesh": init_device_mesh("cpu", (1,))}})
    finally:
        dist.destroy_process_group()


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(archive: bytes) -> bytes:
        def of_pickle(content: bytes) -> bytes:
            assert content.count(old) == 1
            return content.replace(old, new)

        return hostile.packed_again(archive, of_pickle)

    return change


def compressed(archive: bytes) -> bytes:
    content = torch.load(io.BytesIO(archive), weights_only=True)
    large = hostile.saved({**content, "more": torch.zeros(BOMB, dtype=torch.uint8)})
    return hostile.packed_again(large, compression=zipfile.ZIP_DEFLATED)


def twice(name: str) -> Callable[[bytes], bytes]:
    return lambda archive: hostile.packed_again(archive, more={f"archive/{name}": b"\x80\2}."})


def overlapping(archive: bytes) -> bytes:
    """Two entries of the directory are one part of the file."""
    first, second = (archive.rindex(b"archive/" + name) for name in (b"data/0", b"byteorder"))
    changed = bytearray(archive)
    changed[second - 4 : second] = archive[first - 4 : first]  # where the part begins
    return bytes(changed)


def deep(archive: bytes) -> bytes:
    content = torch.load(io.BytesIO(archive), weights_only=True)
    nested = b"]" * 5000 + b"a" * 4999
    return hostile.packed_again(
        hostile.saved({**content, "more": "HERE"}), lambda pickled: pickled.replace(text("HERE"), nested)
    )


def several(given: bytes, call: bytes, num: int = 1000) -> Callable[[bytes], bytes]:
    """A list of something and what calls make of it, which is in the pickle once."""
    return replaced(text("HERE"), b"](" + given + b"q\0" + call * num + b"e")


LATIN = text("latin1")
NUMBERS = torch.tensor([1.25, 2.5, 3.75])
GIVEN = "gives the same values to several calls"
VALUES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "mesh": (with_mesh, r"names torch\.distributed\.device_mesh\.\w+, which could join a process group"),
    "compressed": (compressed, "has a compressed part"),
    "pickle twice": (twice("data.pkl"), "has parts of one name"),
    "pickle in capitals": (twice("DATA.PKL"), "has parts of one name"),
    "overlapping": (overlapping, "overlap|damaged"),
    "prefix": (lambda archive: archive[:4] + archive, "with bytes before its beginning|damaged"),
    "suffix": (lambda archive: archive + b"more", "damaged|with bytes after its end"),
    "more numbers than there are": (
        replaced(b"K\3tq", b"J\0\0\0\1tq"),
        r"does not have the \d+ numbers that tensor '0' claims",
    ),
    "a tensor longer than its numbers": (replaced(b"QK\0K\3\x85", b"QK\0J\0\0\0\1\x85"), "in a way that torch"),
    "a tensor behind its numbers": (replaced(b"QK\0K\3\x85", b"QM\0\1K\3\x85"), "in a way that torch"),
    "a tensor of a size alone": (replaced(text("HERE"), b"ctorch\nFloatTensor\nJ\0\0\0\1\x85R"), "FloatTensor in a"),
    "bytes of a size alone": (replaced(text("HERE"), b"c__builtin__\nbytearray\nJ\0\0\0\1\x85R"), "bytearray in a"),
    "deep": (deep, "nested more than 200 deep"),
    "a deep key": (replaced(text("HERE"), b"})" + b"\x85" * 300_000 + b"Ns"), "has a key of kind tuple"),
    "a set of a deep tuple": (
        replaced(text("HERE"), b"c__builtin__\nset\n])" + b"\x85" * 300_000 + b"a\x85R"),
        "has a key of kind tuple",
    ),
    "a text given to calls": (several(text("x" * 1000), b"c_codecs\nencode\nh\0" + LATIN + b"\x86R"), GIVEN),
    "a text given to byte arrays": (
        several(text("x" * 1000), b"c__builtin__\nbytearray\nh\0" + LATIN + b"\x86R"),
        GIVEN,
    ),
    "a list given to sets": (several(b"](" + b"K\1" * 3000 + b"e", b"c__builtin__\nset\nh\0\x85R"), GIVEN),
    "a dict given to counters": (
        several(b"}(" + b"".join(b"K%cN" % i for i in range(256)) + b"u", b"ccollections\nCounter\nh\0\x85R"),
        GIVEN,
    ),
    "a tuple given to sizes": (several(b"(" + b"K\1" * 3000 + b"t", b"ctorch\nSize\nh\0\x85R"), GIVEN),
    "a tuple of tuples": (
        several(b"(" + b"K\1" * 3000 + b"tq\0(" + b"h\0" * 3000 + b"t", b"ctorch\nSize\nh\0\x85R"),
        GIVEN,
    ),
    "a state given to objects": (
        several(b"}(" + b"".join(text(str(i)) + b"N" for i in range(256)) + b"u", b"ccollections\nOrderedDict\n)Rh\0b"),
        GIVEN,
    ),
    "a call in place of a tensor": (
        replaced(text("HERE"), b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nset\nc__builtin__\nset\n)NtR"),
        "_rebuild_from_type_v2 in a way",
    ),
    "a parameter of no tensor": (
        replaced(text("HERE"), b"ctorch._utils\n_rebuild_parameter\n)\x88)\x87R"),
        "_rebuild_parameter in a way",
    ),
    "lists of lists": (replaced(text("HERE"), b"(]q\0" + b"](h\0h\0eq\0" * 60 + b"t"), "repeats the same values"),
    "texts of texts": (
        replaced(text("HERE"), b"(" + text("x" * 1000) + b"q\0" + (b"](" + b"h\0" * 20 + b"eq\0") * 5 + b"t"),
        "repeats the same values",
    ),
}


def content() -> dict[str, Any]:
    return {"numbers": NUMBERS, "place": "HERE"}


@pytest.mark.parametrize("case", VALUES)
def test_values_made_to_do_harm(tmp_path: Path, case: str) -> None:
    path = save(tmp_path / "a", content())
    change, reason = VALUES[case]
    file = path / "values.pt"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(StateError, match=reason):
        open_directory(path, alone=True)
    assert outcome(lambda: open_directory(path, alone=True)) == "StateError"
    assert not dist.is_initialized()


@pytest.mark.parametrize("case", VALUES)
def test_files_of_lightning_made_to_do_harm(tmp_path: Path, case: str) -> None:
    file = tmp_path / "a.ckpt"
    change, reason = VALUES[case]
    file.write_bytes(change(hostile.saved({"state_dict": {}, **content()})))
    with pytest.raises(StateError, match=reason):
        read_file(file)
    assert not dist.is_initialized()


PIECES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (lambda piece: hostile.packed_again(piece, compression=zipfile.ZIP_DEFLATED), "has a compressed pa"),
    "mesh": (lambda _: with_mesh(hostile.saved({})), "could join a process group"),
    "more numbers": (replaced(b"K\5tq", b"J\0\0\0\1tq"), r"does not have the \d+ numbers"),
    "longer": (replaced(b"QK\0K\5\x85", b"QK\0K\6\x85"), "in a way that torch"),
    "other shape": (lambda _: hostile.saved(torch.arange(6)), "has b in another shape or dtype"),
    "other dtype": (lambda _: hostile.saved(torch.arange(5.0)), "has b in another shape or dtype"),
    "no tensor": (
        lambda _: hostile.saved([torch.arange(5)]).ljust(3000, b"\0"),
        "damaged|does not hold a single tensor|with bytes after its ",
    ),
    "no archive": (lambda _: b"a" * 3000, "is not an archive that torch.save has written"),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_made_to_do_harm(tmp_path: Path, case: str) -> None:
    path = save(tmp_path / "a")
    change, reason = PIECES[case]
    hostile.forge_piece(path, "b", change(hostile.saved(torch.arange(5))))
    target = torch.zeros(5, dtype=torch.long)
    with pytest.raises(StateError, match=reason):
        open_directory(path, alone=True).load({"b": target}, strict=False)
    assert not target.any()


# What is legal stays


class Known:
    def __init__(self, number: int) -> None:
        self.number = number


def plain_values() -> dict[str, Any]:
    tagged = torch.ones(2)
    tagged.tag = "kept"  # type: ignore[attr-defined]
    nested: Any = 1
    for _ in range(50):
        nested = [nested]
    return {
        "ordered": OrderedDict(a=1),
        "module": nn.BatchNorm1d(2).state_dict(),
        "counter": Counter("abca"),
        "set": {1, "a", (2, 3)},
        "keys": {(1, "a"): 1, 2.5: 2, None: 3, torch.float32: 4},
        "texts": ["ä\0", b"ab", bytearray(b"c")],
        "numbers": [2**64 - 1, -(2**100), 1j, float("inf"), True],
        "size": torch.Size((1, 2)),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "parameter": nn.Parameter(torch.ones(2)),
        "views": [torch.arange(12).view(3, 4).T, torch.ones(1).expand(5), torch.arange(9)[4:6], torch.ones(0, 3)],
        "images": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "dtypes": [torch.ones(2).to(dtype) for dtype in (torch.uint16, torch.bool, torch.bfloat16, torch.cfloat)],
        "sparse": torch.eye(3).to_sparse(),
        "tagged": tagged,
        "known": Known(3),
        "nested": nested,
        "shared": [[1, "a"] * 100] * 50,
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("old_format", [False, True])
def test_what_is_plain_can_be_read(tmp_path: Path, old_format: bool) -> None:
    values = plain_values()
    if old_format:  # torch cannot write all of them so
        values["dtypes"].pop(0)
    with torch.serialization.safe_globals([Known]):
        torch.save({"state_dict": {}, **values}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not old_format)
        found = read_file(tmp_path / "a.ckpt")
        assert list(found) == ["state_dict", *values]
        assert found["known"].number == 3
        assert found["tagged"].tag == "kept"
        save(tmp_path / "directory", values)
        assert open_directory(tmp_path / "directory", alone=True).values["keys"] == values["keys"]


def test_code_that_the_user_trusts_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(with_mesh(hostile.saved({"state_dict": {}})))
    check_file(tmp_path / "a.ckpt", weights_only=False)
    with pytest.raises(StateError, match="could join a process group"):
        check_file(tmp_path / "a.ckpt")


def test_records_say_what_a_file_holds() -> None:
    saved: Any = read_saved(io.BytesIO(hostile.saved({"a": torch.ones(2, 3), "b": [1, None]})))
    assert saved["b"] == [1, None]
    assert saved["a"].by == "torch._utils._rebuild_tensor_v2"
    assert saved["a"].args[2] == (2, 3)
