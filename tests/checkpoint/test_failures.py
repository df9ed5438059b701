"""Saves that cannot be finished and files that cannot be read: an error on all ranks, at once, and nothing changed."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import resource
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_d9d import StateError
from lightning_d9d.checkpoint import directory, open_directory, save_directory
from lightning_d9d.checkpoint import tensors as tensor_files
from tests.harness.ranks import RankContext


def save(path: Path, number: int, size: int = 300, values: dict[str, Any] | None = None) -> None:
    """Both ranks have something to write."""
    tensors = {name: torch.full((size,), float(number)) for name in "abcd"}
    save_directory(path, tensors, {"number": number, **(values or {})})


def loaded(path: Path) -> int:
    checkpoint = open_directory(path)
    target = torch.zeros(300)
    checkpoint.load({"a": target}, strict=False)
    number = checkpoint.values["number"]
    assert target.tolist() == 300 * [number]
    return number


def data_folder(path: Path) -> Path:
    (found,) = path.glob("data-*")
    return found


# Saves that fail


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("former", [True, False])
def test_disk_full(rank: RankContext, full: tuple[int, ...], former: bool) -> None:
    path = rank.tmp_dir / "checkpoint"
    if former:
        save(path, 1)
    before = sorted(rank.tmp_dir.rglob("*"))
    rank.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        who = "ranks 0, 1" if len(full) == 2 else f"rank {full[0]}"
        with pytest.raises(StateError, match=f"cannot be saved: {who}: .*File too large.*free space") as caught:
            save(path, 2, size=200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(path) in str(caught.value)
    assert len(set(rank.all_gather_object(str(caught.value)))) == 1
    assert sorted(rank.tmp_dir.rglob("*")) == before
    rank.barrier()
    if former:
        assert loaded(path) == 1
    save(path, 3)
    assert loaded(path) == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", ["value", "named value", "tensor"])
def test_what_cannot_be_loaded_is_not_saved(rank: RankContext, bad: str) -> None:
    path = rank.tmp_dir / "checkpoint"
    save(path, 1)
    wrong = Path("a") if rank.rank == (0 if bad == "value" else 1) else 1
    tensors: dict[str, Any] = {"a": wrong if bad == "tensor" and rank.rank else torch.ones(2)}
    with pytest.raises(StateError, match=r"rank \d: .*(wrong' holds pathlib.*Path|a is not a tensor but PosixPath)"):
        save_directory(path, tensors, {"wrong" if bad == "value" else "fine": wrong}, named_values={"wrong": wrong})
    assert loaded(path) == 1


@pytest.mark.ranks(2)
def test_ranks_that_do_not_see_each_others_files(rank: RankContext) -> None:
    path, elsewhere = rank.tmp_dir / "checkpoint", rank.tmp_dir / "other node"
    real = tensor_files.write_tensors
    if rank.rank == 1:
        tensor_files.write_tensors = lambda data, *rest: real(elsewhere / data.name, *rest)
    try:
        with pytest.raises(StateError, match=r"rank 0: .*__1_0.distcp' is missing: .*file system that all ranks see"):
            save(path, 1)
    finally:
        tensor_files.write_tensors = real
    rank.barrier()
    assert os.listdir(rank.tmp_dir) == ["other node"]


@pytest.mark.ranks(2)
def test_ranks_that_see_different_checkpoints(rank: RankContext) -> None:
    for number in (0, 1):
        save(rank.tmp_dir / str(number), number)
    with pytest.raises(StateError, match="ranks see different checkpoints"):
        open_directory(rank.tmp_dir / str(rank.rank))
    with pytest.raises(StateError, match=r"cannot be read: rank 1: the path does not exist"):
        open_directory(rank.tmp_dir / ("0" if rank.rank == 0 else "none"))


@pytest.mark.ranks(2, record=False)
def test_another_job_saves_between_the_reads_of_two_ranks(rank: RankContext) -> None:
    path, other = rank.tmp_dir / "last.ckpt", rank.tmp_dir / "other"
    save(path, 1)
    save(other, 2)
    real_values, real_metadata = directory._read_values, directory.read_metadata
    has_read = torch.zeros(1)

    def values_after_the_save(path: Path) -> dict[str, Any]:
        directory._read_values = real_values
        dist.recv(has_read, src=0)
        os.rename(data_folder(other), path / data_folder(other).name)
        os.replace(other / "values.pt", path / "values.pt")
        return real_values(path)

    def metadata_before_the_save(*arguments: Any) -> Any:
        directory.read_metadata = real_metadata
        metadata = real_metadata(*arguments)
        dist.send(has_read, dst=1)
        return metadata

    if rank.rank == 1:
        directory._read_values = values_after_the_save
    else:
        directory.read_metadata = metadata_before_the_save
    assert loaded(path) == 2


def forked(action: Callable[[], None]) -> str:
    """The `StateError` that a process without rights of its own meets."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)
            action()
        except StateError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", 1)
    for folder in (tmp_path, tmp_path / "checkpoint"):
        folder.chmod(0o555)
    try:
        for name in ("checkpoint", "new"):
            text = forked(lambda name=name: save(tmp_path / name, 2))
            assert "Permission denied" in text
            assert "give this user permission to write there" in text
    finally:
        for folder in (tmp_path, tmp_path / "checkpoint"):
            folder.chmod(0o755)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert loaded(tmp_path / "checkpoint") == 1


