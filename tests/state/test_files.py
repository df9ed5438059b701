"""Damaged, foreign and malicious files: a `StateError` names file and tensor, and what was there stays.

Each case damages a directory, of this package's with a manifest or somebody else's, and loads it into tensors that must
not change.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import mmap
import os
import pickle
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import lightning_d9d.state.format as files
from lightning_d9d.errors import StateError
from lightning_d9d.state import SafetensorsReader, load_tensors, read_tensors, save_tensors
from lightning_d9d.state.format import SafetensorsFile
from lightning_d9d.state.manifest import read_manifest
from tests.harness.compare import assert_bitwise_equal

WEIGHTS, INDEX, MANIFEST = (f"model.safetensors{end}" for end in ("", ".index.json", ".manifest.json"))


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in {"a": (4, 6), "b": (3,), "c": (5, 2)}.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Tensors that are saved in three files."""
    save_tensors(make_tensors(), tmp_path / "saved", max_shard_bytes=10)
    return tmp_path / "saved"


def file_of(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def refuses(path: Path, *parts: str, **options: Any) -> str:
    """Loading raises an error that has all parts, and changes nothing."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    with pytest.raises(StateError) as caught:
        load_tensors(targets, path, **options)
    for part in parts:
        assert part in str(caught.value)
    assert not any(tensor.any() for tensor in targets.values())
    return str(caught.value)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


# Content


@pytest.mark.parametrize("place", [-1, -20, -96])
def test_a_flipped_bit_in_a_file_of_ours(saved: Path, place: int) -> None:
    path = file_of(saved, "a")
    flip(path, place)
    refuses(saved, str(path), "a is damaged or was replaced: its checksum differs from the manifest's;")
    found = dict(read_tensors(saved, verify=False))
    assert sum(int((found[name] != tensor).sum()) for name, tensor in make_tensors().items()) == 1
    with pytest.raises(StateError, match="a is damaged"):
        next(read_tensors(saved))
    with pytest.raises(StateError, match="a is damaged"):
        save_tensors(SafetensorsReader(saved), saved.parent / "new")


def test_numbers_that_are_not_finite(saved: Path) -> None:
    for value in (float("inf"), float("nan")):
        tensors = make_tensors()
        tensors["c"][3, 1] = value
        save_tensors(tensors, saved, overwrite=True)
        refuses(saved, "c has numbers that are not finite", check_finite=True)
        save_file(tensors, saved.parent / "foreign.safetensors")
        refuses(saved.parent / "foreign.safetensors", "foreign.safetensors: c has numbers", check_finite=True)


def test_without_a_manifest_nothing_is_compared(saved: Path) -> None:
    flip(file_of(saved, "a"), -1)
    (saved / MANIFEST).unlink()
    assert len(dict(read_tensors(saved))) == 3


def test_large_numbers_are_finite(tmp_path: Path) -> None:
    tensors = {"double": torch.tensor([1e300], dtype=torch.float64), "eight": torch.ones(3).to(torch.float8_e5m2)}
    save_file(tensors, tmp_path / "w.safetensors")
    assert dict(read_tensors(tmp_path / "w.safetensors", check_finite=True))["double"] == 1e300
    tensors["eight"][1] = float("inf")
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(StateError, match="eight has numbers that are not finite"):
        next(read_tensors(tmp_path / "w.safetensors", check_finite=True))


def test_an_empty_tensor_at_the_end_of_a_page(tmp_path: Path) -> None:
    path, length = tmp_path / "w.safetensors", 900

    def save() -> int:
        save_file({"a": torch.ones(length), "empty": torch.zeros(0, 3)}, path)
        return path.stat().st_size

    length += -save() % mmap.PAGESIZE // 4
    assert save() % mmap.PAGESIZE == 0
    assert dict(read_tensors(path))["empty"].shape == (0, 3)
    targets = {"a": torch.zeros(length), "empty": torch.zeros(0, 3)}
    load_tensors(targets, path, check_finite=True)
    assert targets["a"].all()


def test_a_tensor_that_was_exchanged_for_a_sound_one(saved: Path) -> None:
    save_file({"a": torch.zeros(4, 6)}, file_of(saved, "a"))
    refuses(saved, "a is damaged")
    save_file({"a": torch.zeros(4, 6).half()}, file_of(saved, "a"))
    refuses(saved, "a has dtype F16, but the manifest has F32")
    save_file({"b": make_tensors()["b"], "d": torch.zeros(1)}, file_of(saved, "b"))
    edit_json(saved / INDEX, lambda index: index["weight_map"].update(d=file_of(saved, "b").name))
    targets = {"d": torch.ones(1)}
    with pytest.raises(StateError, match="d is not in the manifest"):
        load_tensors(targets, saved, strict=False)
    assert targets["d"] == 1


# Files


@pytest.mark.parametrize("length", [0, 4, 8, 50, -1])
def test_truncated(saved: Path, length: int) -> None:
    path = file_of(saved, "b")
    os.truncate(path, length if length >= 0 else path.stat().st_size - 1)
    refuses(saved, str(path), "cannot be read")


def test_longer_than_its_tensors(saved: Path) -> None:
    path = file_of(saved, "b")
    path.write_bytes(path.read_bytes() + b"x")
    refuses(saved, str(path), "file not fully covered")


def test_missing_files(saved: Path) -> None:
    path = file_of(saved, "b")
    path.unlink()
    refuses(saved, str(path), "cannot be read")
    path.mkdir()
    refuses(saved, str(path), "not a regular file")
    shutil.rmtree(saved)
    refuses(saved, f"{saved} does not exist; give the directory")


@pytest.mark.parametrize("name", [WEIGHTS, INDEX, MANIFEST])
def test_pipes_are_not_waited_for(saved: Path, name: str) -> None:
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    refuses(saved, str(saved / name), "not a regular file")


@contextlib.contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, limits)


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((2,), float(i)) for i in range(80)}
    save_tensors(tensors, tmp_path / "many", max_shard_bytes=8)
    found = {name: torch.zeros(2) for name in tensors}
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    gc.disable()  # files are closed as soon as nobody holds them
    try:
        with limited(resource.RLIMIT_NOFILE, highest + 50):
            load_tensors(found, tmp_path / "many", check_finite=True)
    finally:
        gc.enable()
    for name, tensor in tensors.items():
        assert_bitwise_equal(name, found[name], tensor)
    with limited(resource.RLIMIT_NOFILE, 1), pytest.raises(StateError, match=r"json.* raise the limit of open files"):
        SafetensorsReader(tmp_path / "many")


def test_a_file_that_is_larger_than_all_memory(tmp_path: Path) -> None:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    size = 1024 * sum(2 * int(words[1]) for words in lines if words[0] in ("MemTotal:", "SwapTotal:"))
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert SafetensorsReader(tmp_path / "w.safetensors")["a"][slice(size - 2, size),].tolist() == [0, 0]


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another name": (lambda h: h.update(x=h.pop("a")), "lacks a, which the index puts there"),
    "another shape": (lambda h: h["a"].update(shape=[6, 4]), "a has shape [6, 4] in the files, but [4, 6] here"),
    "a shape of other size": (lambda h: h["a"].update(shape=[4, 5]), "invalid shape, data type, or offset"),
    "a huge shape": (lambda h: h["a"].update(shape=[2**62, 2**62]), "overflow computing buffer size"),
    "a negative shape": (lambda h: h["a"].update(shape=[-4, -6]), "integer `-4`, expected usize"),
    "a shape of text": (lambda h: h["a"].update(shape="ab"), 'string "ab", expected a sequence'),
    "no shape": (lambda h: h["a"].pop("shape"), "missing field `shape`"),
    "no entry": (lambda h: h.update(a=3), "integer `3`, expected struct TensorInfo"),
    "another dtype": (lambda h: h["a"].update(dtype="I32"), "a is torch.int32 in the files and torch.float32 here"),
    "unknown dtype": (lambda h: h["a"].update(dtype="F4", shape=[4, 48]), "a is F4, not one of F64"),
    "dtype of no text": (lambda h: h["a"].update(dtype=["F32"]), "sequence, expected string or map"),
    "behind the end": (lambda h: h["a"].update(data_offsets=[8, 104]), "invalid offset for tensor `a`"),
    "turned around": (lambda h: h["a"].update(data_offsets=[96, 0]), "invalid offset for tensor `a`"),
    "too many dims": (lambda h: h["a"].update(shape=[1] * 100 + [4, 6]), "a has 102 dims, [1, 1, 1, 1] first"),
    "a shape that is too large for torch": (
        lambda h: h.update({"a": {**h["a"], "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "b": h["a"]}),
        "a has 3 dims",
    ),
    "overlapping": (lambda h: h.update(z=h["a"]), "invalid offset for tensor"),
    "a hole": (lambda h: h.pop("a"), "file not fully covered"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(saved: Path, case: str) -> None:
    change, message = HEADERS[case]
    path = file_of(saved, "a")
    edit_header(path, change)
    refuses(saved, message, *[] if message.endswith(" here") else [str(path)])


def write_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "\xff", "9" * 5000])
def test_headers_that_are_none(saved: Path, text: str) -> None:
    path = file_of(saved, "a")
    write_header(path, text.encode("latin1"))
    refuses(saved, str(path), "cannot be read")


@pytest.mark.parametrize(
    "change", [{"dtype": "F4", "shape": [4, 48]}, {"shape": [1] * 100 + [4, 6]}, {"shape": "a"}, None]
)
def test_a_traceback_does_not_steer_a_terminal(saved: Path, change: dict[str, Any] | None) -> None:
    path, name = file_of(saved, "a"), "\x1b[2J"
    if change is None:
        entry = '"\\u001b[2J": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
        write_header(path, f"{{{entry}, {entry}}}".encode())
    else:
        edit_header(path, lambda header: header.update({name: {**header.pop("a"), **change}}))
    with pytest.raises(StateError) as caught:
        SafetensorsFile(path)
    assert "\x1b" not in "".join(traceback.format_exception(caught.value))


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Allow this many seconds of this process's own time, whatever else the machine does."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < seconds


def test_names_and_keys_that_are_there_twice(saved: Path) -> None:
    """The package takes the last of them, other readers the first."""
    path, empty = file_of(saved, "a"), '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    write_header(path, f'{{"b": {empty}, "a": {empty}, "a": {empty}}}'.encode())
    refuses(saved, str(path), "it has a twice")
    write_header(path, f'{{"a": {empty[:-1]}, "shape": [1]}}}}'.encode())
    refuses(saved, str(path), "cannot be read")


@pytest.mark.parametrize("kind", ["header", "manifest", "index"])
def test_many_names(saved: Path, kind: str) -> None:
    """The time is linear. The last of 30,000 names is there twice."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' if kind == "header" else '"x"'
    table = ",".join(f'"{name}":{entry}' for name in [*range(30_000), 29_999])
    read: Callable[[], object] = functools.partial(SafetensorsReader, saved)
    if kind == "header":
        path = file_of(saved, "a")
        write_header(path, f"{{{table}}}".encode())
        read = functools.partial(SafetensorsFile, path)
    elif kind == "manifest":
        (saved / MANIFEST).write_text(f'{{"tensors":{{{table}}}}}')
        read = functools.partial(read_manifest, saved)
    else:
        (saved / INDEX).write_text(f'{{"weight_map":{{{table}}}}}')
    with within(2), pytest.raises(StateError, match="it has 29999 twice"):
        read()


def test_an_index_of_too_many_files(saved: Path) -> None:
    edit_json(saved / INDEX, lambda index: index["weight_map"].update({str(i): f"f{i}" for i in range(300_000)}))
    with within(4):
        refuses(saved, str(saved / INDEX), "300003 files, but the limit is 10000")


def test_an_index_of_many_tensors_in_a_file(saved: Path) -> None:
    """Each file is looked at once, however many names lead to it."""
    name = file_of(saved, "a").name
    edit_json(saved / INDEX, lambda index: index["weight_map"].update({str(i): name for i in range(300_000)}))
    with within(4):
        assert len(SafetensorsReader(saved)) == 300_003


INDICES: list[Any] = [(), (1,), (slice(1, 4),), (slice(0, 5), slice(1, 3)), (2, slice(0, 3)), (slice(2, 2),), (1, 2, 3)]


@pytest.mark.parametrize("piece", [4, 48, 2**21])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("home", ["", "memory://test_slices"])
def test_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, index: Any, piece: int) -> None:
    """Slices are in one piece and in several, unchanged and cast, in their order and transposed."""
    monkeypatch.setattr(files, "_PIECE_BYTES", piece)
    whole = torch.arange(60.0).view(5, 3, 4) / 7
    save_tensors({"before": torch.ones(3), "w": whole}, home or tmp_path / "w", overwrite=True)
    stored = SafetensorsReader(home or tmp_path / "w")["w"]
    assert_bitwise_equal("slice", stored[index], whole[index])
    assert_bitwise_equal("chunks", torch.cat([chunk.clone() for chunk in stored.chunks()]), whole.view(-1))
    for casts in ((), (torch.bfloat16, torch.float64)):
        expected = whole[index]
        for dtype in casts:
            expected = expected.to(dtype)
        transposed = torch.zeros(expected.shape[::-1], dtype=expected.dtype)
        for target in (torch.zeros_like(expected), transposed.permute([*reversed(range(expected.dim()))])):
            stored.copy_to(index, target, casts)
            assert_bitwise_equal("copy", target, expected)


