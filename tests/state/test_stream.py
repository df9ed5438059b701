"""Directories to tensors, modules to directories, directories to directories, through mappers."""

from __future__ import annotations

import errno
import json
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lightning_d9d.state.format as files
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.state import (
    Cast,
    Checks,
    Concatenate,
    Distribute,
    Identity,
    LocalShard,
    MappedBox,
    Parallel,
    Prefix,
    Rename,
    SafetensorsReader,
    Sequential,
    Split,
    fill_shards,
    load_tensors,
    read_tensors,
    reader,
    save_tensors,
    threads,
    whole_box,
    writer,
)
from lightning_d9d.state.boxes import Readable
from lightning_d9d.state.format import SafetensorsFile
from lightning_d9d.state.places import UrlPath
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

NUM_LAYERS = 2
MERGE = Parallel(Prefix(Concatenate(["q", "k", "v"], "qkv"), f"{i}.") for i in range(NUM_LAYERS))


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 5), "k": (2, 5), "v": (2, 5), "norm": (5,)}
    return {
        f"{i}.{name}": torch.randn(shape, generator=generator)
        for i in range(NUM_LAYERS)
        for name, shape in shapes.items()
    }


def merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return MERGE.with_rest(tensors).apply(tensors)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise_equal(name, actual[name], tensor)


