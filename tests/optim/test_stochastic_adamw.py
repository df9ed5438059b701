"""AdamW for bfloat16: equal to torch's in float32, better than nearest rounding, and the same wherever it runs."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from lightning_d9d import ConfigError
from lightning_d9d.checkpoint import load_optimizer_state, open_directory, optimizer_state, save_directory
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.mesh.sharding import local
from lightning_d9d.optim import StochasticAdamW
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Tolerance

SHAPES = [(7, 30), (5,), (), (4, 3, 66)]
NARROW, CODES = torch.bfloat16, torch.uint8
ALL_DTYPES = pytest.mark.parametrize("state_dtype", [torch.float32, NARROW, CODES], ids=str)


def parameters(dtype: torch.dtype = NARROW) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: Sequence[Tensor], step: int) -> None:
    """The same for the same shapes and step."""
    for index, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def steps(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        give_gradients(parameters, step)
        optimizer.step()


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise_equal(f"parameter {index}", one, other)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.0}, {"weight_decay": 0.3, "betas": (0.0, 0.5), "eps": 1e-3}, {"lr": torch.tensor(0.02)}],
    ids=str,
)
def test_equals_torch_in_float32(options: dict[str, Any]) -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizers: list[torch.optim.Optimizer] = []
    for make, own in ((StochasticAdamW, ours), (torch.optim.AdamW, theirs)):
        optimizers.append(make(own, **copy.deepcopy({"lr": 0.01, **options})))
    schedulers = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    for step in range(10):
        for optimizer, scheduler, own in zip(optimizers, schedulers, (ours, theirs), strict=True):
            give_gradients(own, step)
            if step % 3 == 1:
                own[1].grad = None
            optimizer.step()
            scheduler.step()
    assert_tensors_close(*({str(i): p for i, p in enumerate(own)} for own in (ours, theirs)))
    for one, other in zip(ours, theirs, strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (one, other), strict=True)]
        assert states[0].keys() == states[1].keys()
        assert_tensors_close(*states)


def test_scalars_are_taken_as_torch_takes_them() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for make, own in ((StochasticAdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = make(own, lr=0.01, **({} if make is StochasticAdamW else {"fused": True}))
        for step, found_inf in enumerate((0.0, 1.0, 0.0)):
            give_gradients(own, step)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(0.25), torch.tensor(found_inf)
            optimizer.step()
        assert [state["step"].item() for state in optimizer.state.values()] == [2.0] * len(own)
    assert_tensors_close(*({str(i): p for i, p in enumerate(own)} for own in (ours, theirs)))


@pytest.mark.gpu
@ALL_DTYPES
def test_the_host_waits_for_nothing(state_dtype: torch.dtype) -> None:
    own = [nn.Parameter(each.detach().cuda()) for each in parameters()]
    optimizer = StochasticAdamW(own, state_dtype=state_dtype)
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor(value, device="cuda") for value in (2.0, 0.0))  # type: ignore[attr-defined]
    steps(optimizer, own, 0, 2)
    give_gradients(own, 2)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@ALL_DTYPES
def test_long_runs_stay_near_float32_where_nearest_rounding_stands_still(state_dtype: torch.dtype) -> None:
    """Weights near 1 move by 1e-4 a step towards 0.9 or 1.1, which is a fortieth of what bfloat16 resolves there."""
    shape, num_steps = (64, 64), 500
    target = torch.where(torch.arange(64) % 2 == 0, 0.9, 1.1).expand(shape)

    def trained(dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], **options: Any) -> Tensor:
        weights = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = make([weights], lr=1e-4, weight_decay=0.0, **options)
        generator = torch.Generator().manual_seed(0)
        for _ in range(num_steps):
            noise = 0.03 * torch.randn(shape, generator=generator)
            weights.grad = (weights.detach().float() - target + noise).to(dtype)
            optimizer.step()
        return weights.detach().double()

    exact = trained(torch.float32, torch.optim.AdamW)
    nearest = trained(NARROW, torch.optim.AdamW)
    ours = trained(NARROW, StochasticAdamW, state_dtype=state_dtype)
    assert bool((nearest == 1).all())
    moved = (exact - 1).abs().mean().item()
    assert moved > 0.03
    for half in (slice(0, None, 2), slice(1, None, 2)):
        assert abs((ours - exact)[:, half].mean().item()) < moved / 20
    assert (ours - exact).norm() < (nearest - exact).norm() / 3


@ALL_DTYPES
@pytest.mark.parametrize("carried", [copy.deepcopy, through_a_file], ids=["copied", "through a file"])
def test_a_resumed_run_gets_the_same_bits(state_dtype: torch.dtype, carried: Callable[..., Any]) -> None:
    ours = parameters()
    optimizer = StochasticAdamW(ours, lr=0.01, state_dtype=state_dtype, seed=5)
    steps(optimizer, ours, 0, 3)
    resumed = copy.deepcopy(ours)
    again = StochasticAdamW(resumed, lr=1.0, state_dtype=state_dtype)
    again.load_state_dict(carried(optimizer.state_dict()))
    assert again.param_groups[0]["seed"] == 5
    steps(optimizer, ours, 3, 6)
    steps(again, resumed, 3, 6)
    assert_same(resumed, ours)
    for one, other in zip(resumed, ours, strict=True):
        for name, value in optimizer.state[other].items():
            is_wide = name == "step" or (state_dtype == CODES and other.dim() < 2)
            assert value.dtype == (torch.float32 if is_wide else state_dtype)
            assert_bitwise_equal(name, again.state[one][name], value)


def test_a_copied_optimizer_gets_the_same_bits() -> None:
    ours = parameters()
    optimizer = StochasticAdamW(ours, lr=0.01)
    steps(optimizer, ours, 0, 2)
    copied, again = copy.deepcopy((ours, optimizer))
    steps(optimizer, ours, 2, 4)
    steps(again, copied, 2, 4)
    assert_same(copied, ours)


def test_goes_on_from_a_state_of_torch() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    torchs = torch.optim.AdamW(theirs, lr=0.01)
    steps(torchs, theirs, 0, 3)
    for parameter, other in zip(ours, theirs, strict=True):
        parameter.data.copy_(other)
    optimizer = StochasticAdamW(ours, lr=1.0)
    optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
    steps(torchs, theirs, 3, 6)
    steps(optimizer, ours, 3, 6)
    assert_tensors_close(*({str(i): p for i, p in enumerate(own)} for own in (ours, theirs)))


def test_hooks_of_loading_see_tensors() -> None:
    ours = parameters()
    optimizer = StochasticAdamW(ours)
    steps(optimizer, ours, 0, 1)
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["state"][0]["exp_avg"]))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert isinstance(seen[0], Tensor)


def test_order_and_groups_do_not_matter() -> None:
    ours, theirs = parameters(), parameters()
    one = StochasticAdamW(ours, lr=0.01)
    other = StochasticAdamW([{"params": theirs[2:]}, {"params": theirs[1::-1]}], lr=0.01)
    for step in range(3):
        for own, optimizer in ((ours, one), (theirs, other)):
            give_gradients(own, step)
            optimizer.step()
    assert_same(theirs, ours)


def test_seeds_differ() -> None:
    results = []
    for seed in (0, 1):
        own = parameters()
        steps(StochasticAdamW(own, lr=1e-3, seed=seed), own, 0, 1)
        results.append(own[0])
    assert not torch.equal(*results)


def test_groups_have_hyperparameters_of_their_own() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    for make, own in ((StochasticAdamW, ours), (torch.optim.AdamW, theirs)):
        groups = [{"params": own[:2], "weight_decay": 0.0, "lr": 0.1}, {"params": own[2:], "betas": (0.5, 0.6)}]
        steps(make(groups, lr=0.01, weight_decay=0.5), own, 0, 3)
    assert_tensors_close(*({str(i): p for i, p in enumerate(own)} for own in (ours, theirs)))


def test_the_closure_computes_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = StochasticAdamW([weight], lr=0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.899), rtol=1e-5, atol=0)


PLACEMENTS = {
    "rows": [(Shard(0),)] * 2,
    "columns": [(Shard(1),), (Shard(0),)],
    "replicas": [(Replicate(),)] * 2,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS.keys())
@ALL_DTYPES
def test_shards_get_the_bits_of_the_whole(rank: RankContext, placements: Any, state_dtype: torch.dtype) -> None:
    """Some rows do not divide, one parameter has no row on the second rank, and one stays plain."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    mesh = domains.for_axes("dp_cp_shard")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(rank.device, NARROW) for shape in ((7, 63), (1,), (3,))]
    whole = [nn.Parameter(value.clone()) for value in values]
    cut = [nn.Parameter(distribute_tensor(v, mesh, p)) for v, p in zip(values[:2], placements, strict=True)]
    cut.append(nn.Parameter(values[2].clone()))
    optimizers = [StochasticAdamW(own, lr=0.01, state_dtype=state_dtype) for own in (whole, cut)]
    for optimizer, own in zip(optimizers, (whole, cut), strict=True):
        steps(optimizer, own, 0, 3)
    assert_same(cut, whole)
    for one, other in zip(cut, whole, strict=True):
        ours, theirs = optimizers[1].state[one], optimizers[0].state[other]
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_bitwise_equal(name, ours[name], theirs[name])
        for name in ("exp_avg", "exp_avg_sq"):
            assert local(ours[name]).shape == local(one).shape
    domains.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("state_dtype", [NARROW, CODES], ids=str)