def test_truncated_while_it_is_read(saved: Path) -> None:
    """If the file was mapped into memory, that would end the process."""
    path = file_of(saved, "a")
    stored = SafetensorsFile(path)["a"]
    os.truncate(path, 0)
    with pytest.raises(StateError, match=rf"{path}: cannot be read \(it ends too early\)"):
        stored[()]


def test_names_missing_and_extra(saved: Path) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items() if name != "c"}
    with pytest.raises(StateError, match="1 unexpected in the files: c"):
        load_tensors(targets, saved)
    with pytest.raises(StateError, match="1 missing in the files: d"):
        load_tensors({**targets, "c": torch.zeros(5, 2), "d": torch.zeros(1)}, saved)
    assert not any(tensor.any() for tensor in targets.values())
    edit_json(saved / INDEX, lambda index: index["weight_map"].pop("c"))
    targets = {name: tensor for name, tensor in targets.items() if name != "c"}
    with pytest.raises(StateError, match="lacks c, which the manifest has"):
        load_tensors(targets, saved)


# Index and manifest


OUTSIDE = ["../b.safetensors", "/etc/passwd", "x/../../b.safetensors", "..\\b", "C:\\b", "C:b", "\\\\host\\b", "b\0c"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leaves_its_directory(saved: Path, name: str) -> None:
    save_file(make_tensors(), saved.parent / "b.safetensors")
    edit_json(saved / INDEX, lambda index: index["weight_map"].update(b=name))
    refuses(saved, INDEX, repr(name), "outside of the directory")


@pytest.mark.parametrize("target", ["../b.safetensors", "/etc/passwd", "loop"])
def test_links_that_leave_the_directory(saved: Path, target: str) -> None:
    save_file(make_tensors(), saved.parent / "b.safetensors")
    (saved / "loop").symlink_to(target)
    edit_json(saved / INDEX, lambda index: index["weight_map"].update(b="loop"))
    refuses(saved, "'loop'")


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_tables_that_are_links_out_of_the_directory(saved: Path, name: str) -> None:
    (saved / name).rename(saved.parent / "elsewhere.json")
    (saved / name).symlink_to("../elsewhere.json")
    refuses(saved, f"the file {name!r} is a link out of the directory")


def test_links_within_the_directory_and_in_the_cache_of_the_hub(saved: Path) -> None:
    revision, blobs = saved.parent / "repo" / "snapshots" / "abc", saved.parent / "repo" / "blobs"
    shutil.copytree(saved, revision)
    blobs.mkdir()
    for number, path in enumerate(sorted(revision.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..", "..", "blobs", str(number)))
    assert len(dict(read_tensors(revision))) == 3
    (saved / "again.safetensors").symlink_to(file_of(saved, "b").name)
    edit_json(saved / INDEX, lambda index: index["weight_map"].update(b="again.safetensors"))
    assert len(dict(read_tensors(saved))) == 3
    (saved.parent / "link").symlink_to(saved)
    assert len(dict(read_tensors(saved.parent / "link"))) == 3


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "x", "a": "y"}}', "[" * 100_000, "\xff"]
)
def test_bad_index(saved: Path, text: str) -> None:
    (saved / INDEX).write_bytes(text.encode("latin1"))
    refuses(saved, str(saved / INDEX), "is not an index")


