"""Muon in one process: singular values, stacks, scale, momentum, AdamW for the rest."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import AdamW

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.sharding import distribute, local, local_ranges
from lightning_d9d.optim import MuonAdamW
from lightning_d9d.optim.muon import orthogonalized
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_gradient(weight: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    return parameter


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_singular_values_come_near_to_one(shape: tuple[int, int]) -> None:
    before = drawn(*shape)
    after = orthogonalized(before)
    u, _, v = torch.linalg.svd(before, full_matrices=False)
    in_its_basis = u.mT @ after @ v.mT
    values = in_its_basis.diagonal()
    assert (in_its_basis - values.diag()).abs().max() < 1e-12  # singular vectors stay
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_zeros_stay() -> None:
    assert_bitwise_equal("zeros", orthogonalized(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_two_steps_are_what_the_rule_says() -> None:
    weight, gradients = drawn(4, 6), [drawn(4, 6, seed=seed) for seed in (1, 2)]
    parameter = with_gradient(weight, gradients[0])
    optimizer = MuonAdamW([parameter], lr=0.1, weight_decay=0.5, momentum=0.9)
    optimizer.step()
    parameter.grad = gradients[1].clone()
    optimizer.step()
    average, expected = torch.zeros(4, 6, dtype=torch.float64), weight
    for gradient in gradients:
        average = 0.9 * average + gradient
        direction = orthogonalized(gradient + 0.9 * average)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * math.sqrt(6) * direction
    assert_close_named("weight", parameter.detach(), expected, tolerance=Tolerance(relative=1e-12))
    assert optimizer.state[parameter].keys() == {"step", "momentum"}


def test_stacks_are_matrices_each_by_itself_and_so_are_parts() -> None:
    """Experts of gate and up: two experts, each with two matrices of 3 rows."""
    weight, gradient = drawn(2, 6, 4), drawn(2, 6, 4, seed=1)
    together = with_gradient(weight, gradient)
    MuonAdamW([together], lr=0.1, num_parts=2).step()
    for expert in range(2):
        for part in range(2):
            rows = slice(3 * part, 3 * part + 3)
            alone = with_gradient(weight[expert, rows], gradient[expert, rows])
            MuonAdamW([alone], lr=0.1).step()
            theirs = together.detach()[expert, rows]
            assert_close_named("part", theirs, alone.detach(), tolerance=Tolerance(relative=1e-12))


def test_iterations_of_float32_are_in_bfloat16() -> None:
    weight, gradient = drawn(4, 6, dtype=torch.float32), drawn(4, 6, seed=1, dtype=torch.float32)
    parameter = with_gradient(weight, gradient)
    MuonAdamW([parameter], lr=1.0, weight_decay=0.0, momentum=0.0).step()
    direction = orthogonalized(gradient.bfloat16())
    expected = weight - direction.float() * (0.2 * math.sqrt(6))
    assert_close_named("weight", parameter.detach(), expected, tolerance=Tolerance(relative=1e-6))


def test_updates_are_as_large_as_those_of_adamw() -> None:
    """So its learning rate carries over; a first step of AdamW changes each element by the learning rate."""
    parameter = with_gradient(torch.zeros(64, 96, dtype=torch.float64), drawn(64, 96))
    MuonAdamW([parameter], lr=1e-3).step()
    root_mean_square = parameter.detach().square().mean().sqrt()
    assert 0.15e-3 < root_mean_square < 0.25e-3  # 0.2, as AdamW's later steps have it


def test_the_rest_is_adamw() -> None:
    shapes = [(5,), (3, 4)]
    ours, theirs = ([nn.Parameter(drawn(*shape)) for shape in shapes] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    one = MuonAdamW([{"params": ours[:1]}, {"params": ours[1:], "matrices": False}], **settings)
    other = AdamW(theirs, **settings)
    for step in range(3):
        for mine, its, shape in zip(ours, theirs, shapes, strict=True):
            mine.grad, its.grad = drawn(*shape, seed=step), drawn(*shape, seed=step)
        one.step()
        other.step()
    for mine, its in zip(ours, theirs, strict=True):
        assert_close_named("weight", mine.detach(), its.detach(), tolerance=Tolerance(relative=1e-12))


def test_a_state_is_loaded() -> None:
    def fresh() -> tuple[nn.Parameter, nn.Parameter, MuonAdamW]:
        matrix, vector = with_gradient(drawn(3, 4), drawn(3, 4, seed=1)), with_gradient(drawn(4), drawn(4, seed=1))
        return matrix, vector, MuonAdamW([matrix, vector])

    *expected, through = fresh()
    through.step()
    *actual, resumed = fresh()
    for mine, its in zip(actual, expected, strict=True):
        mine.data.copy_(its.data)
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))  # else they would share tensors
    through.step()
    resumed.step()
    for mine, its in zip(actual, expected, strict=True):
        assert_bitwise_equal("weight", mine.detach(), its.detach())


BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize("shape", [(32, 48), (40,)])
def test_small_updates_of_bfloat16_weights_are_not_lost(shape: tuple[int, ...]) -> None:
    """Weights move on average as those of float32 do. The states are in float32."""
    exact, rough = (nn.Parameter(torch.ones(shape, dtype=dtype)) for dtype in (torch.float32, BFLOAT16))
    made = [MuonAdamW([each], lr=1e-4, weight_decay=0.1) for each in (exact, rough)]
    for step in range(40):
        for parameter, optimizer in zip((exact, rough), made, strict=True):
            parameter.grad = (drawn(*shape) + drawn(*shape, seed=step + 1)).to(parameter.dtype)
            optimizer.step()
    expected, moved = exact.detach() - 1, rough.detach().float() - 1
    assert expected.abs().max() < 2**-7  # the distance to the next bfloat16, which 40 steps do not go
    assert ((moved * expected).sum() / expected.square().sum()).item() == pytest.approx(1, abs=0.2)
    states = [value for value in made[1].state[rough].values() if isinstance(value, Tensor)]
    assert {value.dtype for value in states} == {torch.float32}


def test_a_state_of_bfloat16_weights_is_loaded_in_float32() -> None:
    first, second = (nn.Parameter(torch.ones(3, 4, dtype=BFLOAT16)) for _ in range(2))
    one, other = (MuonAdamW([each], lr=0.1) for each in (first, second))
    for step in range(2):
        first.grad = drawn(3, 4, seed=step).bfloat16()
        one.step()
        if step == 0:
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            second.data.copy_(first.data)
    second.grad = drawn(3, 4, seed=1).bfloat16()
    other.step()
    assert_bitwise_equal("momentum", other.state[second]["momentum"], one.state[first]["momentum"])
    assert_bitwise_equal("weight", second.detach(), first.detach())


def test_a_loss_scaler_is_respected() -> None:
    """The scaler is torch's for float16: gradients are divided, and a step with infinite ones is left out."""
    ours, theirs = (nn.Parameter(drawn(3, 4, dtype=torch.float32)) for _ in range(2))
    scaled, plain = (MuonAdamW([each], lr=0.1) for each in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        gradient = drawn(3, 4, seed=step, dtype=torch.float32)
        ours.grad = gradient * scaler.scale(torch.ones(())) if step != 1 else torch.full((3, 4), math.inf)
        scaler.step(scaled)
        scaler.update()
        if step != 1:
            theirs.grad = gradient
            plain.step()
    assert_bitwise_equal("weight", ours.detach(), theirs.detach())
    assert scaled.state[ours]["step"] == 2


PLACED: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((8, 6), [Shard(0), Shard(1)]),
    ((8, 6), [Shard(1), Shard(0)]),
    ((5, 7), [Shard(0), Shard(1)]),  # parts of unequal sizes
    ((8, 6), [Shard(0), Shard(0)]),
    ((7, 3), [Shard(0), Shard(0)]),  # one rank has no row
    ((6, 5), [Replicate(), Shard(1)]),
    ((2, 4, 6), [Shard(0), Shard(2)]),
    ((2, 4, 6), [Shard(1), Shard(2)]),
    ((9,), [Replicate(), Shard(0)]),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, BFLOAT16])
