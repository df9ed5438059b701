"""The gradient norm over meshes and stages, and clipping, against torch on the full gradients in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_d9d import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.sync.norm import SquaredNorms, clip_gradients_by_norm, gradient_norm
from tests.harness.compare import (
    assert_bitwise_equal,
    assert_close_named,
    assert_gradients_equal,
    assert_tensors_close,
)
from tests.harness.ranks import RankContext

NORM_TYPES = [1, 2, 3.5, math.inf]
Layout = tuple[Sequence[int], Sequence[str], Sequence[Placement]]
"""Shape, axes of the mesh, placements; without axes a plain tensor."""

S0, S1, R = Shard(0), Shard(1), Replicate()
DENSE_AND_EXPERTS: list[Layout] = [
    ((8, 6), ("dp_cp_shard", "tp"), (S0, S1)),
    ((5, 3), ("dp_cp_shard", "tp"), (S0, S1)),
    ((8, 6), ("dp_cp_shard", "tp"), (S0, S0)),
    ((3, 6), ("dp_cp_shard", "tp"), (S0, S0)),
    ((7,), ("dp_cp_shard", "tp"), (S0, R)),
    ((4, 7), ("dp_cp_shard", "tp"), (R, S1)),
    ((6,), ("dp_cp_shard", "tp"), (R, R)),
    ((6, 2), ("dp_cp_shard",), (S0,)),
    ((4, 2, 3), ("ep_replicate", "ep_shard"), (S1, S0)),
    ((4, 2, 3), ("ep_replicate", "ep_shard"), (R, S0)),
    ((3, 4), (), ()),
]
CASES: dict[str, tuple[MeshConfig, list[Layout]]] = {
    "shards": (
        MeshConfig(data_parallel_shard=4),
        [((8, 3), ("dp_cp_shard",), (S0,)), ((4, 6), ("dp_cp_shard",), (S1,))],
    ),
    "uneven and empty shards": (
        MeshConfig(data_parallel_shard=4),
        [((5, 3), ("dp_cp_shard",), (S0,)), ((2, 3), ("dp_cp_shard",), (S0,)), ((0, 3), ("dp_cp_shard",), (S0,))],
    ),
    "shards beside copies": (
        MeshConfig(data_parallel_shard=4),
        [((8, 3), ("dp_cp_shard",), (S0,)), ((6,), ("dp_cp_shard",), (R,)), ((3, 4), (), ())],
    ),
    "copies of shards": (
        MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
        [((5, 3), ("dp_replicate", "dp_cp_shard"), (R, S0)), ((6,), ("dp_replicate", "dp_cp_shard"), (R, R))],
    ),
    "shards over all ranks, experts over two axes": (
        MeshConfig(data_parallel_shard=4, expert_parallel=2),
        [((8, 3), ("dp_cp_shard",), (S0,)), *DENSE_AND_EXPERTS[-3:]],
    ),
    "shards, tensor, experts": (
        MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=2),
        DENSE_AND_EXPERTS,
    ),
    "shards, tensor, experts on all ranks": (
        MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=4),
        DENSE_AND_EXPERTS,
    ),
}


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def plain(gradient: Tensor | None, like: Tensor | None = None) -> nn.Parameter:
    """A parameter with this gradient."""
    shape = torch.zeros(3) if gradient is None else gradient
    parameter = nn.Parameter(torch.zeros_like(shape if like is None else like))
    parameter.grad = None if gradient is None else gradient.clone()
    return parameter


def placed(gradient: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient.clone(), mesh, placements)  # a replicated one would share memory
    return parameter


def model(
    domains: MeshDomains, layouts: list[Layout], device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters laid out on the mesh, and the same ones whole."""
    whole = [
        plain(values(seed + i, *shape, dtype=dtype, device=device) * (i + 1)) for i, (shape, _, _) in enumerate(layouts)
    ]
    laid_out = []
    for parameter, (_, axes, placements) in zip(whole, layouts, strict=True):
        assert parameter.grad is not None
        mesh = domains.for_axes(*axes) if axes else None
        laid_out.append(placed(parameter.grad, mesh, placements) if mesh is not None else plain(parameter.grad))
    return laid_out, whole


def gradients(parameters: Sequence[nn.Parameter]) -> dict[str, Tensor | None]:
    return {str(index): parameter.grad for index, parameter in enumerate(parameters)}


