"""An optimizer that was saved and loaded takes the same steps as one that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from lightning_d9d import ConfigError, StateError
from lightning_d9d.checkpoint import (
    fit_scheduler_state,
    load_optimizer_state,
    open_directory,
    optimizer_state,
    save_directory,
)
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.optim import MuonAdamW, StochasticAdamW
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, betas=(0.8, 0.9), foreach=True),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "tensor learning rate": lambda p: AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, centered=True),
}


class Network(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def train(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    device = next(module.parameters()).device
    for step in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        module(x.to(device)).square().mean().backward()
        optimizer.step()


def save(path: Path, module: nn.Module, *optimizers: Optimizer, values: Mapping[str, Any] | None = None) -> None:
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in module.named_parameters()}
    named_values: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        more_tensors, more_values = optimizer_state(optimizer, names_of(module), f"optimizers.{number}")
        tensors |= more_tensors
        named_values |= more_values
    save_directory(path, tensors, values or {}, named_values=named_values)


def load(path: Path, module: nn.Module, *optimizers: Optimizer, alone: bool = False) -> None:
    checkpoint = open_directory(path, alone=alone)
    parameters = {f"model.{name}": p for name, p in module.named_parameters()}
    checkpoint.load(parameters, strict=False)
    for number, optimizer in enumerate(optimizers):
        load_optimizer_state(optimizer, names_of(module), f"optimizers.{number}", checkpoint)


def resumed(path: Path, network: nn.Module, make: Make, alone: bool = False) -> nn.Module:
    """Another network, whose optimizer goes on from the checkpoint."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    optimizer = make(network.parameters())
    load(path, network, optimizer, alone=alone)
    train(network, optimizer, 2, 5)
    return network


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_bitwise(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    network = Network().double()
    optimizer = make(network.parameters())
    train(network, optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    save(tmp_path / "checkpoint", network, optimizer)
    other = Network().double()
    loaded = make(other.parameters())
    load(tmp_path / "checkpoint", other, loaded)
    torch.testing.assert_close(loaded.state_dict(), before, rtol=0, atol=0)
    train(network, optimizer, 2, 5)
    again = resumed(tmp_path / "checkpoint", Network().double(), make)
    for key, parameter in network.named_parameters():
        assert_bitwise_equal(key, again.get_parameter(key).detach(), parameter.detach())


# Meshes

MESHES = {
    "fsdp": MeshConfig(data_parallel_shard=4),
    "hsdp": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "fsdp and tensor": MeshConfig(data_parallel_shard=2, tensor_parallel=2),
    "replicated": MeshConfig(data_parallel_replicate=4),
}


def vector_network(device: torch.device) -> Network:
    """Return a network without scalar parameters, which FSDP does not support."""
    network = Network().to(device, torch.float64)
    network.scale = nn.Parameter(network.scale.detach()[None])
    return network


def on_mesh(config: MeshConfig, device: torch.device) -> Network:
    """All ranks compute the same, so that gradients are those of one process."""
    domains = MeshDomains.build(config, device.type)
    network = vector_network(device)
    if domains.sizes["tp"] > 1:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(network, domains.for_axes("tp", domain="dense"), plan)
    if domains.sizes["dp_cp_shard"] > 1:
        fully_shard(network, mesh=domains.for_axes("dp_replicate", "dp_cp_shard"))
    domains.close()
    return network


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("amsgrad", ("hsdp", "fsdp and tensor")),
        ("momentum", ("fsdp and tensor", "replicated")),
        ("adagrad", ("fsdp", "replicated")),
    ],
)
def test_any_mesh_goes_on_from_any_mesh(rank: RankContext, name: str, meshes: tuple[str, ...]) -> None:
    """Each mesh saves for itself, for the next one and for one process, with one optimizer of each kind."""
    make = OPTIMIZERS[name]
    finished = {}
    for mesh in meshes:
        network = on_mesh(MESHES[mesh], rank.device)
        optimizer = make(network.parameters())
        train(network, optimizer, 0, 2)
        save(rank.tmp_dir / mesh, network, optimizer)
        train(network, optimizer, 2, 5)
        finished[mesh] = whole_parameters(network)
    for saved_on, other in zip(meshes, meshes[1:] + meshes[:1], strict=True):
        same = whole_parameters(resumed(rank.tmp_dir / saved_on, on_mesh(MESHES[saved_on], rank.device), make))
        for key, parameter in same.items():
            assert_bitwise_equal(f"{saved_on}: {key}", parameter, finished[saved_on][key])
        away = whole_parameters(resumed(rank.tmp_dir / saved_on, on_mesh(MESHES[other], rank.device), make))
        for key, parameter in away.items():
            assert_close_named(f"{saved_on} to {other}: {key}", parameter, finished[saved_on][key])
        alone = vector_network(rank.device)
        for key, parameter in resumed(rank.tmp_dir / saved_on, alone, make, alone=True).named_parameters():
            assert_close_named(f"{saved_on} to one process: {key}", parameter, finished[saved_on][key])


