"""Four and eight ranks that share one GPU and write into each other's memory there: the numbers of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.multiprocessing.reductions import reduce_tensor

from lightning_d9d.modules import GroupedExperts, LocalDispatch
from lightning_d9d.modules.peer_dispatch import PeerDispatch
from lightning_d9d.ops import peer_buffers
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.modules.test_dispatch import HIDDEN, INTERMEDIATE, run

NUM_EXPERTS, NUM_TOKENS, TOP_K = 16, 37, 4


def shared_by_cuda_ipc(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """`_device_buffers` of `peer_buffers` without torch's symmetric memory."""
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    shared = peer_buffers.gathered_objects(group, reduce_tensor(own))
    return [own if rank == group.rank() else rebuild(*args) for rank, (rebuild, args) in enumerate(shared)], own


def make_experts(dtype: torch.dtype, device: torch.device) -> GroupedExperts:
    torch.manual_seed(0)
    return GroupedExperts(NUM_EXPERTS, HIDDEN, INTERMEDIATE, initializer_range=0.3).to(device, dtype)


def part_of(experts: GroupedExperts, rank: int, num_ranks: int) -> GroupedExperts:
    part = GroupedExperts(NUM_EXPERTS // num_ranks, HIDDEN, INTERMEDIATE, initializer_range=0.3)
    for name, parameter in experts.named_parameters():
        setattr(part, name, nn.Parameter(parameter.detach().chunk(num_ranks)[rank].clone()))
    return part


def make_tokens(source: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(source)
    num_tokens = NUM_TOKENS - 5 * (source % 3)
    x, gradient = (torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(2))
    weights, indices = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x.to(device, dtype), indices.to(device), weights.to(device), gradient.to(device, dtype)


def body(rank: int, num_ranks: int, symmetric: bool, dtype: torch.dtype, directory: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    assert dist.group.WORLD is not None
    if not symmetric:
        peer_buffers._device_buffers = shared_by_cuda_ipc
    experts = make_experts(dtype, device)
    tokens = [make_tokens(source, dtype, device) for source in range(num_ranks)]
    whole = run(LocalDispatch(NUM_EXPERTS), experts, tuple(map(torch.cat, zip(*tokens, strict=True))))
    counts = [len(each[0]) for each in tokens]
    expected = {
        name: value.split(counts)[rank] if name in ("output", "x", "weights") else value.chunk(num_ranks)[rank]
        for name, value in whole.items()
    }
    dispatch = PeerDispatch(NUM_EXPERTS, dist.group.WORLD)
    part = part_of(experts, rank, num_ranks)
    dispatch.exchange.capacity = float(num_ranks)
    actual = run(dispatch, part, tokens[rank])
    assert_tensors_close(actual, expected)
    for _ in range(5):
        for name, value in run(dispatch, part, tokens[rank]).items():
            assert_bitwise_equal(name, value, actual[name])
    failures = dispatch.exchange.failures()
    assert failures is not None
    assert failures.item() == 0
    dist.barrier()
    dispatch.exchange.close()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric memory", "CUDA IPC"])
def test_equals_one_process(
    num_ranks: int, symmetric: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is torch's symmetric memory, or memory that CUDA shares between processes."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    spawn: Callable[..., None] = multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(body, (num_ranks, symmetric, dtype, str(tmp_path)), nprocs=num_ranks)
