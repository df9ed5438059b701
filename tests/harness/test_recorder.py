"""Programs are run rank by rank on torch's fake backend, where nothing waits, so that wrong ones end too."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.recorder import Recorder
from tests.harness.records import Entry, mismatches, read

Simulate = Callable[..., list[list[Entry]]]


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Simulate]:
    recorder = Recorder()

    def run(program: Callable[[int], object], num_ranks: int = 2) -> list[list[Entry]]:
        for rank in range(num_ranks):
            dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
            recorder.start(tmp_path / str(rank))
            try:
                program(rank)
            finally:
                recorder.stop()
                dist.destroy_process_group()
        return [read(tmp_path / str(rank)) for rank in range(num_ranks)]

    yield run
    recorder.close()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def words(record: list[Entry]) -> list[str]:
    return [str(entry) for entry in record]


def test_every_way_to_issue_a_collective_is_recorded(simulate):
    def program(rank: int) -> None:
        world = dist.group.WORLD
        assert world is not None
        dist.all_reduce(ones(4))
        functional.wait_tensor(functional.all_reduce(ones(5), "sum", world))
        rows = ones(2, 3).requires_grad_()
        exchanged = functional.all_to_all_single_autograd(rows, [1, 1], [1, 1], world)
        exchanged.sum().backward()
        with torch.inference_mode():
            dist.all_reduce(ones(6))
        dist.all_to_all([ones(2), ones(3)], [ones(2), ones(3)])
        dist.scatter(ones(2), [ones(2), ones(2)] if rank == 0 else None, src=0)
        dist.send(ones(2), 1 - rank, tag=3)
        dist.irecv(ones(2))
        module = fully_shard(nn.Linear(3, 4))
        module(ones(2, 3)).sum().backward()

    _, record = simulate(program)
    assert words(record) == [
        "allreduce float32[4]",
        "allreduce float32[5]",
        "alltoall_base float32[*, 3] sends [1, 1] receives [1, 1]",
        "alltoall_base float32[*, 3] sends [1, 1] receives [1, 1]",
        "allreduce float32[6]",
        "alltoall float32[*] sends [2, 3] receives [2, 3]",
        "scatter float32[2] with root 0",
        "send float32[2] to rank 0 with tag 3",
        "receive float32[2] from any rank",
        "allgather_base float32[16]",
        "reduce_scatter_base float32[16]",
    ]


def test_another_thread_is_recorded_without_a_place_between_groups(simulate):
    def program(rank: int) -> None:
        other = dist.new_group([0, 1])
        thread = threading.Thread(target=lambda: dist.all_reduce(ones(1), group=other))
        if rank:
            dist.barrier()
        thread.start()
        thread.join()
        if not rank:
            dist.barrier()

    records = simulate(program)
    assert [entry.ordered for entry in records[0]] == [False, True]
    assert mismatches(records) == []


def test_nothing_is_recorded_before_start_and_after_stop(simulate, tmp_path):
    simulate(lambda rank: None)
    assert read(tmp_path / "0") == []
    assert read(tmp_path / "never") == []


def test_an_entry_cut_off_by_the_end_of_its_rank_is_left_out(simulate, tmp_path):
    whole, _ = simulate(uneven_exchange)
    content = (tmp_path / "0").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-5])
    assert len(whole) == 2
    assert read(tmp_path / "cut") == whole[:1]


def uneven_exchange(rank: int) -> None:
    splits = [[1, 2], [2, 0]]  # rows from each rank to each rank
    receives = [splits[peer][rank] for peer in range(2)]
    dist.all_to_all_single(ones(sum(receives)), ones(sum(splits[rank])), receives, splits[rank])
    dist.barrier()


def receive_from_any(rank: int) -> None:
    dist.isend(ones(2), 0) if rank else dist.irecv(ones(2))


def groups_of_four(rank: int) -> None:
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    row, _ = dist.new_subgroups_by_enumeration(rows)
    column, _ = dist.new_subgroups_by_enumeration(columns)
    dist.all_reduce(ones(2), group=row)
    dist.all_reduce(ones(1 + rank % 2), group=column)
    dist.all_reduce(ones(2), group=row)
    if rank == 3:
        dist.send(ones(1), 2, group=row)
    if rank == 2:
        dist.recv(ones(1), 3, group=row)
    dist.barrier()


@pytest.mark.parametrize(
    ("program", "num_ranks"),
    [(uneven_exchange, 2), (receive_from_any, 2), (groups_of_four, 4)],
)
def test_right_programs_are_silent(simulate, program, num_ranks):
    records = simulate(program, num_ranks)
    assert all(records)
    assert mismatches(records) == []


def swapped_order(rank: int) -> None:
    for size in (3, 4) if rank else (4, 3):
        dist.all_reduce(ones(size))


def missing_collective(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(ones(4))


def other_dtype(rank: int) -> None:
    dist.all_reduce(ones(4, dtype=torch.float64 if rank else torch.float32))


def other_shape(rank: int) -> None:
    dist.all_gather([ones(2 + rank), ones(2 + rank)], ones(2 + rank))


def other_operator(rank: int) -> None:
    dist.barrier() if rank else dist.all_reduce(ones(1))


def other_root(rank: int) -> None:
    dist.broadcast(ones(1), src=rank)


def other_splits(rank: int) -> None:
    dist.all_to_all_single(ones(3), ones(3), [1, 2], [1, 2])


def unmatched_send(rank: int) -> None:
    if rank:
        dist.isend(ones(2), 0)


def unmatched_receive_from_any(rank: int) -> None:
    if rank:
        dist.irecv(ones(2))


def other_message(rank: int) -> None:
    dist.isend(ones(2), 0) if rank else dist.irecv(ones(3), 1)


def swapped_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups[:: -1 if rank else 1]:
        dist.all_reduce(ones(4), group=group)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (swapped_order, "collective 0: rank 0: allreduce float32[4]; rank 1: allreduce float32[3]"),
        (missing_collective, "collective 1: rank 0: allreduce float32[4]; rank 1: nothing more"),
        (other_dtype, "collective 0: rank 0: allreduce float32[4]; rank 1: allreduce float64[4]"),
        (other_shape, "rank 0: allgather float32[2], float32[2]; rank 1: allgather float32[3], float32[3]"),
        (other_operator, "rank 0: allreduce float32[1]; rank 1: barrier"),
        (other_root, "rank 0: broadcast float32[1] with root 0; rank 1: broadcast float32[1] with root 1"),
        (
            other_splits,
            "rank 0: alltoall_base float32[*] sends [1, 2] receives [1, 2]; "
            "rank 1: alltoall_base float32[*] sends [1, 2] receives [1, 2]",
        ),
        (
            unmatched_send,
            "message 0 of rank 1 to rank 0: rank 1: send float32[2] to rank 0; rank 0: no receive",
        ),
        (unmatched_receive_from_any, "rank 1: 1 receives from any rank lack a send"),
        (
            other_message,
            "of rank 1 to rank 0: rank 1: send float32[2] to rank 0; rank 0: receive float32[3] from rank 1",
        ),
        (
            swapped_groups,
            "order between groups, collective 0 of ranks 0 and 1: "
            "rank 0: allreduce float32[4] on group 1 of ranks [0, 1]; "
            "rank 1: allreduce float32[4] on group 2 of ranks [0, 1]",
        ),
    ],
)
def test_wrong_programs_are_found(simulate, program, message):
    problems = mismatches(simulate(program))
    assert len(problems) == 2  # the heading and the one thing that is wrong
    assert message in problems[1]