def test_paths_where_nothing_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "of others").mkdir(parents=True)
    for name, text in {
        "x" * 256: "File name too long.*give a shorter name",
        "file/checkpoint": "Not a directory|File exists",
        "folder": "it is a directory with other files; remove it",
    }.items():
        with pytest.raises(StateError, match=f"cannot be saved: .*{text}"):
            save(tmp_path / name, 1)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# Files that cannot be read


def flip(file: Path, at: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(at)] ^= 8
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def forge(path: Path, content: bytes, values: dict[str, Any] | None = None) -> None:
    """Other metadata, with a hash that fits."""
    (data_folder(path) / ".metadata").write_bytes(content)
    packed = torch.load(path / "values.pt", weights_only=True)
    torch.save({**packed, "metadata": hashlib.sha256(content).hexdigest(), **(values or {})}, path / "values.pt")


def change_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def corrupt(path: Path) -> None:
        metadata = pickle.loads((data_folder(path) / ".metadata").read_bytes())
        change(metadata)
        forge(path, pickle.dumps(metadata))

    return corrupt


def point_outside(path: Path) -> None:
    shutil.copy(data_folder(path) / "__0_0.distcp", path.parent / "__0_0.distcp")
    change_metadata(lambda m: [setattr(s, "relative_path", "../../__0_0.distcp") for s in m.storage_data.values()])(
        path
    )


def link_outside(path: Path) -> None:
    file = data_folder(path) / "__0_0.distcp"
    file.rename(path.parent / file.name)
    file.symlink_to(path.parent / file.name)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path / "executed"),)


def malicious_values(path: Path) -> None:
    torch.save({"format": "lightning_d9d checkpoint 1", "values": {"a": Malicious(path)}}, path / "values.pt")


def values_of(path: Path, **changes: Any) -> None:
    torch.save({**torch.load(path / "values.pt", weights_only=True), **changes}, path / "values.pt")


CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "the path does not exist"),
    "a file": (
        lambda p: (shutil.rmtree(p), p.write_text("a")),
        r"values.pt' is missing: the checkpoint is incomplete or not one of this",
    ),
    "no values": (
        lambda p: (p / "values.pt").unlink(),
        r"values.pt' is missing: the checkpoint is incomplete or not one of this",
    ),
    "values truncated": (lambda p: truncate(p / "values.pt"), "values.pt' is damaged, truncated or foreign"),
    "values empty": (lambda p: os.truncate(p / "values.pt", 0), "values.pt' is damaged, truncated or foreign"),
    "values flipped": (lambda p: flip(p / "values.pt", b"number"), "values.pt' is damaged;"),
    "values of others": (lambda p: torch.save({"a": 1}, p / "values.pt"), "values.pt' is not of this version"),
    "folder outside": (lambda p: values_of(p, data="../data"), "values.pt' does not name a folder of tensors"),
    "malicious values": (malicious_values, "values.pt' is damaged, truncated or foreign"),
    "no tensors": (lambda p: shutil.rmtree(data_folder(p)), ".metadata' is missing"),
    "no metadata": (lambda p: (data_folder(p) / ".metadata").unlink(), ".metadata' is missing"),
    "metadata truncated": (lambda p: truncate(data_folder(p) / ".metadata"), ".metadata' is damaged, truncated or"),
    "metadata flipped": (
        lambda p: flip(data_folder(p) / ".metadata", b"float32"),
        ".metadata' is damaged, truncated or another",
    ),
    "malicious metadata": (
        lambda p: forge(p, pickle.dumps(Malicious(p))),
        "names posix.mkdir, which metadata of tensors do not need",
    ),
    "nested malicious metadata": (
        change_metadata(lambda m: setattr(m, "planner_data", Malicious(Path("/nowhere")))),
        "names posix.mkdir, which metadata of tensors do not need",
    ),
    "metadata of other things": (
        lambda p: forge(p, pickle.dumps([1])),
        ".metadata' has something else in place of a Meta",
    ),
    "metadata no pickle": (lambda p: forge(p, b"a"), ".metadata' is not a pickle of plain values"),
    "bytes in metadata": (
        change_metadata(lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata())),
        "names torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    ),
    "chunk missing": (change_metadata(lambda m: m.state_dict_metadata["a"].chunks.clear()), "is inconsistent at 'a'"),
    "place missing": (
        change_metadata(lambda m: m.storage_data.clear()),
        r".metadata' has 0 places for [1-4] pieces or more",
    ),
    "file outside": (point_outside, "names the file '../../__0_0.distcp'"),
    "link outside": (link_outside, "__0_0.distcp' is missing"),
    "no file": (lambda p: (data_folder(p) / "__1_0.distcp").unlink(), "__1_0.distcp' is missing"),
    "file truncated": (lambda p: truncate(data_folder(p) / "__1_0.distcp"), r"__1_0.distcp' is truncated \(\d+ of \d+"),
}