PAIRS = '{"format": "lightning_d9d manifest 1", "tensors": [[1, {}], ["q", {}]]}'


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": "lightning_d9d manifest 1"}', '{"format": 1}', PAIRS, "\xff"]
)
def test_bad_manifest(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_bytes(text.encode("latin1"))
    refuses(saved, str(saved / MANIFEST), "is not a manifest")


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.full((2,), float(i)) for i in range(10_000)}
    save_tensors(tensors, tmp_path / "many", max_shard_bytes=8000)
    assert len([*(tmp_path / "many").glob("*.safetensors")]) == 10
    found = {name: torch.zeros(2) for name in tensors}
    load_tensors(found, tmp_path / "many")
    assert torch.equal(torch.stack([*found.values()]), torch.stack([*tensors.values()]))
    edit_json(
        tmp_path / "many" / INDEX, lambda index: index["weight_map"].update(extra="model-00010-of-00010.safetensors")
    )
    with pytest.raises(StateError, match="lacks extra, which the index puts there"):
        load_tensors(found, tmp_path / "many")


# Code


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of a file was run",)


def test_a_pickle_is_no_file_of_weights(saved: Path) -> None:
    for path in (file_of(saved, "a"), saved / INDEX, saved / MANIFEST):
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps({"a": Malicious()}))
        refuses(saved, str(path))
        path.write_bytes(kept)
    torch.save({"a": Malicious()}, file_of(saved, "a"))
    refuses(saved, str(file_of(saved, "a")), "cannot be read")


