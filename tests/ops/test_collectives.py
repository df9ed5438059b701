"""Collectives with gradients against the same computation in one process. Small integers, so that sums are exact."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.ops import gather_dim, scatter_sum, sum_over
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

DTYPES = [torch.float64, torch.bfloat16]
# Shape of a part and the dim along which parts follow each other.
PARTS = [((3, 2), 0), ((1, 4, 3), 1), ((2, 3, 5), 1), ((2, 3, 5), -1), ((2, 0, 5), 1)]


def draw(seed: int, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values in another order of memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def check(
    rank: RankContext,
    run: Callable[[Tensor], Tensor],
    reference: Callable[[list[Tensor]], list[Tensor]],
    inputs: list[Tensor],
    factors: list[Tensor],
) -> None:
    """Compares results and gradients, where the loss of one process is the sum of the products with `factors`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = reference(leaves)
    sum((y * factor).sum() for y, factor in zip(expected, factors, strict=True)).backward()
    x = inputs[rank.rank].clone().to(rank.device).requires_grad_()
    y = run(strided(x))
    y.backward(strided(factors[rank.rank].to(rank.device)))
    assert y.is_contiguous()
    assert_bitwise_equal("y", y, expected[rank.rank])
    assert_bitwise_equal("dx", x.grad, leaves[rank.rank].grad)


def check_gather_and_scatter(rank: RankContext, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    size, name = rank.world_size, rank.group.group_name
    parts = [draw(seed, shape, dtype) for seed in range(size)]
    wholes = [draw(size + seed, torch.cat(parts, dim).shape, dtype) for seed in range(size)]
    check(rank, lambda x: gather_dim(x, dim, name), lambda xs: [torch.cat(xs, dim)] * size, parts, wholes)
    check(rank, lambda x: scatter_sum(x, dim, name), lambda xs: list(sum(xs).chunk(size, dim)), wholes, parts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), PARTS, ids=str)
def test_gather_and_scatter_on_two(rank: RankContext, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    check_gather_and_scatter(rank, shape, dim, dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("shape", "dim"), PARTS[1:3], ids=str)
def test_gather_and_scatter_on_four(rank: RankContext, shape: tuple[int, ...], dim: int) -> None:
    check_gather_and_scatter(rank, shape, dim, torch.float64)


def check_sums(rank: RankContext, dtype: torch.dtype) -> None:
    size, name = rank.world_size, rank.group.group_name
    inputs = [draw(seed, (3, 4), dtype) for seed in range(size)]
    factors = [draw(size + seed, (3, 4), dtype) for seed in range(size)]
    # Each rank has a term of the loss; then all have the whole of it.
    check(rank, lambda x: sum_over(x, name, sums_gradients=True), lambda xs: [sum(xs)] * size, inputs, factors)
    x = inputs[rank.rank].to(rank.device).requires_grad_()
    sum_over(strided(x), name, sums_gradients=False).backward(strided(factors[0].to(rank.device)))
    assert_bitwise_equal("dx of one loss", x.grad, factors[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_on_two(rank: RankContext, dtype: torch.dtype) -> None:
    check_sums(rank, dtype)


@pytest.mark.ranks(4)
def test_sums_on_four(rank: RankContext) -> None:
    check_sums(rank, torch.float64)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_for_one_computation(rank: RankContext, dim: int) -> None:
    """All ranks make the same of the whole: each part's gradient is its own, as it came."""
    parts = [draw(seed, (2, 3, 4), torch.float64) for seed in range(2)]
    factor = draw(2, torch.cat(parts, dim).shape, torch.float64)
    x = parts[rank.rank].clone().to(rank.device).requires_grad_()
    whole = gather_dim(x, dim, rank.group.group_name, sums_gradients=False)
    whole.backward(strided(factor.to(rank.device)))
    assert_bitwise_equal("whole", whole, torch.cat(parts, dim))
    assert_bitwise_equal("dx", x.grad, factor.chunk(2, dim)[rank.rank])


@pytest.mark.ranks(2)
def test_integers_and_wrong_lengths(rank: RankContext) -> None:
    ids = torch.arange(3, device=rank.device) + 3 * rank.rank
    assert gather_dim(ids, 0, rank.group.group_name).tolist() == list(range(6))
    with pytest.raises(ConfigError, match=r"dim -2 of a tensor \[1, 5, 3\] has length 5, which 2 ranks cannot share"):
        scatter_sum(torch.ones(1, 5, 3, device=rank.device), -2, rank.group.group_name)


@pytest.mark.ranks(2)
def test_gradients_of_expanded_sums(rank: RankContext) -> None:
    name = rank.group.group_name
    x = torch.ones(2, 2, device=rank.device, requires_grad=True)
    whole = gather_dim(x, 1, name)
    sum_over(scatter_sum(whole, 0, name), name, sums_gradients=True).sum().backward()
    # Each step from the loss back to `x` sums over 2 ranks, but for the gather of the scatter.
    assert x.grad.tolist() == [[4.0, 4.0]] * 2


@pytest.mark.ranks(2)
def test_compiled_as_one_operator_each(rank: RankContext) -> None:
    graphs = []
    name = rank.group.group_name

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def compute(x: Tensor) -> Tensor:
        part = scatter_sum(gather_dim(x.sin(), 1, name).cos(), 0, name)
        return sum_over(part.exp(), name, sums_gradients=True).sin()

    x = torch.randn(4, 3, device=rank.device, requires_grad=True)
    expected = compute(x)
    (expected_dx,) = torch.autograd.grad(expected.sum(), x)
    actual = torch.compile(compute, backend=backend, fullgraph=True)(x)
    (dx,) = torch.autograd.grad(actual.sum(), x)
    assert_bitwise_equal("y", actual, expected)
    assert_bitwise_equal("dx", dx, expected_dx)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    ops = torch.ops.lightning_d9d
    assert {ops.gather_dim, ops.scatter_sum, ops.sum_over} <= set(targets)


@pytest.mark.ranks(2)
def test_one_rank_has_no_messages(rank: RankContext) -> None:
    alone, _ = dist.new_subgroups(1)
    name = alone.group_name
    x = torch.ones(3, 5, device=rank.device, requires_grad=True)
    results = [gather_dim(x, 0, name), scatter_sum(x, 1, name), sum_over(x, name, sums_gradients=True)]
    dist.destroy_process_group(alone)
    assert all(result is x for result in results)


def test_registration_passes_torchs_checks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    ops = torch.ops.lightning_d9d
    try:
        for shape, dim in PARTS:
            x = strided(torch.randn(shape)).requires_grad_()
            for op, arguments in (
                (ops.gather_dim, (dim, name, True)),
                (ops.gather_dim, (dim, name, False)),
                (ops.scatter_sum, (dim, name)),
                (ops.sum_over, (name, True)),
                (ops.sum_over, (name, False)),
            ):
                assert set(torch.library.opcheck(op.default, (x, *arguments)).values()) == {"SUCCESS"}
    finally:
        dist.destroy_process_group()