@pytest.mark.ranks(2)
def test_damaged_and_foreign_checkpoints(rank: RankContext) -> None:
    save(rank.tmp_dir / "good", 1)
    for case, (corrupt, text) in CORRUPTIONS.items():
        path = rank.tmp_dir / case
        if rank.rank == 0:
            shutil.copytree(rank.tmp_dir / "good", path)
            corrupt(path)
        rank.barrier()
        print(case)
        with pytest.raises(StateError, match=text) as caught:
            open_directory(path)
        assert str(path) in str(caught.value)
        assert "cannot be read: rank" in str(caught.value)
        assert not list(rank.tmp_dir.rglob("executed")), case
        rank.barrier()


@pytest.mark.ranks(2)
def test_flipped_bits_in_the_tensors(rank: RankContext) -> None:
    """Wherever they are, file and tensor are named on all ranks, and no tensor has changed."""
    path = rank.tmp_dir / "checkpoint"
    save(path, 1)
    files = sorted(data_folder(path).glob("*.distcp"))
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        for place in range(0, len(content), len(content) // 12):
            rank.barrier()
            if rank.rank == 0:
                file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
            rank.barrier()
            mine = {name: torch.zeros(300) for name in ("ab" if rank.rank else "abcd")}
            with pytest.raises(
                StateError, match=rf"cannot be loaded: .*{file.name}' is damaged at the place of [a-d]:"
            ):
                open_directory(path).load(mine)
            assert not any(tensor.any() for tensor in mine.values())
            rank.barrier()
            if rank.rank == 0:
                file.write_bytes(content)
    rank.barrier()
    if rank.rank == 0:
        files[0].write_bytes(bytes(files[0].stat().st_size))
    rank.barrier()
    with pytest.raises(StateError, match="is damaged at the place of a"):
        open_directory(path, alone=True).read("a")


@pytest.mark.ranks(2)
def test_flipped_bits_in_what_is_loaded_later(rank: RankContext) -> None:
    """Whichever rank has to look at a piece, all ranks hear of it before any tensor has changed."""
    path = rank.tmp_dir / "checkpoint"
    save_directory(path, {name: torch.full((3,), i + 2.0) for i, name in enumerate(["model", "b.0", "b.1", "b.2"])}, {})
    files = sorted(data_folder(path).glob("*.distcp"))
    contents, looked_at, mine = [file.read_bytes() for file in files], [], torch.zeros(3)

    def put_back() -> None:
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)

    for number in range(3):
        rank.barrier()
        if rank.rank == 0:
            put_back()
            part = torch.full((3,), number + 3.0).numpy().tobytes()
            flip(next(file for file in files if part in file.read_bytes()), part)
        rank.barrier()
        with pytest.raises(StateError, match=rf"rank \d: .*damaged at the place of b.{number}:") as caught:
            open_directory(path).load({"model": mine}, strict=False, later="b.")
        looked_at.append(str(caught.value).split("rank ")[1][0])
        assert not mine.any()
    assert set(looked_at) == {"0", "1"}
    rank.barrier()
    if rank.rank == 0:
        put_back()
    rank.barrier()
    checkpoint = open_directory(path)
    checkpoint.load({"model": mine}, strict=False, later="b.")
    checkpoint.load({"b.1": mine}, strict=False)
    assert mine.tolist() == [4, 4, 4]


@pytest.mark.ranks(2)
def test_code_among_the_tensors_does_not_run(rank: RankContext) -> None:
    """The checksum of the file fits."""
    path = rank.tmp_dir / "checkpoint"
    save(path, 1)
    if rank.rank == 0:
        file = data_folder(path) / "__1_0.distcp"
        buffer = io.BytesIO()
        torch.save(Malicious(path), buffer)
        padded = buffer.getvalue().ljust(file.stat().st_size, b"\0")
        file.write_bytes(padded)
        sums = torch.load(path / "values.pt", weights_only=True)["checksums"]
        ends = [*sorted(sums[file.name])[1:], len(padded)]
        sums[file.name] = {a: zlib.crc32(padded[a:b]) for a, b in zip(sorted(sums[file.name]), ends, strict=True)}
        values_of(path, checksums=sums)
    rank.barrier()
    checkpoint = open_directory(path)
    mine = {"abcd"[rank.rank]: torch.zeros(300)}
    with pytest.raises(StateError, match=r"cannot be loaded: rank 1: .*__1_0.distcp', where it has [a-d], is an arch"):
        checkpoint.load(mine, strict=False)
    assert not (path / "executed").exists()
    assert loaded_after_saving_again(path) == 2


def loaded_after_saving_again(path: Path) -> int:
    save(path, 2)
    return loaded(path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["values truncated", "values flipped", "no tensors", "malicious metadata"])
def test_saving_over_a_damaged_checkpoint(rank: RankContext, case: str) -> None:
    path = rank.tmp_dir / "checkpoint"
    save(path, 1)
    if rank.rank == 0:
        CORRUPTIONS[case][0](path)
    rank.barrier()
    assert loaded_after_saving_again(path) == 2
    assert len(os.listdir(path)) == 2