def test_goes_on_from_a_directory_with_weights_cut_otherwise(rank: RankContext, state_dtype: torch.dtype) -> None:
    """Two ranks have a half each of what went on whole: the same bits."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    mesh = domains.for_axes("dp_cp_shard")
    whole = nn.Parameter(torch.randn(7, 30, generator=torch.Generator().manual_seed(0)).to(rank.device, NARROW))
    optimizer = StochasticAdamW([whole], lr=0.01, state_dtype=state_dtype, seed=3)
    steps(optimizer, [whole], 0, 3)
    saved, values = optimizer_state(optimizer, {whole: "weight"}, "optimizer")
    save_directory(rank.tmp_dir / "checkpoint", {**saved, "weight": whole}, {}, named_values=values)
    cut = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
    again = StochasticAdamW([cut], lr=1.0, state_dtype=state_dtype)
    checkpoint = open_directory(rank.tmp_dir / "checkpoint")
    checkpoint.load({"weight": cut.detach()}, strict=False)
    load_optimizer_state(again, {cut: "weight"}, "optimizer", checkpoint)
    steps(optimizer, [whole], 3, 6)
    steps(again, [cut], 3, 6)
    assert_same([cut], [whole])
    domains.close()


@pytest.mark.ranks(2)
def test_gradients_are_placed_as_their_parameters(rank: RankContext) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    mesh = domains.for_axes("dp_cp_shard")
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4, device=rank.device), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.ones(4, 4, device=rank.device), mesh, [Shard(1)])
    with pytest.raises(ConfigError, match=r"is placed \(Shard\(dim=1\),\); call"):
        StochasticAdamW([weight]).step()
    domains.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
def test_gpu_equals_cpu(dtype: torch.dtype) -> None:
    here, there = parameters(dtype), [nn.Parameter(p.detach().cuda()) for p in parameters(dtype)]
    for own in (here, there):
        steps(StochasticAdamW(own, lr=0.01, state_dtype=dtype), own, 0, 5)
    for one, other in zip(there, here, strict=True):
        tolerance = Tolerance(relative=1e-6 if dtype == torch.float32 else 1e-3)  # beta**step is no exact operation
        assert_tensors_close({"": one}, {"": other}, tolerance=tolerance)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"state_dtype": torch.float16}, "state_dtype=torch.float16 must be torch.float32, torch.b"),
        ({"seed": 2**32}, "seed=4294967296 must be from 0"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        StochasticAdamW(parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    optimizer = StochasticAdamW(parameters())
    with pytest.raises(ConfigError, match=rf"shape \[2\] is {dtype}"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=dtype))]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"shape \[4, 3\] is torch.sparse_coo"):
        StochasticAdamW(embedding.parameters()).step()
