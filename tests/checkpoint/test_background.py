"""Saves in the background: of what was there when they began, complete or not at all, one copy at a time."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_d9d import StateError
from lightning_d9d.checkpoint import BackgroundSaver, open_directory, remove_directory
from lightning_d9d.checkpoint import tensors as tensor_files
from lightning_d9d.checkpoint.background import HostCopies, placed
from tests.harness.ranks import RankContext


@contextmanager
def saver_of(rank: RankContext | None = None) -> Iterator[BackgroundSaver]:
    group = None if rank is None else dist.new_group(backend="gloo")
    saver = BackgroundSaver(group)  # type: ignore[arg-type]
    yield saver
    saver.close()
    if group is not None:
        dist.destroy_process_group(group)  # type: ignore[arg-type]


@contextmanager
def held() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    real, go_on = tensor_files.write_tensors, threading.Event()

    def write_later(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return real(*arguments)

    tensor_files.write_tensors = write_later
    try:
        yield go_on
    finally:
        tensor_files.write_tensors = real
        go_on.set()


def loaded(path: Path) -> dict[str, Any]:
    checkpoint = open_directory(path, alone=True)
    return {**checkpoint.values, **{name: tensor.tolist() for name, tensor in checkpoint.read().items()}}


@pytest.mark.ranks(2)
def test_what_is_saved_may_change_meanwhile(rank: RankContext) -> None:
    path = rank.tmp_dir / "a"
    weight, moments = torch.ones(3, device=rank.device), [1, 2]
    with saver_of(rank) as saver, held() as go_on:
        saver.save_directory(
            path, {"w": weight, f"own.{rank.rank}": weight}, {"m": moments}, named_values={"n": moments}
        )
        weight.zero_()
        moments.append(3)
        assert not path.exists()
        go_on.set()
        saver.wait()
        assert loaded(path) == {"m": [1, 2], "n": [1, 2], "w": 3 * [1], "own.0": 3 * [1], "own.1": 3 * [1]}
        saver.save_directory(path, {"w": weight}, {}, named_values={})  # over it, from the memory that is there
        saver.wait()
        assert loaded(path) == {"w": 3 * [0]}


def test_the_same_tensors_are_copied_once_and_others_wait(tmp_path: Path) -> None:
    weight = torch.ones(3)
    with saver_of() as saver, held() as go_on:
        saver.save_directory(tmp_path / "a", {"w": weight}, {"name": "a"}, named_values={}, version=1)
        saver.save_directory(tmp_path / "b", {"w": weight}, {"name": "b"}, named_values={}, version=1)  # does not wait
        weight.zero_()
        threading.Timer(0.2, go_on.set).start()
        saver.save_directory(tmp_path / "c", {"w": weight}, {"name": "c"}, named_values={}, version=1)
        assert go_on.is_set()
        assert loaded(tmp_path / "b") == {"name": "b", "w": 3 * [1]}
    assert loaded(tmp_path / "a") == {"name": "a", "w": 3 * [1]}
    assert loaded(tmp_path / "c") == {"name": "c", "w": 3 * [0]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shown_by", ["wait", "save"])
def test_a_failure_shows_later_on_all_ranks(rank: RankContext, shown_by: str) -> None:
    """What was to be done behind it is left: the older checkpoint stays."""
    older, path = rank.tmp_dir / "older", rank.tmp_dir / "checkpoint"
    tensors = {f"own.{rank.rank}": torch.ones(200_000)}
    with saver_of(rank) as saver:
        saver.save_directory(older, tensors, {"number": 1}, named_values={})
        saver.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if rank.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
            saver.save_directory(path, tensors, {"number": 2}, named_values={})
            if rank.rank == 0:
                saver.submit(lambda: remove_directory(older), older, exists=False)
            show = {"wait": saver.wait, "save": lambda: saver.save_directory(path, {}, {}, named_values={})}[shown_by]
            with pytest.raises(StateError, match=r"checkpoint.* cannot be saved: rank 1: .*File too large") as caught:
                show()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(set(rank.all_gather_object(str(caught.value)))) == 1
        assert os.listdir(rank.tmp_dir) == ["older"]
        rank.barrier()
        saver.save_directory(path, tensors, {"number": 3}, named_values={})
        saver.wait()
        assert open_directory(path).values["number"] == 3


@pytest.mark.ranks(2)
def test_what_cannot_be_saved_is_refused_at_once(rank: RankContext) -> None:
    with saver_of(rank) as saver:
        wrong = Path("a") if rank.rank == 1 else 1
        with pytest.raises(StateError, match="rank 1: value 'n' holds pathlib"):
            saver.save_directory(rank.tmp_dir / "a", {}, {}, named_values={"n": wrong})
        saver.wait()
    assert os.listdir(rank.tmp_dir) == []


def test_pinned_blocks_have_little_room_that_nobody_takes() -> None:
    """Each of the experts of Qwen3-30B-A3B has 768 and 384 MiB, and each of two states has half as much."""
    mib = 2**20
    of_layer = [768, 384, 384, 384, 192, 192, 16, 16, 8, 8, 1, 1, 1]
    sizes = {(layer, i): size * mib for layer in range(48) for i, size in enumerate(of_layer)}
    sizes |= {"head": 622_329_856, "step": 4, "empty": 0}
    blocks, places = placed(sizes)
    assert all(size & (size - 1) == 0 for size in blocks)
    assert sum(blocks) < 1.02 * sum(sizes.values())
    by_place = sorted((place, sizes[key]) for key, place in places.items())
    for (place, size), (following, _) in itertools.pairwise(by_place):
        assert place[1] + size <= (following[1] if following[0] == place[0] else blocks[place[0]])
    assert placed({"small": 100})[0] == [128]
    assert placed({})[0] == []


@pytest.mark.gpu
def test_copies_from_a_gpu_lie_in_pinned_memory_that_is_kept() -> None:
    kinds = [((3, 5), torch.float32), ((), torch.int64), ((0, 4), torch.bfloat16), ((1001,), torch.bfloat16)]
    tensors = {i: torch.ones(shape, dtype=dtype, device="cuda") for i, (shape, dtype) in enumerate(kinds)}
    tensors[9] = torch.ones(7)
    copies = HostCopies()
    first = copies.of(tensors)
    assert all(first[i].is_pinned() for i in (0, 1, 3))
    for i, tensor in tensors.items():
        assert torch.equal(first[i], tensor.cpu())
        tensor.zero_()
    places = {i: copy.data_ptr() for i, copy in first.items()}
    assert {i: copy.data_ptr() for i, copy in copies.of(tensors).items()} == places
    assert not any(copy.any() for copy in first.values())