def test_matrices_cut_on_two_axes_have_the_bits_of_one_process(rank: RankContext, dtype: torch.dtype) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2, tensor_parallel=2), rank.device.type)
    device_mesh = domains.for_axes("dp_cp_shard", "tp", domain="dense")
    wholes = [nn.Parameter(drawn(*shape, seed=n).to(rank.device, dtype)) for n, (shape, _) in enumerate(PLACED)]
    parts = [
        nn.Parameter(distribute_tensor(whole.detach(), device_mesh, placements))
        for whole, (_, placements) in zip(wholes, PLACED, strict=True)
    ]
    sharded = _under_fully_shard(domains, dtype, rank.device)
    parts.append(sharded)
    wholes.append(nn.Parameter(sharded.full_tensor().detach().clone()))
    one, other = (MuonAdamW(each, lr=0.1, seed=3) for each in (wholes, parts))
    for step in range(2):
        for whole, part in zip(wholes, parts, strict=True):
            whole.grad = drawn(*whole.shape, seed=step).to(rank.device, dtype)
            part.grad = _placed_as(whole.grad, part)
        one.step()
        other.step()
    for index, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
        assert_bitwise_equal(str(index), local(part).contiguous(), _part_of(whole.detach(), part).contiguous())


def _under_fully_shard(domains: MeshDomains, dtype: torch.dtype, device: torch.device) -> Any:
    """Rows over tensor ranks, and what each has over data ranks, as FSDP2 does it."""
    layer = nn.Linear(6, 12, bias=False, device=device, dtype=dtype)
    layer.weight = nn.Parameter(drawn(12, 6, seed=99).to(device, dtype))
    distribute(layer, "weight", domains.for_axes("tp", domain="dense"), [Shard(0)])
    fully_shard(layer, mesh=domains.for_axes("dp_cp_shard", domain="dense"))
    return layer.weight


def _part_of(whole: Tensor, like: Any) -> Tensor:
    return whole[tuple(slice(each.start, each.stop) for each in local_ranges(like))]


def _placed_as(whole: Tensor, like: Any) -> Tensor:
    part = _part_of(whole, like).contiguous()
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, **shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "message"),
    [
        (
            (2, 2),
            torch.float16,
            {},
            r"a parameter of shape \[2, 2\] is torch.float16.*; give .*bfloat16, or train with",
        ),
        (
            (5,),
            torch.float32,
            {"matrices": True},
            r"a parameter of shape \[5\] is a vector in a group .* Leave matrices=True out",
        ),
        ((2, 2), torch.float32, {"seed": 2**31}, "seed=2147483648 must be from 0 to"),
        ((3, 2), torch.float32, {"num_parts": 2}, r"num_parts=2 does not divide the 3 rows .* \[3, 2\]"),
        ((2, 2), torch.float32, {"num_parts": 0}, "num_parts=0 must be 1 or more"),
        ((2, 2), torch.float32, {"momentum": 1.0}, "momentum=1.0 must be from 0 to below 1"),
        ((2, 2), torch.float32, {"lr": -1.0}, "lr=-1.0 must be 0 or more"),
    ],
)
def test_what_cannot_be(shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"MuonAdamW: {message}"):
        MuonAdamW([nn.Parameter(torch.zeros(shape, dtype=dtype))], **settings)