# Writing


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Make the disk seem full from some size on: writing fails with the system's own error."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with limited(resource.RLIMIT_FSIZE, num_bytes):
            yield
    finally:
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("num_bytes", [0, 300, 2**16])
def test_no_room_left(saved: Path, num_bytes: int) -> None:
    large = {"a": torch.randn(2**15)}
    message = r"saved': .*model\.safetensors(, at a)?: File too large; free space, raise the limit"
    with largest_file(num_bytes), pytest.raises(StateError, match=message):
        save_tensors(large, saved, overwrite=True)
    assert os.listdir(saved.parent) == ["saved"]
    for name, tensor in read_tensors(saved):
        assert_bitwise_equal(name, tensor, make_tensors()[name])


@contextlib.contextmanager
def as_user() -> Iterator[None]:
    """Root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_that_may_only_be_read(saved: Path) -> None:
    saved.parent.chmod(0o555)
    try:
        with (
            as_user(),
            pytest.raises(StateError, match=r"ermission denied.*; give this user permission to write there"),
        ):
            save_tensors(make_tensors(), saved.parent / "new")
    finally:
        saved.parent.chmod(0o755)
    assert os.listdir(saved.parent) == ["saved"]


# Any bytes


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens to a file: a byte replaced, inserted or removed, at a fraction of its length."""
    kinds = st.sampled_from(["replace", "insert", "remove"])
    place = st.one_of(st.integers(0, 40), st.integers(41, 2**16), st.integers(-40, -1))
    return draw(st.lists(st.tuples(kinds, place, st.integers(0, 255)), min_size=1, max_size=4))


