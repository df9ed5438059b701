"""What one mesh saves, any other loads, and one process without a process group too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_d9d import ConfigError, StateError
from lightning_d9d.checkpoint import is_directory, open_directory, remove_directory, save_directory
from lightning_d9d.mesh import MeshDomains
from tests.checkpoint.layouts import MESHES, SPECS, local, on_mesh, whole_tensors
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], case: str = "") -> None:
    assert actual.keys() == expected.keys(), case
    for name, tensor in expected.items():
        assert_bitwise_equal(f"{case}: {name}", local(actual[name].detach()), local(tensor.detach()))


# Meshes


@pytest.mark.ranks(4)
def test_any_mesh_loads_what_any_mesh_saved(rank: RankContext) -> None:
    whole = whole_tensors()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    ours, targets = {}, {}
    for name, mesh in MESHES.items():
        domains = MeshDomains.build(mesh.config, rank.device.type)
        ours[name], targets[name] = (on_mesh(mesh, domains, tensors, rank.device) for tensors in (whole, zeros))
        named = {f"stage {domains.coordinates['pp']}": [rank.rank], "everywhere": rank.rank}
        save_directory(rank.tmp_dir / name, ours[name], {"of": rank.rank}, named_values=named)
        domains.close()
    for saved_on in MESHES:
        checkpoint = open_directory(rank.tmp_dir / saved_on)
        stages = {"stage 0": [0], "stage 1": [2]} if saved_on == "stages" else {"stage 0": [0]}
        assert checkpoint.values == {"of": 0, **stages, "everywhere": 0}
        for loaded_on, tensors in targets.items():
            for tensor in tensors.values():
                local(tensor.detach()).zero_()
            checkpoint.load(tensors)
            assert_same(tensors, ours[loaded_on], f"saved on {saved_on}, loaded on {loaded_on}")
        if rank.rank == 0:
            alone = open_directory(rank.tmp_dir / saved_on, alone=True)
            assert {name: (tuple(shape), dtype) for name, (shape, dtype) in alone.tensors.items()} == SPECS
            assert_same(alone.read(), whole, f"saved on {saved_on}, loaded by one process")
            assert alone.read("un").keys() == {"uneven"}


@pytest.mark.ranks(2)
def test_the_job_that_loads_may_be_smaller(rank: RankContext) -> None:
    """Ranks of a group of one's own save and load: two groups of one rank each."""
    whole = whole_tensors()
    groups = [dist.new_group([number]) for number in range(2)]
    path = rank.tmp_dir / str(rank.rank)
    save_directory(path, whole, {"rank": rank.rank}, group=groups[rank.rank])
    checkpoint = open_directory(path, group=groups[rank.rank])
    zeros = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    checkpoint.load(zeros)
    assert_same(zeros, whole)
    assert checkpoint.values == {"rank": rank.rank}
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@pytest.mark.filterwarnings("error")
def test_one_process_without_a_process_group(tmp_path: Path) -> None:
    whole = whole_tensors()
    whole["transposed"] = torch.arange(6.0).view(2, 3).t()
    whole["view"] = torch.arange(100.0)[10:12]
    whole["parameter"] = torch.nn.Parameter(torch.ones(3))
    values = {"step": 3, "name": "a", "nested": {"list": [1.5, None, True]}}
    save_directory(tmp_path / "made" / "here", whole, values, named_values={"tensor": torch.arange(3)})
    with pytest.raises(StateError, match="x in both"):
        save_directory(tmp_path / "made" / "here", whole, {"x": 1}, named_values={"x": 1})
    checkpoint = open_directory(tmp_path / "made" / "here")
    assert_same(checkpoint.read(), {name: tensor.detach() for name, tensor in whole.items()})
    assert torch.equal(checkpoint.values.pop("tensor"), torch.arange(3))
    assert checkpoint.values == values


@pytest.mark.ranks(2)
def test_few_files(rank: RankContext) -> None:
    """One a rank, the metadata and the values, however many tensors; replicated ones once."""
    tensors = {f"layer.{number}": torch.full((1000,), float(number), device=rank.device) for number in range(20)}
    save_directory(rank.tmp_dir / "checkpoint", tensors, {})
    files = [path for path in (rank.tmp_dir / "checkpoint").rglob("*") if path.is_file()]
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) < 1.8 * 20 * 4000


def test_torch_reads_the_tensors(tmp_path: Path) -> None:
    save_directory(tmp_path / "checkpoint", {"a": torch.arange(3.0)}, {})
    target = {"a": torch.zeros(3)}
    (data,) = (tmp_path / "checkpoint").glob("data-*")
    dcp.load(target, checkpoint_id=data, no_dist=True)
    assert target["a"].tolist() == [0, 1, 2]