def check(
    ours: list[nn.Parameter],
    same_whole: list[nn.Parameter],
    norm_type: float,
    *,
    others: Sequence[nn.Parameter] = (),
    pipeline_group: dist.ProcessGroup | None = None,
) -> None:
    """Norm and clipping as torch's on the whole gradients of this stage and `others`. Changes the gradients."""
    everything = [p for p in (*same_whole, *others) if p.numel() > 0]  # torch knows no maximum of an empty one
    expected = clip_grad_norm_(everything, math.inf, norm_type)
    assert expected > 0
    norm = gradient_norm(ours, norm_type, pipeline_group)
    assert_close_named(f"{norm_type}-norm", norm, expected)
    clip_grad_norm_(everything, float(expected) / 3, norm_type)
    before = clip_gradients_by_norm(ours, float(expected) / 3, norm_type, pipeline_group)
    assert_bitwise_equal("norm before clipping", before, norm)
    assert_tensors_close(gradients(ours), gradients(same_whole))
    afterwards = gradient_norm(ours, norm_type, pipeline_group)
    assert_close_named("norm afterwards", afterwards, expected / 3 * expected / (expected + 1e-6))


@contextmanager
def all_reduced_groups() -> Iterator[list[dist.ProcessGroup | None]]:
    """The groups of all-reduces issued in the body."""
    groups = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, op: object = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> None:
        assert tensor.numel() == 1
        groups.append(group)
        real(tensor, op, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield groups


# One process


@pytest.mark.parametrize("norm_type", [0.5, *NORM_TYPES])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_plain_float32_gradients_are_clipped_as_by_torch_bitwise(norm_type: float, max_norm: float) -> None:
    shapes = [(7, 5), (33,), (), (2, 3, 4), (1000,)]
    ours = [plain(values(i, *shape, dtype=torch.float32)) for i, shape in enumerate(shapes)]
    ours.insert(1, plain(None))
    theirs = copy.deepcopy(ours)
    for our, their in zip(ours, theirs, strict=True):  # deepcopy leaves gradients out
        their.grad = None if our.grad is None else our.grad.clone()
    norm = clip_gradients_by_norm(iter(ours), max_norm, norm_type)
    assert_bitwise_equal("norm", norm, clip_grad_norm_(theirs, max_norm, norm_type))
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert (our.grad is None) == (their.grad is None)
        if our.grad is not None and their.grad is not None:
            assert_bitwise_equal(str(index), our.grad, their.grad)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_one_process_in_float64(norm_type: float) -> None:
    ours, theirs = ([plain(values(i, 4, i + 1)) for i in range(3)] for _ in range(2))
    check(ours, theirs, norm_type)


@pytest.mark.parametrize("parameters", [[], [None], [None, None]], ids=["none", "one", "two"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_without_gradients_the_norm_is_zero(parameters: list[None], norm_type: float) -> None:
    norm = clip_gradients_by_norm([plain(gradient) for gradient in parameters], 1.0, norm_type)
    assert_bitwise_equal("norm", norm, torch.tensor(0.0))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_dtypes_mix(norm_type: float) -> None:
    dtypes = [torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    ours = [plain(values(i, 50, dtype=dtype)) for i, dtype in enumerate(dtypes)]
    whole = [p.grad.clone().double() for p in ours if p.grad is not None]
    norm = gradient_norm(ours, norm_type)
    assert norm.dtype == torch.float64
    assert_close_named("norm", norm.float(), get_total_norm(whole, norm_type))  # parts of it are summed in float32
    clip_gradients_by_norm(ours, norm.item() / 2, norm_type)
    for parameter, before, dtype in zip(ours, whole, dtypes, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        assert_close_named(str(dtype), parameter.grad, before * (norm / 2 / (norm + 1e-6)))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_large_and_small_gradients_in_bfloat16(norm_type: float) -> None:
    """The norms of large ones are those of the norms of their rows."""
    sizes = [(1024, 1024), (7,), (2, 1024, 513), (1,)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    whole = torch.cat([parameter.grad.double().flatten() for parameter in parameters if parameter.grad is not None])
    expected = torch.linalg.vector_norm(whole, norm_type).float()
    assert_close_named("norm", gradient_norm(parameters, norm_type), expected)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_bfloat16_gradients_are_summed_in_float32(norm_type: float) -> None:
    ours = [plain(values(i, 100, dtype=torch.bfloat16)) for i in range(20)]
    in_float32 = [p.grad.float() for p in ours if p.grad is not None]
    assert_bitwise_equal("norm", gradient_norm(ours, norm_type), get_total_norm(in_float32, norm_type))


def test_gradients_may_be_of_another_dtype_than_their_parameters() -> None:
    gradient = values(0, 30, dtype=torch.float32)
    parameter = nn.Parameter(torch.zeros(30, dtype=torch.bfloat16))
    parameter.grad_dtype = None
    parameter.grad = gradient.clone()
    assert_bitwise_equal("norm", clip_gradients_by_norm([parameter], 0.5), gradient.norm())
    assert_close_named("gradient", parameter.grad, gradient / gradient.norm() / 2)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_empty_gradients_count_nothing(norm_type: float) -> None:
    ours, theirs = ([plain(values(0, 5)), plain(values(1, 0, 3))] for _ in range(2))
    assert_close_named("norm", gradient_norm(ours, norm_type), get_total_norm([theirs[0].grad], norm_type))
    assert gradient_norm(ours[1:], norm_type) == 0


def test_a_parameter_given_twice_counts_once() -> None:
    parameter = plain(torch.tensor([3.0, 4.0]))
    assert clip_gradients_by_norm([parameter, parameter], 1.0) == 5.0
    assert_close_named("gradient", parameter.grad, torch.tensor([0.6, 0.8]))


def test_a_gradient_of_a_frozen_parameter_counts() -> None:
    parameter = plain(torch.tensor([3.0, 4.0])).requires_grad_(False)
    assert gradient_norm([parameter]) == 5.0


def test_a_known_norm_is_taken() -> None:
    parameter = plain(torch.tensor([3.0, 4.0]))
    known = torch.tensor(50.0)
    assert clip_gradients_by_norm([parameter], 5.0, norm=known) is known
    assert_close_named("gradient", parameter.grad, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_show(norm_type: float, bad: float) -> None:
    ours = [plain(torch.tensor([1.0, bad])), plain(torch.tensor([2.0]))]
    torch.testing.assert_close(gradient_norm(ours, norm_type), torch.tensor(bad), equal_nan=True)


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_a_norm_type_that_is_not_positive_is_refused(norm_type: float) -> None:
    with pytest.raises(ConfigError, match="greater than 0"):
        gradient_norm([plain(torch.ones(2))], norm_type)


# Meshes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_two_ranks(rank: RankContext, norm_type: float) -> None:
    """An even, an uneven and an empty shard, a copy and a plain tensor."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    layouts: list[Layout] = [
        ((4, 3), ("dp_cp_shard",), (S0,)),
        ((3, 3), ("dp_cp_shard",), (S0,)),
        ((1, 3), ("dp_cp_shard",), (S0,)),
        ((2, 3), ("dp_cp_shard",), (R,)),
        ((5,), (), ()),
    ]
    check(*model(domains, layouts, rank.device), norm_type)
    domains.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks(rank: RankContext, case: str, norm_type: float) -> None:
    config, layouts = CASES[case]
    domains = MeshDomains.build(config, rank.device.type)
    check(*model(domains, layouts, rank.device), norm_type)
    for layout in layouts:  # each alone, so that no other hides it
        if 0 not in layout[0]:
            check(*model(domains, [layout], rank.device), norm_type)
    domains.close()


@pytest.mark.ranks(4)
def test_dtypes_mix_on_meshes(rank: RankContext) -> None:
    domains = MeshDomains.build(CASES["shards, tensor, experts"][0], rank.device.type)
    ours, whole = [], []
    for dtype in (torch.bfloat16, torch.float32):
        parts, same_whole = model(domains, DENSE_AND_EXPERTS, rank.device, dtype=dtype)
        ours += parts
        whole += [p.grad.double() for p in same_whole if p.grad is not None]
    norm = clip_gradients_by_norm(ours, 1.0)
    assert norm.dtype == torch.float32
    assert_close_named("norm", norm, get_total_norm(whole))
    assert_close_named("norm afterwards", gradient_norm(ours).bfloat16(), torch.ones((), device=rank.device))
    domains.close()


class Weighted(nn.Module):
    """A module whose gradient is the factor of its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, factors: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return (weight * factors).sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("expert_parallel", [1, 2, 4])
def test_fully_sharded_layers_and_experts(rank: RankContext, norm_type: float, expert_parallel: int) -> None:
    """Placements that `fully_shard` makes of tensor- and expert-parallel parameters, gradients of a backward."""
    config = MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=expert_parallel)
    domains = MeshDomains.build(config, rank.device.type)
    reference = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 4)).double().to(rank.device)
    with torch.no_grad():
        for index, parameter in enumerate(reference.parameters()):
            parameter.copy_(values(index, *parameter.shape))
    module = copy.deepcopy(reference)
    tensor_parallel = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(module, domains.for_axes("tp", domain="dense"), tensor_parallel)
    fully_shard(module, mesh=domains.for_axes("dp_cp_shard"))
    x = values(10, 8, 6, device=rank.device)
    module(x.chunk(2)[domains.coordinates["dp_cp_shard"]]).square().mean().backward()
    reference(x).square().mean().backward()

    factors = values(11, 4, 3, device=rank.device) / 10
    experts = Weighted(distribute_tensor(torch.zeros_like(factors), domains.expert["ep_shard"], [Shard(0)]))
    fully_shard(experts, mesh=domains.expert["ep_replicate"])  # of one expert a rank, one of two ranks gets nothing
    experts(factors.chunk(expert_parallel)[domains.coordinates["ep_shard"]]).backward()

    placements = [str(p.placements) for p in (*module.parameters(), *experts.parameters()) if isinstance(p, DTensor)]
    assert len(placements) == 7
    assert sum("_StridedShard" in text for text in placements) >= 2
    assert_gradients_equal(module, reference)
    check([*module.parameters(), *experts.parameters()], [*reference.parameters(), plain(factors)], norm_type)
    domains.close()


@pytest.mark.ranks(4)
def test_ranks_without_gradients_send_alike(rank: RankContext) -> None:
    """Experts, the only ones sharded over all four ranks, get none on two of them; one parameter gets none anywhere."""
    domains = MeshDomains.build(CASES["shards, tensor, experts on all ranks"][0], rank.device.type)
    ours, whole = model(domains, DENSE_AND_EXPERTS, rank.device)
    for expert, whole_expert in zip(ours[8:10], whole[8:10], strict=True):
        assert isinstance(expert.grad, DTensor)
        assert whole_expert.grad is not None
        whole_expert.grad[[0, 3]] = 0  # an expert a rank
        if rank.rank in (0, 3):
            expert.grad = None
    ours[3].grad = whole[3].grad = None
    ours[1].requires_grad_(rank.rank != 2)
    assert_close_named("norm", gradient_norm(ours), get_total_norm([p.grad for p in whole if p.grad is not None]))
    domains.close()


@pytest.mark.ranks(4)
def test_one_message_for_each_set_of_groups_and_axis(rank: RankContext) -> None:
    config = MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=4)
    domains = MeshDomains.build(config, rank.device.type)
    ours, _ = model(domains, DENSE_AND_EXPERTS * 2, rank.device)
    with all_reduced_groups() as groups:
        gradient_norm(ours)
    data, tensor, experts = (domains.group(axis) for axis in ("dp_cp_shard", "tp", "ep_shard"))
    assert groups == [data, tensor, data, tensor, experts]
    with all_reduced_groups() as groups:
        clip_gradients_by_norm(ours, 1.0, norm=torch.ones((), device=rank.device))
        gradient_norm([ours[6], ours[10]])  # a copy, a plain tensor
    assert groups == []
    domains.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_values_of_one_rank_that_are_not_finite_show_on_all(rank: RankContext, norm_type: float, bad: float) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2, tensor_parallel=2), rank.device.type)
    ours, _ = model(domains, [((4, 4), ("dp_cp_shard", "tp"), (S0, S1)), ((3,), (), ())], rank.device)
    assert isinstance(ours[0].grad, DTensor)
    if rank.rank == 1:
        ours[0].grad.to_local()[0, 0] = bad
    norm = gradient_norm(ours, norm_type)
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf
    domains.close()


@pytest.mark.ranks(2)
def test_gradients_that_lie_unlike_their_parameters_are_refused(rank: RankContext) -> None:
    """Partial ones, and whole ones of shards, which would count once a rank. The remedy of the message works."""
    mesh = MeshDomains.build(MeshConfig(tensor_parallel=2), rank.device.type).for_axes("tp")
    whole = values(0, 4, 3, device=rank.device)
    for placement, wrong in ((Replicate(), Partial()), (Shard(0), Replicate()), (Shard(0), Partial())):
        parameter = placed(whole, mesh, [placement])
        assert isinstance(parameter, DTensor)
        local = whole if wrong.is_replicate() else whole * (0.25, 0.75)[rank.rank]
        parameter.grad = DTensor.from_local(local, mesh, [wrong])
        for call in (gradient_norm, lambda parameters: clip_gradients_by_norm(parameters, 1.0)):
            with pytest.raises(ConfigError, match="redistribute"):
                call([parameter])
        assert isinstance(parameter.grad, DTensor)
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        check([parameter], [plain(whole)], 2)
    unfinished = nn.Parameter(DTensor.from_local(whole, mesh, [Partial()]))
    with pytest.raises(ConfigError, match="sharded or replicated"):
        gradient_norm([unfinished])


# Stages


def stages(domains: MeshDomains, device: torch.device) -> list[tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Return this rank's own kind of parameters at its place, and the whole ones of every stage."""
    layouts: list[list[Layout]] = [
        [((5, 3), ("dp_cp_shard",), (S0,)), ((4,), (), ()), ((6,), ("dp_cp_shard",), (R,))],
        [((4, 2), ("ep_replicate", "ep_shard"), (R, S0)), ((3, 3), (), ())],
    ]
    return [model(domains, own, device, seed=10 * stage) for stage, own in enumerate(layouts)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_stages_hold_other_parameters(rank: RankContext, norm_type: float) -> None:
    config = MeshConfig(pipeline_parallel=2, data_parallel_shard=2, expert_parallel=2)
    domains = MeshDomains.build(config, rank.device.type)
    both = stages(domains, rank.device)
    stage = domains.coordinates["pp"]
    (ours, whole), (_, others) = both[stage], both[1 - stage]
    alone = get_total_norm([p.grad for p in whole if p.grad is not None], norm_type)
    assert_close_named("norm of the stage alone", gradient_norm(ours, norm_type), alone)
    check(ours, whole, norm_type, others=others, pipeline_group=domains.group("pp"))
    norms = rank.all_gather_object(gradient_norm(ours, norm_type, domains.group("pp")).item())
    assert len(set(norms)) == 1
    domains.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("second", ["nothing", "frozen", "no gradient"])
def test_a_stage_with_nothing_to_train(rank: RankContext, norm_type: float, second: str) -> None:
    domains = MeshDomains.build(MeshConfig(pipeline_parallel=2), rank.device.type)
    whole = [plain(values(0, 4, 3, device=rank.device)), plain(values(1, 5, device=rank.device))]
    empty = nn.Parameter(torch.zeros(3, device=rank.device), requires_grad=second != "frozen")
    ours = whole if domains.coordinates["pp"] == 0 else [] if second == "nothing" else [empty]
    expected = get_total_norm([p.grad for p in whole if p.grad is not None], norm_type)
    norm = clip_gradients_by_norm(ours, float(expected) / 2, norm_type, domains.group("pp"))
    assert norm.device.type == rank.device.type
    assert_close_named("norm", norm, expected)
    afterwards = gradient_norm(ours, norm_type, domains.group("pp"))
    assert_close_named("norm afterwards", afterwards, expected / 2 * expected / (expected + 1e-6))
    domains.close()


# GPU


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_host_waits_for_nothing(norm_type: float) -> None:
    ours = [plain(values(i, 50, dtype=dtype, device="cuda")) for i, dtype in enumerate((torch.float32, torch.bfloat16))]
    clip_gradients_by_norm(ours, 1.0, norm_type)  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_gradients_by_norm(ours, 0.5, norm_type)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close_named("norm", gradient_norm(ours, norm_type).bfloat16(), torch.tensor(0.5, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_devices_mix(norm_type: float) -> None:
    devices = ["cpu", "cuda", "cpu"]
    ours = [plain(values(i, 50, device=device)) for i, device in enumerate(devices)]
    whole = [plain(values(i, 50)) for i in range(3)]
    check(ours, whole, norm_type)
    assert [p.grad.device.type for p in ours if p.grad is not None] == devices


@pytest.mark.ranks(2)
def test_gradients_that_are_gone_count(rank: RankContext) -> None:
    mesh = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type).for_axes("dp_cp_shard")
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(6)]
    parameters = [nn.Parameter(torch.zeros(6, 3, dtype=torch.float64, device=rank.device)) for _ in range(2)]
    parameters += [nn.Parameter(distribute_tensor(torch.zeros_like(whole[0]), mesh, [S0])) for _ in range(4)]
    for parameter, gradient in zip(parameters, whole, strict=True):
        on_device = gradient.to(rank.device)
        is_sharded = isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(on_device, mesh, [S0]) if is_sharded else on_device
    gone = SquaredNorms()
    for part in ([0, 2], [3, 4]):
        gone.add(parameters[index] for index in part)
        for index in part:
            parameters[index].grad = None
    norm = gradient_norm(parameters, gone=gone)
    assert_close_named("norm", norm, torch.stack(whole).norm())
