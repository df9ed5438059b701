import pytest
import torch
import torch.distributed as dist

from lightning_d9d.ops import all_to_all_rows
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

# Row [source][destination]: how many rows go there. The last rank sends none, and the first of three receives none.
SENT = [[0, 2, 1], [0, 3, 4], [0, 0, 0]]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def make(source: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(source)
    return torch.randint(-99, 99, (sum(SENT[source]), *shape), generator=generator).to(dtype)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), ()], ids=str)
def test_rows_go_to_their_ranks_and_gradients_back(
    rank: RankContext, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    inputs = [make(source, shape, dtype) for source in range(3)]
    received, sent = [row[rank.rank] for row in SENT], SENT[rank.rank]
    x = inputs[rank.rank].to(rank.device).requires_grad_(dtype.is_floating_point)
    y = all_to_all_rows(x, received, sent, rank.group.group_name)
    expected = [rows.split(SENT[source])[rank.rank] for source, rows in enumerate(inputs)]
    assert_bitwise_equal("y", y, torch.cat(expected))
    if dtype.is_floating_point:
        y.backward(2 * y.detach())
        assert_bitwise_equal("dx", x.grad, 2 * inputs[rank.rank])


@pytest.mark.ranks(2)
def test_an_expanded_gradient_and_strided_rows(rank: RankContext) -> None:
    x = torch.arange(12.0, device=rank.device).view(3, 4).t().requires_grad_()
    y = all_to_all_rows(x, [2, 2], [2, 2], rank.group.group_name)
    (y.sum() * (rank.rank + 1)).backward()
    assert y[0].tolist() == [2.0 * rank.rank, 2.0 * rank.rank + 4, 2.0 * rank.rank + 8]
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.ranks(2)
def test_lists_that_change_before_the_backward(rank: RankContext) -> None:
    received, sent = ([2, 1], [2, 1]) if rank.rank == 0 else ([1, 2], [1, 2])
    x = torch.arange(3.0, device=rank.device, requires_grad=True)
    y = all_to_all_rows(x, received, sent, rank.group.group_name)
    received[:], sent[:] = [3, 0], [0, 3]
    y.backward(2 * y.detach())
    assert_bitwise_equal("dx", x.grad, 2 * x.detach())


@pytest.mark.ranks(2)
def test_compiled_as_one_operator(rank: RankContext) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def exchange(x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        return all_to_all_rows(x.sin(), received, sent, rank.group.group_name).cos()

    splits = ([2, 1], [2, 1]) if rank.rank == 0 else ([1, 2], [1, 2])
    x = torch.randn(3, 4, device=rank.device, requires_grad=True)
    expected = exchange(x, *splits)
    (expected_dx,) = torch.autograd.grad(expected.sum(), x)
    actual = torch.compile(exchange, backend=backend, fullgraph=True)(x, *splits)
    (dx,) = torch.autograd.grad(actual.sum(), x)
    assert_bitwise_equal("y", actual, expected)
    assert_bitwise_equal("dx", dx, expected_dx)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.lightning_d9d.all_to_all_rows in targets


def test_registration_passes_torchs_checks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for shape in ((4, 3), (4,), (0, 3)):
            x = torch.randn(shape, requires_grad=True)
            splits = [shape[0]]
            results = torch.library.opcheck(
                torch.ops.lightning_d9d.all_to_all_rows.default, (x, splits, splits, dist.group.WORLD.group_name)
            )
            assert set(results.values()) == {"SUCCESS"}
    finally:
        dist.destroy_process_group()