@pytest.fixture(params=["one file", "many files"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save_tensors(make_tensors(), tmp_path / "saved", max_shard_bytes=10**9 if request.param == "one file" else 100)
    return tmp_path / "saved"


def test_read_and_load_what_was_saved(saved: Path) -> None:
    assert_same(dict(read_tensors(saved)), make_tensors())
    found = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    load_tensors(found, saved)
    assert_same(found, make_tensors())


def test_a_mapper_on_the_way_in_and_on_the_way_out(saved: Path, tmp_path: Path) -> None:
    whole = MERGE.with_rest(make_tensors())
    assert_same(dict(read_tensors(saved, whole)), merged(make_tensors()))
    assert_same(dict(read_tensors(saved, MERGE)), {f"{i}.qkv": merged(make_tensors())[f"{i}.qkv"] for i in range(2)})
    save_tensors(merged(make_tensors()), tmp_path / "back", whole.inverse(make_tensors()))
    assert_same(dict(read_tensors(tmp_path / "back")), make_tensors())


def test_a_directory_is_rewritten(saved: Path, tmp_path: Path) -> None:
    mapper = MERGE.with_rest(make_tensors())
    save_tensors(SafetensorsReader(saved), tmp_path / "new", mapper, dtype=torch.bfloat16, files={"note": b"text"})
    expected = {name: tensor.bfloat16() for name, tensor in merged(make_tensors()).items()}
    assert_same(load_file(tmp_path / "new" / "model.safetensors"), expected)
    assert (tmp_path / "new" / "note").read_bytes() == b"text"


def test_a_single_file_of_others_has_no_manifest(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(3, 2),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "weights.safetensors")
    assert_same(dict(read_tensors(tmp_path / "weights.safetensors")), tensors)
    save_tensors(tensors, tmp_path / "ours", dtype=torch.float64)
    doubled = {"w": tensors["w"].double(), "none": tensors["none"].double()}
    assert_same(dict(read_tensors(tmp_path / "ours")), {**tensors, **doubled})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_modules_with_buffers_and_tied_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, other = Tied(), Tied()
    module.norm(torch.randn(5, 3))
    save_tensors(module, tmp_path / "all")
    load_tensors(other, tmp_path / "all")
    assert_same(other.state_dict(), module.state_dict())
    once = {name: tensor for name, tensor in module.state_dict().items() if name != "head.weight"}
    save_tensors(once, tmp_path / "once")
    third = Tied()
    load_tensors(third, tmp_path / "once")
    assert_same(third.state_dict(), module.state_dict())


def test_a_tensor_with_two_names_is_filled_under_the_first(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(3), "b": torch.full((3,), 2.0)}, tmp_path / "two")
    same = torch.zeros(3)
    load_tensors({"b": same, "a": same}, tmp_path / "two")
    assert same.tolist() == [2, 2, 2]


def test_a_state_dict_of_tied_weights_is_filled_once(tmp_path: Path) -> None:
    """Its tensors are different objects with the same memory: two threads would write to it, each its own numbers."""
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    module = nn.ModuleDict({"first": first, "last": last})
    save_tensors(module, tmp_path / "untied")
    expected = first.weight.detach().clone()
    last.weight = first.weight
    load_tensors(module.state_dict(), tmp_path / "untied")
    assert_bitwise_equal("first.weight", first.weight.detach(), expected)
    save_tensors({"last.weight": torch.ones(4, 4)}, tmp_path / "one")
    load_tensors(module.state_dict(), tmp_path / "one")
    assert first.weight.sum() == 16


def test_large_tensors_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, of eight that are under way on a machine with as many processors."""
    monkeypatch.setattr(reader, "_LARGE_BYTES", 10)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_MIN_BUNDLE", 1)
    save_tensors({str(i): torch.full((4,), float(i)) for i in range(8)}, tmp_path / "eight")
    pair, three = threading.Barrier(2, timeout=60), threading.Barrier(3, timeout=0.5)

    class Waiting(MappedBox):
        def copy(self, source: Readable, target: Tensor) -> None:
            pair.wait()
            with suppress(threading.BrokenBarrierError):
                three.wait()
                pytest.fail("three at a time")
            super().copy(source, target)

    targets = {str(i): torch.zeros(4) for i in range(8)}
    part = Waiting((range(4),), "", (range(4),), (0,))
    SafetensorsReader(tmp_path / "eight").fill({name: [(part, target)] for name, target in targets.items()})
    assert_same(targets, {str(i): torch.full((4,), float(i)) for i in range(8)})


def test_only_what_both_have(saved: Path) -> None:
    wanted = {"0.norm": torch.zeros(5), "new": torch.zeros(2)}
    with pytest.raises(
        StateError, match=r"1 missing in the files: new\. 7 unexpected in the files: 0\.k; 0\.q; 0\.v; and"
    ):
        load_tensors(wanted, saved)
    assert not wanted["0.norm"].any()
    load_tensors(wanted, saved, strict=False)
    assert_same(wanted, {"0.norm": make_tensors()["0.norm"], "new": torch.zeros(2)})


def test_a_mapper_of_more_than_the_files_have(saved: Path) -> None:
    """Groups of the mapper that are complete are loaded."""
    mapper = Parallel([MERGE, Concatenate(["0.norm", "gone"], "norms")])
    wanted = {"0.qkv": torch.zeros(10, 5), "norms": torch.zeros(10)}
    with pytest.raises(StateError, match="gone: this input of the mapper is missing"):
        load_tensors(wanted, saved, mapper)
    load_tensors(wanted, saved, mapper, strict=False)
    assert_same(wanted, {"0.qkv": merged(make_tensors())["0.qkv"], "norms": torch.zeros(10)})
    load_tensors(wanted, saved, Rename("gone", "norms"), strict=False)
    assert not wanted["norms"].any()


def test_casts_on_the_way_from_and_to_files(saved: Path, tmp_path: Path) -> None:
    names = [*make_tensors()]
    rounding = Sequential([Cast(names, torch.bfloat16), Cast(names, torch.float32)])
    rounded = {name: tensor.bfloat16().float() for name, tensor in make_tensors().items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    load_tensors(found, saved, rounding)
    assert_same(found, rounded)
    load_tensors(found, saved, Cast(names, torch.bfloat16))
    assert_same(found, rounded)
    save_tensors(make_tensors(), tmp_path / "new", rounding)
    assert_same(dict(read_tensors(tmp_path / "new")), rounded)


def test_quantized_weights_have_scales_that_are_not_known(tmp_path: Path) -> None:
    quantized = {"w": torch.tensor([300.0, 1.0]).to(torch.float8_e4m3fn)}
    save_file(quantized, tmp_path / "w.safetensors")
    target = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(
        StateError, match=r"w is torch\.float8_e4m3fn in the files and torch\.bfloat16 here; .*unquantized"
    ):
        load_tensors({"w": target}, tmp_path / "w.safetensors")
    assert not target.any()
    with pytest.raises(StateError, match=r"w is torch\.float8_e4m3fn .*torch\.bfloat16.*unquantized"):
        save_tensors(quantized, tmp_path / "new", dtype=torch.bfloat16)
    found = {"w": torch.zeros(2).to(torch.float8_e4m3fn)}
    load_tensors(found, tmp_path / "w.safetensors")
    assert_same({"w": found["w"].float()}, {"w": quantized["w"].float()})


def test_urls(tmp_path: Path) -> None:
    url = "memory://test_urls/model"
    save_tensors(make_tensors(), url, max_shard_bytes=100)
    assert_same(dict(read_tensors(url, MERGE.with_rest(make_tensors()))), merged(make_tensors()))
    found = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    load_tensors(found, url, check_finite=True)
    assert_same(found, make_tensors())
    with pytest.raises(StateError, match="overwrite=True"):
        save_tensors(make_tensors(), url)
    save_tensors(make_tensors(1), url, overwrite=True)
    assert_same(dict(read_tensors(url)), make_tensors(1))
    assert len(fsspec.filesystem("memory").ls("test_urls/model")) == 2  # one file and the manifest
    save_tensors(make_tensors(), f"file://{tmp_path}/local")
    assert_same(dict(read_tensors(f"file://{tmp_path}/local/model.safetensors")), make_tensors())
    with pytest.raises(StateError, match="memory://test_urls/none has neither"):
        list(read_tensors("memory://test_urls/none"))


@pytest.mark.parametrize("former", ["", "memory://test_read_and_replaced/", "file"])
def test_what_is_read_is_not_replaced(tmp_path: Path, former: str) -> None:
    home = f"{tmp_path}/" if not former else f"file://{tmp_path}/" if former == "file" else former
    save_tensors(make_tensors(), f"{home}model")
    for target in (f"{home}model", f"{home}model/new", home):
        with pytest.raises(StateError, match=r"cannot be saved to .* the target .*, which is read; choose another"):
            save_tensors(SafetensorsReader(f"{home}model"), target, overwrite=True)
    with pytest.raises(StateError, match="contains"):
        save_tensors(SafetensorsReader(f"{home}model/model.safetensors"), f"{home}model", overwrite=True)
    assert_same(dict(read_tensors(f"{home}model")), make_tensors())
    save_tensors(SafetensorsReader(f"{home}model"), f"{home}other", overwrite=True)
    assert_same(dict(read_tensors(f"{home}other")), make_tensors())


def test_checks_fetch_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not hold all of a tensor at a time either."""
    url = "memory://test_checks/model"
    save_tensors({"w": torch.randn(100)}, url)
    reader = SafetensorsReader(url)
    stored, fetched, original = reader["w"], [], UrlPath.read_bytes

    def read_bytes(self: UrlPath, *bounds: int) -> bytes:
        fetched.extend([range(*bounds)] if self.name == files.WEIGHTS_FILE else [])  # the manifest is read, too
        return original(self, *bounds)

    monkeypatch.setattr(UrlPath, "read_bytes", read_bytes)
    monkeypatch.setattr(files, "_CHUNK_BYTES", 160)
    reader.verify(["w"], Checks(finite=True))
    assert [*map(len, fetched)] == [160, 160, 80]
    assert len({byte for each in fetched for byte in each}) == stored.num_bytes


class ClientError(Exception):
    """An error as packages for stores of objects have it, which is no `OSError`."""


@pytest.mark.parametrize("call", ["exists", "size", "cat_file"])
def test_errors_of_stores_name_the_file(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    url = f"memory://test_errors/{call}"
    save_tensors(make_tensors(), url)

    def fail(*_: object, **__: object) -> None:
        raise ClientError("no rights")

    monkeypatch.setattr(MemoryFileSystem, call, fail)
    with pytest.raises(StateError, match=rf"^{url}.*ClientError: no rights.*check .* the address, the rights"):
        next(read_tensors(url))
    monkeypatch.setattr(MemoryFileSystem, "open", fail)
    with pytest.raises(StateError, match=rf"{url}.*ClientError: no rights"):
        save_tensors(make_tensors(), url, overwrite=True)
    with pytest.raises(StateError, match=r"^none://a.*cannot be read .*Protocol not known"):
        next(read_tensors("none://a"))


def test_progress_is_shown_when_asked_for(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_tensors(make_tensors(1), saved)
    assert capsys.readouterr().err == ""
    load_tensors(make_tensors(1), saved, progress=True)
    save_tensors(make_tensors(1), tmp_path / "new", progress=True)
    shown = capsys.readouterr().err
    for what in ("checking", "reading", "writing"):
        assert what in shown
    assert "100%" in shown


def test_what_would_be_lost_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"0\.k; 0\.v; 0\.norm; and 4 more: the mapper does not take it"):
        save_tensors(make_tensors(), tmp_path / "new", Identity(["0.q"]))
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8"):
        save_tensors(make_tensors(), tmp_path / "new", dtype=torch.int8)
    with pytest.raises(StateError, match="complex64, which safetensors files do not support"):
        save_tensors({"c": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "new")
    with pytest.raises(StateError, match="nothing to write"):
        save_tensors({}, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_manifest(saved: Path) -> None:
    manifest = json.loads((saved / "model.safetensors.manifest.json").read_text())
    assert manifest["tensors"].keys() == make_tensors().keys()
    assert manifest["tensors"]["0.q"]["shape"] == [6, 5]
    assert manifest["tensors"]["0.q"]["dtype"] == "F32"
    assert len({each["crc32"] for each in manifest["tensors"].values()}) == len(manifest["tensors"])


def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is read of tensors from now on."""
    read, original = list[int](), SafetensorsFile.values

    def values(self: SafetensorsFile, begin: int, end: int, *rest: Any) -> Tensor:
        read.append(end - begin)
        return original(self, begin, end, *rest)

    monkeypatch.setattr(SafetensorsFile, "values", values)
    return read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("check_first", [True, False])
def test_checks_while_reading_read_once(
    saved: Path, check_first: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 16)  # a checksum goes on from piece to piece
    read, num_bytes = counted_bytes(monkeypatch), sum(tensor.nbytes for tensor in make_tensors().values())
    found = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in make_tensors(1).items()}
    load_tensors(found, saved, check_finite=True, check_first=check_first)
    assert_same(found, {name: tensor.to(dtype) for name, tensor in make_tensors().items()})
    assert sum(read) == num_bytes * (2 if check_first else 1)


def flip_a_bit(saved: Path, name: str) -> None:
    """Flip a bit of the last number of a tensor."""
    path = next(path for path in sorted(saved.glob("*.safetensors")) if name in SafetensorsFile(path).entries)
    content = bytearray(path.read_bytes())
    content[SafetensorsFile(path).entries[name].end - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("check_first", [True, False])
@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_flipped_bit_is_found_before_or_while_reading(saved: Path, check_first: bool, is_sliced: bool) -> None:
    """This also holds for the rest of a tensor of which a part is loaded."""
    flip_a_bit(saved, "0.q")
    whole = make_tensors()["0.q"]
    mapper = Split("0.q", {"first": 4, "last": len(whole) - 4}) if is_sliced else Identity(["0.q"])
    found = {"first" if is_sliced else "0.q": torch.zeros_like(whole[:4] if is_sliced else whole)}
    with pytest.raises(StateError, match=r"0\.q is damaged"):
        load_tensors(found, saved, mapper, strict=False, check_first=check_first)
    assert any(bool(tensor.any()) for tensor in found.values()) is not check_first


def test_numbers_that_are_not_finite_are_found_while_reading(tmp_path: Path) -> None:
    save_tensors({"w": torch.tensor([1.0, math.nan])}, tmp_path / "saved")
    with pytest.raises(StateError, match="w has numbers that are not finite"):
        load_tensors({"w": torch.zeros(2)}, tmp_path / "saved", check_finite=True, check_first=False)


# Ranks


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("check_first", [True, False])
def test_a_flipped_bit_in_slices_of_ranks(rank: RankContext, check_first: bool, dim: int, tmp_path: Path) -> None:
    """No rank reads the tensor whole, and all ranks hear of it."""
    save_tensors({"w": torch.ones(4, 6), "v": torch.ones(8)}, tmp_path / "saved")
    if rank.rank == 0:
        flip_a_bit(tmp_path / "saved", "w")
    rank.barrier()
    mesh = init_device_mesh(rank.device.type, (2,))
    target = distribute_tensor(torch.zeros(4, 6, device=rank.device), mesh, [Shard(dim)], src_data_rank=None)
    with pytest.raises(StateError, match="w is damaged"):
        load_tensors({"w": target}, tmp_path / "saved", strict=False, check_first=check_first)
    assert bool(target.to_local().any()) is not check_first


def cut(tensors: dict[str, Tensor], rank: RankContext) -> dict[str, Tensor]:
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return {
        name: distribute_tensor(tensor.to(rank.device), mesh, [Shard(tensor.ndim - 1)], src_data_rank=None)
        for name, tensor in tensors.items()
    }


@pytest.mark.ranks(2)
def test_shards_through_a_mapper(rank: RankContext, tmp_path: Path) -> None:
    """Merged weights that are cut over ranks, from and to files with single ones."""
    whole = MERGE.with_rest(make_tensors())
    save_tensors(
        cut(merged(make_tensors()), rank), tmp_path / "saved", whole.inverse(make_tensors()), max_shard_bytes=150
    )
    assert_same(dict(read_tensors(tmp_path / "saved")), make_tensors())
    found = cut(merged(make_tensors(1)), rank)
    load_tensors(found, tmp_path / "saved", whole)
    assert_same(found, merged(make_tensors()))
    mesh = init_device_mesh(rank.device.type, (2,))
    distributed = Sequential([MERGE, Distribute([f"{i}.qkv" for i in range(NUM_LAYERS)], mesh, [Shard(0)])])
    for name, tensor in read_tensors(tmp_path / "saved", distributed):
        assert isinstance(tensor, DTensor)
        assert_bitwise_equal(name, tensor, merged(make_tensors())[name])


@pytest.mark.ranks(2)
def test_ranks_with_different_names(rank: RankContext, tmp_path: Path) -> None:
    """Pipeline stages have different names. An error that only one rank finds is raised on both."""
    own = {name: tensor for name, tensor in make_tensors().items() if name.startswith(str(rank.rank))}
    save_tensors(own, tmp_path / "saved")
    assert_same(dict(read_tensors(tmp_path / "saved")), make_tensors())
    found = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
    load_tensors(found, tmp_path / "saved")
    assert_same(found, own)
    if rank.rank == 1:
        found["1.norm"] = torch.zeros(6)
    before = {name: tensor.clone() for name, tensor in found.items()}
    with pytest.raises(StateError, match=r"rank 1: 1\.norm has shape \[5\] in the files, but \[6\] here"):
        load_tensors(found, tmp_path / "saved")
    assert_same(found, before)


@pytest.mark.ranks(2)
def test_ranks_that_have_a_name_twice(rank: RankContext, tmp_path: Path) -> None:
    """A rank with the first and the last stage has tied weights twice."""
    save_tensors(make_tensors(), tmp_path / "saved")
    reader = SafetensorsReader(tmp_path / "saved")
    names = ["0.q", "0.q", "0.k", "0.k"]
    local = [(name, torch.zeros(reader.specs[name].shape, device=rank.device)) for name in names]
    shards = [(name, LocalShard(values, whole_box(values.shape))) for name, values in local]
    fill_shards(reader, Identity(names).plan(reader.specs), shards, Checks(), "not filled")
    for name, values in local:
        assert_bitwise_equal(name, values.cpu(), make_tensors()[name])


class Own(nn.Module):
    """A user's module with buffers and a tied parameter, of which nothing divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(11))
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight


def make_own() -> Own:
    torch.manual_seed(0)
    return Own()


OWN_LAYOUTS = {
    "shards": MeshConfig(data_parallel_shard=4),
    "copies of shards": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "copies": MeshConfig(data_parallel_replicate=4),
    "stages of shards": MeshConfig(pipeline_parallel=2, data_parallel_shard=2),
}


@pytest.fixture
def from_one_process(tmp_path: Path) -> Path:
    save_tensors(make_own(), tmp_path / "one", max_shard_bytes=300)
    return tmp_path / "one"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", OWN_LAYOUTS)
def test_all_ranks_write_what_one_process_does(rank: RankContext, layout: str, from_one_process: Path) -> None:
    """Byte for byte."""
    module, domains = make_own().to(rank.device), MeshDomains.build(OWN_LAYOUTS[layout], rank.device.type)
    for part in (*module.layers, module) if domains.sizes["dp_shard"] > 1 else ():
        fully_shard(part, mesh=domains.for_axes("dp_replicate", "dp_cp_shard"))
    tensors = module.state_dict(keep_vars=True)
    if layout == "stages of shards":  # layers by turns; the tied parameter is on both
        stage = rank.rank // 2
        names = [name for name in tensors if not name.startswith("layers.") or int(name.split(".")[1]) % 2 == stage]
        tensors = {name: tensors[name] for name in names}
    original, written = writer.write_safetensors, list[Path]()

    def note(path: Path, *rest: Any) -> dict[str, int]:
        written.append(path)
        return original(path, *rest)

    writer.write_safetensors = note
    try:
        save_tensors(tensors if "stages" in layout else module, rank.tmp_dir / "many", max_shard_bytes=300)
    finally:
        writer.write_safetensors = original
        domains.close()
    assert len(written) > 1
    for path in from_one_process.iterdir():
        assert (rank.tmp_dir / "many" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.ranks(2)
def test_one_rank_cannot_write(rank: RankContext, tmp_path: Path) -> None:
    """The other goes on sending and writing, all raise, and nothing is left."""

    def fail(path: Path, shapes: object, dtypes: object, values: Iterator[Tensor]) -> dict[str, int]:
        next(values)
        raise OSError(errno.ENOSPC, "No space left on device")

    original = writer.write_safetensors
    writer.write_safetensors = fail if rank.rank == 1 else original
    try:
        with pytest.raises(StateError, match=r"rank 1: .*No space left on device"):
            save_tensors(cut(make_tensors(), rank), tmp_path / "new", max_shard_bytes=100)
    finally:
        writer.write_safetensors = original
    rank.barrier()
    assert not [*tmp_path.iterdir()]
    rank.barrier()
    found = cut(make_tensors(), rank)
    save_tensors(found, tmp_path / "new", max_shard_bytes=100)
    assert_same(dict(read_tensors(tmp_path / "new")), make_tensors())


def test_reading_takes_what_is_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor after the other: the next is not read before it is asked for."""
    opened: list[str] = []
    original = SafetensorsReader.__getitem__
    stream: Iterator[tuple[str, Tensor]] = read_tensors(saved, verify=False)
    first, _ = next(stream)
    monkeypatch.setattr(
        SafetensorsReader, "__getitem__", lambda self, name: opened.append(name) or original(self, name)
    )
    name, _ = next(stream)
    assert set(opened) <= {name, first}


def test_names_alone(saved: Path) -> None:
    assert dict(read_tensors(saved, Rename("0.norm", "n"))).keys() == {"n"}
    with pytest.raises(StateError, match="gone: this input of the mapper is missing"):
        list(read_tensors(saved, Rename("gone", "n")))
