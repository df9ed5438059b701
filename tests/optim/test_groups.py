"""Parameter groups: what decays, and what fused and foreach optimizers of torch take in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.optim import parameter_groups
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext


class Network(nn.Module):
    """Matrices, biases, a norm's weight and stacked experts, named in no order of dims."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=dtype)
        self.up = nn.Linear(4, 6, dtype=dtype)
        self.experts = nn.Parameter(torch.zeros(2, 6, 3, dtype=dtype))
        self.down = nn.Linear(3, 2, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh() @ self.experts[0] + 1).square().mean()


def names(module: nn.Module, groups: list[dict[str, Any]]) -> list[tuple[list[str], float]]:
    """Names of each group's parameters, and its decay."""
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    return [([name_of[parameter] for parameter in group["params"]], group["weight_decay"]) for group in groups]


def test_matrices_decay_and_vectors_do_not() -> None:
    module = Network()
    assert names(module, parameter_groups(module, 0.3)) == [
        (["experts", "up.weight", "down.weight"], 0.3),
        (["norm.weight", "norm.bias", "up.bias", "down.bias"], 0.0),
    ]


def test_groups_stay_as_they_are_without_decay() -> None:
    """Else a checkpoint could not be loaded with another weight decay."""
    module = Network()
    assert [len(group["params"]) for group in parameter_groups(module, 0.0)] == [3, 4]


def test_the_user_tells_what_decays() -> None:
    module = Network()
    groups = parameter_groups(module, decays=lambda name, parameter: name.startswith("up") or parameter.ndim == 3)
    assert names(module, groups) == [
        (["experts", "up.weight", "up.bias"], 0.1),
        (["norm.weight", "norm.bias", "down.weight", "down.bias"], 0.0),
    ]


def test_frozen_parameters_are_left_out() -> None:
    module = Network()
    module.up.requires_grad_(False)
    module.norm.requires_grad_(False)
    assert names(module, parameter_groups(module)) == [(["experts", "down.weight"], 0.1), (["down.bias"], 0.0)]


def test_a_tied_parameter_comes_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert names(module, parameter_groups(module)) == [(["0.weight"], 0.1)]


def test_dtypes_do_not_mix() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    assert names(module, parameter_groups(module)) == [
        (["0.weight", "2.weight"], 0.1),
        (["1.weight"], 0.1),
        (["0.bias", "2.bias"], 0.0),
        (["1.bias"], 0.0),
    ]


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW fused": (AdamW, {"fused": True}),
    "AdamW foreach": (AdamW, {"foreach": True}),
    "AdamW": (AdamW, {}),
    "SGD": (SGD, {"momentum": 0.9}),
    "SGD fused": (SGD, {"momentum": 0.9, "fused": True}),
    "SGD foreach": (SGD, {"momentum": 0.9, "foreach": True}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("frozen", [nn.Linear(2, 2).requires_grad_(False), nn.Tanh()], ids=["frozen", "no parameters"])
def test_optimizers_take_a_stage_with_nothing_to_train(frozen: nn.Module, optimizer: str) -> None:
    make, options = OPTIMIZERS[optimizer]
    before = copy.deepcopy(frozen.state_dict())
    first, second = (make(parameter_groups(frozen, 0.2), lr=0.1, **options) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    first.step()
    first.zero_grad()
    scheduler.step()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert [(g["params"], g["lr"], g["weight_decay"]) for g in second.param_groups] == [([], 0.05, 0.2)]
    second.step()
    for name, value in frozen.state_dict().items():
        assert_bitwise_equal(name, value, before[name])


def laid_out(domains: MeshDomains, module: Network) -> Network:
    """Layers sharded over one mesh, experts over another; the last layer stays plain."""
    for layer in (module.norm, module.up):
        fully_shard(layer, mesh=domains.for_axes("dp_cp_shard"))
    experts = nn.ParameterList([module.experts])
    fully_shard(experts, mesh=domains.for_axes("ep_replicate"))
    module.experts = experts[0]
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "SGD fused"])  # torch: no DTensors
def test_optimizers_take_meshes_beside_plain_tensors(rank: RankContext, optimizer: str) -> None:
    make, options = OPTIMIZERS[optimizer]
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    reference = Network().to(rank.device)
    module = laid_out(domains, copy.deepcopy(reference))
    groups = parameter_groups(module)
    assert names(module, groups) == [
        (["experts"], 0.1),
        (["up.weight"], 0.1),
        (["down.weight"], 0.1),
        (["norm.weight", "norm.bias", "up.bias"], 0.0),
        (["down.bias"], 0.0),
    ]
    ours, theirs = (make(g, lr=0.1, **options) for g in (groups, parameter_groups(reference)))
    for step in range(3):
        for index, (parameter, whole) in enumerate(zip(module.parameters(), reference.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(10 * step + index)
            whole.grad = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(rank.device)
            parameter.grad = (
                torch.distributed.tensor.distribute_tensor(whole.grad, parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else whole.grad.clone()
            )
        if step == 1:  # the state travels
            state = copy.deepcopy(ours.state_dict())
            ours = make(parameter_groups(module), lr=0.1, **options)
            ours.load_state_dict(state)
        ours.step()
        theirs.step()
    assert_tensors_close(dict(module.named_parameters()), dict(reference.named_parameters()))
    domains.close()