def mutate(content: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    mutated = bytearray(content)
    for kind, place, value in changes:
        place %= max(len(mutated), 1)
        if kind == "insert":
            mutated.insert(place, value)
        elif kind == "replace" and mutated:
            mutated[place] = value
        elif mutated:
            del mutated[place]
    return bytes(mutated)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "saved"
    save_tensors(make_tensors(), directory, max_shard_bytes=100)
    return directory


@given(changes=mutations(), which=st.integers(0, 3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mutation_of_an_export_is_refused_or_harmless(
    exported: Path, changes: list[tuple[str, int, int]], which: int
) -> None:
    path = sorted(exported.iterdir())[which]
    kept = path.read_bytes()
    path.write_bytes(mutate(kept, changes))
    targets = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    try:
        load_tensors(targets, exported)
    except StateError:
        assert not any(tensor.any() for tensor in targets.values())
    else:
        for name, tensor in make_tensors().items():
            assert_bitwise_equal(name, targets[name], tensor)
    finally:
        path.write_bytes(kept)


@given(content=st.binary(max_size=200), length=st.integers(0, 300), honest=st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_or_read(exported: Path, content: bytes, length: int, honest: bool) -> None:
    path = exported.parent / "any.safetensors"
    path.write_bytes((len(content) if honest else length).to_bytes(8, "little") + content)
    with contextlib.suppress(StateError):
        file = SafetensorsFile(path)
        for stored in map(file.__getitem__, file.entries):
            stored[()].clone()
