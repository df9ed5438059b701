"""Values of a module's own: `Normal`, `Constant`, what users write themselves, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_d9d import ConfigError
from lightning_d9d.modules import Constant, Linear
from lightning_d9d.pipeline.initial_weights import materialize
from tests.mesh.fake_world import fake_world

CPU = torch.device("cpu")


def made(module: nn.Module) -> nn.Module:
    materialize(module, CPU, seed=0)
    return module


class DrawnByGenerator:
    """Draws values with a generator, as they were drawn before they followed from places."""

    def draw(self, generator: object, shape: tuple[int, int]) -> Tensor:
        return torch.zeros(shape)

    def fill_(self, tensor: Tensor) -> None:
        nn.init.zeros_(tensor)


def test_values_of_the_old_interface_are_refused() -> None:
    class Older(Linear):
        def initial_values(self):
            return {"weight": DrawnByGenerator()}

    message = (
        r"initial_values\(\) of submodule 'part' \(Older\) gives 'weight' a DrawnByGenerator, .* Return "
        r"\{'weight': Normal\(std=0.02\)\} .* needs fill_slice_\(target, shape, ranges, key\) instead of draw"
    )
    with torch.device("meta"):
        module = nn.ModuleDict({"part": Older(3, 4, initializer_range=1.0)})
    with pytest.raises(ConfigError, match=message):
        made(module)


class Ramp:
    """A value of one's own: each element is its place."""

    def fill_slice_(self, target: Tensor, shape: tuple[int, ...], ranges: list[range], key: int) -> None:
        whole = torch.arange(math.prod(shape), dtype=target.dtype, device=target.device).view(shape)
        target.copy_(whole[tuple(slice(r.start, r.stop) for r in ranges)])

    def fill_(self, tensor: Tensor) -> None:
        nn.init.zeros_(tensor)


def test_values_of_ones_own_fill_slices() -> None:
    class Ramped(Linear):
        def initial_values(self):
            return {"weight": Ramp(), "bias": Constant(0.1)}

    with torch.device("meta"):
        module = Ramped(5, 7, bias=True, initializer_range=1.0).double()
    with fake_world(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        for name, parameter in list(module.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded))
        made(module)
        weight, bias = (p.to_local() for p in module.parameters() if isinstance(p, DTensor))
    assert weight.tolist() == torch.arange(10.0, 20.0).view(2, 5).tolist()
    assert bias.tolist() == [0.1, 0.1]  # in float64, too


def test_reset_by_hand_follows_torchs_random_state() -> None:
    layer = Linear(3, 4, bias=True, initializer_range=1.0)
    torch.manual_seed(3)
    layer.reset_parameters()
    first = copy.deepcopy(layer)
    layer.reset_parameters()
    assert not torch.equal(layer.weight, first.weight)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert torch.equal(layer.weight, first.weight)
