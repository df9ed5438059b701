"""Gathers of objects and of tensors of unequal shapes, and who goes first."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.errors import RankError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.collectives import (
    all_gather_object,
    all_gather_variadic_shape,
    digest,
    first_on_node,
    gather_object,
    gather_variadic_shape,
    main_first,
)
from tests.harness.ranks import RankContext

SHAPES = {
    "lengths": [(3,), (1,), (7,), (2,)],
    "dimensions": [(), (2, 3), (1, 1, 4), (5,)],
    "empty here and there": [(0,), (2, 2), (0, 3), ()],
    "all empty": [(0,), (0, 1), (2, 0), (0,)],
    "equal": [(2, 3)] * 4,
}


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.arange(torch.Size(shape).numel()) * 3 + rank
    return (values % 2 if dtype == torch.bool else values).to(device, dtype).reshape(shape)


@pytest.mark.ranks(4)
def test_objects_come_in_the_order_of_ranks(rank: RankContext) -> None:
    ours = {"rank": rank.rank, "text": "x" * rank.rank}
    everyone = [{"rank": r, "text": "x" * r} for r in range(4)]
    assert all_gather_object(ours) == everyone
    assert gather_object(ours, dst=2) == (everyone if rank.rank == 2 else None)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_tensors_of_unequal_shapes(rank: RankContext, shapes: str, dtype: str) -> None:
    parts = [tensor_of(r, shape, getattr(torch, dtype), rank.device) for r, shape in enumerate(SHAPES[shapes])]
    gathered = gather_variadic_shape(parts[rank.rank], rank.group, dst=3)
    assert (gathered is None) == (rank.rank != 3)
    for everyone in all_gather_variadic_shape(parts[rank.rank], rank.group), gathered or parts:
        for actual, expected in zip(everyone, parts, strict=True):
            assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)
            assert actual.tolist() == expected.tolist()


@pytest.mark.ranks(4)
def test_parts_of_a_group_and_of_a_graph(rank: RankContext) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_replicate=2, tensor_parallel=2), rank.device.type)
    table = torch.arange(12.0, device=rank.device).reshape(3, 4).requires_grad_()
    ours = table.T[: rank.rank + 1]  # not contiguous, with a graph
    group = domains.group("dp")
    ranks = dist.get_process_group_ranks(group)
    everyone = all_gather_variadic_shape(ours, group)
    assert [part.tolist() for part in everyone] == [table.T[: r + 1].tolist() for r in ranks]
    assert not any(part.requires_grad for part in everyone)
    gathered = gather_variadic_shape(ours, group, dst=ranks[1])
    assert [part.shape[0] for part in gathered or ()] == ([r + 1 for r in ranks] if rank.rank == ranks[1] else [])
    domains.close()


def first(kind: str, rank: RankContext) -> AbstractContextManager[None]:
    """Return the first of four ranks, which are on one machine or on two."""
    return main_first() if kind == "main" else first_on_node(node=f"node {rank.rank // 2}")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "firsts"), [("main", [0]), ("node", [0, 2])])
def test_first_ranks_run_the_body_before_the_others(rank: RankContext, kind: str, firsts: list[int]) -> None:
    rank.barrier()
    with first(kind, rank):
        start = time.monotonic()
        torch.mm(*torch.randn(2, 700, 700, dtype=torch.float64))
        end = time.monotonic()
    times = rank.all_gather_object((start, end))
    latest_end = max(times[r][1] for r in firsts)
    assert all(times[r][0] > latest_end for r in range(4) if r not in firsts)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "failing"), [("main", 0), ("node", 0), ("node", 2)])
def test_an_error_of_a_first_rank_reaches_all(rank: RankContext, kind: str, failing: int) -> None:
    entered = []

    def body() -> None:
        with first(kind, rank):
            entered.append(rank.rank)
            if rank.rank == failing:
                raise KeyError("no such file")

    with pytest.raises((KeyError, RankError)) as caught:
        body()
    if rank.rank == failing:
        assert caught.type is KeyError
    else:
        assert str(caught.value) == f"rank {failing}, which the others waited for, failed with KeyError: 'no such file'"
    is_first = rank.rank == 0 or (kind == "node" and rank.rank == 2)
    assert bool(entered) == is_first
    rank.barrier()


@pytest.mark.ranks(4)
def test_an_error_of_another_rank_stays_its_own(rank: RankContext) -> None:
    if rank.rank == 3:
        with pytest.raises(ValueError, match="mine"), main_first():
            raise ValueError("mine")
    else:
        with main_first():
            pass
    rank.barrier()


@pytest.mark.ranks(4)
def test_ranks_of_this_machine_have_one_first(rank: RankContext) -> None:
    with first_on_node():
        order = sorted(path.name for path in rank.tmp_dir.iterdir())
        (rank.tmp_dir / str(rank.rank)).touch()
    assert ("0" in order) == (rank.rank != 0)


def test_one_process_just_runs_the_body() -> None:
    ran = []
    for context in main_first(), first_on_node():
        with context:
            ran.append(True)
    assert len(ran) == 2


def test_a_digest_tells_values_shapes_and_dtypes_apart() -> None:
    values = torch.arange(6.0)
    kinds = [
        [values],
        [values.view(2, 3)],
        [values.view(2, 3).t()],
        [values.int()],
        [values[:3], values[3:]],
        [values + 2.0**-20],
        [values.bfloat16()],
        [torch.zeros(0)],
        [],
    ]
    assert len({digest(tensors) for tensors in kinds}) == len(kinds)
    assert digest([values.view(2, 3).t().contiguous()]) == digest([values.view(2, 3).t()])
    assert digest([values.clone().requires_grad_()]) == digest([values])
