"""Gradient buckets: sums over ranks, flags of unused parameters, order, dtype and size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_d9d import ConfigError
from lightning_d9d.sync.buckets import BucketGroup, GradientBuckets
from tests.harness.ranks import RankContext


class Branches(nn.Module):
    """Three layers; a forward uses the ones it is asked to."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in used:
                x = layer(x).tanh()
        return x


def rows(seed: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def local_gradients(module: Branches, inputs: list[tuple[Tensor, set[int]]]) -> list[Tensor | None]:
    reference = Branches().to(inputs[0][0].device)
    for x, used in inputs:
        reference(x, used).square().sum().backward()
    return [p.grad for p in reference.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_mb", [1e-4, 32])
@pytest.mark.parametrize("used", [[{0, 1, 2}, {0, 1, 2}], [{0, 1}, {1, 2}], [{0, 1}, {0}], [{1}, set[int]()]], ids=str)
def test_sums_over_microbatches_and_ranks(rank: RankContext, used: list[set[int]], bucket_mb: float) -> None:
    """Rank r uses `used[r]` in both microbatches; a parameter that neither uses keeps no gradient."""
    module = Branches().to(rank.device)
    buckets = GradientBuckets([BucketGroup([*module.parameters()], rank.group)], bucket_mb=bucket_mb)
    for _ in range(2):  # two windows: the second must not see the first
        module.zero_grad()
        for microbatch in range(2):
            if microbatch == 1:
                buckets.start()
            if used[rank.rank]:
                module(rows(2 * rank.rank + microbatch, rank.device), used[rank.rank]).square().sum().backward()
        buckets.finish(divisor=2)
    expected: list[Tensor | None] = [None] * 6
    for r in range(2):
        for m in range(2):
            local = local_gradients(module, [(rows(2 * r + m, rank.device), used[r])]) if used[r] else [None] * 6
            expected = [b if a is None else a if b is None else a + b for a, b in zip(expected, local, strict=True)]
    for parameter, total in zip(module.parameters(), expected, strict=True):
        if total is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, total / 2, rtol=1e-12, atol=1e-12)
    buckets.remove()


@pytest.mark.ranks(2)
def test_buckets_leave_during_backward_in_one_order(rank: RankContext) -> None:
    """Ranks reach the layers in opposite orders; the messages go out in one, and the first before backward ends."""
    module = Branches().to(rank.device)
    buckets = GradientBuckets([BucketGroup([*module.parameters()], rank.group)], bucket_mb=1e-4)
    assert len(buckets.buckets) == 6
    launched_at_end: list[int] = []
    first = next(iter(module.parameters()))
    first.register_post_accumulate_grad_hook(lambda _: launched_at_end.append(buckets._next))
    buckets.start()
    x = rows(rank.rank, rank.device)
    order = [0, 1, 2] if rank.rank == 0 else [2, 1, 0]
    for index in order:
        x = module.layers[index](x).tanh()
    x.square().sum().backward()
    buckets.finish()
    sums = rank.all_gather_object([p.grad.cpu() for p in module.parameters() if p.grad is not None])
    for ours, theirs in zip(*sums, strict=True):
        assert torch.equal(ours, theirs)
    if rank.rank == 0:  # layer 0 comes last in its backward: the other layers' buckets have left by then
        assert launched_at_end[0] >= 4
    buckets.remove()


@pytest.mark.ranks(2)
def test_bfloat16_gradients_are_summed_in_float32(rank: RankContext) -> None:
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device=rank.device))
    buckets = GradientBuckets([BucketGroup([*[parameter]], rank.group)], dtype=torch.float32)
    for step in range(257):  # bf16 cannot count beyond 256
        if step == 256:
            buckets.start()
        parameter.sum().backward()
    buckets.finish()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [514.0] * 64
    buckets.remove()


def test_views_of_one_flat_buffer_are_the_gradients() -> None:
    module = Branches()
    buckets = GradientBuckets([BucketGroup([*module.parameters()], None)])
    module(rows(0, torch.device("cpu")), {0, 1, 2}).sum().backward()
    (bucket,) = buckets.buckets
    assert bucket.flat is not None
    storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
    assert storages == {bucket.flat.untyped_storage().data_ptr()}
    before = [p.grad for p in module.parameters()]
    module(rows(1, torch.device("cpu")), {0, 1, 2}).sum().backward()
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))


@pytest.mark.ranks(2)
def test_a_buffer_is_there_from_the_first_gradient_to_the_sum(rank: RankContext) -> None:
    module = Branches().to(rank.device)
    buckets = GradientBuckets([BucketGroup([*module.parameters()], rank.group)], bucket_mb=1e-4)
    assert len(buckets.buckets) == 6
    assert buckets.num_bytes == sum((p.numel() + 1) * 8 for p in module.parameters())
    held: list[int] = []
    handed: list[nn.Parameter] = []

    def free(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            handed.append(parameter)
            parameter.grad = None

    buckets.on_summed = free
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(bucket.flat is not None for bucket in buckets.buckets))
        )
    for _ in range(2):
        assert all(bucket.flat is None for bucket in buckets.buckets)
        buckets.start()
        module(rows(rank.rank, rank.device), {0, 1, 2}).square().sum().backward()
        buckets.finish()
    assert max(held) <= 2
    assert len(handed) == 2 * 5  # `finish` has waited for the last one
    assert {id(parameter) for parameter in handed} == {id(p) for p in [*module.parameters()][1:]}
    buckets.remove()


def test_size_counts_local_elements_in_the_buffers_dtype() -> None:
    parameters = [nn.Parameter(torch.zeros(256, 1024, dtype=torch.bfloat16)) for _ in range(4)]  # 1 MiB each in float32
    assert [len(b.parameters) for b in GradientBuckets([BucketGroup([*parameters], None)], bucket_mb=2).buckets] == [4]
    in_float32 = GradientBuckets([BucketGroup([*parameters], None)], bucket_mb=2, dtype=torch.float32)
    assert [len(b.parameters) for b in in_float32.buckets] == [2, 2]
    large = GradientBuckets([BucketGroup([*parameters], None)], bucket_mb=0.1)
    assert [len(b.parameters) for b in large.buckets] == [1, 1, 1, 1]
    assert large.buckets[0].parameters[0] is parameters[-1]


def test_parameters_of_several_dtypes_do_not_mix() -> None:
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16) * 2]
    buckets = GradientBuckets([BucketGroup([*parameters], None)]).buckets
    assert sorted(str(b.dtype) for b in buckets) == ["torch.bfloat16", "torch.float32"]
    assert [len(b.parameters) for b in buckets] == [2, 2]


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    GradientBuckets([BucketGroup([*embedding.parameters()], None)])
    with pytest.raises(ConfigError, match="sparse=False"):
        embedding(torch.tensor([1])).sum().backward()


@pytest.mark.ranks(2, record=False)
def test_a_gradient_after_its_bucket_left_is_refused(rank: RankContext) -> None:
    """Reentrant checkpointing of one layer twice delivers its gradient in two goes."""
    layer = nn.Linear(4, 4).to(rank.device)
    buckets = GradientBuckets([BucketGroup([*layer.parameters()], rank.group)])
    buckets.start()
    x = torch.ones(2, 4, device=rank.device, requires_grad=True)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        x.sum().backward()
    buckets.finish()
    buckets.remove()
    dist.barrier()
