"""What a test body may rely on."""

import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_d9d.mesh.groups import GroupPool
from tests.harness.compare import assert_gradients_equal
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import read

pytestmark = pytest.mark.ranks(2)


def double(value: int) -> int:
    return 2 * value


def test_context(rank: RankContext):
    assert rank.all_gather_object(rank.rank) == list(range(rank.world_size)) == [0, 1]
    assert (dist.get_rank(), dist.get_world_size()) == (rank.rank, rank.world_size)
    assert dist.get_backend(rank.group) == rank.backend == {"cpu": "gloo", "cuda": "nccl"}[rank.device.type]
    total = torch.ones(3, device=rank.device)
    dist.all_reduce(total, group=rank.group)
    assert total.tolist() == [2.0, 2.0, 2.0]


def test_a_rank_starts_processes_as_any_other_does(rank: RankContext):
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]


def test_folder_is_empty_and_shared(rank: RankContext):
    assert list(rank.tmp_dir.iterdir()) == []
    rank.barrier()
    (rank.tmp_dir / str(rank.rank)).touch()
    rank.barrier()
    assert sorted(path.name for path in rank.tmp_dir.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(("function", "expected"), [(double, 6), (abs, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_travel(rank: RankContext, function, expected, dtype, tmp_path):
    assert function(3) == expected
    assert torch.zeros(1, dtype=dtype).dtype in (torch.float32, torch.bfloat16)
    assert rank.all_gather_object((str(dtype), tmp_path)) == [(str(dtype), rank.tmp_dir)] * 2


class TestInAClass:
    @pytest.mark.parametrize("value", [1])
    def test_method(self, rank: RankContext, value):
        assert type(self).__name__ == "TestInAClass"
        assert rank.world_size == 2 * value


def test_failed_assert_shows_its_values(rank: RankContext):
    values = [rank.rank, 5]
    with pytest.raises(AssertionError, match=rf"assert \[{rank.rank}, 5\] == \[7\]"):
        assert values == [7]


def test_environment_is_torchruns(rank: RankContext):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    assert [os.environ[name] for name in names] == [str(rank.rank), str(rank.rank), "2", "2", "1"]
    assert dist.is_torchelastic_launched()
    assert int(os.environ["MASTER_PORT"]) > 0
    assert torch.get_num_threads() == 1


@pytest.mark.filterwarnings("ignore:left behind")
@pytest.mark.parametrize("round_number", [0, 1])
def test_every_body_starts_from_the_same_state(rank: RankContext, round_number):
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert torch.get_default_dtype() == torch.float32
    assert "LEFT_BEHIND" not in os.environ
    pool = GroupPool.living()  # lives as long as the default group, whichever test made it
    kept = {dist.group.WORLD, *(pooled.group for pooled in (pool.groups if pool else ()))}
    assert set(dist.distributed_c10d._world.pg_map) <= kept
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0, 1])


def test_collectives_of_a_training_step_fit_together(rank: RankContext):
    torch.manual_seed(1)
    ours, theirs = nn.Linear(4, 3, device=rank.device), nn.Linear(4, 3, device=rank.device)
    theirs.load_state_dict(ours.state_dict())
    batch = torch.randn(2, 5, 4, device=rank.device)
    (sum(theirs(part).square().mean() for part in batch) / 2).backward()
    fully_shard(ours)
    ours(batch[rank.rank]).square().mean().backward()
    assert_gradients_equal(ours, theirs)


def test_trainer_takes_the_ranks_as_they_are(rank: RankContext):
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    warnings.simplefilter("ignore")
    group = rank.group
    trainer = lightning.Trainer(
        accelerator=rank.device.type,
        devices=rank.world_size,
        strategy="ddp",
        max_steps=2,
        default_root_dir=rank.tmp_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model)
    assert (trainer.global_rank, trainer.world_size, trainer.global_step) == (rank.rank, 2, 2)
    assert rank.group is group
    weights = rank.all_gather_object(model.layer.weight.tolist())
    assert weights[0] == weights[1]


def test_a_rank_starts_processes_as_usual(rank: RankContext):
    command = [sys.executable, "-c", "import os; print(os.environ['RANK'])"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{rank.rank}\n"


def test_all_reduces_of_ddp_are_recorded(rank: RankContext):
    recorder = Recorder()
    module = nn.parallel.DistributedDataParallel(nn.Linear(3, 3, device=rank.device))
    recorder.start(rank.tmp_dir / str(rank.rank))
    module(torch.ones(2, 3, device=rank.device)).sum().backward()
    recorder.close()
    assert "allreduce float32[12]" in [str(entry) for entry in read(rank.tmp_dir / str(rank.rank))]


def test_recorder_leaves_dropped_collectives_alone(rank: RankContext):
    """Gloo's thread is often the last to hold these tensors: a deadlock if the recorder kept the interpreter lock."""
    for _ in range(1000):
        dist.all_reduce(torch.ones(10, device=rank.device), async_op=True)
    rank.barrier()


@pytest.mark.filterwarnings("ignore:left behind")
def test_a_body_may_end_the_process_group(rank: RankContext):
    rank.barrier()
    dist.destroy_process_group()


def test_the_next_body_has_a_process_group(rank: RankContext):
    rank.barrier()


def rank_and_calls(factor: int) -> tuple[int, int]:
    _called.append(factor)
    return factor * dist.get_rank(), len(_called)


_called: list[int] = []


@pytest.mark.ranks(2)
def test_a_value_of_the_first_rank_is_made_once_there_and_kept(rank: RankContext) -> None:
    _called.clear()
    assert rank.from_first_rank(rank_and_calls, 3) == (0, 1)
    assert rank.from_first_rank(rank_and_calls, 3) == (0, 1)
    assert rank.from_first_rank(rank_and_calls, 4) == (0, 2)
    assert _called == ([3, 4] if rank.rank == 0 else [])