# Other parameter groups, frozen parts, stages


def groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    vectors = [p for p in network.parameters() if p.ndim < 2]
    matrices = [p for p in network.parameters() if p.ndim >= 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def saved(path: Path, weight_decay: float = 0.0) -> Network:
    """Trained for 5 steps, saved after 2."""
    network = Network().double()
    optimizer = AdamW(groups(network, weight_decay), lr=0.01)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    optimizer.param_groups[1]["initial_lr"] = 0.5
    train(network, optimizer, 0, 2)
    save(path, network, optimizer)
    train(network, optimizer, 2, 5)
    return network


@pytest.mark.parametrize(
    "regroup",
    [
        lambda n: n.parameters(),
        lambda n: list(n.parameters())[::-1],
        lambda n: [{"params": [p]} for p in n.parameters()],
    ],
    ids=["one group", "other order", "many groups"],
)
def test_other_groups(tmp_path: Path, regroup: Callable[[nn.Module], Any]) -> None:
    """Hyperparameters come from the file, those that the new optimizer does not know included."""
    expected = saved(tmp_path / "checkpoint")
    network = Network().double()
    optimizer = AdamW(regroup(network), lr=9.0)
    load(tmp_path / "checkpoint", network, optimizer)
    assert {(group["lr"], group["initial_lr"]) for group in optimizer.param_groups} == {(0.01, 0.5)}
    train(network, optimizer, 2, 5)
    for key, parameter in expected.named_parameters():
        assert_bitwise_equal(key, network.get_parameter(key).detach(), parameter.detach())


def test_groups_that_differed_cannot_become_one(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", weight_decay=0.1)
    network = Network().double()
    optimizer = AdamW(network.parameters(), lr=9.0)
    text = r"optimizers.0.scale and optimizers.0.0.weight are in one group .* weight_decay=0.0 and 0.1"
    with pytest.raises(StateError, match=text):
        load(tmp_path / "checkpoint", network, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 9


def test_frozen_and_thawed_parameters(tmp_path: Path) -> None:
    network = Network().double()
    network[0].requires_grad_(False)
    optimizer = AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
    train(network, optimizer, 0, 2)
    save(tmp_path / "checkpoint", network, optimizer)
    thawed, frozen = Network().double(), Network().double()
    all_of_it = AdamW([{"params": thawed[0].parameters(), "lr": 0.5}, {"params": thawed[2].parameters()}])
    load(tmp_path / "checkpoint", thawed, all_of_it)
    assert [p in all_of_it.state for p in (thawed[0].weight, thawed[2].weight)] == [False, True]
    assert [group["lr"] for group in all_of_it.param_groups] == [0.5, 0.01]
    part = AdamW(frozen[2].parameters())
    load(tmp_path / "checkpoint", frozen, part)
    assert len(part.state) == 2
    stranger = AdamW(frozen[0].parameters())
    with pytest.raises(StateError, match="the checkpoint has none of the parameters' names"):
        load(tmp_path / "checkpoint", frozen, stranger)
    with pytest.raises(StateError, match=r"optimizers.1.* no state was saved under this prefix"):
        load(tmp_path / "checkpoint", frozen, part, stranger)


@pytest.mark.ranks(4)
def test_stages_become_one_process_and_other_stages(rank: RankContext) -> None:
    """Saved by two stages of two ranks; loaded by one process, and by four ranks with other parameters each."""
    reference = Network().to(rank.device, torch.float64)
    optimizer = AdamW(reference.parameters(), lr=0.01)
    train(reference, optimizer, 0, 2)
    names = names_of(reference)
    stage = {name: p for p, name in names.items() if (name[0] in "01") == (rank.rank < 2)}
    part = AdamW(stage.values(), lr=0.01)
    part.state.update({p: optimizer.state[p] for p in stage.values() if p in optimizer.state})
    tensors, named_values = optimizer_state(part, names, "optimizers.0")
    tensors |= {f"model.{name}": p for name, p in stage.items()}
    save_directory(rank.tmp_dir / "checkpoint", tensors, {}, named_values=named_values)

    other = Network().to(rank.device, torch.float64)
    mine = {name: p for i, (name, p) in enumerate(other.named_parameters()) if i % 4 == rank.rank}
    loaded = AdamW(mine.values())
    load(rank.tmp_dir / "checkpoint", other, loaded)
    expected = {name: optimizer.state[p] for p, name in names.items() if name in mine and p in optimizer.state}
    assert {name for name, p in mine.items() if p in loaded.state} == expected.keys()
    for name, state in expected.items():
        for key, value in state.items():
            assert_bitwise_equal(f"{name}: {key}", loaded.state[mine[name]][key], value)

    alone = Network().to(rank.device, torch.float64)
    resumed(rank.tmp_dir / "checkpoint", alone, OPTIMIZERS["adamw"], alone=True)
    train(reference, optimizer, 2, 5)
    for name, parameter in reference.named_parameters():
        assert_bitwise_equal(name, alone.get_parameter(name).detach(), parameter.detach())


class Accumulating(SGD):
    """An optimizer with state that belongs to no parameter, and keys that are no strings."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(
                    {0: torch.ones(2), "history": [1, 2], "row": torch.ones(parameter.shape[:1])}
                )
        self.state["steps"] = {"all": 3}
        self.hooks: list[str] = []
        self.register_state_dict_pre_hook(lambda *_: self.hooks.append("save"))
        self.register_load_state_dict_post_hook(lambda *_: self.hooks.append("load"))


def test_state_of_other_kinds(tmp_path: Path) -> None:
    network = nn.Linear(2, 3)
    optimizer, other = Accumulating(network.parameters()), Accumulating(network.parameters())
    optimizer.state["steps"] = {"all": 7}
    optimizer.state[network.weight]["history"] = [5]
    save(tmp_path / "checkpoint", network, optimizer)
    load(tmp_path / "checkpoint", network, other)
    torch.testing.assert_close(dict(other.state), dict(optimizer.state), rtol=0, atol=0)
    assert (optimizer.hooks, other.hooks) == (["save"], ["load"])


def test_parameters_without_a_name(tmp_path: Path) -> None:
    network = nn.Linear(2, 3)
    optimizer = SGD([{"params": [network.weight]}, {"params": [nn.Parameter(torch.ones(4, 5))]}], lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \[4, 5\] in group 1 of SGD is not in the module"):
        optimizer_state(optimizer, names_of(network), "optimizers.0")


def test_a_missing_tensor(tmp_path: Path) -> None:
    network = Network().double()
    optimizer = AdamW(network.parameters())
    train(network, optimizer, 0, 1)
    tensors, named_values = optimizer_state(optimizer, names_of(network), "optimizers.0")
    del tensors["optimizers.0.2.weight.exp_avg"]
    save_directory(tmp_path / "checkpoint", tensors, {}, named_values=named_values)
    with pytest.raises(StateError, match=r"optimizers.0.2.weight.exp_avg is not in the checkpoint"):
        load(tmp_path / "checkpoint", network, AdamW(network.parameters()))


EIGHT_BITS = partial(StochasticAdamW, state_dtype=torch.uint8)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (SGD, AdamW, "the checkpoint lacks betas, eps of AdamW: another kind of optimizer was saved"),
        (AdamW, SGD, "was saved with exp_avg, exp_avg_sq, step, and SGD keeps momentum_buffer: another kind"),
        (MuonAdamW, AdamW, "was saved with momentum, step, and AdamW keeps exp_avg, exp_avg_sq, .*: another kind"),
        (MuonAdamW, StochasticAdamW, "was saved with momentum, step, and StochasticAdamW keeps exp_avg"),
        (AdamW, MuonAdamW, "was saved with exp_avg, exp_avg_sq, step, and MuonAdamW keeps momentum, step"),
        (EIGHT_BITS, AdamW, r"exp_avg_scale.*StochasticAdamW\(state_dtype=torch.float32\) takes its eight bits, or"),
        (
            AdamW,
            EIGHT_BITS,
            r"saved as torch.float32, and would lose digits .*StochasticAdamW\(state_dtype=torch.float",
        ),
        (AdamW, Adam, None),
        (AdamW, StochasticAdamW, None),
        (StochasticAdamW, AdamW, None),
        (EIGHT_BITS, StochasticAdamW, None),
    ],
)
def test_the_state_of_another_optimizer(tmp_path: Path, first: Any, second: Any, problem: str | None) -> None:
    """It is loaded if nothing is lost, and refused otherwise."""
    network, other = (nn.Linear(4, 3) for _ in range(2))
    saved, loaded = first(network.parameters(), lr=0.1), second(other.parameters(), lr=0.2)
    step_with_ones(network, saved)
    save(tmp_path / "checkpoint", network, saved)
    if problem is None:
        load(tmp_path / "checkpoint", other, loaded)
        assert loaded.param_groups[0]["lr"] == 0.1
        step_with_ones(other, loaded)
        assert all(bool(parameter.isfinite().all()) for parameter in other.parameters())
        assert {int(state["step"]) for state in loaded.state.values()} == {2}
        return
    with pytest.raises(StateError, match=f"{problem}.*callbacks.InitialWeights"):
        load(tmp_path / "checkpoint", other, loaded)


def step_with_ones(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_scheduler_fits_other_groups() -> None:
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    warm, then = (lr_scheduler.LambdaLR(optimizer, lambda step: 0.5) for _ in range(2))
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm, then], milestones=[2])
    state = copy.deepcopy(scheduler.state_dict())
    for each in (state, *state["_schedulers"]):
        for key in {"base_lrs", "_last_lr", "lr_lambdas"} & each.keys():
            each[key] = each[key][:1] * 3  # of three groups
    fit_scheduler_state(state, optimizer.param_groups)
    assert state["_last_lr"] == [group["lr"] for group in optimizer.param_groups]
    for each in state["_schedulers"]:
        assert each["base_lrs"] == [0.1, 0.2]
        assert len(each["lr_lambdas"]) == 2


def test_a_scheduler_that_tells_other_groups_apart_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    state = {"_last_lr": [0.1, 0.1], "min_lrs": [0.0, 0.01], "best": 1.0}
    with pytest.raises(
        StateError, match=r"min_lrs=\[0.0, 0.01\], one for each of the optimizer's groups, but there are"
    ):
        fit_scheduler_state(state, optimizer.param_groups)


def test_what_is_no_scheduler_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    nested: Any = [1]
    for _ in range(60):
        nested = [nested, nested]
    for state, reason in (
        ({"_schedulers": nested}, r"in place of the state of a learning rate scheduler"),
        ({"_schedulers": 5}, r"_schedulers=5, which must be a list"),
        ({"min_lrs": 0.5}, r"min_lrs=0.5, which must be a list"),
        ({"min_lrs": [nested, 0.5]}, r"min_lrs=\[\[.*\], one for each"),
        ([], r"the checkpoint has \[\] in place"),
    ):
        with pytest.raises(StateError, match=reason):
            fit_scheduler_state(state, optimizer.param_groups)


def test_schedulers_that_are_held_several_times() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    state = innermost = {"base_lrs": [0.5, 0.5]}
    for _ in range(60):
        state = {"_schedulers": [state, state]}
    fit_scheduler_state(state, optimizer.param_groups)
    assert innermost["base_lrs"] == [0.5]


def one_or_two(build: Callable[[Optimizer], Any], num_groups: int) -> tuple[Optimizer, Any]:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(num_groups)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1, momentum=0.9)
    return optimizer, build(optimizer)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "milestones": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[2]
    ),
    "phases": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "cycle": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, step_size_up=3),
    "nested": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]),
            lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("num_groups", [(1, 2), (2, 1), (2, 3)])
def test_lists_that_are_not_of_groups_stay(name: str, num_groups: tuple[int, int]) -> None:
    """Such lists may be as long as the optimizer had groups."""
    first, other = (one_or_two(SCHEDULERS[name], number) for number in num_groups)
    optimizer, scheduler = first
    optimizer.step()
    scheduler.step()
    for group in other[0].param_groups:
        group.update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    state = copy.deepcopy(scheduler.state_dict())
    fit_scheduler_state(state, other[0].param_groups)
    other[1].load_state_dict(state)
    for _ in range(5):
        for optimizer, scheduler in (first, other):
            optimizer.step()
            scheduler.step()
        assert other[1].get_last_lr() == first[1].get_last_lr()[:1] * num_groups[1]