@contextmanager
def broadcasts() -> Iterator[list[int]]:
    """Return the ranks from which the package broadcast objects."""
    real, sources = dist.broadcast_object_list, []

    def broadcast(object_list: list[Any], src: int, group: dist.ProcessGroup | None = None) -> None:
        sources.append(src)
        real(object_list, src=src, group=group)

    dist.broadcast_object_list = broadcast
    try:
        yield sources
    finally:
        dist.broadcast_object_list = real


@pytest.mark.ranks(4)
def test_one_rank_of_a_stage_sends_its_names_and_values(rank: RankContext) -> None:
    stage = rank.rank // 2
    tensors = {f"{stage}.weight": torch.ones(2, device=rank.device)}
    with broadcasts() as sources:
        save_directory(rank.tmp_dir / "checkpoint", tensors, {}, named_values={f"{stage}.weight": stage})
    assert [source for source in sources if source != 0] == [2]  # rank 0 has more to tell
    checkpoint = open_directory(rank.tmp_dir / "checkpoint")
    assert checkpoint.values == {"0.weight": 0, "1.weight": 1}
    with broadcasts() as sources:
        checkpoint.load(tensors)
    assert sources == [0, 2]


# What does not fit


def fit(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = {
        "model.a": torch.zeros(2, 3),
        "model.b": torch.zeros(4),
        "model.steps": torch.zeros(2, dtype=torch.int64),
    }
    renamed = {name.replace("_", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in {**tensors, **renamed}.items() if tensor is not None}


MISFITS: dict[str, tuple[dict[str, Tensor], str]] = {
    "shape": (fit(model_a=torch.zeros(3, 2)), r"model.a has shape \[2, 3\] in the checkpoint, \[3, 2\] in the model"),
    "missing": (fit(model_c=torch.zeros(1)), "model.c is not in the checkpoint"),
    "extra": (fit(model_b=None), "model.b is in the checkpoint, but was not requested"),
    "float for integer": (fit(model_steps=torch.zeros(2)), "model.steps is torch.int64 in the checkpoint"),
    "other integer": (fit(model_steps=torch.zeros(2, dtype=torch.int32)), "torch.int32 in the model"),
    "meta": (fit(model_a=torch.zeros(2, 3, device="meta")), "model.a is on the meta device"),
    "many": (
        fit(**{f"model_{k}": torch.zeros(1) for k in "vwxyz"}),
        "model.v is.*model.w is.*model.x is.*; and 2 more",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", MISFITS)
def test_other_models_are_refused_on_all_ranks_alike(rank: RankContext, case: str) -> None:
    ones = {name: torch.ones_like(tensor) for name, tensor in fit().items()}
    save_directory(rank.tmp_dir / "checkpoint", {**ones, "optimizer.a": torch.ones(2)}, {})
    tensors, text = MISFITS[case]
    mine = tensors if rank.rank == 1 or case == "extra" else fit()
    mine = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    checkpoint = open_directory(rank.tmp_dir / "checkpoint")
    with pytest.raises(StateError, match=text) as caught:
        checkpoint.load(mine, prefix="model.")
    assert len(set(rank.all_gather_object(str(caught.value)))) == 1
    assert not any(tensor.any() for tensor in mine.values() if not tensor.is_meta)
    if case in ("missing", "extra", "many"):
        checkpoint.load(mine, strict=False)
        assert all(tensor.all() for name, tensor in mine.items() if name in ones)
        assert not any(tensor.any() for name, tensor in mine.items() if name not in ones)


def test_floating_dtypes_are_cast(tmp_path: Path) -> None:
    save_directory(tmp_path / "checkpoint", {"a": torch.tensor([1.0, 1.0 + 2**-10])}, {})
    target = torch.zeros(2, dtype=torch.bfloat16)
    open_directory(tmp_path / "checkpoint").load({"a": target})
    assert target.tolist() == [1, 1]


# Paths


def test_remove(tmp_path: Path) -> None:
    path, link = tmp_path / "checkpoint", tmp_path / "link"
    save_directory(path, {"a": torch.ones(2)}, {})
    link.symlink_to(path.name)
    assert is_directory(path)
    assert is_directory(link)
    remove_directory(link)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
    remove_directory(path)
    remove_directory(path)
    assert os.listdir(tmp_path) == []
    assert not is_directory(path)


def test_urls_are_refused() -> None:
    for call in (lambda: save_directory("s3://bucket/a", {}, {}), lambda: open_directory("s3://bucket/a")):
        with pytest.raises(ConfigError, match="s3://bucket/a is a URL"):
            call()
